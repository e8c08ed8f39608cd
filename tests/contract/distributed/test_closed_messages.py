"""What is closed with a group, and what a forked child leaves alone."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from stratagem.distributed import mailbox
from stratagem.distributed.forming import form
from stratagem.distributed.messages import Messages
from stratagem.errors import CollectiveError, ConfigurationError
from tests.contract.distributed.ranks import process_groups
from tests.polling import until


class StandingLane:
    """Takes a message, and has not sent it before it is closed."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self._closed = threading.Event()

    def send(self, *_: Any) -> None:
        self.has_begun.set()
        assert self._closed.wait(30.0)
        raise CollectiveError("the lane is closed")

    def close(self, reason: str) -> None:
        self._closed.set()


def test_a_message_that_waits_hears_why_the_group_was_closed() -> None:

    lane = StandingLane()
    diagnosis: Any = SimpleNamespace(waiting_for=lambda rank, what: contextlib.nullcontext())
    opener: Any = SimpleNamespace(sender=lambda *_: lane)
    messages = Messages(0, 2, lambda timeout_s: opener, lambda rank: "tcp", diagnosis, 30.0)
    large = torch.zeros(1 << 20)
    sent = [messages.send(large, 1, tag) for tag in range(3)]
    assert lane.has_begun.wait(30.0)
    messages.close("rank 0 has left")
    assert isinstance(sent[0].exception(30.0), CollectiveError)
    for waiting in sent[1:]:
        with pytest.raises(CollectiveError, match="rank 0 has left"):
            waiting.result(30.0)
    with pytest.raises(CollectiveError, match="rank 0 has left"):
        messages.send(large, 1, 3)


def test_a_rank_that_has_ended_lets_no_other_one_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "UNREAD_BYTES", 8)
    box = mailbox.Mailbox(0, [1, 2])
    box.broke(1, CollectiveError("rank 1 has left", 1))
    box.put(2, 7, torch.zeros(2))
    reads = threading.Thread(target=box.wait_for_room, args=(2,), daemon=True)
    reads.start()
    reads.join(0.2)
    assert reads.is_alive()
    box.post(mailbox.PostedReceive(2, 7, torch.empty(2)))
    reads.join(30.0)
    assert not reads.is_alive()


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_receive_of_what_nobody_sends_does_not_keep_the_group(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem.distributed.messages._LOOK_S", 60.0)
    with process_groups(2, transport) as groups:
        received = groups[0].recv([torch.zeros(3)], 1, 7)
        [reader] = [thread for thread in threading.enumerate() if thread.name == "messages-from-1"]
    assert not reader.is_alive()
    with pytest.raises(CollectiveError, match="rank 0 has destroyed its process group"):
        received.wait()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("call", ["recv", "all_reduce"])
def test_a_wait_during_which_its_own_rank_ends_the_group_says_so(transport: str, call: str) -> None:
    """And blames no other rank."""
    with process_groups(2, transport) as (group, _), ThreadPoolExecutor(1) as pool:

        def wait() -> None:
            with pytest.raises(CollectiveError) as error:
                (group.recv([torch.zeros(3)], 1, 7) if call == "recv" else group.allreduce([torch.zeros(3)])).wait()
            assert str(error.value).endswith("rank 0 has destroyed its process group, or ended")
            assert "worker:1" not in str(error.value)

        waiting = pool.submit(wait)
        ring = group.communicator
        until(lambda: ring.waiting() is not None or bool(group._messages.diagnosis.waits))
        group.shutdown()
        waiting.result(30.0)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_ends_nothing_of_its_parents_group() -> None:
    with process_groups(1) as (group,):
        close, group._close = group._close, lambda *_: os._exit(3)
        if not (child := os.fork()):
            group.shutdown()
            os._exit(0)
        group._close = close
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_group_of_a_forked_childs_own_is_refused() -> None:
    """It waited for ever, whatever its timeout."""
    with process_groups(1):
        if not (child := os.fork()):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            try:
                form(HashStore(), 0, [0], 5.0)
            except ConfigurationError as error:
                os._exit(0 if 'get_context("spawn")' in str(error) else 4)
            finally:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_what_was_sent_arrives_though_the_sender_closes_its_group(transport: str) -> None:
    with process_groups(2, transport) as (sender, receiver):
        rooms = [torch.zeros(100) for _ in range(20)]
        first = receiver.recv([rooms[0]], 0, 0)
        for tag in range(20):
            sender.send([torch.full((100,), tag + 1.0)], 1, tag).wait()
        sender.shutdown()
        first.wait()
        for tag in range(1, 20):
            receiver.recv([rooms[tag]], 0, tag).wait()
        assert [float(room[-1]) for room in rooms] == [tag + 1.0 for tag in range(20)]


def test_a_rank_that_ends_because_of_another_says_so() -> None:
    """Also where that one still answers: its lanes close before its server stops."""
    with process_groups(3, "tcp") as groups:
        for rank in (0, 1):  # the lanes stand
            groups[rank + 1].send([torch.zeros(3)], rank, 0).wait()
            groups[rank].recv([torch.zeros(3)], rank + 1, 0).wait()
        waiting = groups[0].recv([torch.zeros(3)], 1, 0)
        groups[2]._messages.close("worker:2 ends")
        with pytest.raises(CollectiveError, match="worker:2 is at"):
            groups[1].recv([torch.zeros(3)], 2, 0).wait()
        groups[1].shutdown()
        with pytest.raises(CollectiveError, match=r"rank 1 has destroyed its process group.*: worker:2 is at"):
            waiting.wait()


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("end", [ValueError("the sizes of its parameters are others"), StopIteration()], ids=repr)
def test_the_others_hear_of_the_error_at_which_a_rank_ends(transport: str, end: Exception) -> None:
    """That data end is none."""
    with process_groups(2, transport) as (failing, other), ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(other.recv([torch.zeros(3)], 0, 7).wait),
            pool.submit(other.allreduce([torch.zeros(3)]).wait),
        ]
        until(lambda: other.communicator.waiting() is not None and other._messages.diagnosis.waits)
        try:
            raise end
        except (ValueError, StopIteration):
            failing.shutdown()
        for each in waiting:
            with pytest.raises(CollectiveError) as caught:
                each.result(30.0)
            is_told = "has destroyed its process group, or ended, at ValueError: the sizes" in str(caught.value)
            assert is_told == isinstance(end, ValueError), caught.value
