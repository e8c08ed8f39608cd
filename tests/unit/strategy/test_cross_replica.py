"""What is made of the values of all replicas, where a script gives something else than it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.errors import ConfigurationError


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


def test_each_value_of_a_structure_has_the_shares_of_its_own_run(strategy: sg.Strategy) -> None:
    one = sg.PerReplica((torch.tensor(1.0), torch.tensor(4.0)), (2.0, 1.0))
    other = sg.PerReplica((torch.tensor(1.0), torch.tensor(4.0)), (1.0, 2.0))
    assert strategy.reduce_mean({"one": one, "other": [other]}) == {"one": 2.0, "other": [3.0]}
    assert strategy.reduce_mean(sg.PerReplica((torch.Size([2, 3]), torch.Size([4, 3])), (1.0, 1.0))) == (3.0, 3.0)


def test_a_mean_of_unlike_shapes_is_refused_and_that_of_an_empty_replica_not_looked_at(strategy: sg.Strategy) -> None:
    parts = torch.ones(3), torch.ones(1)
    with pytest.raises(ConfigurationError, match="one mean from each replica, all of the same shape"):
        strategy.reduce_mean(sg.PerReplica(parts, (3.0, 1.0)))
    assert strategy.reduce_mean(sg.PerReplica(parts[::-1], (0.0, 3.0))).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("dtype", "op"), [(torch.uint16, "SUM"), (torch.complex64, "MIN")], ids=str)
def test_a_reduction_that_torch_has_not_says_what_to_do(strategy: sg.Strategy, dtype: torch.dtype, op: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{op} of {dtype} over replicas"):
        strategy.reduce(op, values(strategy, lambda _: torch.ones(2).to(dtype)))


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("axis", [None, 0])
def test_what_was_reduced_is_the_scripts_own(num_replicas: int, axis: int | None) -> None:
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(num_replicas)])
    counts = [torch.ones(1, 2, requires_grad=True) for _ in range(num_replicas)]
    total = strategy.reduce("SUM", [{"count": sg.PerReplica(tuple(counts))}], axis=axis)[0]["count"]
    for count in counts:
        count.detach().zero_()
    assert not total.requires_grad and total.flatten().tolist() == [num_replicas] * 2
    strategy.close()


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
    with pytest.raises(ConfigurationError, match=r"tensors and numbers from replicas, got NoneType.* return its loss"):
        strategy.reduce("SUM", values(strategy, lambda replica: None))
    with pytest.raises(ConfigurationError, match="tensors and numbers from replicas, got str"):
        strategy.run(lambda: all_reduce("a"))
    makes: tuple[Callable[[int], torch.Tensor], ...] = (
        lambda replica: torch.ones(2, 1 + replica),
        lambda replica: torch.ones((2,) * (1 + replica)),
        lambda replica: torch.ones(2, dtype=(torch.int64, torch.float32)[replica]),
    )
    for make in makes:
        with pytest.raises(ConfigurationError, match="differ along that axis alone"):
            strategy.gather(values(strategy, make), 0)


@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_a_variable_with_a_value_on_each_replica_is_combined_as_those_values(
    strategy: sg.Strategy, aggregation: str
) -> None:
    """The numbers are TensorFlow 2.21's; what its own aggregation makes of the values does not matter."""
    with strategy.scope():
        seen = sg.Variable([0.0], aggregation, "ON_READ")

    def step() -> dict[str, sg.Variable]:
        return {"seen": seen.assign([here().replica_id_in_sync_group + 1.0])}

    returned = strategy.run(step)
    for value in (returned, {"seen": seen}):
        assert strategy.reduce("SUM", value) == {"seen": torch.tensor([3.0])}
        assert strategy.reduce("MEAN", value) == {"seen": torch.tensor([1.5])}
        assert strategy.gather(value, axis=0)["seen"].tolist() == [1.0, 2.0]
        assert [one["seen"].tolist() for one in strategy.local_results(value)] == [[1.0], [2.0]]
    assert float(strategy.reduce("SUM", seen)) == 3.0 and len(strategy.local_results(seen)) == 2


def test_a_variable_with_one_value_is_it_on_each_replica(strategy: sg.Strategy) -> None:
    """As in TensorFlow 2.21, which refuses the sum of such a variable too."""
    with strategy.scope():
        rate = sg.Variable([5.0])
    assert [one.tolist() for one in strategy.local_results(rate)] == [[5.0], [5.0]]
    assert strategy.gather(rate, axis=0).tolist() == [5.0, 5.0]
    assert strategy.reduce("MEAN", rate).tolist() == [5.0] and float(strategy.reduce("SUM", rate, axis=0)) == 10.0
    with pytest.raises(ConfigurationError, match=r"value\(\) is what it has on all of them together"):
        strategy.reduce("SUM", rate)


def test_a_sum_in_the_step_of_one_says_what_to_use_there(strategy: sg.Strategy) -> None:
    with pytest.raises(ConfigurationError, match="use all_reduce and all_gather"):
        strategy.run(lambda: strategy.reduce("SUM", torch.ones(())))


@pytest.mark.parametrize("scale", [sg.compute_average_loss, sg.scale_regularization_loss])
def test_a_loss_of_no_replica_is_not_divided_by_their_number(
    strategy: sg.Strategy, scale: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """TensorFlow refuses it there too."""
    losses = torch.ones(4)
    inside = strategy.local_results(strategy.run(lambda: scale(losses)))
    with strategy.scope(), pytest.raises(ConfigurationError, match=r"call it in the step that strategy\.run runs"):
        scale(losses)
    with strategy.scope():
        assert sg.compute_average_loss(losses, global_batch_size=8) == 0.5
    assert inside[0] == inside[1] == float(scale(losses)) / 2


def test_local_results_are_the_objects_that_the_replicas_returned(strategy: sg.Strategy) -> None:
    """Not rebuilt, as a structure with a variable in it has to be: it may be a container that cannot."""
    returned = [[1], {"a": (2,)}]
    results = strategy.local_results(strategy.run(lambda: returned[here().replica_id_in_sync_group]))
    assert all(found is given for found, given in zip(results, returned, strict=True))
