"""Which writes of a step to what was not prepared are warned of, and that looking for them changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stratagem.strategy.replicas.mirrored import MirroredModule, mirrored
from stratagem.strategy.replicas.unprepared import UnpreparedWrites


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().split(" was not prepared")[0] for record in caplog.records]


def run(step: Callable[[], Any], *work: Callable[[], Any], prepared: nn.Module | None = None) -> None:
    """The work of the replicas, in turn; ``step`` names what is looked at."""
    writes = UnpreparedWrites(lambda: () if prepared is None else prepared.modules())
    for one in writes.watched(work, (step, (), {})):
        one()


def test_a_replica_that_ends_while_another_writes_has_not_written(caplog: pytest.LogCaptureFixture) -> None:
    """On GPUs replicas run at once, and only one of them updates the average."""
    average = nn.Linear(2, 2)
    writes = UnpreparedWrites(list)
    rest: list[Callable[[], None]] = []

    def writer() -> None:
        with torch.no_grad():
            average.weight.add_(1)
            rest[0]()  # another replica ends here
            average.bias.add_(1)

    first, other = writes.watched((writer, lambda: None), (lambda: average, (), {}))
    rest.append(other)
    first()
    assert told(caplog) == []


def test_weights_taken_from_a_prepared_model_and_sums_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    weights, sums = list(model.parameters()), {"loss": torch.zeros(())}

    def add() -> None:
        sums["loss"] += 1
        with torch.no_grad():
            weights[0].add_(1)

    run(add, add, add, prepared=model)
    assert told(caplog) == []
    run(add, add, add)
    assert told(caplog) == ["weights"]


def test_a_model_that_holds_a_prepared_one_lets_go_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """What lets go of weights has them carried to all replicas: a clip of replica 0's alone was not found out."""

    touched: list[str] = []
    home: Any = SimpleNamespace(unusable={}, which=lambda: None, touch=lambda: touched.append("weights"))
    net = nn.Linear(2, 2)
    whole, extra = nn.Module(), nn.Linear(2, 2)
    whole.extra, whole.net = extra, mirrored(MirroredModule, [net, nn.Linear(2, 2)], home)
    touched.clear()

    def write() -> None:
        with torch.no_grad():
            extra.weight.add_(1)
            net.weight.add_(1)

    run(lambda: whole, write, write, prepared=net)
    assert not touched
    assert told(caplog) == ["whole"]


class NoSize(dict[str, int]):
    def __len__(self) -> int:
        raise RuntimeError("counts 100 GB")


class NoClass:
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("outside of its context")


class NoDictionary:
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


@pytest.mark.parametrize(
    "kind", [NoSize, NoClass, NoDictionary, lambda: nn.LazyLinear(2), lambda: nn.Linear.__new__(nn.Linear)]
)
def test_an_object_that_does_not_let_itself_be_looked_at_fails_no_step(kind: Callable[[], Any]) -> None:
    item = kind()
    run(lambda: item, lambda: None)
