"""Who sends what to whom, in which order: pure functions of (ranks, rank, elements).

The ring: rank r receives from r-1 and sends to r+1. A flat tensor is cut into one slice for each rank. In the
*reduce-scatter* the partial result of a slice starts at the rank after its owner and goes once around; each rank
reduces it with its own elements, and it is complete when it reaches its owner. In the *all-gather* each complete slice
starts at its owner and goes once around. Both take N-1 hops, and a rank sends (N-1)/N of the elements in each
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).

Slices travel in chunks, and a chunk is forwarded as soon as it arrives, while the next one is still in flight. Each
rank's schedule lists receives in the order in which its left neighbour's schedule lists the sends, so messages need no
search and no sorting.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Sequence


class ChunkAction(enum.Enum):
    """What a rank does with one chunk."""

    SEND_OWN = "send own"
    """Send this rank's own elements, with which nothing has been reduced yet."""
    SEND = "send"
    """Send what this rank has reduced or received, or its own slice in an all-gather."""
    REDUCE = "reduce"
    """Receive, and reduce with this rank's own elements."""
    STORE = "store"
    """Receive: the elements are final."""


@dataclasses.dataclass(frozen=True, slots=True)
class RingStep:
    """One action on the elements from ``start`` to ``stop`` of the flat tensor; never empty."""

    action: ChunkAction
    slice: int
    """Owner of the elements."""
    hop: int
    """1 … N-1: how many ranks away from its start the chunk is, in its phase, when this message has been received."""
    start: int
    stop: int


Schedule = tuple[RingStep, ...]


def cut(num_elements: int, num_parts: int) -> list[tuple[int, int]]:
    """Cuts a flat tensor into contiguous slices, as even as can be; the first ones have one element more. The
    (start, stop) of each; parts may be empty."""
    base, extra = divmod(num_elements, num_parts)
    starts = [part * base + min(part, extra) for part in range(num_parts + 1)]
    return list(itertools.pairwise(starts))


@functools.lru_cache(maxsize=1024)
def chunks(start: int, stop: int, chunk_elements: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of the fewest equal chunks of at most ``chunk_elements``; none for no elements."""
    num_chunks = -(-(stop - start) // chunk_elements)
    return tuple((start + a, start + b) for a, b in cut(stop - start, num_chunks)) if num_chunks else ()


@functools.lru_cache(maxsize=64)
def reduce_scatter_schedule(size: int, rank: int, num_elements: int, chunk_elements: int) -> Schedule:
    """Steps after which ``rank`` has its slice (:func:`cut`) of the reduction."""
    slices = cut(num_elements, size)
    received = _reduced(size, rank)
    return tuple(_relay(slices, chunk_elements, (ChunkAction.SEND_OWN, (rank - 1) % size), received))


@functools.lru_cache(maxsize=64)
def gather_slices(slices: tuple[tuple[int, int], ...], rank: int, chunk_elements: int) -> Schedule:
    """Steps after which ``rank`` has the slices of all: ``slices[r]`` is (start, stop) of what rank r begins with."""
    size = len(slices)
    return tuple(_relay(slices, chunk_elements, (ChunkAction.SEND, rank), _gathered(size, rank)))


@functools.lru_cache(maxsize=64)
def all_reduce_schedule(size: int, rank: int, num_elements: int, chunk_elements: int) -> Schedule:
    """Reduce-scatter and all-gather in one: a chunk starts its second round as soon as its first one is complete."""
    slices = cut(num_elements, size)
    received = [*_reduced(size, rank), *_gathered(size, rank)]
    return tuple(_relay(slices, chunk_elements, (ChunkAction.SEND_OWN, (rank - 1) % size), received))


def _reduced(size: int, rank: int) -> list[tuple[ChunkAction, int, int]]:
    return [(ChunkAction.REDUCE, (rank - 1 - hop) % size, hop) for hop in range(1, size)]


def _gathered(size: int, rank: int) -> list[tuple[ChunkAction, int, int]]:
    return [(ChunkAction.STORE, (rank - hop) % size, hop) for hop in range(1, size)]


def _relay(
    slices: Sequence[tuple[int, int]],
    chunk_elements: int,
    first: tuple[ChunkAction, int],
    received: Sequence[tuple[ChunkAction, int, int]],
) -> list[RingStep]:
    """Sends the first slice, then receives one slice after the other and sends each on, except the last.

    The slices follow each other as waves: at beat ``c + place`` a rank sends chunk c of the slice that is its place-th
    to send, and then it receives what its left neighbour sent at that beat: a chunk departs to the next rank at the
    beat after its arrival. So every rank has about as much under way as the next one takes, and the bytes are still in
    the caches when they are read. ``first``: how and which slice is sent first; ``received``: (action, slice, hop) in
    the order in which they begin to come.
    """
    parts = [chunks(*bounds, chunk_elements) for bounds in slices]
    events: list[tuple[int, int, int, RingStep]] = []
    for place, (action, index, hop) in enumerate(received):
        sent_action, sent = first if place == 0 else (ChunkAction.SEND, received[place - 1][1])
        for number, chunk in enumerate(parts[sent]):
            events.append((number + place, 0, place, RingStep(sent_action, sent, hop, *chunk)))
        for number, chunk in enumerate(parts[index]):
            events.append((number + place, 1, place, RingStep(action, index, hop, *chunk)))
    events.sort(key=lambda event: event[:3])
    return [step for *_, step in events]
