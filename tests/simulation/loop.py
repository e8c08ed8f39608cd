"""The event loop of a simulated chief: asyncio's own tasks, on the queue of the world."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any

from tests.simulation.world import Process


class Transport:
    """A connection that was only tried."""

    def close(self) -> None:
        """Nothing is there."""

    def is_closing(self) -> bool:
        return True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class Handle:
    """As ``asyncio.Handle`` and ``TimerHandle``, of which a schedule makes a thousand."""

    __slots__ = ("_arguments", "_callback", "_context", "_loop")

    def __init__(self, loop: Loop, callback: Any, arguments: tuple[Any, ...], context: contextvars.Context | None):
        self._loop = loop
        self._callback = callback
        self._arguments = arguments
        self._context = context or contextvars.copy_context()

    def cancel(self) -> None:
        self._callback, self._arguments = None, ()

    def run(self) -> None:
        """Calls it, unless it was cancelled."""
        if self._callback is not None:
            try:
                self._context.run(self._callback, *self._arguments)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self._loop.call_exception_handler({"message": f"in {self._callback}", "exception": error})


if TYPE_CHECKING:  # a part of its methods is enough here
    _Base = object
else:
    _Base = asyncio.AbstractEventLoop


class Loop(_Base):
    """What asyncio's tasks, locks and timeouts need.

    Args:
        process: the chief.
        connect: whether an address takes connections: raises what a connection attempt would.
        disk_s: how long work on the disk takes, in seconds.
    """

    def __init__(self, process: Process, connect: Callable[[Process, str], None], disk_s: Callable[[], float]) -> None:
        self._me: Any = self
        self._process = process
        self._connect = connect
        self._disk_s = disk_s
        self._ready: collections.deque[Handle] = collections.deque()
        self._scheduled = False
        self._tasks: list[Any] = []
        self.signals: dict[int, Callable[[], None]] = {}

    # -- what is called ----------------------------------------------------------------------------------------

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None) -> Any:
        handle = Handle(self, callback, args, context)
        self._ready.append(handle)
        if not self._scheduled:
            self._scheduled = True
            self._process.world.after(0.0, self._process, self._run_ready)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        handle = Handle(self, callback, args, context)
        world = self._process.world
        world.after(max(0.0, when - world.now), self._process, self.enter, handle.run)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def time(self) -> float:
        return self._process.world.now

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._me)

    def create_task(self, coro: Generator[Any, None, Any] | Coroutine[Any, Any, Any], **kwargs: Any) -> Any:
        task: Any = asyncio.Task(coro, loop=self._me, **kwargs)
        self._tasks.append(task)
        if len(self._tasks) > 500:
            self._tasks = [task for task in self._tasks if not task.done()]
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self._process.world.after(self._disk_s(), self._process, work)
        return future

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        await asyncio.sleep(0.001)
        self._connect(self._process, f"{host}:{port}")
        return Transport(), protocol_factory()

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:
        self.signals[sig] = lambda: callback(*args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self.signals.pop(sig, None) is not None

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        world = self._process.world
        error = context.get("exception")
        if error is not None and not world.closing and self._process.alive:
            world.fail(f"{self._process}: {context.get('message')}: {type(error).__name__}: {error}")

    # -- what the queue calls ----------------------------------------------------------------------------------

    def enter(self, run: Callable[[], Any]) -> None:
        """Calls something inside the loop."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._me)
        try:
            run()
        finally:
            asyncio._set_running_loop(before)

    def _run_ready(self) -> None:
        self._scheduled = False
        asyncio._set_running_loop(self._me)
        try:
            for _ in range(len(self._ready)):
                self._ready.popleft().run()
                if not self._process.alive:
                    return
        finally:
            asyncio._set_running_loop(None)
            if self._ready and not self._scheduled:
                self._scheduled = True
                self._process.world.after(0.0, self._process, self._run_ready)

    def close(self) -> None:
        """Ends what is left of the tasks, without any effect."""
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False
                with contextlib.suppress(BaseException):
                    task.get_coro().close()
        self._tasks.clear()
        self._ready.clear()
