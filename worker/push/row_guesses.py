"""Tables that are looked up together: which ones, and where their ids lie, as it was in the batches before."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

MIN_USE = 4
"""How often a table is looked up with another one, for each time that it was not and its rows came in vain."""
MAX_COMPANIONS = 1024
"""Of a table; where places are never the same again, more would be in vain."""
T = TypeVar("T")
Tensors = Callable[[], Sequence[torch.Tensor]]


class Place(NamedTuple):
    """Where the ids of a lookup lie."""

    tensor: int
    """Which of the tensors that are known: 0 is the ids of the first lookup, the others are the batch's."""
    offset: int
    """From the first element of that one to the first of these, in memory."""
    shape: tuple[int, ...]
    """-1: as many as that one has."""
    stride: tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Companion(Generic[T]):
    """A table that was looked up after another one."""

    table: T
    place: Place
    num_used: int = 0
    num_wasted: int = 0

    @property
    def is_worth(self) -> bool:
        """Whether reading its rows with those of others has been of use."""
        return self.num_used >= MIN_USE * self.num_wasted


class RowGuesses(Generic[T]):
    """Which tables follow the one that a batch looks up first. Ids may lie in any tensor of a step's arguments, or of
    the batch of a distributed dataset; elsewhere in the one that the first lookup was given."""

    def __init__(self) -> None:
        self._companions: dict[T, dict[tuple[T, Place], Companion[T]]] = {}
        """By the table that is looked up first."""
        self._firsts: dict[tuple[T, Place], Companion[T]] = {}
        """Those whose rows were read in the batch before."""
        self._batch: Tensors | None = None
        self._arguments: Tensors | None = None
        self._tensors: list[torch.Tensor] = []
        """That are known: see :attr:`Place.tensor`."""
        self._by_element: dict[int, int] = {}
        self._by_storage: dict[int, int] = {}
        """The last of them by the address of its first element, and of its memory."""
        self._first: tuple[T, Place] | None = None
        self._begun: tuple[tuple[T, Place], Sequence[torch.Tensor]] | None = None
        """How the script began with a batch of a distributed dataset before an update: the first lookup, and what was
        known."""

    def begin(self, batch: Tensors | None) -> None:
        """The script gets a batch; None: the last one is over."""
        self._batch = batch
        self.within(None)
        self._begun = None

    def within(self, arguments: Tensors | None) -> None:
        """What a step begins with; None: it is over."""
        self._arguments = arguments or self._batch
        self.clear()

    def clear(self) -> None:
        """Another batch begins, or this one anew."""
        if self._batch is not None and self._begun is None and self._first is not None:
            self._begun = self._first, self._tensors.copy()
        self._first = None
        self._tensors.clear()

    def note(self, table: T, ids: torch.Tensor) -> Collection[Companion[T]] | None:
        """Remembers which tables are looked up after one another. None: this one is no first one; else what is known to
        follow it."""
        place = self._place_of(ids) if self._first is not None else None
        if self._first is None or (table is self._first[0] and self._is_another(place)):
            arguments = self._arguments() if self._arguments is not None else ()
            self._tensors[:] = [ids, *_possible(arguments)]
            self._by_element = {tensor.data_ptr(): at for at, tensor in enumerate(self._tensors)}
            self._by_storage = {tensor.untyped_storage().data_ptr(): at for at, tensor in enumerate(self._tensors)}
            self._first = table, self._place_of(ids) or _place_in(ids, 0, ids)
            if self._first in self._firsts:
                self._firsts[self._first].num_used += 1
            return self._companions.get(table, {}).values()
        if place is not None:
            known = self._companions.setdefault(self._first[0], {})
            if (table, place) in known or len(known) < MAX_COMPANIONS:
                known.setdefault((table, place), Companion(table, place)).num_used += 1
        return None

    def ids_of(self, known: Collection[Companion[T]]) -> Iterator[tuple[Companion[T], torch.Tensor]]:
        """Where the ids of those that follow should be in this batch."""
        return _ids_in(self._tensors, known)

    def following(self, batch: Tensors) -> Iterator[tuple[Companion[T], torch.Tensor]]:
        """Where the ids of the first lookup, and of those that follow, should be in the batch after this one. Asks for
        that only if this batch was used as it is."""
        found = self._begun or (self._first and (self._first, self._tensors))
        if found is None or self._batch is None or not found[0][1].tensor:
            return
        key, known = found
        own = _possible(self._batch())
        if len(own) + 1 != len(known) or not all(map(operator.is_, own, known[1:])):
            return
        if key not in self._firsts and len(self._firsts) < MAX_COMPANIONS:
            self._firsts[key] = Companion(*key)
        first = self._firsts.get(key)
        if first is None or not first.is_worth or len(tensors := _possible(batch())) != len(own):
            return
        for companion, ids in _ids_in([tensors[0], *tensors], [first]):
            yield companion, ids
            yield from _ids_in([ids, *tensors], self._companions.get(first.table, {}).values())

    def _is_another(self, place: Place | None) -> bool:
        """Whether a lookup of the first table is of another batch; a step may look it up with other ids, too."""
        return self._arguments is None or place is None or (self._first is not None and place == self._first[1])

    def _place_of(self, ids: torch.Tensor) -> Place | None:
        at = self._by_element.get(ids.data_ptr(), self._by_storage.get(ids.untyped_storage().data_ptr()))
        if at is None or self._tensors[at].dtype != ids.dtype:
            return None
        return _place_in(self._tensors[at], at, ids)


def _possible(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those that may be ids."""
    types = torch.int32, torch.int64
    return [each for each in tensors if each.dtype in types and each.layout is torch.strided and not each.is_nested]


def _ids_in(
    tensors: Sequence[torch.Tensor], known: Collection[Companion[T]]
) -> Iterator[tuple[Companion[T], torch.Tensor]]:
    for companion in known:
        place = companion.place
        if not companion.is_worth or place.tensor >= len(tensors):
            continue
        tensor = tensors[place.tensor]
        if not tensor.dim() and -1 in place.shape:
            continue
        shape = [len(tensor) if size < 0 else size for size in place.shape]
        try:
            ids = tensor.as_strided(shape, place.stride, tensor.storage_offset() + place.offset)
        except RuntimeError:  # beyond the memory that the tensor is in
            continue
        yield companion, ids


def _place_in(tensor: torch.Tensor, at: int, ids: torch.Tensor) -> Place:
    shape = tuple(ids.shape)
    if shape and tensor.dim() and shape[0] == len(tensor):
        shape = (-1, *shape[1:])
    return Place(at, (ids.data_ptr() - tensor.data_ptr()) // ids.itemsize, shape, ids.stride())
