"""Random collectives on three groups that overlap, several under way at once: right values, no hang, nothing left."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from stratagem.distributed.process_group import LaneProcessGroup
from tests.contract.distributed.ranks import on_every_rank, process_groups

PARTS = [[0, 1, 2], [1, 2, 3]]
UNDER_WAY = 8
Check = Callable[[], bool]
Call = Callable[[LaneProcessGroup, int, int], tuple[dist.Work, Check]]


def all_reduce(group: LaneProcessGroup, length: int, seed: int) -> tuple[dist.Work, Check]:
    tensor, size = torch.full((length,), float(group.rank() + seed)), group.size()
    total = float(sum(range(size)) + seed * size)
    return group.allreduce([tensor]), lambda: bool((tensor == total).all())


def all_gather(group: LaneProcessGroup, length: int, seed: int) -> tuple[dist.Work, Check]:
    out = torch.zeros(group.size(), length)
    work = group._allgather_base(out, torch.full((length,), float(group.rank() * seed)))
    return work, lambda: all(bool((row == rank * seed).all()) for rank, row in enumerate(out))


def reduce_scatter(group: LaneProcessGroup, length: int, seed: int) -> tuple[dist.Work, Check]:
    rows = torch.arange(float(group.size())).repeat_interleave(length) * seed
    out, expected = torch.zeros(length), group.rank() * seed * group.size()
    return group._reduce_scatter_base(out, rows), lambda: bool((out == expected).all())


def broadcast(group: LaneProcessGroup, length: int, seed: int) -> tuple[dist.Work, Check]:
    root = seed % group.size()
    tensor = torch.full((length,), float(group.rank()))
    return group.broadcast([tensor], root), lambda: bool((tensor == root).all())


def all_to_all(group: LaneProcessGroup, length: int, seed: int) -> tuple[dist.Work, Check]:
    size, rank = group.size(), group.rank()
    out = torch.zeros(size * length)
    sent = torch.cat([torch.full((length,), float(rank * 10 + other)) for other in range(size)])
    expected = torch.cat([torch.full((length,), float(other * 10 + rank)) for other in range(size)])
    return group.all_to_all_single(out, sent, [], []), lambda: torch.equal(out, expected)


def message(group: LaneProcessGroup, length: int, seed: int) -> tuple[dist.Work, Check]:
    size, rank = group.size(), group.rank()
    after, before, got = (rank + 1) % size, (rank - 1) % size, torch.zeros(length)
    sent = group.send([torch.full((length,), float(rank + seed))], after, 0)
    work = group.recv([got], before, 0)
    return work, lambda: sent.wait() and bool((got == before + seed).all())


CALLS: list[Call] = [all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, message]


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.timeout(600)
def test_random_collectives(transport: str, count: int) -> None:
    def run(world: LaneProcessGroup) -> int:
        choice = random.Random(count)  # the same on every rank
        parts = [world.split_group(part, group_name=str(part)) for part in PARTS]
        groups = [world, *parts]
        under_way: collections.deque[tuple[dist.Work, Check]] = collections.deque()
        done = 0
        for _ in range(count):
            group, call = groups[choice.randrange(3)], choice.choice(CALLS)
            length, seed = choice.choice((0, 1, 17, 1000, 9000)), choice.randrange(1, 50)
            if group is not None:
                under_way.append(call(group, length, seed))
            if choice.random() < 0.1 or len(under_way) > UNDER_WAY:
                while under_way:
                    work, check = under_way.popleft()
                    assert work.wait() and check()
                    done += 1
        assert all(work.wait() and check() for work, check in under_way)
        for part in parts:
            if part is not None:
                part.barrier().wait()
                part.shutdown()
        return done + len(under_way)

    with process_groups(4, transport, 60.0) as worlds:
        done = on_every_rank(worlds, run)
    assert done[1] == done[2] == count and min(done) > count // 2
