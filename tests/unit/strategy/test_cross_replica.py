"""What is made of the values of all replicas, where a script gives something else than it should."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.errors import ConfigurationError


@pytest.fixture
def strategy() -> Iterator[sg.Strategy]:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    yield strategy
    strategy.close()


def values(strategy: sg.Strategy, make: Callable[[int], Any]) -> Any:
    return strategy.distribute_values_from_function(lambda context: make(context.replica_id_in_sync_group))


def here() -> sg.ReplicaContext:
    context = sg.get_replica_context()
    assert context is not None
    return context


def all_reduce(value: Any) -> Any:
    return here().all_reduce("SUM", value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_short_floats_over_many_examples(strategy: sg.Strategy, dtype: torch.dtype) -> None:
    ones = values(strategy, lambda replica: torch.full((70_001,), 1.0 + replica, dtype=dtype))
    mean = strategy.reduce("MEAN", ones, axis=0)
    assert mean.dtype is dtype and float(mean) == 1.5


def test_the_mean_of_large_halves_is_none_of_their_sum(strategy: sg.Strategy) -> None:
    assert float(strategy.reduce("MEAN", values(strategy, lambda _: torch.tensor(4e4, dtype=torch.float16)))) == 4e4


def test_a_weighted_mean_of_complex_values_is_complex(strategy: sg.Strategy) -> None:
    mean = strategy.reduce_mean(values(strategy, lambda replica: torch.tensor(1 + 2j * replica)))
    assert mean.dtype is torch.complex64 and complex(mean) == 1 + 1j


@pytest.mark.parametrize("weight", [float("inf"), float("nan"), -1.0])
def test_what_is_no_weight_of_a_loss_is_refused(strategy: sg.Strategy, weight: float) -> None:
    with pytest.raises(ConfigurationError, match="expected a finite weight of at least 0"):
        strategy.run(strategy.set_weight, args=(weight,))


def test_a_sum_of_booleans_is_their_number(strategy: sg.Strategy) -> None:
    flags = values(strategy, lambda replica: torch.tensor([True, replica == 0]))
    assert strategy.reduce("SUM", flags).tolist() == [2, 1]
    assert int(strategy.reduce("SUM", flags, axis=0)) == 3
    assert strategy.reduce("MAX", flags).tolist() == [True, True]


@pytest.mark.parametrize("name", ["reduce", "reduce_mean", "gather"])
def test_the_step_of_one_replica_cannot_reduce_over_all(strategy: sg.Strategy, name: str) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "reduce": lambda: strategy.reduce("MEAN", torch.ones(1)),
        "reduce_mean": lambda: strategy.reduce_mean(torch.ones(1)),
        "gather": lambda: strategy.gather(torch.ones(1), 0),
    }
    with pytest.raises(ConfigurationError, match=r"inside strategy\.run.*get_replica_context"):
        strategy.run(calls[name])
    merged = strategy.run(lambda: here().merge_call(lambda strategy, value: strategy.reduce("SUM", value), (1.0,)))
    assert [float(value) for value in strategy.local_results(merged)] == [2.0, 2.0]


def test_what_cannot_be_reduced_or_gathered_is_named(strategy: sg.Strategy) -> None:
    with pytest.raises(ConfigurationError, match="tensors and numbers of replicas, got NoneType"):
        strategy.reduce("SUM", values(strategy, lambda replica: None))
    with pytest.raises(ConfigurationError, match="tensors and numbers of replicas, got str"):
        strategy.run(lambda: all_reduce("a"))
    makes: tuple[Callable[[int], torch.Tensor], ...] = (
        lambda replica: torch.ones(2, 1 + replica),
        lambda replica: torch.ones((2,) * (1 + replica)),
        lambda replica: torch.ones(2, dtype=(torch.int64, torch.float32)[replica]),
    )
    for make in makes:
        with pytest.raises(ConfigurationError, match="differ along that axis alone"):
            strategy.gather(values(strategy, make), 0)
