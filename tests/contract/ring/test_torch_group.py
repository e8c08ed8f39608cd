"""The group over ``torch.distributed``, with gloo on a CPU; what NCCL shares with it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError
from stratagem.worker.ring.group import OutOfStepError, Tag
from stratagem.worker.ring.schedule import cut
from stratagem.worker.ring.torch_group import TorchGroup, free_store_address
from tests import forks
from tests.contract.ring.groups import in_threads, outcomes_of

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0

# libuv, which serves torch's stores, keeps one pipe for the life of the process; made here, before the first test looks
# for leaks.
TCPStore("127.0.0.1", 0, 1, True)


@contextlib.contextmanager
def torch_groups(size: int, timeout_s: float = 20.0) -> Iterator[Sequence[TorchGroup]]:
    """Ranks in threads of this process."""
    address = free_store_address("127.0.0.1")
    groups = in_threads(
        [functools.partial(TorchGroup, rank, size, "gloo", address, timeout_s, CPU) for rank in range(size)]
    )
    try:
        yield groups
    finally:
        for group in groups:
            group.close("the test is over")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective(size: int) -> None:
    def work(group: TorchGroup) -> None:
        rank = group.rank
        sources = [torch.arange(7, dtype=torch.float64) + peer for peer in range(size)]
        total = torch.stack(sources).sum(0)
        arena = group.arena(56, Tag(1, 1))
        arena.source.view(torch.float64).copy_(sources[rank])
        out = arena.result.view(torch.float64)
        group.all_reduce(arena.source.view(torch.float64), out, ReduceOp.SUM, Tag(2, 1))
        assert torch.equal(out, total)
        assert torch.equal(arena.source.view(torch.float64), sources[rank]), "the source was written to"
        group.all_reduce(sources[rank], out, ReduceOp.MAX, Tag(3, 1))
        assert torch.equal(out, sources[-1])
        in_place = sources[rank].clone()
        group.all_reduce(in_place, in_place, ReduceOp.SUM, Tag(4, 1))
        assert torch.equal(in_place, total)
        start, stop = cut(7, size)[rank]
        scattered = torch.empty(stop - start, dtype=torch.float64)
        group.reduce_scatter(sources[rank], scattered, ReduceOp.SUM, Tag(5, 1))
        assert torch.equal(scattered, total[start:stop])
        outs = [torch.full((peer,), 77) for peer in range(size)]
        group.all_gather(torch.full((rank,), rank), outs, Tag(6, 1))
        assert all(torch.equal(out, torch.full((peer,), peer)) for peer, out in enumerate(outs))
        buffer = torch.full((4,), float(rank))
        group.broadcast(buffer, size - 1, Tag(7, 1))
        assert torch.equal(buffer, torch.full((4,), float(size - 1)))
        outs = [torch.full((peer + rank,), 77) for peer in range(size)]
        group.all_to_all([torch.full((rank + peer,), 10 * rank + peer) for peer in range(size)], outs, Tag(8, 1))
        assert all(torch.equal(out, torch.full((peer + rank,), 10 * peer + rank)) for peer, out in enumerate(outs))
        group.all_reduce(torch.empty(0), torch.empty(0), ReduceOp.SUM, Tag(9, 1))
        group.barrier(Tag(10, 1))
        assert group.waiting_on() is None

    with torch_groups(size) as groups:
        in_threads([functools.partial(work, group) for group in groups])
    assert not dist.is_initialized(), "the default group belongs to the script"


def test_a_barrier_tells_who_is_somewhere_else() -> None:
    with torch_groups(3) as groups:
        tags = [Tag(4, 1), Tag(4, 1), Tag(5, 2)]
        outcomes = outcomes_of([functools.partial(group.barrier, tag) for group, tag in zip(groups, tags, strict=True)])
        assert [getattr(outcome.error, "rank", None) for outcome in outcomes] == [2, 2, 0]
        assert "in collective 4 (fingerprint 00000001), it is in 5 (fingerprint 00000002)" in str(outcomes[0].error)
        for group, outcome in zip(groups, outcomes, strict=True):
            with pytest.raises(CollectiveError) as again:
                group.all_reduce(torch.ones(2), torch.ones(2), ReduceOp.SUM, Tag(6, 1))
            assert again.value is outcome.error


@pytest.mark.thorough
def test_ranks_that_wait_in_different_collectives_find_each_other() -> None:
    with torch_groups(2, timeout_s=8.0) as groups:  # gloo, unlike NCCL, ends no sooner
        # Each waits for the other's values.
        outcomes = outcomes_of(
            [
                functools.partial(group.broadcast, torch.ones(2), 1 - group.rank, Tag(4, 1 + group.rank))
                for group in groups
            ]
        )
    named = [outcome.error for outcome in outcomes if isinstance(outcome.error, OutOfStepError)]
    assert named and all(error.rank in (0, 1) for error in named)
    assert "in collective 4 (fingerprint 0000000" in str(named[0])


def test_a_rank_that_stands_still() -> None:
    with torch_groups(2, timeout_s=3.0) as groups:
        with pytest.raises(CollectiveError, match="collective 1 failed: gloo") as raised:
            groups[0].barrier(Tag(1, 1))
        with pytest.raises(CollectiveError) as again:
            groups[0].arena(8, Tag(2, 1))
        assert again.value is raised.value


def test_close_wakes_a_call_that_waits() -> None:
    with torch_groups(2, timeout_s=5.0) as groups:
        started = threading.Event()

        def work() -> None:
            started.set()
            groups[0].barrier(Tag(1, 1))

        def close() -> None:
            assert started.wait(DEADLINE_S)
            groups[0].close("the user has had enough")

        outcomes = outcomes_of([work, close])
    assert str(outcomes[0].error) == "the user has had enough"


def test_ranks_that_do_not_find_each_other() -> None:
    with pytest.raises(CollectiveError, match="did not find each other"):
        TorchGroup(0, 2, "gloo", free_store_address("127.0.0.1"), 0.3, CPU)


@pytest.mark.usefixtures("preloaded")
@pytest.mark.thorough
def test_a_killed_process() -> None:
    address = free_store_address("127.0.0.1")
    command = [sys.executable, "-m", "tests.contract.ring.torch_rank"]
    processes = [
        forks.Popen(
            [*command, str(rank), "2", address],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            said = process.stdout.readline()
            while said.startswith("[Gloo]"):  # up to torch 2.9
                said = process.stdout.readline()
            assert said.split() == ["1", "3", "5", "7", "9"]
        processes[1].send_signal(signal.SIGKILL)
        assert processes[1].wait(DEADLINE_S) == -signal.SIGKILL
        said, _ = processes[0].communicate("go on\n", DEADLINE_S)
        assert said.split() == ["CollectiveError"]
        assert processes[0].returncode == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_on_one_device() -> None:
    device = torch.device("cuda:0")
    group = TorchGroup(0, 1, "nccl", free_store_address("127.0.0.1"), 60.0, device)
    try:
        for where in (device, CPU):
            source, out = torch.arange(5.0, device=where), torch.empty(5, device=where)
            group.all_reduce(source, out, ReduceOp.SUM, Tag(1, 1))
            assert torch.equal(out, source)
        group.barrier(Tag(2, 1))
    finally:
        group.close("the test is over")
