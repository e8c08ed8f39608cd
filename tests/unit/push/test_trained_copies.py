"""Weights on parameter servers that a script changes in its own copies: said, not lost without a word."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stratagem.errors import ConfigurationError, PeerUnavailableError
from stratagem.worker.push.layout import Layout, VariableSpec
from stratagem.worker.push.variables import NUM_EXACT, RemoteVariables, TrainedCopies

Change = Callable[[torch.nn.Linear], object]
CHANGES: dict[str, Change] = {
    "loaded": lambda model: model.load_state_dict({"weight": torch.ones(1, 2), "bias": torch.ones(1)}),
    "initialised": lambda model: torch.nn.init.ones_(model.weight),
    "clamped behind torch's back": lambda model: model.bias.data.clamp_(5.0, 6.0),
    "put elsewhere": lambda model: setattr(model.weight, "data", torch.full((1, 2), 3.0)),
}


@pytest.fixture
def model() -> torch.nn.Linear:
    return torch.nn.Linear(2, 1)


@pytest.fixture
def copies(model: torch.nn.Linear) -> TrainedCopies:
    return TrainedCopies(list(model.named_parameters()))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_values_are_refused(model: torch.nn.Linear, copies: TrainedCopies, change: Change) -> None:
    copies.note()
    copies.check()
    change(model)
    with pytest.raises(ConfigurationError, match=r"(weight|bias) was changed here .* strategy\.load_once"):
        copies.check()


def test_weights_that_come_in_many_parts_are_looked_at_all_the_same(
    model: torch.nn.Linear, copies: TrainedCopies
) -> None:
    for _ in range(2 * NUM_EXACT):
        copies.note()  # each ps brings its own
    torch.nn.init.ones_(model.weight)
    with pytest.raises(ConfigurationError, match="weight was changed here"):
        copies.check()


def test_values_that_were_put_back_are_not(model: torch.nn.Linear, copies: TrainedCopies) -> None:
    copies.note()
    before = model.state_dict()["weight"].clone()
    torch.nn.init.zeros_(model.weight)
    with torch.no_grad():
        model.weight.copy_(before)
    copies.check()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_the_ps_bring_may_be_anything(model: torch.nn.Linear, copies: TrainedCopies, change: Change) -> None:
    for _ in range(2 * NUM_EXACT):
        copies.note()
        copies.forget()
        change(model)
        copies.check()


@pytest.mark.parametrize("num_before", range(NUM_EXACT + 1, NUM_EXACT + 5))
def test_a_model_that_is_loaded_later_is_refused_all_the_same(
    model: torch.nn.Linear, copies: TrainedCopies, num_before: int
) -> None:
    for _ in range(num_before):
        copies.note()
        copies.check()
    copies.note()
    CHANGES["loaded"](model)
    with pytest.raises(ConfigurationError, match=r"(weight|bias) was changed here"):
        copies.check()


def test_one_large_variable_that_nobody_changes_is_left_in_peace() -> None:
    copies = TrainedCopies([("weight", torch.ones(100, 100, dtype=torch.bfloat16).t())])
    for _ in range(2 * NUM_EXACT):
        copies.note()
        copies.check()


def test_whoever_puts_one_weight_back_after_an_epoch_is_not_taken_for_a_change(
    model: torch.nn.Linear, copies: TrainedCopies, caplog: pytest.LogCaptureFixture
) -> None:
    """All values are looked at then: that of one tensor alone had but a warning, and only of its counter."""
    for _ in range(2 * NUM_EXACT):
        copies.note()
        copies.check()
    copies.look_closely()
    copies.note()
    for tensor, kept in [(tensor, tensor.clone()) for tensor in model.parameters()]:
        torch.nn.init.ones_(tensor)
        assert copies.changed()
        with torch.no_grad():
            tensor.copy_(kept)
        copies.check()
    assert not caplog.records


@pytest.mark.parametrize("put", [torch.nn.init.zeros_, lambda bias: setattr(bias, "data", torch.zeros(1))])
def test_later_a_change_is_said_once(
    model: torch.nn.Linear, copies: TrainedCopies, caplog: pytest.LogCaptureFixture, put: Callable[[Any], object]
) -> None:
    for _ in range(NUM_EXACT + 1):
        copies.note()
        copies.check()
    copies.note()
    assert not caplog.records
    for _ in range(3):
        put(model.bias)
        copies.check()
    assert [record.getMessage().partition(". ")[0] for record in caplog.records] == [
        "bias was written to since the last update"
    ]
    for _ in range(300):
        copies.check()
        copies.note()
        if copies._sums is not None:
            break
    model.bias.data.fill_(9.0)
    with pytest.raises(ConfigurationError, match="bias was changed here"):
        copies.check()


def test_who_has_written_to_them_is_looked_at_closely(model: torch.nn.Linear, copies: TrainedCopies) -> None:
    """Averaged weights that were swapped in and out again had the only warning; what was changed later was lost."""
    kept = model.bias.detach().clone()
    for _ in range(2 * NUM_EXACT):
        copies.note()
        copies.check()
    for written in (torch.ones(1), kept):
        with torch.no_grad():
            model.bias.copy_(written)
    copies.check()
    for _ in range(2 * NUM_EXACT):
        copies.note()
        copies.check()
    torch.nn.init.ones_(model.bias)
    with pytest.raises(ConfigurationError, match="bias was changed here"):
        copies.check()


def test_values_of_another_dtype_or_size_are_not_sent(model: torch.nn.Linear) -> None:
    """The ps refused the frame by ending the connection, and the worker sent it again over a new one, for ever."""
    layout = Layout([VariableSpec("weight", (1, 2), torch.float32, 0)], [[(0, 0, 1)]], 1 << 20)
    client: Any = SimpleNamespace(index=0)
    variables = RemoteVariables([client], layout, [model.weight], "")
    variables.check_form()
    for other in (model.weight.detach().double(), torch.ones(1, 3)):
        model.weight.data = other
        with pytest.raises(ConfigurationError, match=r"here, and torch.float32 of shape \[1, 2\] on the"):
            variables.assign(client, [0])


def test_what_a_reply_that_broke_off_has_left_is_no_change_of_the_script(model: torch.nn.Linear) -> None:
    """A ps died in the middle of it; the next update brings all of it, and was refused."""
    layout = Layout([VariableSpec("weight", (1, 2), torch.float32, 0)], [[(0, 0, 1)]], 1 << 20)
    client: Any = SimpleNamespace(index=0)
    variables = RemoteVariables([client], layout, [model.weight], "SGD")

    def result(*_: Any) -> None:
        model.weight.data.fill_(7.0)
        raise PeerUnavailableError("ps:0 is gone")

    for _ in range(2 * NUM_EXACT):
        variables.finish()
        with pytest.raises(PeerUnavailableError):
            variables.take(client, SimpleNamespace(result=result))  # type: ignore[arg-type]
        variables.copies.check()
        model.weight.data.fill_(8.0)
