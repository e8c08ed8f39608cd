"""Values of several replicas, and how they become one."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

from stratagem.cluster.communication import ReduceOp

T = TypeVar("T")

__all__ = ["PerReplica", "ReduceOp", "local_values"]


@dataclasses.dataclass(frozen=True)
class PerReplica(Generic[T]):
    """One value for each local replica, in replica order."""

    values: tuple[T, ...]
    shares: tuple[float, ...] = ()
    """Weight of each replica: its examples in the batch it was given; empty when they are equal."""


def local_values(value: Any) -> tuple[Any, ...]:
    """The values in ``value``: those of a :class:`PerReplica`, or ``value`` itself."""
    return value.values if isinstance(value, PerReplica) else (value,)
