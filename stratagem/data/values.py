"""Values of several replicas, and how they become one."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, NoReturn, TypeVar

from stratagem.cluster.communication import ReduceOp
from stratagem.data.nested import map_values
from stratagem.errors import ConfigurationError

T = TypeVar("T")

__all__ = ["PerReplica", "ReduceOp", "ValueContext", "local_values", "part_of_replica"]


@dataclasses.dataclass(frozen=True)
class PerReplica(Generic[T]):
    """One value for each local replica, in replica order."""

    values: tuple[T, ...]
    shares: tuple[float, ...] = ()
    """Weight of each replica: its examples in the batch it was given, or what ``set_weight`` said; empty when they are
    equal."""

    def __iter__(self) -> NoReturn:
        raise ConfigurationError(
            "a PerReplica holds one value for each replica: give it whole to strategy.run and take it apart in the "
            "step, or ask strategy.local_results for its values"
        )


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """What a function given to ``distribute_values_from_function`` is told about the replica its value is for."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


def local_values(value: Any) -> tuple[Any, ...]:
    """The values in ``value``: those of a :class:`PerReplica`, or ``value`` itself."""
    return value.values if isinstance(value, PerReplica) else (value,)


def part_of_replica(value: Any, replica: int) -> Any:
    """``value``, with each :class:`PerReplica` in it, also inside dicts, lists and tuples, replaced by one's value."""
    return map_values(value, lambda leaf: leaf.values[replica] if isinstance(leaf, PerReplica) else leaf)
