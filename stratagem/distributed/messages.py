"""send and recv: a lane for each pair of ranks and direction, opened when it is first needed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable

import torch

from stratagem.distributed.mailbox import Mailbox, PostedReceive
from stratagem.distributed.tensors import BYTES_OF, dtype_number, movable, writable_anywhere
from stratagem.errors import (
    CollectiveError,
    ConfigurationError,
    FrameError,
    PeerUnavailableError,
    SegmentError,
    StratagemError,
)
from stratagem.rpc.generated import frame_pb2
from stratagem.rpc.lane import ReceivingLane, SendingLane
from stratagem.worker.ring.building import Opener
from stratagem.worker.ring.failure_diagnosis import FailureDiagnosis
from stratagem.worker.ring.lane_plan import PairLane
from stratagem.worker.ring.schedule import chunks

_PURPOSE = "messages"
_FRAME_BYTES = 64 << 20
_SMALL_BYTES = 64 << 10
"""A message up to this size is copied and is on its way when send returns."""
_LOOK_S = 2.0
"""How often a receive looks whether a rank lives that has never sent."""
_NUM_LOOKS = 3
"""So often in a row it must not answer."""
_FLUSH_S = 1.0
"""So long a group that closes waits for its last small messages to leave."""
_BARRIER_TAG = 1 << 40
"""Of the first monitored barrier, no script's; each has one, so that nobody takes a late word for one of the next."""
_NO_DEADLINE = math.inf
"""Of a read: a rank may have nothing to say for as long as it likes."""


@dataclasses.dataclass(eq=False, repr=False)
class Messages:
    """Messages of one rank."""

    _rank: int
    size: dataclasses.InitVar[int]
    _opener: Callable[[float], Opener]
    """Opens lanes within so many seconds."""
    _lane: Callable[[int], PairLane]
    """Which one to a rank is tried first: shm gives way to tcp where there is no memory to share."""
    diagnosis: FailureDiagnosis
    timeout_s: float
    """Seconds a message may take to leave, or to come."""

    def __post_init__(self, size: int) -> None:
        self._others = [other for other in range(size) if other != self._rank]
        self.mailbox = Mailbox(self._rank, self._others)
        self._barrier_tags = itertools.count(_BARRIER_TAG)
        self._guard = threading.Lock()
        self._senders: dict[int, SendingLane] = {}
        self._executors: dict[int, concurrent.futures.ThreadPoolExecutor] = {}
        self._num_queued = dict.fromkeys(self._others, 0)
        self._readers: dict[int, threading.Thread] = {}
        self._receivers: dict[int, ReceivingLane] = {}
        self._closed: str = ""

    def send(self, values: torch.Tensor, rank: int, tag: int) -> concurrent.futures.Future[None]:
        """Sends flat values; the result says when their memory may be changed."""
        if values.nbytes <= _SMALL_BYTES and self._leaves_at_once(values.nbytes, rank):
            with self.diagnosis.waiting_for(rank, f"a message to rank {rank}"):
                self._send(values.clone(), rank, tag)
            done: concurrent.futures.Future[None] = concurrent.futures.Future()
            done.set_result(None)
            return done
        with self._guard:
            if self._closed:
                raise CollectiveError(self._closed)
            self._num_queued[rank] += 1
            if rank not in self._executors:
                self._executors[rank] = concurrent.futures.ThreadPoolExecutor(1, f"send-to-{rank}")
            return self._executors[rank].submit(self._send_queued, values, rank, tag)

    def receive(self, into: torch.Tensor, rank: int | None, tag: int) -> PostedReceive:
        """Waits, in the background, for the next message with this tag from a rank, or from any."""
        if not (sources := self._others if rank is None else [rank]):
            raise ConfigurationError("this group has one rank: there is no other to receive from")
        for source in sources:
            self._read_from(source)
        receive = PostedReceive(rank, tag, writable_anywhere(into))
        self.mailbox.post(receive)
        return receive

    def close(self, reason: str) -> None:
        """Ends lanes; whoever waits gets ``CollectiveError``."""
        with self._guard:
            if self._closed:
                return
            self._closed = reason
            lanes: list[SendingLane | ReceivingLane] = [*self._senders.values(), *self._receivers.values()]
            waiting = [lane for rank, lane in self._senders.items() if not self._num_queued[rank]]
        for source in self._others:
            self.mailbox.broke(source, CollectiveError(reason, source))
        for sender in waiting:
            with contextlib.suppress(StratagemError):  # a small message is sent, for the script, once it is queued
                sender.flush(time.monotonic() + _FLUSH_S)
        for lane in lanes:
            lane.close(reason)
        for executor in self._executors.values():
            executor.shutdown()  # what is queued fails at once, with the reason

    def join(self) -> None:
        """Waits for the threads, once it is closed and no lane can be opened any more."""
        for reader in self._readers.values():
            if reader is not threading.current_thread():
                reader.join(5.0)

    # -- a barrier that says who did not come, and breaks nothing -------------------------------------------------

    def barrier(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Returns when every rank has called it: each tells rank 0, and hears from it. Rank 0 waits ``timeout_s``
        seconds for the others, and names the first who did not come, or with ``wait_all_ranks`` everybody: in a
        CollectiveError in torch's words."""
        tag = next(self._barrier_tags)
        deadline = time.monotonic() + timeout_s
        if self._rank:
            # Rank 0 may come as late as this rank may wait for it, and wait as long again.
            self._ask(tag, deadline + timeout_s, 2 * timeout_s)
            return
        if timeout_s <= 0:
            raise CollectiveError(f"Rank 0 timed out in monitoredBarrier after {timeout_s:g} s", 0)
        missing = [other for other in self._others if not self._comes(torch.zeros(1), other, tag, deadline)]
        for other in self._others:
            if other not in missing:
                self.send(torch.tensor([float(missing[0] if missing else 0)]), other, tag)
        if missing:
            named = missing if wait_all_ranks else missing[:1]
            who = f"Rank{'s' * (len(named) > 1)} {', '.join(map(str, named))}"
            raise CollectiveError(f"{who} failed to pass monitoredBarrier in {timeout_s:g} s", missing[0])

    def _ask(self, tag: int, deadline: float, patience_s: float) -> None:
        self.send(torch.zeros(1), 0, tag)
        missing = torch.zeros(1)  # the first rank that did not come; rank 0, which says so, has
        came = self._comes(missing, 0, tag, deadline)
        if came and not missing:
            return
        silence = f"nothing came within {patience_s:g} s" if time.monotonic() >= deadline else "it is gone"
        why = f"it misses rank {int(missing)}" if came else silence
        raise CollectiveError(
            f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            f"from rank 0: {why}",
            0,
        )

    def _comes(self, into: torch.Tensor, source: int, tag: int, deadline: float) -> bool:
        receive = self.receive(into, source, tag)
        try:
            with self.diagnosis.waiting_for(source, "a monitored barrier"):
                receive.done.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return not self.mailbox.withdraw(receive)
        except CollectiveError:  # it is gone
            return False
        return True

    # -- out ----------------------------------------------------------------------------------------------------

    def _leaves_at_once(self, num_bytes: int, rank: int) -> bool:
        """Who only begins to send must not wait for a rank that reads later, and maybe begins to send itself."""
        lane = self._senders.get(rank)
        return not self._num_queued[rank] and (lane is None or lane.takes_at_once(num_bytes))

    def _send_queued(self, values: torch.Tensor, rank: int, tag: int) -> None:
        try:
            with self.diagnosis.waiting_for(rank, f"a message to rank {rank}"):
                self._send(values, rank, tag, flush=True)
        finally:
            with self._guard:
                self._num_queued[rank] -= 1

    def _send(self, values: torch.Tensor, rank: int, tag: int, flush: bool = False) -> None:
        try:
            lane, number = self._sender(rank), dtype_number(values.dtype)
            values = movable(values)
            num_elements = values.numel()
            parts = chunks(0, num_elements, max(1, _FRAME_BYTES // values.itemsize)) or ((0, 0),)
            for start, stop in parts:
                part = values[start:stop]
                lane.send(frame_pb2.COLLECTIVE, tag + 1, number, num_elements, lambda part=part: (part,), stop - start)  # type: ignore[misc]
            if flush:
                lane.flush(time.monotonic() + self.timeout_s)
        except StratagemError as error:
            raise CollectiveError(f"sending to rank {rank} failed: {error}", rank) from None

    def _sender(self, rank: int) -> SendingLane:
        with self._guard:
            if self._closed:
                raise CollectiveError(self._closed)
            if rank not in self._senders:
                opener, lane = self._opener(self.timeout_s), self._lane(rank)
                try:
                    self._senders[rank] = opener.sender(rank, lane, _PURPOSE)
                except SegmentError:
                    self._senders[rank] = opener.sender(rank, "tcp", _PURPOSE)
            return self._senders[rank]

    # -- in -----------------------------------------------------------------------------------------------------

    def _read_from(self, rank: int) -> None:
        with self._guard:
            if rank not in self._readers and not self._closed:
                thread = threading.Thread(target=self._read, args=(rank,), name=f"messages-from-{rank}", daemon=True)
                self._readers[rank] = thread
                thread.start()

    def _read(self, rank: int) -> None:
        try:
            lane = self._await_lane(rank)
            while not self._closed:
                self.mailbox.wait_for_room(rank)
                self._read_message(lane, rank)
        except StratagemError as error:
            text = self._closed or f"nothing more comes from rank {rank}: {error}"
            self.mailbox.broke(rank, CollectiveError(text, rank))

    def _await_lane(self, rank: int) -> ReceivingLane:
        num_silent = 0
        while True:
            try:
                lane = self._opener(_LOOK_S).receiver(rank, self._lane(rank), _PURPOSE)
                break
            except PeerUnavailableError as error:
                if self._closed:
                    raise
                num_silent = 0 if self.diagnosis.answers(rank) else num_silent + 1
                if num_silent == _NUM_LOOKS:
                    raise PeerUnavailableError(f"it does not answer ({error})") from None
        with self._guard:
            if self._closed:
                lane.close(self._closed)
            self._receivers[rank] = lane
        return lane

    def _read_message(self, lane: ReceivingLane, rank: int) -> None:
        frame = lane.receive(0, _NO_DEADLINE)
        total, tag, dtype = frame.offset, frame.transfer - 1, frame.tensor.dtype
        length = total
        if frame.group:
            if frame.group not in BYTES_OF:
                raise FrameError(f"rank {rank} sends a dtype that torch {torch.__version__} here lacks: use its torch")
            dtype = BYTES_OF[frame.group]
            length = total // dtype.itemsize
        elif frame.tensor.numel() == total:
            self.mailbox.put(rank, tag, frame.tensor)
            return
        receive = self.mailbox.expected(rank, tag, length, dtype)
        whole = receive.into if receive is not None else torch.empty(length, dtype=dtype)
        values = movable(whole)
        try:
            filled = frame.tensor.numel()
            values[:filled].copy_(frame.tensor)
            del frame
            while filled < total:
                part = lane.receive(0, _NO_DEADLINE, values[filled:]).tensor
                if part.data_ptr() != values[filled:].data_ptr():
                    values[filled : filled + part.numel()].copy_(part)
                filled += part.numel()
        except StratagemError as error:
            if receive is not None:
                receive.done.set_exception(
                    CollectiveError(f"rank {rank} stopped in the middle of a message: {error}", rank)
                )
            raise
        if receive is not None:
            receive.done.set_result(rank)
        else:
            self.mailbox.put(rank, tag, whole)
