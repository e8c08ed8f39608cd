"""Every enum of the public API takes its member or its name in any case, and nothing else stands for a member."""

from __future__ import annotations

import contextlib
import enum
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

import stratagem as sg
from stratagem.cluster.named_enum import NamedEnum
from stratagem.errors import ConfigurationError
from stratagem.worker.ring.communicator import Communicator
from tests.unit.ring.thread_group import Meeting, ThreadGroup

PAIR = sg.PerReplica((torch.tensor([1.0, 5.0]), torch.tensor([3.0, 4.0])))
TENSORS = list(PAIR.values)
REDUCED = {"SUM": [4.0, 9.0], "MEAN": [2.0, 4.5], "MIN": [1.0, 4.0], "MAX": [3.0, 5.0], "PRODUCT": [3.0, 20.0]}
ENUMS = [one for name in sg.__all__ if isinstance(one := getattr(sg, name), type) and issubclass(one, enum.Enum)]


class Other(enum.Enum):
    SUM = 1


@pytest.fixture
def workers() -> Iterator[Communicator]:
    made = Communicator(ThreadGroup(Meeting(1), 0), lambda error, position: error)
    yield made
    made.close()


def _in_a_step(strategy: sg.Strategy, given: Any) -> torch.Tensor:
    def step(value: torch.Tensor) -> Any:
        context = sg.get_replica_context()
        assert context is not None
        return context.all_reduce(given, value)

    result: torch.Tensor = strategy.run(step, (PAIR,)).values[1]
    return result


def _spec(mode: Any) -> sg.EstimatorSpec:
    net = torch.nn.Linear(1, 1)
    return sg.EstimatorSpec(mode, net.weight, net.weight.sum(), torch.optim.SGD(net.parameters()))


# Argument: its enum, what it becomes when it is given, and what it has to become where that is no member.
Row = tuple[type[enum.Enum], Callable[[Any, sg.Strategy, Communicator], Any], dict[str, list[float]] | None]
OPS = sg.ReductionToOneDevice()
ROWS: dict[str, Row] = {
    "Strategy.reduce(op)": (sg.ReduceOp, lambda given, strategy, _: strategy.reduce(given, PAIR), REDUCED),
    "ReplicaContext.all_reduce(op)": (sg.ReduceOp, lambda given, strategy, _: _in_a_step(strategy, given), REDUCED),
    "CrossDeviceOps.all_reduce(op)": (sg.ReduceOp, lambda given, *_: OPS.all_reduce(given, TENSORS)[1], REDUCED),
    "CrossDeviceOps.all_reduce_many(op)": (
        sg.ReduceOp,
        lambda given, *_: sg.HierarchicalCopyAllReduce().all_reduce_many(given, [TENSORS])[0][1],
        REDUCED,
    ),
    "CrossDeviceOps.reduce(op)": (sg.ReduceOp, lambda given, *_: OPS.reduce(given, TENSORS, "cpu")[0], REDUCED),
    "Communicator.all_reduce(op)": (sg.ReduceOp, lambda given, _, workers: workers.all_reduce(TENSORS[0], given), None),
    "Variable.__init__(aggregation)": (
        sg.VariableAggregation,
        lambda given, *_: sg.Variable(0.0, aggregation=given).aggregation,
        None,
    ),
    "Variable.__init__(synchronization)": (
        sg.VariableSynchronization,
        lambda given, *_: sg.Variable(0.0, synchronization=given).synchronization,
        None,
    ),
    "CommunicationOptions.__init__(implementation)": (
        sg.CommunicationImplementation,
        lambda given, *_: sg.CommunicationOptions(given).implementation,
        None,
    ),
    "MultiWorkerMirroredStrategy.__init__(cluster_resolver)": (
        sg.CommunicationImplementation,
        lambda given, *_: _ring(given),
        None,
    ),
    "MultiWorkerMirroredStrategy.__init__(communication)": (
        sg.CommunicationImplementation,
        lambda given, *_: _ring(communication=given),
        None,
    ),
    "DistributeOptions.__init__(auto_shard_policy)": (
        sg.AutoShardPolicy,
        lambda given, *_: sg.DistributeOptions(given).auto_shard_policy,
        None,
    ),
    "EstimatorSpec.__init__(mode)": (sg.ModeKeys, lambda given, *_: _spec(given).mode, None),
}

NAMELESS = ("foo", "", 0, True, Other.SUM, numpy.array([1, 2]), [1])
REFUSED = (*NAMELESS, None)
ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "MultiWorkerMirroredStrategy.__init__(cluster_resolver)": ("foo", ""),  # or a resolver, or None
    "MultiWorkerMirroredStrategy.__init__(communication)": NAMELESS,  # or None
}


def _ring(*args: Any, **kwargs: Any) -> sg.CommunicationImplementation:
    with contextlib.closing(sg.MultiWorkerMirroredStrategy(*args, **kwargs, devices="cpu")) as strategy:
        return strategy.options.implementation


def _functions() -> Iterator[Callable[..., Any]]:
    """The public functions, and of public classes the constructor and the public methods."""
    for room in (sg, sg.callbacks, sg.nn, {"Communicator": Communicator}):
        names = room if isinstance(room, dict) else {name: getattr(room, name) for name in room.__all__}
        for one in names.values():
            if inspect.isclass(one) and not issubclass(one, enum.Enum):
                members = inspect.getmembers(one, inspect.isfunction)
                yield from (method for name, method in members if name == "__init__" or not name.startswith("_"))
            elif inspect.isfunction(one):
                yield one


def test_every_public_enum_argument_has_a_row_here() -> None:
    kinds = re.compile(rf"\b({'|'.join(kind.__name__ for kind in ENUMS)})\b")
    found = {
        f"{function.__qualname__}({parameter.name})"
        for function in _functions()
        for parameter in inspect.signature(function).parameters.values()
        if kinds.search(str(parameter.annotation))
    }
    assert found == set(ROWS)
    assert {kind for kind, _, _ in ROWS.values()} == set(ENUMS)
    assert all(issubclass(kind, NamedEnum) for kind in ENUMS)


@pytest.mark.parametrize("name", ROWS)
def test_a_member_and_its_name_in_any_case_are_the_same(
    name: str, strategy: sg.MirroredStrategy, workers: Communicator
) -> None:
    kind, call, expected = ROWS[name]
    for member in kind:
        for given in (member, member.name, member.name.lower(), member.name.title()):
            got = call(given, strategy, workers)
            if expected is not None:
                assert got.tolist() == expected[member.name], given
            elif isinstance(got, torch.Tensor):
                assert got.tolist() == TENSORS[0].tolist(), given
            else:
                assert got is member, given


@pytest.mark.parametrize("name", ROWS)
def test_anything_else_is_refused_with_the_choices(
    name: str, strategy: sg.MirroredStrategy, workers: Communicator
) -> None:
    kind, call, _ = ROWS[name]
    choices = ", ".join(member.name for member in kind)
    for given in ELSEWHERE.get(name, REFUSED):
        expected = f"expected {kind.__name__} of {choices} (the member or its name), got {given!r}"
        with pytest.raises(ConfigurationError, match=re.escape(expected)):
            call(given, strategy, workers)
