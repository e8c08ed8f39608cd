"""What is inside of containers changes; the containers stay what they are."""

from __future__ import annotations

import collections
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import stratagem as sg
from stratagem.data.nested import map_values, outline, refilled, values_in
from stratagem.data.values import PerReplica
from stratagem.errors import ConfigurationError


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (collections.defaultdict(int, {"a": 1}), collections.defaultdict(int, {"a": 2})),
        (collections.OrderedDict(b=1, a=2), collections.OrderedDict(b=2, a=3)),
        (collections.Counter({"a": 1}), collections.Counter({"a": 2})),
        ({"a": [1, (2,)]}, {"a": [2, (3,)]}),
        (Pair(1, 2), Pair(2, 3)),
    ],
)
def test_containers_keep_their_type(value: Any, expected: Any) -> None:
    before = repr(value)
    changed = map_values(value, lambda leaf: leaf + 1)
    assert changed == expected and type(changed) is type(expected)
    assert repr(value) == before
    if isinstance(value, collections.defaultdict):
        assert changed.default_factory is int


def test_values_by_name_meet_whatever_order_each_replica_or_worker_has_them_in() -> None:
    one, other = {"loss": 1, "accuracy": [2]}, {"accuracy": [2], "loss": 1}
    assert values_in(one) == values_in(other) and outline(one) == outline(other)
    assert list(refilled(one, values_in(other)).items()) == [("loss", 1), ("accuracy", [2])]
    assert values_in({second: 2 for second in (Pair, 3)}) == [2, 2]  # not all are texts: as they come


def test_a_step_may_take_and_return_a_defaultdict() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sums: dict[str, torch.Tensor] = collections.defaultdict(lambda: torch.zeros(()))
        sums["loss"] += losses["loss"]
        return sums

    given: dict[str, Any] = collections.defaultdict(
        float, {"loss": sg.PerReplica((torch.tensor(1.0), torch.tensor(2.0)))}
    )
    assert strategy.reduce("sum", strategy.run(step, (given,)))["loss"] == 3.0
    strategy.close()


@pytest.mark.parametrize(
    "use",
    [
        float,
        int,
        bool,
        list,
        "{:.3f}".format,
        lambda value: value + 1,
        lambda value: 2 * value,
        lambda value: value < 3,
        lambda value: value == 3,
        lambda value: value != "mean",
        torch.tanh,
        torch.nn.Linear(1, 1),
        lambda value: torch.nn.functional.mse_loss(torch.ones(()), target=value),
        lambda value: torch.stack([value]),
        lambda value: torch.ones(()) * value,
    ],
)
def test_values_of_replicas_are_no_number(use: Callable[[Any], object]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"one value for each replica: strategy.reduce_mean combines them into one"
    ):
        use(PerReplica((torch.ones(()),)))


def test_values_of_replicas_have_no_methods_of_tensors() -> None:
    value: Any = PerReplica((torch.ones(()),))
    with pytest.raises(AttributeError, match=r"strategy.local_results gives those of this process.*no 'item'"):
        value.item()
    assert not hasattr(value, "cpu") and pickle.loads(pickle.dumps(value)) == value
