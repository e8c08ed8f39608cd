"""What is inside of containers changes; the containers stay what they are."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.data.nested import map_values, outline, refilled, values_in
from stratagem.data.values import PerReplica
from stratagem.errors import ConfigurationError


@dataclasses.dataclass
class Record:
    inputs: Any


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


def test_structures_of_replicas_unpack_and_index_into_their_parts() -> None:
    loss, named = PerReplica(((1.0, {"hits": 2, "all": [3]}), (5.0, {"hits": 6, "all": [7]})), (4.0, 2.0))
    assert loss == PerReplica((1.0, 5.0), (4.0, 2.0))
    assert named["hits"] == PerReplica((2, 6), (4.0, 2.0))
    (one,) = named["all"]
    assert len(named["all"]) == len([*named["all"]]) == 1
    assert one == named["all"][0] == PerReplica((3, 7), (4.0, 2.0))
    with pytest.raises(KeyError):
        named["misses"]
    pair: Any = PerReplica((Pair(1, [2]), Pair(3, [4])))
    assert pair.second == pair[1] == PerReplica(([2], [4]))
    whole = PerReplica((named, named))
    assert copy.copy(whole) == whole and whole.shares == ()
    record: Any = PerReplica((Record(1), Record(2)))
    assert record.inputs == PerReplica((1, 2)) and copy.deepcopy(record).inputs == record.inputs
    with pytest.raises(AttributeError, match="it has no 'targets' itself"):
        str(record.targets)


@pytest.mark.parametrize("values", [((1, 2), (1,)), ((1,), 1), ("ab", "cd"), ({"a": 1}, {"a": 1})])
def test_what_is_no_tuple_or_another_on_each_replica_does_not_unpack(values: Any) -> None:
    with pytest.raises(ConfigurationError, match="one value for each replica"):
        list(PerReplica(values))


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_a_loop_that_takes_batches_apart_trains_and_means_as_one_that_does_not(devices: list[str]) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(10, 3), torch.randn(10, 1))

    def train(apart: bool) -> tuple[torch.Tensor, list[float]]:
        strategy = sg.MirroredStrategy(devices)
        with strategy.scope():
            torch.manual_seed(1)
            module = torch.nn.Linear(3, 1)
        model, optimizer = strategy.prepare(module, torch.optim.SGD(module.parameters(), 0.1))

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            return loss.detach(), {"most": inputs.max()}

        losses: list[float] = []
        loader: Any = strategy.distribute_dataset(DataLoader(data, batch_size=4))  # the last batch is 2
        if apart:
            for batch in loader:
                inputs, targets = batch
                loss, named = strategy.run(step, args=batch if losses else (inputs, targets))
                losses += [float(strategy.reduce_mean(loss)), float(strategy.reduce("SUM", named["most"]))]
        else:
            for batch in loader:
                means = strategy.run(lambda pair: step(*pair), args=(batch,))
                losses += [float(strategy.reduce_mean(means)[0]), float(strategy.reduce("SUM", means)[1]["most"])]
        strategy.close()
        return module.weight.detach().clone(), losses

    whole, apart = train(False), train(True)
    assert apart[1] == whole[1] and torch.equal(apart[0], whole[0])


def test_values_of_replicas_have_no_methods_of_tensors() -> None:
    value: Any = PerReplica((torch.ones(()),))
    with pytest.raises(AttributeError, match=r"strategy.local_results gives those of this process.*no 'item'"):
        value.item()
    assert not hasattr(value, "cpu") and pickle.loads(pickle.dumps(value)) == value
