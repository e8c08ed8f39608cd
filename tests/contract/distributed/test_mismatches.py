"""Ranks that do not do the same: an error on every rank that says who was where; never a wrong sum, never a hang."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import GatherOptions, ScatterOptions

from stratagem.distributed.process_group import LaneProcessGroup
from stratagem.distributed.work import LaneWork
from stratagem.errors import ClusterTimeoutError, CollectiveError
from tests.contract.distributed.ranks import on_every_rank, process_groups
from tests.polling import until

Call = Callable[[LaneProcessGroup], Any]


def errors(size: int, transport: str, call: Call, timeout_s: float = 20.0) -> list[str]:
    """What every rank's call raises; empty: nothing."""

    def run(group: LaneProcessGroup) -> str:
        try:
            call(group)
        except CollectiveError as error:
            return str(error)
        return ""

    with process_groups(size, transport, timeout_s) as groups:
        return on_every_rank(groups, run)


def other_length(group: LaneProcessGroup) -> None:
    group.allreduce([torch.zeros(3 + group.rank())]).wait()


def other_shape(group: LaneProcessGroup) -> None:
    group.allreduce([torch.zeros(2, 6) if group.rank() else torch.zeros(3, 4)]).wait()


def other_dtype(group: LaneProcessGroup) -> None:
    group.allreduce([torch.zeros(3, dtype=torch.float64 if group.rank() else torch.float32)]).wait()


def other_collective(group: LaneProcessGroup) -> None:
    (group.barrier() if group.rank() else group.allreduce([torch.zeros(3)])).wait()


def other_order(group: LaneProcessGroup) -> None:
    calls: list[Callable[[], LaneWork]] = [lambda: group.barrier(), lambda: group.broadcast([torch.zeros(2)], 1)]
    for call in calls if group.rank() else reversed(calls):
        call().wait()


def other_sparse_dimensions(group: LaneProcessGroup) -> None:
    group.allreduce([torch.ones(3, 2).to_sparse(1 + group.rank())]).wait()


def other_splits(group: LaneProcessGroup) -> None:
    rows = [2, 2] if group.rank() else [2, 3]
    group.all_to_all_single(torch.zeros(4), torch.zeros(sum(rows)), [2, 2], rows).wait()


def other_root(group: LaneProcessGroup) -> None:
    """Each sends, and returns: the next collective finds out."""
    group.broadcast([torch.zeros(3)], group.rank()).wait()
    group.barrier().wait()


def other_direction(group: LaneProcessGroup) -> None:
    """The same with calls of two kinds, some of which are over."""
    for _ in range(3):
        if group.rank():
            group.scatter([torch.zeros(3)], [[torch.zeros(3)] * 2], rooted(ScatterOptions(), 1)).wait()
        else:
            group.gather([], [torch.zeros(3)], rooted(GatherOptions(), 1)).wait()
    group.barrier().wait()


def rooted(options: Any, rank: int) -> Any:
    options.rootRank = rank
    return options


WORDS: list[tuple[Call, str, str]] = [
    (other_root, "broadcast of float32 [3] from rank 0", "broadcast of float32 [3] from rank 1"),
    (other_direction, "gather of float32 [3] to rank 1", "scatter of float32 [3] from rank 1"),
    (other_length, "all_reduce SUM of float32 [3]", "all_reduce SUM of float32 [4]"),
    (other_shape, "all_reduce SUM of float32 [3, 4]", "all_reduce SUM of float32 [2, 6]"),
    (other_dtype, "all_reduce SUM of float32 [3]", "all_reduce SUM of float64 [3]"),
    (other_collective, "all_reduce SUM of float32 [3]", "barrier"),
    (other_order, "broadcast of float32 [2] from rank 1", "barrier"),
    (other_sparse_dimensions, "of sparse float32 [3, 2] (1 sparse dim", "of sparse float32 [3, 2] (2 sparse dim"),
    (other_splits, "rank 0 sends 3 elements to rank 1, which expects 2", "rank 0 sends 3 elements to rank 1"),
]


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
@pytest.mark.parametrize(("call", "one", "other"), WORDS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_rank_names_both(transport: str, call: Call, one: str, other: str) -> None:
    said = errors(2, transport, call)
    assert all(one in text and other in text for text in said), said


def test_every_rank_of_a_ring_hears_what_the_one_elsewhere_does() -> None:
    def call(group: LaneProcessGroup) -> None:
        (group.allreduce([torch.zeros(3)]) if group.rank() == 2 else group.barrier()).wait()

    said = errors(4, "tcp", call)
    assert all("all_reduce SUM of float32 [3]" in text and "barrier" in text for text in said), said


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.thorough)])
def test_a_rank_that_does_not_come_is_named_with_what_it_does(transport: str) -> None:
    def call(group: LaneProcessGroup) -> None:
        group.barrier().wait()
        if group.rank() != 1:
            group.allreduce([torch.zeros(3)]).wait()

    said = errors(3, transport, call, timeout_s=4.0)
    for text in (said[0], said[2]):
        assert "worker:1 is at step 0, collective 1 (barrier) and does not take part" in text, said
    assert not said[1]


def test_ranks_that_only_receive_hear_early_that_they_wait_for_each_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem.distributed.work._LOOK_S", 1.0)  # each looks once, when all have to wait
    said = errors(3, "tcp", lambda group: group.recv([torch.zeros(3)], (group.rank() + 1) % 3, 7).wait(), timeout_s=3.0)
    for rank, text in enumerate(said):
        one, two, three = (f"worker:{(rank + step) % 3}" for step in range(3))
        circle = rf"after 1 s {one} waits for {two} \(at recv .*\), which waits for {three} \(at recv .*\)"
        assert re.search(f"{circle}, which waits for {one}: does one", text), said
        assert any(re.search(circle, line) for line in caplog.messages), caplog.messages


def test_a_message_that_does_not_come() -> None:
    with process_groups(2, "shm", 1.0) as groups:
        receive = groups[0].recv([torch.zeros(3)], 1, 7)
        groups[1].send([torch.zeros(2, 2)], 0, 6).wait()
        until(lambda: groups[0]._messages.mailbox.unread(1))
        with pytest.raises(
            CollectiveError, match=r"no message for recv of .* from rank 1 with tag 7 came within 1 s"
        ) as no:
            receive.wait()
        assert "no receive has taken: float32 [4] with tag 6 from rank 1" in str(no.value)
        on_every_rank(groups, lambda group: group.barrier().wait())  # the group goes on


def test_waiting_for_less_than_the_timeout() -> None:
    with process_groups(2, "tcp") as groups:
        work = groups[0].barrier()
        with pytest.raises(ClusterTimeoutError, match=r"barrier is not done after 0.05 s"):
            work.wait(datetime.timedelta(seconds=0.05))
        assert not work.is_completed() and not work.is_success() and work.exception() is None
        groups[1].barrier().wait()
        assert work.wait()


def test_after_an_abort_every_rank_raises() -> None:
    with process_groups(3, "shm") as groups:
        waiting = [group.barrier() for group in groups[1:]]
        groups[0].abort()
        for work in waiting:
            with pytest.raises(CollectiveError, match="the process group was aborted"):
                work.wait()
            assert isinstance(work.exception(), CollectiveError)
        with pytest.raises(RuntimeError, match=r"CollectiveError: .*the process group was aborted"):
            waiting[0].get_future().wait()  # what C++ gets: DDP's reducer would take anything else for a result
        with pytest.raises(CollectiveError, match="the process group was aborted"):
            groups[0].barrier().wait()
