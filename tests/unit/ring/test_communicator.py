"""One order for all collectives; positions; tensors of any form."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError, ConfigurationError, SegmentError
from stratagem.worker.ring.communicator import Communicator, Position
from stratagem.worker.ring.group import Arena, Tag
from tests.unit.ring.thread_group import Meeting, ThreadGroup

T = TypeVar("T")


def each(size: int, work: Callable[[Communicator], T]) -> list[T | BaseException]:
    """What ``work`` returned or raised on every rank."""
    meeting = Meeting(size)
    outcomes: list[T | BaseException] = [RuntimeError("nothing")] * size

    def run(rank: int) -> None:
        communicator = Communicator(ThreadGroup(meeting, rank), lambda error, position: error)
        try:
            outcomes[rank] = work(communicator)
        except BaseException as error:
            outcomes[rank] = error
        finally:
            communicator.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def good(outcomes: list[T | BaseException]) -> list[T]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def test_any_shape_and_strides() -> None:
    def work(communicator: Communicator) -> torch.Tensor:
        whole = torch.arange(12.0).view(3, 4) + communicator.rank
        return communicator.all_reduce(whole.t()[1:])

    expected = (torch.arange(12.0).view(3, 4).t()[1:] * 2) + 1
    assert all(torch.equal(result, expected) for result in good(each(2, work)))


def test_the_mean_of_a_scalar_and_of_integers() -> None:
    assert good(each(3, lambda c: float(c.all_reduce(torch.tensor(float(c.rank)), ReduceOp.MEAN)))) == [1.0] * 3
    assert good(each(2, lambda c: float(c.all_reduce(torch.tensor(4e4).half(), ReduceOp.MEAN)))) == [4e4] * 2
    for outcome in each(2, lambda c: c.all_reduce(torch.tensor(1), ReduceOp.MEAN)):
        assert isinstance(outcome, ConfigurationError)


def test_out_may_have_strides() -> None:
    def work(communicator: Communicator) -> list[float]:
        out = torch.zeros(4, 2)
        communicator.all_reduce(torch.ones(4), out=out[:, 1])
        return out.sum(0).tolist()

    assert good(each(2, work)) == [[0.0, 8.0]] * 2
    for outcome in each(1, lambda c: c.all_reduce(torch.ones(4), out=torch.zeros(3))):
        assert isinstance(outcome, ConfigurationError)


def test_gather_broadcast_scatter_and_all_to_all() -> None:
    def work(communicator: Communicator) -> None:
        rank = communicator.rank
        rows = communicator.all_gather(torch.full((rank, 2), float(rank)))
        assert [part.shape for part in rows] == [(0, 2), (1, 2), (2, 2)]
        assert float(communicator.all_gather(torch.tensor(float(rank)))[2]) == 2
        empty = communicator.all_gather(torch.empty(rank, 0, 4))
        assert [part.shape for part in empty] == [(0, 0, 4), (1, 0, 4), (2, 0, 4)]
        parameter = torch.nn.Parameter(torch.full((2, 2), float(rank)))
        assert communicator.broadcast(parameter, root=1) is parameter
        assert parameter.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        strided = torch.zeros(2, 3).t()
        communicator.broadcast(strided.copy_(torch.full((3, 2), float(rank))), root=2)
        assert strided.tolist() == [[2.0, 2.0]] * 3
        got = communicator.all_to_all([torch.full((other,), float(rank)) for other in range(3)])
        assert [part.tolist() for part in got] == [[float(other)] * rank for other in range(3)]
        communicator.barrier()

    good(each(3, work))


def test_a_direct_call_waits_for_what_was_submitted_before() -> None:
    def work(communicator: Communicator) -> list[float]:
        seen: list[float] = []
        gate = threading.Event()

        def queued(number: float) -> None:
            gate.wait(60)
            seen.append(float(communicator.all_reduce(torch.tensor(number))))

        futures = [communicator.submit(functools.partial(queued, float(number))) for number in range(3)]
        releasing = threading.Thread(target=gate.set)
        releasing.start()
        seen.append(float(communicator.all_reduce(torch.tensor(10.0))))
        releasing.join()
        assert all(future.done() for future in futures)
        return seen

    assert good(each(2, work)) == [[0.0, 2.0, 4.0, 20.0]] * 2


def test_what_is_waited_for_runs_in_the_thread_that_waits_where_nothing_is_queued() -> None:
    def work(communicator: Communicator) -> list[bool]:
        ran_in: list[threading.Thread] = []
        gate = threading.Event()
        note = lambda: ran_in.append(threading.current_thread())  # noqa: E731
        communicator.submit(note, is_awaited=True).result()
        communicator.submit(gate.wait)
        behind = communicator.submit(note, is_awaited=True)
        gate.set()
        behind.result()
        return [thread is threading.current_thread() for thread in ran_in]

    assert each(1, work) == [[True, False]]


def test_a_rank_that_leaves_a_collective_by_ctrl_c_makes_no_further_one() -> None:
    def work(communicator: Communicator) -> str:
        def interrupted(tag: Tag) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            communicator.submit(lambda: communicator.collective("sum", interrupted), is_awaited=True)
        with pytest.raises(CollectiveError) as caught:
            communicator.barrier()
        return str(caught.value)

    assert each(1, work) == ["this rank left step 0, collective 1 (sum) by KeyboardInterrupt"]


def test_ranks_at_different_steps_do_not_mix() -> None:
    def work(communicator: Communicator) -> None:
        communicator.step = communicator.rank
        communicator.all_reduce(torch.ones(3))

    assert all(isinstance(outcome, CollectiveError) for outcome in each(2, work))


def test_the_first_error_is_kept_and_explained() -> None:
    meeting = Meeting(1)
    communicator = Communicator(
        ThreadGroup(meeting, 0, fail_at=[2]), lambda error, position: CollectiveError(f"{error} at {position}")
    )
    communicator.step = 7
    communicator.barrier()
    with pytest.raises(CollectiveError, match=r"step 7, collective 2 \(all_reduce sum of 1,000 float64\)") as first:
        communicator.all_reduce(torch.ones(10, 100, dtype=torch.float64))
    with pytest.raises(CollectiveError) as second:
        communicator.barrier()
    assert second.value is first.value
    assert communicator.position.ordinal == 2
    communicator.close()


def test_positions_tell_collectives_apart() -> None:
    tags = {Position(1, step, what).tag for step in (1, 2) for what in ("barrier", "all_reduce sum of 3 float32")}
    assert len(tags) == 4


def test_without_shared_memory_an_arena_is_memory_of_this_process(caplog: pytest.LogCaptureFixture) -> None:
    class Poor(ThreadGroup):
        def arena(self, num_bytes: int, tag: Tag, in_place: bool = False) -> Arena:
            raise SegmentError("no shared memory of 64 bytes: none is left")

    communicator = Communicator(Poor(Meeting(1), 0), lambda error, position: error)
    arena = communicator.arena(64)
    arena.source.fill_(3)
    communicator.all_reduce(arena.source, out=arena.result)
    assert arena.result.tolist() == [3] * 64
    assert "none is left" in caplog.text
    communicator.close()
