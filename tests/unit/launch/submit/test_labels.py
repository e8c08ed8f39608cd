"""Labels: what Kubernetes takes is taken, what it refuses is refused before anything is built."""

from __future__ import annotations

import pytest

from stratagem.errors import ConfigurationError
from stratagem.launch.submit.request import check_labels


@pytest.mark.parametrize(
    ("key", "value"),
    [("team", "vision"), ("example.com/team", "a.b_c-D9"), ("a", ""), ("x" * 63, "y" * 63), (f"{'p' * 253}/n", "v")],
)
def test_labels_that_kubernetes_takes(key: str, value: str) -> None:
    assert check_labels({key: value}) == {key: value}


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"-team": "x"}, "no valid key"),
        ({"te am": "x"}, "no valid key"),
        ({"x" * 64: "y"}, "no valid key"),
        ({"": "x"}, "text as the key"),
        ({1: "x"}, "text as the key"),
        ({"Example.com/team": "x"}, "no valid prefix"),
        ({"/team": "x"}, "no valid prefix"),
        ({"a/b/c": "x"}, "no valid prefix"),
        ({"kubernetes.io/arch": "x"}, "reserved"),
        ({"app.kubernetes.io/name": "x"}, "reserved"),
        ({"team": "x y"}, "no valid value"),
        ({"team": "x."}, "no valid value"),
        ({"team": "y" * 64}, "no valid value"),
        ({"team": 3}, "text as the value"),
        ({f"k{index}": "v" for index in range(65)}, "at most 64"),
        (None, "job_labels like"),
    ],
)
def test_labels_that_it_refuses(labels: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_labels(labels)
