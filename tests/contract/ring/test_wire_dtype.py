"""A ring that sends float32 as 16 bits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import pytest
import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.rpc.codec import Frame
from stratagem.rpc.lane import Place, ReceivingLane
from stratagem.worker.ring.group import Tag
from stratagem.worker.ring.ring_group import SMALL_BYTES, RingGroup
from stratagem.worker.ring.schedule import cut
from tests.contract.ring.groups import LanePair, in_threads, ring_over, tcp_lane

LENGTH = 40_009


class Tap:
    """A receiving lane that notes what comes."""

    def __init__(self, lane: ReceivingLane, seen: list[torch.dtype]) -> None:
        self.name = lane.name
        self._lane = lane
        self._seen = seen

    def receive(self, transfer: int, deadline: float, into: torch.Tensor | Place | None = None) -> Frame:
        frame = self._lane.receive(transfer, deadline, into)
        self._seen.append(frame.tensor.dtype)
        return frame

    def forget(self, transfer: int) -> None:
        self._lane.forget(transfer)

    def close(self, reason: str) -> None:
        self._lane.close(reason)


@contextlib.contextmanager
def rings(size: int, wire_dtype: torch.dtype) -> Iterator[tuple[list[RingGroup], list[torch.dtype]]]:
    """A ring, and the dtypes of all messages in it."""
    seen: list[torch.dtype] = []

    def tapped(stack: contextlib.ExitStack) -> LanePair:
        sender, receiver = tcp_lane(stack)
        return sender, Tap(receiver, seen)

    with contextlib.ExitStack() as stack:
        groups = ring_over(tapped, wire_dtype)(size, stack, 20.0)
        for group in groups:
            stack.callback(group.close, "the test is over")
        yield groups, seen


def reduce_on_every_rank(groups: Sequence[RingGroup], sources: torch.Tensor, op: ReduceOp) -> list[torch.Tensor]:
    def work(group: RingGroup) -> torch.Tensor:
        source = sources[group.rank].clone()
        out = torch.empty_like(source)
        group.all_reduce(source, out, op, Tag(1, 1))
        assert torch.equal(source, sources[group.rank]), "the source was written to"
        scattered = torch.empty(len(out[slice(*cut(len(out), group.size)[group.rank])]), dtype=out.dtype)
        group.reduce_scatter(source, scattered, op, Tag(2, 1))
        assert torch.equal(scattered, out[slice(*cut(len(out), group.size)[group.rank])])
        group.all_reduce(source, source, op, Tag(3, 1))
        assert torch.equal(source, out), "in place is not the same"
        return out

    return in_threads([functools.partial(work, group) for group in groups])


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_float32_and_rounded_once_for_each_hop(size: int, wire_dtype: torch.dtype) -> None:
    sources = torch.randn(size, LENGTH, generator=torch.Generator().manual_seed(size))
    with rings(size, wire_dtype) as (groups, seen):
        outs = reduce_on_every_rank(groups, sources, ReduceOp.SUM)
    assert set(seen) == {wire_dtype}
    expected = torch.empty(LENGTH)
    for owner, (start, stop) in enumerate(cut(LENGTH, size)):
        partial = sources[(owner + 1) % size, start:stop].to(wire_dtype).float()
        for hop in range(2, size + 1):
            partial = (partial + sources[(owner + hop) % size, start:stop]).to(wire_dtype).float()
        expected[start:stop] = partial
    assert all(torch.equal(out, expected) for out in outs)


def test_other_dtypes_and_short_tensors_travel_as_they_are() -> None:
    for sources in (torch.randn(2, LENGTH).double(), torch.randn(2, SMALL_BYTES // 16), torch.ones(2, LENGTH).long()):
        with rings(2, torch.bfloat16) as (groups, seen):

            def work(group: RingGroup, sources: torch.Tensor = sources) -> torch.Tensor:
                out = torch.empty_like(sources[0])
                group.all_reduce(sources[group.rank], out, ReduceOp.SUM, Tag(1, 1))
                return out

            for out in in_threads([functools.partial(work, group) for group in groups]):
                assert torch.equal(out, sources[0] + sources[1])
        assert set(seen) == {sources.dtype}


def test_a_change_of_the_chunk_size() -> None:
    sources = torch.randn(2, LENGTH)
    counts = []
    with rings(2, torch.float32) as (groups, seen):
        for ordinal, chunk_bytes in enumerate((1 << 20, 8192), 1):

            def work(group: RingGroup, ordinal: int = ordinal, chunk_bytes: int = chunk_bytes) -> torch.Tensor:
                group.chunk_bytes = chunk_bytes
                out = torch.empty(LENGTH)
                group.all_reduce(sources[group.rank], out, ReduceOp.SUM, Tag(ordinal, 1))
                return out

            before = len(seen)
            for out in in_threads([functools.partial(work, group) for group in groups]):
                assert torch.equal(out, sources[0] + sources[1])
            counts.append(len(seen) - before)
    assert counts == [4, sum(2 * -(-4 * (stop - start) // 8192) for start, stop in cut(LENGTH, 2))]
