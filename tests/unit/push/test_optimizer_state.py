"""The state of an optimizer that is on parameter servers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stratagem.errors import ConfigurationError, PeerUnavailableError, StaleStoreError, StratagemError
from stratagem.rpc.generated import ps_pb2
from stratagem.worker.push import optimizer_state
from stratagem.worker.push.layout import Layout, VariableSpec
from stratagem.worker.push.optimizer_state import OptimizerState


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_state_is_fetched_from_ps_that_come_back(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a ps has no update of is as in torch: Adagrad's constructor makes sums."""
    layout = Layout([VariableSpec("w", (2,), torch.float32, 1)], [[(0, 0, 2)]], 1 << 20)
    variables: Any = SimpleNamespace(clients=[SimpleNamespace(index=0)], layout=layout)
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = kind([parameter], 0.1)
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
    torch.testing.assert_close(optimizer.state_dict()["state"], kind([parameter], 0.1).state_dict()["state"])
    assert not failures


def test_a_state_of_before_is_given_to_ps_that_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script ended with PeerUnavailableError, by the sums of Adagrad's constructor too, which a ps makes itself."""
    layout = Layout([VariableSpec("w", (2,), torch.float32, 1)], [[(0, 0, 2)]], 1 << 20)
    variables: Any = SimpleNamespace(clients=[SimpleNamespace(index=0)], layout=layout)
    parameter = torch.nn.Parameter(torch.zeros(2))
    failures: list[StratagemError] = [StaleStoreError("it went back"), PeerUnavailableError("it is gone")]
    given: list[tuple[str, list[int]]] = []

    def send(*_: object) -> None:
        if failures:
            raise failures[-1]

    def reconnect() -> None:
        failures.pop()

    monkeypatch.setattr(optimizer_state, "send_values", send)
    monkeypatch.setattr(optimizer_state, "assign_values", lambda _, __, ___, *what: given.append(what[:2]))
    fresh = torch.optim.Adagrad([parameter], 0.1)
    OptimizerState(variables, fresh, [parameter], lambda: True, reconnect).begin(True)
    assert not given and len(failures) == 2
    trained = torch.optim.Adagrad([parameter], 0.1)
    parameter.grad = torch.ones(2)
    trained.step()
    OptimizerState(variables, trained, [parameter], lambda: True, reconnect).begin(True)
    assert given == [("sum", [1])] and not failures


def test_parameters_that_are_added_later_are_refused() -> None:
    """They were never trained, without a word."""
    layout = Layout([VariableSpec("w", (2,), torch.float32, 1)], [[(0, 0, 2)]], 1 << 20)
    variables: Any = SimpleNamespace(clients=[], layout=layout)
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    OptimizerState(variables, optimizer, [parameter], lambda: True, lambda: None).begin(False)
    optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ConfigurationError, match="before prepare"):
        optimizer.step()
