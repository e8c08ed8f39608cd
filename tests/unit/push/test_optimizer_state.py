"""The state of an optimizer that is on parameter servers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stratagem.errors import PeerUnavailableError, StaleStoreError, StratagemError
from stratagem.rpc.generated import ps_pb2
from stratagem.worker.push import optimizer_state
from stratagem.worker.push.layout import Layout, VariableSpec
from stratagem.worker.push.optimizer_state import OptimizerState


def test_a_state_is_fetched_from_ps_that_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout([VariableSpec("w", (2,), torch.float32, 1)], [[(0, 0, 2)]], 1 << 20)
    variables: Any = SimpleNamespace(clients=[SimpleNamespace(index=0)], layout=layout)
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    failures: list[StratagemError] = [StaleStoreError("it went back"), PeerUnavailableError("it is gone")]

    def pull(*_: object) -> SimpleNamespace:
        if failures:
            raise failures[-1]
        return SimpleNamespace(result=lambda write: ps_pb2.PullWeightsReply(step_counts=[0]))

    def reconnect() -> None:
        failures.pop()

    monkeypatch.setattr(optimizer_state, "pull_weights", pull)
    state = OptimizerState(variables, optimizer, [parameter], lambda: True, reconnect)
    state.begin(False)
    assert optimizer.state_dict()["state"] == {} and not failures
