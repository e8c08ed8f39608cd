"""Tables that are looked up together: which ones, and where their ids lie, as it was in the batches before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

MIN_USE = 4
"""How often a table is looked up with another one, for each time that it was not and its rows came in vain."""
MAX_COMPANIONS = 1024
"""Of a table; where places are never the same again, more would be in vain."""
T = TypeVar("T")


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


class RowGuesses(Generic[T]):
    """Which tables follow the one that a batch looks up first. In a step, ids may lie in any tensor of its arguments;
    elsewhere in the one that the first lookup was given."""

    def __init__(self) -> None:
        self._companions: dict[T, dict[tuple[T, Place], Companion[T]]] = {}
        """By the table that is looked up first."""
        self._arguments: Callable[[], Sequence[torch.Tensor]] | None = None
        self._tensors: list[torch.Tensor] = []
        """That are known: see :attr:`Place.tensor`."""
        self._by_element: dict[int, int] = {}
        self._by_storage: dict[int, int] = {}
        """The last of them by the address of its first element, and of its memory."""
        self._first: tuple[T, Place] | None = None

    def within(self, arguments: Callable[[], Sequence[torch.Tensor]] | None) -> None:
        """What a step begins with; None: it is over."""
        self._arguments = arguments
        self.clear()

    def clear(self) -> None:
        """Another batch begins, or this one anew."""
        self._first = None
        self._tensors.clear()

    def note(self, table: T, ids: torch.Tensor) -> Collection[Companion[T]] | None:
        """Remembers which tables are looked up after one another. None: this one is no first one; else what is known to
        follow it."""
        place = self._place_of(ids) if self._first is not None else None
        if self._first is None or (table is self._first[0] and self._is_another(place)):
            arguments = self._arguments() if self._arguments is not None else ()
            self._tensors[:] = [ids, *(tensor for tensor in arguments if _may_be_ids(tensor))]
            self._by_element = {tensor.data_ptr(): at for at, tensor in enumerate(self._tensors)}
            self._by_storage = {tensor.untyped_storage().data_ptr(): at for at, tensor in enumerate(self._tensors)}
            self._first = table, self._place_of(ids) or _place_in(ids, 0, ids)
            return self._companions.get(table, {}).values()
        if place is not None:
            known = self._companions.setdefault(self._first[0], {})
            if (table, place) in known or len(known) < MAX_COMPANIONS:
                known.setdefault((table, place), Companion(table, place)).num_used += 1
        return None

    def ids_of(self, known: Collection[Companion[T]]) -> Iterator[tuple[Companion[T], torch.Tensor]]:
        """Where the ids of those that follow should be in this batch."""
        for companion in known:
            place = companion.place
            if companion.num_used < MIN_USE * companion.num_wasted or place.tensor >= len(self._tensors):
                continue
            tensor = self._tensors[place.tensor]
            if not tensor.dim() and -1 in place.shape:
                continue
            shape = [len(tensor) if size < 0 else size for size in place.shape]
            try:
                ids = tensor.as_strided(shape, place.stride, tensor.storage_offset() + place.offset)
            except RuntimeError:  # beyond the memory that the tensor is in
                continue
            yield companion, ids

    def _is_another(self, place: Place | None) -> bool:
        """Whether a lookup of the first table is of another batch; a step may look it up with other ids, too."""
        return self._arguments is None or place is None or (self._first is not None and place == self._first[1])

    def _place_of(self, ids: torch.Tensor) -> Place | None:
        at = self._by_element.get(ids.data_ptr(), self._by_storage.get(ids.untyped_storage().data_ptr()))
        if at is None or self._tensors[at].dtype != ids.dtype:
            return None
        return _place_in(self._tensors[at], at, ids)


def _may_be_ids(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64) and tensor.layout is torch.strided and not tensor.is_nested


def _place_in(tensor: torch.Tensor, at: int, ids: torch.Tensor) -> Place:
    shape = tuple(ids.shape)
    if shape and tensor.dim() and shape[0] == len(tensor):
        shape = (-1, *shape[1:])
    return Place(at, (ids.data_ptr() - tensor.data_ptr()) // ids.itemsize, shape, ids.stride())
