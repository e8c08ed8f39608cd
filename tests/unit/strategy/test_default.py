"""`sg.set_strategy`: a strategy that counts outside of scopes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
import torch

import stratagem as sg
from stratagem.errors import ConfigurationError
from stratagem.strategy import default


@pytest.fixture(autouse=True)
def no_default() -> Iterator[None]:
    yield
    sg.set_strategy(None)


def test_it_counts_outside_of_scopes_in_every_thread_and_scopes_go_before() -> None:
    default, other = sg.MirroredStrategy(["cpu:0", "cpu:1"]), sg.OneDeviceStrategy()
    sg.set_strategy(default)
    assert sg.get_strategy() is default and sg.has_strategy() and sg.in_cross_replica_context()
    seen: list[sg.Strategy] = []
    thread = threading.Thread(target=lambda: seen.append(sg.get_strategy()))
    thread.start()
    thread.join()
    assert seen == [default]
    with other.scope():
        assert sg.get_strategy() is other
    model = sg.Model(torch.nn.Linear(2, 1))
    model.compile(optimizer="SGD", loss="mse")
    assert model.strategy is default
    assert len(model.fit(torch.ones(4, 2), torch.ones(4, 1), batch_size=2, verbose=0).history["loss"]) == 1
    sg.set_strategy(None)
    assert sg.get_strategy().num_replicas_in_sync == 1 and not sg.has_strategy()
    default.close()


def test_what_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"expected a strategy or None, got 'mirrored'; for example sg\."):
        sg.set_strategy("mirrored")  # type: ignore[arg-type]
    with sg.OneDeviceStrategy().scope(), pytest.raises(ConfigurationError, match="leave it first"):
        sg.set_strategy(None)


@pytest.mark.parametrize(
    ("task", "is_lead"),
    [("worker:0", True), ("worker:1", False), ("chief:0", False), ("ps:0", False), ("evaluator:0", True), ("", True)],
)
def test_who_leads_before_there_is_a_strategy(task: str, is_lead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "active_meter", lambda: None)  # other tests may have made strategies
    monkeypatch.setenv("STRATAGEM_TASK", task)
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"], "evaluator": ["e:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster}))
    assert sg.is_lead() is is_lead
    monkeypatch.delenv("TF_CONFIG")
    assert sg.is_lead()
