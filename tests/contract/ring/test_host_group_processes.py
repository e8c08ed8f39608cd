"""The shared-memory group among real processes: killed, stopped, and run for long. This file is also their program."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError
from stratagem.worker.ring import host_group
from stratagem.worker.ring.group import Reduction, Tag
from stratagem.worker.ring.host_group import HostGroup
from stratagem.worker.ring.schedule import cut
from tests.polling import until

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0
ARENA_BYTES = 64 << 20
DIES_IN_CHUNK = 5
NUM_COLLECTIVES = 500
SETTLED_AFTER = 100
"""Collectives after which every cache is as full as it gets."""


def reduce_arena(group: HostGroup) -> torch.Tensor:
    """All-reduce of ones in an arena whose result was zero; gives the result, complete or not."""
    arena = group.arena(ARENA_BYTES, Tag(1, 1))
    source, result = arena.source.view(torch.float32), arena.result.view(torch.float32)
    source.fill_(1.0)
    with contextlib.suppress(CollectiveError):
        group.all_reduce(source, result, ReduceOp.SUM, Tag(2, 1))
    return result


def error_of(group: HostGroup) -> CollectiveError:
    """What a broken group says."""
    with pytest.raises(CollectiveError) as caught:
        group.barrier(Tag(3, 1))
    return caught.value


def raise_signal_in_chunk(number: signal.Signals) -> None:
    """This process sends itself a signal when it has reduced and spread a few chunks of its slice."""
    calls, reduce = itertools.count(), Reduction.__call__

    def reduce_or_end(reduction: Reduction, sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        if next(calls) == DIES_IN_CHUNK:
            os.kill(os.getpid(), number)
        reduce(reduction, sources, into)

    Reduction.__call__ = reduce_or_end  # type: ignore[method-assign, assignment]


def counts() -> dict[str, int]:
    """What must not grow."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:stratagem"),
        "memory": psutil.Process().memory_info().rss,
    }


def run_long(group: HostGroup) -> list[dict[str, int]]:
    """Many collectives of every kind; counts when caches have filled, at the end, and after closing."""
    script, seen = random.Random(1), []
    arena = group.arena(1 << 20, Tag(1, 1))
    for number in range(2, NUM_COLLECTIVES + 2):
        if number == SETTLED_AFTER:
            seen.append(counts())
        tag, length = Tag(number, 1), script.choice([10, 1000, 100_000, 250_000])
        source = torch.full((length,), float(group.rank))
        out = torch.empty(length) if script.random() < 0.5 else arena.result.view(torch.float32)[:length]
        what = script.choice(["all_reduce", "all_reduce", "all_gather", "broadcast"])
        if what == "all_reduce":
            if script.random() < 0.5:
                source = arena.source.view(torch.float32)[:length].copy_(source)
            group.all_reduce(source, out, ReduceOp.SUM, tag)
            assert out.eq(sum(range(group.size))).all()
        elif what == "all_gather":
            group.all_gather(source, [torch.empty(length) for _ in range(group.size)], tag)
        else:
            group.broadcast(source, number % group.size, tag)
            assert source.eq(number % group.size).all()
    seen.append(counts())
    group.close("the test is over")
    del arena, out, source
    seen.append(counts())
    return seen


def program(role: str, rank: int, size: int, timeout_s: float, descriptors: Mapping[str, int]) -> Any:
    """What a child process runs; its result is printed as JSON."""
    print("here", flush=True)
    links = {int(peer): socket.socket(fileno=descriptor) for peer, descriptor in descriptors.items()}
    group = HostGroup(rank, size, links, timeout_s=timeout_s)
    if role == "long":
        return run_long(group)
    if role != "survivor":
        raise_signal_in_chunk(signal.SIGKILL if role == "killed" else signal.SIGSTOP)
    reduce_arena(group)
    error = error_of(group)
    group.close("the test is over")
    return str(error), error.rank


@contextlib.contextmanager
def processes(roles: Sequence[str], timeout_s: float) -> Iterator[tuple[HostGroup, list[subprocess.Popen[str]]]]:
    """This process as rank 0, and one for each role as ranks 1, 2, …"""
    size = len(roles) + 1
    links: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low, high in itertools.combinations(range(size), 2):
        links[low][high], links[high][low] = socket.socketpair()
    children = []
    for rank, role in enumerate(roles, 1):
        descriptors = {peer: link.fileno() for peer, link in links[rank].items()}
        call = [sys.executable, __file__, json.dumps([role, rank, size, timeout_s, descriptors])]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        children.append(
            subprocess.Popen(
                call, env=environment, pass_fds=list(descriptors.values()), stdout=subprocess.PIPE, text=True
            )
        )
        for link in links[rank].values():
            link.close()
    group = None
    try:
        for child in children:  # the time to start counts for nobody
            assert child.stdout is not None
            assert child.stdout.readline() == "here\n"
        group = HostGroup(0, size, links[0], timeout_s=timeout_s)
        yield group, children
    finally:
        if group is not None:
            group.close("the test is over")
        for link in links[0].values():
            link.close()
        for child in children:
            child.kill()
            child.communicate()


def result_of(child: subprocess.Popen[str]) -> Any:
    output, _ = child.communicate(timeout=DEADLINE_S)
    assert child.returncode == 0
    return json.loads(output)


def assert_ended_in_the_middle(result: torch.Tensor, rank: int, size: int) -> None:
    """``rank`` has written the first chunks of its slice into this process's memory, and nothing after them."""
    start, stop = cut(result.numel(), size)[rank]
    written = DIES_IN_CHUNK * host_group._CHUNK_BYTES // 4
    assert result[start : start + written].eq(size).all()
    assert not result[start + written : stop].any()
    assert stop - start > 2 * written


@pytest.mark.thorough  # tests/contract/distributed/test_lost_ranks.py has one
def test_a_process_killed_in_the_middle_is_named_by_all_others() -> None:
    with processes(["survivor", "killed"], timeout_s=DEADLINE_S) as (group, (survivor, killed)):
        result = reduce_arena(group)
        assert killed.wait(DEADLINE_S) == -signal.SIGKILL
        assert_ended_in_the_middle(result, rank=2, size=3)
        error = error_of(group)
        expected = ["rank 2 has ended: its socket closed in collective 2", 2]
        assert [str(error), error.rank] == expected
        assert result_of(survivor) == expected


@pytest.mark.thorough  # test_groups.py has a thread that stands still
def test_a_stopped_process_is_named_when_the_time_is_up() -> None:
    with processes(["stopped"], timeout_s=6.0) as (group, (stopped,)):
        result = reduce_arena(group)
        assert psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED
        assert_ended_in_the_middle(result, rank=1, size=2)
        error = error_of(group)
        assert error.rank == 1
        assert (
            str(error)
            == "rank 1 was stalled for longer than the timeout of 6 s while rank 0 waited for it in collective 2"
        )
        stopped.send_signal(signal.SIGCONT)  # it hears what became of it
        assert result_of(stopped) == [str(error), 1]


@pytest.mark.thorough
def test_nothing_grows_and_nothing_stays() -> None:
    before = counts()
    with processes(["long"], timeout_s=DEADLINE_S) as (group, (child,)):
        reports = [run_long(group), result_of(child)]
    for settled, late, closed in reports:
        assert late["descriptors"] == settled["descriptors"]
        assert late["mappings"] == settled["mappings"] == 4  # scratch and arena of both ranks
        assert closed["mappings"] == 0
        assert closed["descriptors"] == late["descriptors"] - 1
    settled, late, _ = reports[1]  # of the process that does nothing else: the other one runs the tests
    assert late["memory"] - settled["memory"] < 4 << 20
    until(lambda: counts()["descriptors"] == before["descriptors"])


if __name__ == "__main__":
    print(json.dumps(program(*json.loads(sys.argv[1]))))
