"""Weights that a script changes after prepare, under every strategy of several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Start = Callable[..., Any]


@pytest.mark.parametrize(
    ("num_ps", "flags"),
    [
        (2, ["--staleness", "0"]),
        pytest.param(1, [], marks=pytest.mark.thorough),
        pytest.param(0, [], marks=pytest.mark.thorough),
    ],
)
def test_what_is_loaded_once_is_the_jobs(cluster: Start, num_ps: int, flags: list[str]) -> None:
    done = cluster(2, num_ps, "changes_weights.py", "kept", flags=flags).finish()
    assert done.code == 0, done.stderr


def test_what_would_be_lost_is_refused(cluster: Start) -> None:
    done = cluster(2, 1, "changes_weights.py", "refused").finish()
    assert done.code == 2, done.stderr
    assert "weight was changed here since the last update" in done.stderr
    assert "strategy.load_once(lambda: model.load_state_dict" in done.stderr


def test_two_weights_of_one_update_are_refused(cluster: Start) -> None:
    """The first was forgotten."""
    done = cluster(1, 1, "changes_weights.py", "weighed twice").finish()
    assert done.code == 2, done.stderr
    assert "set_weight(2) after a backward with 1: an update has one weight on parameter servers" in done.stderr
