"""The schedule on arrays: rings of 1 to 16 ranks in memory, whose messages are lists of elements."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.cluster.communication import ReduceOp
from stratagem.worker.ring.schedule import (
    ChunkAction,
    RingStep,
    Schedule,
    all_reduce_schedule,
    chunks,
    cut,
    gather_slices,
    reduce_scatter_schedule,
)
from tests.thorough import all_but_each_third

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
]
Reduction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
REDUCTIONS: dict[ReduceOp, Reduction] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
SIZES = range(1, 17)
sizes = st.integers(1, 16)
lengths = st.integers(0, 70)
chunk_lengths = st.integers(1, 40)


class Ring:
    """Ranks that run schedules in memory: one queue between neighbours, a message is the step and its values."""

    def __init__(self, schedules: Sequence[Schedule], own: Sequence[torch.Tensor], reduction: Reduction) -> None:
        self.size = len(schedules)
        self.own = own
        self.has = [torch.full_like(tensor, 99) for tensor in own]
        self.num_sent = [0] * self.size
        self.messages: list[RingStep] = []
        self._reduction = reduction
        self._schedules = schedules
        self._queues: list[collections.deque[tuple[RingStep, torch.Tensor]]] = [collections.deque() for _ in schedules]

    def run(self) -> None:
        """Lets every rank go as far as it can, in turn, until all are done; fails when they wait for each other."""
        ranks = [self._rank(rank) for rank in range(self.size)]
        alive = set(range(self.size))
        while alive:
            before = sum(len(queue) for queue in self._queues), len(self.messages), len(alive)
            for rank in sorted(alive):
                if next(ranks[rank], None) is None:
                    alive.discard(rank)
            assert (sum(len(queue) for queue in self._queues), len(self.messages), len(alive)) != before, "all wait"
        assert not any(self._queues), "messages that nobody received"

    def _rank(self, rank: int) -> Iterator[str]:
        """Yields where it has to wait."""
        inbox, outbox = self._queues[rank], self._queues[(rank + 1) % self.size]
        own, has = self.own[rank], self.has[rank]
        for step in self._schedules[rank]:
            assert 0 <= step.start < step.stop <= len(own)
            part = slice(step.start, step.stop)
            if step.action in (ChunkAction.SEND_OWN, ChunkAction.SEND):
                values = own[part] if step.action is ChunkAction.SEND_OWN else has[part]
                outbox.append((step, values.clone()))
                self.messages.append(step)
                self.num_sent[rank] += step.stop - step.start
                continue
            while not inbox:
                yield "waits"
            sent, values = inbox.popleft()
            assert (sent.start, sent.stop, sent.slice, sent.hop) == (step.start, step.stop, step.slice, step.hop)
            has[part] = self._reduction(own[part], values) if step.action is ChunkAction.REDUCE else values


def all_reduce(own: Sequence[torch.Tensor], op: ReduceOp, chunk: int) -> Ring:
    size = len(own)
    ring = Ring([all_reduce_schedule(size, r, len(own[0]), chunk) for r in range(size)], own, REDUCTIONS[op])
    ring.run()
    if size == 1:  # nobody to talk to: the group copies
        ring.has = [own[0].clone()]
    return ring


def plain(own: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    total = own[0].clone()
    for tensor in own[1:]:
        total = REDUCTIONS[op](total, tensor)
    return total


def small_integers(size: int, length: int, dtype: torch.dtype, op: ReduceOp, seed: int) -> list[torch.Tensor]:
    """Values whose sums and products are exact in every dtype, in any order."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (1, 3) if op is ReduceOp.PRODUCT else (0, 8)
    values = torch.randint(low, high, (size, length), generator=generator)
    if op is ReduceOp.PRODUCT:
        values[3:] = 1  # at most 2³: fits int8 and is exact in bfloat16
    return list(values.to(dtype))


@pytest.mark.parametrize("op", REDUCTIONS, ids=lambda op: op.value)
@pytest.mark.parametrize("dtype", all_but_each_third(DTYPES), ids=str)
def test_equals_the_plain_reduction(dtype: torch.dtype, op: ReduceOp) -> None:
    for size in SIZES:
        for length, chunk in ((size - 1, 1), (2 * size + 1, 2)):  # empty slices; uneven ones of two chunks
            own = small_integers(size, length, dtype, op, seed=size)
            expected = plain(own, op)
            for has in all_reduce(own, op, chunk).has:
                assert torch.equal(has, expected), (size, length, chunk)


@settings(max_examples=60, deadline=None)
@given(sizes, lengths, chunk_lengths, st.sampled_from(list(REDUCTIONS)), st.integers(0, 999))
def test_ranks_are_bit_identical(size: int, length: int, chunk: int, op: ReduceOp, seed: int) -> None:
    own = list(torch.randn(size, length, generator=torch.Generator().manual_seed(seed)))
    ring = all_reduce(own, op, chunk)
    assert all(torch.equal(has, ring.has[0]) for has in ring.has)
    torch.testing.assert_close(ring.has[0], plain(own, op))


@settings(max_examples=60, deadline=None)
@given(sizes, lengths, chunk_lengths)
def test_each_rank_owns_its_slice_after_the_reduce_scatter(size: int, length: int, chunk: int) -> None:
    own = small_integers(size, length, torch.int64, ReduceOp.SUM, seed=length)
    ring = Ring([reduce_scatter_schedule(size, r, length, chunk) for r in range(size)], own, torch.add)
    ring.run()
    for rank, (start, stop) in enumerate(cut(length, size)):
        if size > 1:
            assert torch.equal(ring.has[rank][start:stop], plain(own, ReduceOp.SUM)[start:stop])
    assert sum(ring.num_sent) == (size - 1) * length


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=16), chunk_lengths)
def test_all_gather_of_differing_lengths(counts: list[int], chunk: int) -> None:
    size, total = len(counts), sum(counts)
    starts = [sum(counts[:rank]) for rank in range(size)]
    slices = tuple((start, start + count) for start, count in zip(starts, counts, strict=True))
    whole = torch.arange(total)
    ring = Ring([gather_slices(slices, rank, chunk) for rank in range(size)], [whole] * size, torch.add)
    for rank, (start, stop) in enumerate(slices):
        ring.has[rank][start:stop] = whole[start:stop]
    ring.run()
    assert all(torch.equal(has, whole) for has in ring.has)
    assert sum(ring.num_sent) == (size - 1) * total


@pytest.mark.parametrize("size", SIZES)
def test_hops_and_volume(size: int) -> None:
    length, chunk = 5 * size + 3, 2
    own = small_integers(size, length, torch.int64, ReduceOp.SUM, seed=size)
    ring = all_reduce(own, ReduceOp.SUM, chunk)
    assert sum(ring.num_sent) == 2 * (size - 1) * length  # on average 2(N-1)/N of the elements for each rank
    # The slices that a rank does not send are its right neighbour's, once complete, and the one it owns, once its own.
    extra = [stop - start for start, stop in cut(length, size)]
    for rank, num_sent in enumerate(ring.num_sent):
        if size > 1:
            assert num_sent == 2 * length - extra[rank] - extra[(rank + 1) % size]
    hops = collections.Counter(
        (element, step.hop) for step in ring.messages for element in range(step.start, step.stop)
    )
    # Every element takes each of the hops 1 … N-1 twice: once being reduced and once complete.
    assert hops == {(element, hop): 2 for element in range(length) for hop in range(1, size)}


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_little_is_under_way_and_a_chunk_is_sent_on_before_the_next_of_its_slice_is_received(size: int) -> None:
    steps = all_reduce_schedule(size, 1, 64 * size, 4)
    sending = (ChunkAction.SEND_OWN, ChunkAction.SEND)
    num_ahead = 0
    for index, step in enumerate(steps):
        num_ahead += 1 if step.action in sending else -1
        assert 0 <= num_ahead <= 2 * (size - 1)  # one chunk of each slice that travels
        if step.action in sending or (step.action is ChunkAction.STORE and step.hop == size - 1):
            continue
        rest = steps[index + 1 :]
        departs = next(i for i, one in enumerate(rest) if one.action is ChunkAction.SEND and one.start == step.start)
        same = [
            i for i, one in enumerate(rest) if (one.action, one.slice, one.hop) == (step.action, step.slice, step.hop)
        ]
        arrives = min(same, default=len(steps))
        assert departs < arrives


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300))
def test_chunks_cover_a_slice_evenly(start: int, length: int, chunk: int) -> None:
    found = chunks(start, start + length, chunk)
    assert [element for a, b in found for element in range(a, b)] == list(range(start, start + length))
    assert all(0 < b - a <= chunk for a, b in found)
    assert len(found) == -(-length // chunk)
    assert max((b - a for a, b in found), default=0) - min((b - a for a, b in found), default=0) <= 1


def test_owners_depend_on_elements_and_ranks_only() -> None:
    for chunk in (1, 3, 100):
        owners = {
            (element, step.slice)
            for rank in range(5)
            for step in all_reduce_schedule(5, rank, 23, chunk)
            for element in range(step.start, step.stop)
        }
        assert owners == {(element, rank) for rank, (a, b) in enumerate(cut(23, 5)) for element in range(a, b)}
