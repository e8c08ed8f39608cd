"""The handle of an operation of a process group."""

from __future__ import annotations

import concurrent.futures
import datetime
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Reducer

from stratagem.distributed.mailbox import PostedReceive
from stratagem.distributed.messages import Messages
from stratagem.errors import ClusterTimeoutError
from stratagem.worker.ring.group import OutOfStepError

logger = logging.getLogger(__name__)

_LOOK_S = 20.0
"""After so long, or half of its time, a receive looks whether ranks wait for each other."""
NO_TIMEOUT = datetime.timedelta()
DONE: concurrent.futures.Future[None] = concurrent.futures.Future()
"""What a call waits for that is over when it returns."""
DONE.set_result(None)


class LaneWork(dist.Work):
    """Implements ``torch.distributed.Work``. Waiting blocks the calling thread; nothing is left on a stream."""

    def __init__(self, what: str, outputs: list[torch.Tensor], done: concurrent.futures.Future[Any]) -> None:
        super().__init__()
        self._what = what
        self._outputs = outputs
        self._done = done
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: datetime.timedelta = NO_TIMEOUT) -> bool:
        """Returns True when the outputs are complete. ``timeout``: how long to wait at most; 0: as long as the group's
        own timeout allows. Raises CollectiveError: the operation failed on this or another rank; ClusterTimeoutError:
        it goes on after ``timeout``."""
        if self._done is DONE:
            return True
        seconds = timeout.total_seconds()
        try:
            self._done.result(seconds if seconds > 0 else None)
        except TimeoutError:
            raise ClusterTimeoutError(f"{self._what} is not done after {seconds:g} s") from None
        return True

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self._done.done()

    def is_success(self) -> bool:
        return self._done.done() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        return self._done.exception() if self._done.done() else None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The outputs, once they are complete."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Who sent, after a receive from any rank."""
        self.wait()
        return int(self._done.result())

    _source_rank = source_rank

    def when_done(self, first: Callable[[], None]) -> None:
        """Once it is over, runs ``first`` before anybody hears of that."""
        inner, self._done = self._done, concurrent.futures.Future()

        def pass_on(over: concurrent.futures.Future[Any]) -> None:
            first()
            try:
                self._done.set_result(over.result())
            except BaseException as error:  # also that it was cancelled
                self._done.set_exception(error)

        inner.add_done_callback(pass_on)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the outputs. What is chained to it runs in the thread that completes it."""
        if self._future is None:
            begun: torch.futures.Future[None] = torch.futures.Future()
            # C++ takes an error of Future.set_exception for a value; only one that a callback raises is one to it.
            self._future = begun.then(lambda _: self._finished())
            self._done.add_done_callback(lambda _: begun.set_result(None))
        return self._future

    def _finished(self) -> list[torch.Tensor]:
        self._done.result()
        return self._outputs


class SendWork(LaneWork):
    """A send: fails where its rank reads nothing for the group's timeout."""

    def __init__(self, rank: int, done: concurrent.futures.Future[None], messages: Messages) -> None:
        super().__init__(f"send to rank {rank}", [], done)
        self._rank = rank
        self._messages = messages

    def wait(self, timeout: datetime.timedelta = NO_TIMEOUT) -> bool:
        if timeout > NO_TIMEOUT:
            return super().wait(timeout)
        patience_s = self._messages.timeout_s
        try:
            return super().wait(datetime.timedelta(seconds=patience_s))
        except ClusterTimeoutError:
            with self._messages.diagnosis.waiting_for(self._rank, self._what):
                raise OutOfStepError(f"rank {self._rank} reads nothing for {patience_s:g} s", self._rank) from None


class ReceiveWork(LaneWork):
    """A receive: fails where no message comes. ``finish`` puts what came into ``output``."""

    def __init__(
        self,
        what: str,
        output: torch.Tensor,
        receive: PostedReceive,
        finish: Callable[[], None],
        messages: Messages,
    ) -> None:
        done: concurrent.futures.Future[int] = concurrent.futures.Future()

        def conclude(came: concurrent.futures.Future[int]) -> None:
            try:
                source = came.result()
                finish()
            except Exception as error:  # also of torch's, which does not take every value into every tensor
                done.set_exception(error)
            else:
                done.set_result(source)

        super().__init__(what, [output], done)
        self._receive = receive
        self._messages = messages
        receive.done.add_done_callback(conclude)

    def wait(self, timeout: datetime.timedelta = NO_TIMEOUT) -> bool:
        if timeout > NO_TIMEOUT:
            return super().wait(timeout)
        if not self._done.done() or self._done.exception() is not None:
            with self._messages.diagnosis.waiting_for(self._receive.source, self._what):
                self._wait_for_message()
        return True

    def _wait_for_message(self) -> None:
        patience_s = self._messages.timeout_s
        look_s, deadline, circle = min(_LOOK_S, patience_s / 2), time.monotonic() + patience_s, ""
        try:
            self._done.result(look_s)
            return
        except TimeoutError:
            circle = self._messages.diagnosis.circle(self._receive.source)
        if circle and not self._done.done():
            circle = f"; after {look_s:g} s {circle}: does one of them have to send first?"
            logger.warning("no message for %s came%s", self._what, circle)
        try:
            self._done.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if self._messages.mailbox.withdraw(self._receive):
                unread = self._messages.mailbox.unread(self._receive.source)
                came = f"; what came and no receive has taken: {unread}" if unread else ""
                text = f"no message for {self._what} came within {patience_s:g} s{came}{circle}"
                self._receive.done.set_exception(OutOfStepError(text, self._receive.source))
            self._done.result()


def recorded(name: str, begin: Callable[[], LaneWork]) -> LaneWork:
    """Begins an operation: under ``torch.profiler`` as an event that ends with it, as torch's own backends do."""
    if not torch._C._autograd._profiler_enabled():
        return begin()
    with torch.profiler.record_function(f"stratagem:{name}") as event:
        ended: torch.futures.Future[None] = torch.futures.Future()
        event._call_end_callbacks_on_future(ended)
        _under_way.add(ended)
        try:
            work = begin()
        except BaseException:
            _end(ended)
            raise
        work.when_done(lambda: _end(ended))
        return work


_under_way: set[torch.futures.Future[None]] = set()
"""Events of operations that are not done; ``_ending`` is held for all that touches it after ``add``."""
_ending = threading.Lock()


def _end(*events: torch.futures.Future[None]) -> None:
    """Ends those that have not ended: where no profiler is any more, an end would be written into memory of others."""
    with _ending:
        for event in _under_way.intersection(events):
            _under_way.discard(event)
            event.set_result(None)


_disable = torch.autograd.profiler._disable_profiler  # type: ignore[attr-defined]


def _end_and_disable() -> Any:
    _end(*_under_way.copy())
    return _disable()


torch.autograd.profiler._disable_profiler = _end_and_disable  # type: ignore[attr-defined]


_given: weakref.WeakKeyDictionary[Reducer, dist.Work] = weakref.WeakKeyDictionary()
_give = Reducer._set_forward_pass_work_handle


def _give_and_keep(reducer: Reducer, work: dist.Work, use_static_world_size: bool) -> None:
    """Of ``Join(…, divide_by_initial_world_size=False)``. C++ holds its own half of a work alone, and where the other
    one is gone, it waits for ever."""
    _given[reducer] = work
    _give(reducer, work, use_static_world_size)


Reducer._set_forward_pass_work_handle = _give_and_keep  # type: ignore[method-assign, assignment]
