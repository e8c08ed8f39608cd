"""Values of several replicas, and how they become one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Generic, NoReturn, TypeVar

from stratagem.data.nested import is_named_tuple, is_record, map_values, values_in
from stratagem.errors import ConfigurationError

T = TypeVar("T")

_WAYS_OUT = (
    "a PerReplica holds one value for each replica: strategy.reduce_mean combines them into one, "
    "strategy.local_results gives those of this process, and strategy.run takes it whole"
)


@dataclasses.dataclass(frozen=True)
class PerReplica(Generic[T]):
    """One value for each local replica, in replica order.

    Where each is a tuple or a list, it unpacks (``for images, labels in dataset``); where each is one of them or a
    mapping, it indexes (``outputs["loss"]``); where each is a named tuple or a dataclass object, it has its fields.
    What comes of it is the ``PerReplica`` of that part, which is what TensorFlow has there.
    """

    values: tuple[T, ...]
    shares: tuple[float, ...] = ()
    """Weight of each replica: the number of its examples in its batch, or the value of ``set_weight``; empty when they
    are equal."""

    def __getattr__(self, name: str) -> PerReplica[Any]:
        values = vars(self).get("values", ())  # none yet in a copy that is being made
        if values and all(name in _fields_of(value) for value in values):
            return PerReplica(tuple(getattr(value, name) for value in values), self.shares)
        raise AttributeError(f"{_WAYS_OUT}; it has no {name!r} itself")

    def _refuse(self, *others: object) -> NoReturn:
        raise ConfigurationError(_WAYS_OUT)

    def __len__(self) -> int:
        lengths = {len(value) if isinstance(value, list | tuple) else -1 for value in self.values}
        if len(lengths) != 1 or -1 in lengths:
            self._refuse()
        return lengths.pop()

    def __iter__(self) -> Iterator[PerReplica[Any]]:
        return iter([self[place] for place in range(len(self))])

    def __getitem__(self, place: Any) -> PerReplica[Any]:
        parts: list[Any] = [value for value in self.values if isinstance(value, list | tuple | Mapping)]
        if len(parts) != len(self.values):
            self._refuse()
        return PerReplica(tuple(part[place] for part in parts), self.shares)

    __bool__ = __int__ = __float__ = __format__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PerReplica):
            self._refuse()  # ``strategy.run(step) == 3`` would be False, whatever the replicas returned
        return (self.values, self.shares) == (other.values, other.shares)

    @classmethod
    def __torch_function__(cls, *_: object) -> NoReturn:
        """Torch calls it for a function that is given one, also in a model that is called outside of ``run``."""
        raise ConfigurationError(_WAYS_OUT)


def _fields_of(value: Any) -> Collection[str]:
    if is_named_tuple(value):
        return tuple(value._fields)
    return [field.name for field in dataclasses.fields(value)] if is_record(value) else ()


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """The replica that a value is for, passed to the function of ``distribute_values_from_function``."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


class OnReplicas:
    """An object that has a value on each local replica, and one outside of them."""

    num_values: int
    """Number of local replicas."""
    may_differ: bool
    """Whether a replica's value can be another one than those of the others."""

    def value_on(self, replica: int) -> Any:
        """That of a local replica."""
        raise NotImplementedError


def local_values(value: Any) -> tuple[Any, ...]:
    """The values in ``value``: those of a :class:`PerReplica` or a variable, also inside dicts, lists and tuples, or
    ``value``. Of a variable that a replica returned, it is the one on that replica."""
    if isinstance(value, PerReplica):
        return tuple(_value_on(part, replica) for replica, part in enumerate(value.values))
    leaves = values_in(value)
    counts = [len(leaf.values) for leaf in leaves if isinstance(leaf, PerReplica)]
    counts += [leaf.num_values for leaf in leaves if isinstance(leaf, OnReplicas)]
    parts = (part_of_replica(value, replica) for replica in range(max(counts, default=0)))
    return tuple(_value_on(part, replica) for replica, part in enumerate(parts)) or (value,)


def _value_on(value: Any, replica: int) -> Any:
    if not _has_variable(value):
        return value  # what a replica returned stays the object that it is
    return map_values(value, lambda leaf: leaf.value_on(replica) if isinstance(leaf, OnReplicas) else leaf)


def _has_variable(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(_has_variable, value.values() if isinstance(value, dict) else value))
    return isinstance(value, OnReplicas)


def part_of_replica(value: Any, replica: int) -> Any:
    """``value``, with each :class:`PerReplica` in it, also inside dicts, lists and tuples, replaced by one's value."""
    return map_values(value, lambda leaf: leaf.values[replica] if isinstance(leaf, PerReplica) else leaf)
