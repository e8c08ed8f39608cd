"""Timeouts of one call and of a group, and the barrier that says who did not come."""

from __future__ import annotations

import datetime

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions

from stratagem.distributed.process_group import LaneProcessGroup
from stratagem.errors import CollectiveError
from tests.contract.distributed.ranks import on_every_rank, process_groups


def seconds(number: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=number)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
@pytest.mark.parametrize("is_async", [True, False])
def test_one_call_may_wait_for_less(transport: str, is_async: bool) -> None:
    options = AllreduceOptions()
    options.timeout, options.asyncOp = seconds(15), is_async
    with process_groups(2, transport) as groups:
        on_every_rank(groups, lambda group: group.allreduce([torch.ones(1)], options).wait())
        assert [group.communicator.group.timeout_s for group in groups] == [20.0, 20.0]
        options.timeout = seconds(0.3)
        with pytest.raises(CollectiveError, match=r"worker:1 is at .* and does not take part") as error:
            groups[0].allreduce([torch.ones(1)], options).wait()
        assert isinstance(error.value, RuntimeError)  # as scripts expect of torch


def test_a_barrier_takes_its_timeout_as_torch_gives_it() -> None:
    with (
        process_groups(2, "shm") as groups,
        pytest.raises(CollectiveError, match=r"rank 1 was stalled for longer than the timeout of 0\.3 s"),
    ):
        groups[0].barrier(timeout=seconds(0.3)).wait()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_group_gets_another_timeout(transport: str) -> None:
    with process_groups(2, transport) as groups:
        groups[0].set_timeout(seconds(0.2))
        with pytest.raises(CollectiveError, match=r"came within 0\.2 s"):
            groups[0].recv([torch.zeros(3)], 1, 7).wait()
        with pytest.raises(CollectiveError, match=r"worker:1 is at .* and does not take part"):
            groups[0].barrier().wait()


def test_a_part_of_a_group_has_the_timeout_it_was_given() -> None:
    with process_groups(2, "shm") as groups:
        parts = on_every_rank(groups, lambda group: group.split_group([0, 1], seconds(15), group_name="part"))
        assert [part is not None and part.communicator.group.timeout_s for part in parts] == [15.0, 15.0]
        on_every_rank(groups, lambda group: parts[group.rank()].shutdown())  # type: ignore[union-attr]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ranks_that_come_to_two_groups_in_another_order_are_told_of_both(transport: str) -> None:
    def wait(group: LaneProcessGroup) -> str:
        part = group.split_group([0, 1], seconds(0.5), group_name="part")
        assert part is not None
        group.set_timeout(seconds(0.5))
        with pytest.raises(CollectiveError) as error:
            (group.barrier() if group.rank() else part.allreduce([torch.ones(3)])).wait()
        part.shutdown()
        return str(error.value)

    with process_groups(2, transport) as groups:
        said = on_every_rank(groups, wait)
    words = [
        "while it is in barrier of the group worker:0, worker:1 and does not take part",
        "while it is in all_reduce",
    ]
    assert any(map(str.__contains__, said, words)), said  # one has left when the other asks, perhaps


@pytest.mark.parametrize("wait_all_ranks", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_monitored_barrier_names_who_did_not_come_and_breaks_nothing(wait_all_ranks: bool) -> None:
    def call(group: LaneProcessGroup) -> str:
        group.monitored_barrier()
        if group.rank() in (1, 2):
            return "elsewhere"
        try:
            group.monitored_barrier(seconds(3), wait_all_ranks)
        except CollectiveError as error:
            return str(error)
        return "passed"

    with process_groups(4, "shm") as groups:
        said = on_every_rank(groups, call)
        who = "Ranks 1, 2" if wait_all_ranks else "Rank 1"
        assert said[:3] == [f"{who} failed to pass monitoredBarrier in 3 s", "elsewhere", "elsewhere"]
        assert said[3].startswith("Rank 3 successfully reached monitoredBarrier, but received errors")
        assert said[3].endswith("it misses rank 1")
        on_every_rank(groups, lambda group: group.barrier().wait())
        for late in (1, 2):  # its barrier is over
            with pytest.raises(CollectiveError, match=r"nothing came within 0\.4 s"):
                groups[late].monitored_barrier(seconds(0.2))
        on_every_rank(groups, lambda group: group.monitored_barrier(seconds(20)))


def test_a_monitored_barrier_says_that_rank_0_is_gone() -> None:
    with process_groups(2, "tcp") as (lead, other):
        on_every_rank([lead, other], lambda group: group.monitored_barrier())
        lead.shutdown()
        with pytest.raises(CollectiveError, match="from rank 0: it is gone"):
            other.monitored_barrier()


def test_a_monitored_barrier_without_time() -> None:
    with process_groups(2, "shm") as groups, pytest.raises(CollectiveError, match="Rank 0 timed out in monitoredBar"):
        groups[0].monitored_barrier(seconds(0))


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
@pytest.mark.parametrize("num_elements", [4_000, 12_000])  # in the socket, in a slot
def test_two_ranks_may_both_begin_all_their_sends_before_they_receive(transport: str, num_elements: int) -> None:
    def exchange(group: LaneProcessGroup) -> list[float]:
        other, received = 1 - group.rank(), torch.zeros(num_elements)
        sends = [group.send([torch.full((num_elements,), float(number))], other, 0) for number in range(600)]
        values = []
        for _ in sends:
            group.recv([received], other, 0).wait()
            values.append(float(received[-1]))
        assert all(send.wait() for send in sends)
        return values

    with process_groups(2, transport) as groups:
        assert on_every_rank(groups, exchange) == [[float(number) for number in range(600)]] * 2


def test_a_send_that_nobody_reads_does_not_outlast_the_timeout() -> None:
    with process_groups(2, "shm", timeout_s=0.5) as groups:
        sends = [groups[0].send([torch.full((4_000,), float(number))], 1, 0) for number in range(100)]
        with pytest.raises(CollectiveError, match=r"worker:1 .*: rank 1 reads nothing for 0.5 s"):
            sends[-1].wait()
        received = torch.zeros(4_000)  # nothing is lost by that
        for number in range(100):
            groups[1].recv([received], 0, 0).wait()
            assert received[0] == number
        assert sends[-1].wait()
