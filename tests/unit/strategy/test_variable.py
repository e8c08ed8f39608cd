"""sg.Variable: what replicas assign, what they read, and what is read of all of them together."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from stratagem.data.values import PerReplica
from stratagem.errors import CollectiveError, ConfigurationError, VariableError
from stratagem.strategy.default import get_strategy
from stratagem.strategy.replicas.variable import (
    Variable,
    VariableAggregation,
    VariableSynchronization,
    keep_variables,
)
from stratagem.worker.ring.communicator import Communicator
from tests.unit.ring.thread_group import run_ranks
from tests.unit.strategy.crew_strategy import ReplicaThreadsStrategy, replica_id, values_of

NONE, SUM, MEAN, FIRST = (
    VariableAggregation.NONE,
    VariableAggregation.SUM,
    VariableAggregation.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA,
)
ON_READ = VariableSynchronization.ON_READ


Use = Callable[[int], ReplicaThreadsStrategy]


@pytest.fixture
def use() -> Iterator[Use]:
    """Builds a strategy of so many replicas, and ends them."""
    built: list[ReplicaThreadsStrategy] = []

    def build(num_local: int) -> ReplicaThreadsStrategy:
        built.append(ReplicaThreadsStrategy(num_local))
        return built[-1]

    yield build
    for strategy in built:
        strategy.replica_threads.close()


def test_outside_any_scope_it_is_a_plain_value() -> None:
    counter = Variable(3)
    assert counter.assign_add(2) is counter and int(counter.assign_sub(1)) == 4
    assert counter.dtype == torch.int64 and counter.shape == ()
    assert int(counter.assign(9)) == 9


@pytest.mark.parametrize(("aggregation", "expected"), [(SUM, 1.0 + 1 + 2 + 3), (MEAN, 1.0 + 2), (FIRST, 1.0 + 1)])
def test_adding_in_replicas_aggregates(use: Use, aggregation: VariableAggregation, expected: float) -> None:
    strategy = use(3)
    with strategy.scope():
        total = Variable(1.0, aggregation)

    def step() -> float:
        total.assign_add(float(replica_id() + 1))
        return float(total)

    assert values_of(strategy.run(step)) == [expected] * 3
    assert float(total) == expected and strategy.num_reduced == (aggregation is not FIRST)


@pytest.mark.parametrize(("aggregation", "expected"), [(SUM, 3.0), (MEAN, 1.5), (FIRST, 1.0)])
def test_assigning_and_subtracting_in_replicas(use: Use, aggregation: VariableAggregation, expected: float) -> None:
    strategy = use(2)
    with strategy.scope():
        one, two = Variable(torch.zeros(2), aggregation), Variable(torch.zeros(2), aggregation)

    def step() -> None:
        value = torch.full((2,), float(replica_id() + 1))
        one.assign(value)
        two.assign_sub(value)

    strategy.run(step)
    assert one.numpy().tolist() == [expected] * 2 and two.numpy().tolist() == [-expected] * 2


def test_no_aggregation_and_several_replicas_is_an_error(use: Use) -> None:
    strategy = use(2)
    with strategy.scope():
        plain, counted = Variable(1.0, name="plain"), Variable(1.0, synchronization=ON_READ)
    with pytest.raises(ConfigurationError, match="'plain' was created without aggregation"):
        strategy.run(lambda: plain.assign_add(1.0))
    assert float(plain) == 1.0
    strategy.run(lambda: counted.assign_add(1.0))
    with pytest.raises(ConfigurationError, match="reading makes one value of those of 2 replicas"):
        counted.value()


def test_no_aggregation_and_one_replica_works(use: Use) -> None:
    strategy = use(1)
    with strategy.scope():
        variables = Variable(1.0), Variable(1.0, synchronization=ON_READ)
    for variable in variables:
        strategy.run(lambda variable=variable: variable.assign_add(1.0))
        assert float(variable) == 2.0
        assert float(variable.assign(PerReplica((5.0,)))) == 5.0


@pytest.mark.parametrize(("aggregation", "expected"), [(SUM, 0.0 + 1 + 2), (MEAN, 1.0), (FIRST, 0.0)])
def test_on_read_values_are_each_replicas_own(use: Use, aggregation: VariableAggregation, expected: float) -> None:
    strategy = use(3)
    with strategy.scope():
        metric = Variable(0.0, aggregation, ON_READ)
    strategy.run(lambda: metric.assign_add(float(replica_id())))
    assert values_of(strategy.run(lambda: float(metric))) == [0.0, 1.0, 2.0]
    assert strategy.num_reduced == 0
    assert float(metric) == expected


def test_on_read_starts_with_the_initial_value_on_each_replica(use: Use) -> None:
    strategy = use(2)
    with strategy.scope():
        summed, averaged = Variable(1.0, SUM, ON_READ), Variable(1.0, MEAN, ON_READ)
    assert float(summed) == 2.0 and float(averaged) == 1.0
    strategy.run(lambda: summed.assign(float(replica_id())))
    assert float(summed) == 1.0


def test_setting_a_summed_on_read_variable_outside_of_replicas(use: Use) -> None:
    strategy = use(2)
    with strategy.scope():
        floats, counts = Variable(0.0, SUM, ON_READ), Variable(0, SUM, ON_READ)
    assert float(floats.assign(3.0)) == 3.0
    assert values_of(strategy.run(lambda: float(floats))) == [1.5, 1.5]
    assert int(counts.assign(3)) == 3
    with pytest.raises(ConfigurationError, match="not added to"):
        floats.assign_add(1.0)
    assert float(floats) == 3.0


def test_writing_outside_of_replicas_reaches_all(use: Use) -> None:
    strategy = use(2)
    with strategy.scope():
        mirrored, own = Variable(0.0), Variable(0.0, MEAN, ON_READ)
    for variable in (mirrored, own):
        variable.assign(4.0)
        variable.assign_add(1.0)
        assert values_of(strategy.run(lambda variable=variable: float(variable))) == [5.0, 5.0]


def test_per_replica_values_outside_of_replicas(use: Use) -> None:
    strategy = use(2)
    with strategy.scope():
        summed, plain, own = Variable(0.0, SUM), Variable(0.0), Variable(0.0, MEAN, ON_READ)
    both = PerReplica((1.0, 2.0))
    assert float(summed.assign(both)) == 3.0
    with pytest.raises(ConfigurationError, match="without aggregation"):
        plain.assign(both)
    own.assign(both)
    assert values_of(strategy.run(lambda: float(own))) == [1.0, 2.0]
    with pytest.raises(VariableError, match="2 local replicas"):
        own.assign(PerReplica((1.0, 2.0, 3.0)))


def test_what_was_read_does_not_change_later(use: Use) -> None:
    strategy = use(2)
    with strategy.scope():
        total = Variable(torch.zeros(2), SUM)
    before = total.value()
    source = torch.ones(2)
    total.assign(source)
    source.add_(1)
    assert before.tolist() == [0.0, 0.0] and total.numpy().tolist() == [1.0, 1.0]


def test_integers_stay_what_they_are(use: Use) -> None:
    strategy = use(2)
    with strategy.scope():
        steps = Variable(torch.tensor(0, dtype=torch.int32), FIRST)
        examples = Variable(torch.tensor(0, dtype=torch.int32), SUM)

    def step() -> None:
        steps.assign_add(1)
        examples.assign_add(4)

    for _ in range(3):
        strategy.run(step)
    assert (int(steps), int(examples)) == (3, 24)
    assert steps.dtype == examples.dtype == torch.int32


def test_values_that_do_not_fit_are_refused(use: Use) -> None:
    strategy = use(2)
    with strategy.scope():
        pair, count = Variable(torch.zeros(2), SUM, name="pair"), Variable(0, SUM)
    with pytest.raises(VariableError, match=r"'pair' is \[2\] torch.float32, and was assigned \[3\]"):
        pair.assign(torch.zeros(3))
    with pytest.raises(VariableError, match="float32"):
        count.assign_add(0.5)
    with pytest.raises(VariableError):
        strategy.run(lambda: pair.assign(1.0))
    pair.assign(np.array([1, 2]))
    assert pair.numpy().tolist() == [1.0, 2.0]


def test_arguments_that_do_not_go_together() -> None:
    with pytest.raises(ConfigurationError, match="ON_READ variable cannot be trainable"):
        Variable(1.0, synchronization=ON_READ, trainable=True)
    with pytest.raises(ConfigurationError, match="int64"):
        Variable(1, trainable=True)
    with pytest.raises(ConfigurationError, match="MEAN"):
        Variable(1, MEAN)


def test_creating_inside_a_step_of_several_replicas_is_refused(use: Use) -> None:
    strategy = use(2)
    with pytest.raises(ConfigurationError, match=r"inside strategy\.run"):
        strategy.run(lambda: Variable(1.0))


def test_a_variable_of_no_scope_cannot_be_changed_by_several_replicas(use: Use) -> None:
    strategy = use(2)
    outside = Variable(1.0, SUM)
    assert values_of(strategy.run(lambda: float(outside))) == [1.0, 1.0]
    with pytest.raises(ConfigurationError, match="outside the scope of ReplicaThreadsStrategy"):
        strategy.run(lambda: outside.assign_add(1.0))


def test_one_copy_where_the_strategy_keeps_variables_in_one_place(use: Use) -> None:
    strategy = use(2)
    strategy.place = torch.device("cpu")
    with strategy.scope():
        total, own = Variable(0.0, SUM), Variable(0.0, SUM, ON_READ)
    strategy.run(lambda: (total.assign_add(1.0), own.assign_add(1.0)))
    assert float(total) == 2.0 and len(total.tensors) == 1
    assert float(own) == 2.0 and len(own.tensors) == 2


def test_it_stands_where_a_tensor_can() -> None:
    pair, one = Variable(torch.tensor([1.0, 2.0])), Variable(2)
    assert (pair + 1).tolist() == [2.0, 3.0] and (1 - pair).tolist() == [0.0, -1.0]
    assert (torch.ones(2) * pair).tolist() == [1.0, 2.0] and (pair * pair).tolist() == [1.0, 4.0]
    tensor_like: Any = pair
    assert torch.stack([tensor_like, tensor_like]).shape == (2, 2)
    assert torch.add(input=tensor_like, other=tensor_like).tolist() == [2.0, 4.0]
    assert (pair @ pair).item() == 5.0 and (-pair)[1].item() == -2.0 and (pair > 1).tolist() == [False, True]
    assert [10, 20, 30][one] == 30 and int(one) == 2 and bool(one) and len(pair) == 2
    assert (pair == Variable(torch.tensor([1.0, 3.0]))).tolist() == [True, False] and pair in {pair: 1}
    with pytest.raises(ConfigurationError, match="use assign, assign_add"):
        pair += 1


def test_a_trainable_variable_is_one_parameter_for_life() -> None:
    weight = Variable(torch.tensor([1.0, 2.0]), trainable=True)
    parameter = weight.value()
    optimizer = torch.optim.SGD([parameter], 0.5)
    (weight * torch.tensor([3.0, 4.0])).sum().backward()
    optimizer.step()
    assert weight.numpy().tolist() == [-0.5, 0.0]
    weight.assign(torch.zeros(2))
    assert weight.value() is parameter and parameter.requires_grad and parameter.tolist() == [0.0, 0.0]
    assert float(Variable(1.5, trainable=True)) == 1.5


def test_deep_copies_for_replicas_use_their_values(use: Use) -> None:
    strategy = use(2)
    with strategy.scope():
        weight, counter = Variable(torch.ones(2), MEAN, trainable=True), Variable(0, FIRST)
    optimizer = torch.optim.SGD([weight.value()], 0.5)
    model = torch.nn.Linear(1, 1)
    model.counter = counter  # type: ignore[assignment]
    memo: dict[int, Any] = {}
    keep_variables(strategy, 1, memo)
    second_optimizer, second_model = copy.deepcopy((optimizer, model), memo)

    def parameter() -> torch.Tensor:
        return weight.value()

    ours, theirs = strategy.run(parameter).values
    assert optimizer.param_groups[0]["params"][0] is ours
    assert second_optimizer.param_groups[0]["params"][0] is theirs and theirs is not ours
    assert vars(second_model)["counter"] is counter and second_model.weight is not model.weight


def test_a_copy_of_the_users_is_independent(use: Use) -> None:
    strategy = use(2)
    with strategy.scope():
        total = Variable(1.0, SUM)
    twin = copy.deepcopy(total)
    strategy.run(lambda: twin.assign_add(1.0))
    assert (float(total), float(twin)) == (1.0, 3.0)


def test_pickles_carry_the_value_read(use: Use) -> None:
    strategy = use(2)
    with strategy.scope():
        metric = Variable(1.0, SUM, ON_READ, name="loss")
    strategy.run(lambda: metric.assign_add(1.0))
    back = pickle.loads(pickle.dumps(metric))
    assert float(back) == 4.0 and back.name == "loss" and back.aggregation is SUM


def test_variables_of_a_strategy_in_order_while_they_live(use: Use) -> None:
    strategy = use(2)
    with strategy.scope():
        first, second = Variable(1.0), Variable(2.0)
    assert strategy.variables() == [first, second]
    del first
    gc.collect()
    assert strategy.variables() == [second]
    assert all(variable not in get_strategy().variables() for variable in (second,))


@pytest.mark.parametrize("num_local", [1, 2])
def test_several_workers(num_local: int) -> None:
    def work(communicator: Communicator) -> tuple[list[float], list[float]]:
        strategy = ReplicaThreadsStrategy(num_local, communicator)
        with contextlib.closing(strategy.replica_threads), strategy.scope():
            rank = float(communicator.rank)
            aggregations = (SUM, MEAN, FIRST)
            written = [Variable(10.0 + rank, aggregation) for aggregation in aggregations]
            read = [Variable(rank, aggregation, ON_READ) for aggregation in aggregations]
            count = Variable(0, SUM, ON_READ)

            def step() -> None:
                for variable in (*written, *read):
                    variable.assign_add(float(replica_id() + 1))

            strategy.run(step)
            seen = [float(variable) for variable in (*written, *read)]
            set_to = [float(read[0].assign(6.0)), float(count.assign(7)), float(read[2].assign(rank))]
            return seen, set_to

    ids = range(1, 2 * num_local + 1)
    total, mean = float(sum(ids)), sum(ids) / len(ids)
    for seen, set_to in run_ranks(2, work):
        # Initial values are rank 0's: 10 for the first three, 0 for the others.
        assert seen == [10 + total, 10 + mean, 11.0, total, mean, 1.0]
        assert set_to == [6.0, 7.0, 0.0]


def test_replicas_that_assign_different_variables_are_told(use: Use) -> None:
    strategy = use(2)
    with strategy.scope():
        variables = Variable(0.0, SUM, name="loss"), Variable(0.0, SUM, name="accuracy")
    with pytest.raises(CollectiveError, match=r"assignment to 'loss'.*assignment to 'accuracy'"):
        strategy.run(lambda: variables[replica_id()].assign_add(1.0))
    assert [float(variable) for variable in variables] == [0.0, 0.0]
