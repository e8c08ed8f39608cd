"""Ranks that share a GPU: every collective of tensors there is what it is on the host. Says "ok NAME" of each check.

The first argument says how: "host" (the tensors go by way of it) or "nccl". The variable DEVICE says where tensors are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import stratagem.distributed  # noqa: F401
from stratagem.distributed.process_group import LaneProcessGroup

DEVICE = torch.device(os.environ.get("DEVICE", "cpu"))
if DEVICE.type == "cuda":
    DEVICE = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
LENGTHS = (1, 1000, 300_000)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8)
ONLY_ON_LANES = (torch.int16,)
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda stacked: stacked.sum(0),
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
    "PRODUCT": lambda stacked: stacked.prod(0),
}


def values(rank: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, other ones for each rank: sums are exact in every dtype."""
    return ((torch.arange(length, device=DEVICE) * 7 + rank * 3) % 5 - 2).to(dtype)


def every(length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Those of all ranks."""
    return torch.stack([values(rank, length, dtype) for rank in range(SIZE)])


def same(found: Sequence[torch.Tensor] | torch.Tensor, expected: Sequence[torch.Tensor] | torch.Tensor) -> None:
    """Compares."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(each.device == DEVICE for each in ([found] if isinstance(found, torch.Tensor) else found))


def all_reduce() -> None:
    """Every reduction of every dtype, awaited or not."""
    for length in LENGTHS:
        for dtype in (*DTYPES, *ONLY_ON_LANES):
            for name, reduced in OPS.items():
                tensor = values(RANK, length, dtype)
                work = dist.all_reduce(tensor, getattr(dist.ReduceOp, name), async_op=length == 1000)
                if work is not None:
                    work.wait()
                same(tensor, reduced(every(length, dtype)).to(dtype))
    tensor = values(RANK, 1000)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    same(tensor, every(1000).mean(0))
    tensor = values(RANK, 1000, torch.int32)
    dist.all_reduce(tensor, dist.ReduceOp.BOR)
    expected = values(0, 1000, torch.int32)
    for rank in range(1, SIZE):
        expected |= values(rank, 1000, torch.int32)
    same(tensor, expected)


def in_a_stream_of_its_own() -> None:
    """What a stream has yet to write is what is reduced, and what it reads next is the result."""
    if DEVICE.type != "cuda":
        return
    stream, big = torch.cuda.Stream(), torch.ones(2048, 2048, device=DEVICE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for is_async in (False, True):
            slow = big
            for _ in range(20):
                slow = slow @ big / 2048
            tensor = slow.view(-1)[:1000] * values(RANK, 1000)
            work = dist.all_reduce(tensor, async_op=is_async)
            if work is not None:
                work.wait()
            found = tensor + 1
    torch.cuda.current_stream().wait_stream(stream)
    same(found, every(1000).sum(0) + 1)


def coalesced() -> None:
    """Several by one call."""
    tensors = [values(RANK, length) for length in LENGTHS]
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    same(tensors, [every(length).sum(0) for length in LENGTHS])
    outs = [torch.zeros(SIZE * length, device=DEVICE) for length in LENGTHS]
    with _coalescing_manager():
        for out, length in zip(outs, LENGTHS, strict=True):
            dist.all_gather_into_tensor(out, values(RANK, length))
    same(outs, [every(length).view(-1) for length in LENGTHS])
    outs = [torch.zeros(length, device=DEVICE) for length in LENGTHS]
    with _coalescing_manager():
        for out, length in zip(outs, LENGTHS, strict=True):
            dist.reduce_scatter_tensor(out, values(RANK, SIZE * length))
    same(outs, [every(SIZE * length).sum(0).view(SIZE, -1)[RANK] for length in LENGTHS])


def with_a_root() -> None:
    """broadcast, reduce, gather, scatter."""
    for root in range(SIZE):
        tensor = values(RANK, 1000)
        dist.broadcast(tensor, root)
        same(tensor, values(root, 1000))
        tensor = values(RANK, 1000)
        dist.reduce(tensor, root)
        if root == RANK:
            same(tensor, every(1000).sum(0))
        outs = [torch.zeros(1000, device=DEVICE) for _ in range(SIZE)] if root == RANK else None
        dist.gather(values(RANK, 1000), outs, root)
        if outs is not None:
            same(outs, list(every(1000)))
        out = torch.zeros(1000, device=DEVICE)
        dist.scatter(out, list(every(1000)) if root == RANK else None, root)
        same(out, values(RANK, 1000))


def gathers_and_scatters() -> None:
    """all_gather and reduce_scatter, as lists, also uneven ones, and as one tensor."""
    for length in LENGTHS:
        outs = [torch.zeros(length + rank, device=DEVICE) for rank in range(SIZE)]
        dist.all_gather(outs, values(RANK, length + RANK))
        same(outs, [values(rank, length + rank) for rank in range(SIZE)])
        out = torch.zeros(SIZE * length, device=DEVICE)
        dist.all_gather_into_tensor(out, values(RANK, length))
        same(out, every(length).view(-1))
        out = torch.zeros(length, device=DEVICE)
        dist.reduce_scatter_tensor(out, values(RANK, SIZE * length))
        same(out, every(SIZE * length).sum(0).view(SIZE, -1)[RANK])
        out = torch.zeros(length + RANK, device=DEVICE)
        dist.reduce_scatter(out, [values(RANK + part, length + part) for part in range(SIZE)])
        same(out, torch.stack([values(rank + RANK, length + RANK) for rank in range(SIZE)]).sum(0))


def all_to_all() -> None:
    """In equal parts, in others, as lists."""
    out = torch.zeros(SIZE * 10, device=DEVICE)
    dist.all_to_all_single(out, values(RANK, SIZE * 10))
    same(out, every(SIZE * 10).view(SIZE, SIZE, 10)[:, RANK].reshape(-1))
    rows, out_rows = [RANK + part + 1 for part in range(SIZE)], [rank + RANK + 1 for rank in range(SIZE)]
    out = torch.zeros(sum(out_rows), device=DEVICE)
    dist.all_to_all_single(out, values(RANK, sum(rows)), out_rows, rows)
    parts = [values(rank, sum(rank + part + 1 for part in range(SIZE))) for rank in range(SIZE)]
    cut = [part.split([rank + each + 1 for each in range(SIZE)])[RANK] for rank, part in enumerate(parts)]
    same(out, torch.cat(cut))
    outs = [torch.zeros(5 + rank, device=DEVICE) for rank in range(SIZE)]
    dist.all_to_all(outs, [values(RANK, 5 + RANK) for _ in range(SIZE)])
    same(outs, [values(rank, 5 + rank) for rank in range(SIZE)])


def messages() -> None:
    """send and recv, also from any rank and in batches; objects."""
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    got = torch.zeros(1000, device=DEVICE)
    operations = [dist.P2POp(dist.isend, values(RANK, 1000), after), dist.P2POp(dist.irecv, got, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(got, values(before, 1000))
    if RANK == 0:
        for _ in range(SIZE - 1):
            source = dist.recv(got)
            same(got, values(source, 1000))
    else:
        dist.send(values(RANK, 1000), 0)
    objects: list[object] = [None] * SIZE
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": rank} for rank in range(SIZE)]
    dist.barrier()


def another_group() -> None:
    """A second one, and a part of the first, with groups of their own on the device."""
    group = dist.new_group()
    tensor = values(RANK, 1000)
    dist.all_reduce(tensor, group=group)
    same(tensor, every(1000).sum(0))
    part = dist.new_group([SIZE - 1])
    if RANK == SIZE - 1:
        dist.all_reduce(tensor, group=part)
    same(tensor, every(1000).sum(0))
    dist.destroy_process_group(group)


CHECKS = (
    all_reduce,
    in_a_stream_of_its_own,
    coalesced,
    with_a_root,
    gathers_and_scatters,
    all_to_all,
    messages,
    another_group,
)

if __name__ == "__main__":
    dist.init_process_group("stratagem", device_id=DEVICE if DEVICE.type == "cuda" else None)
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
    for check in CHECKS:
        check()
        dist.barrier()
        if RANK == 0:
            print("ok", check.__name__, flush=True)
    world = dist.group.WORLD
    assert isinstance(world, LaneProcessGroup)
    assert world.nccl.is_taken == (sys.argv[1] == "nccl"), "by the other way"
    dist.destroy_process_group()
