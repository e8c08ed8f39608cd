"""What the product takes from ``threading``, ``time`` and ``queue``, in virtual time."""

from __future__ import annotations

import collections
import threading as real_threading
import time as real_time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from tests.simulation.world import Thread, World

_world: Any = None
"""The world that runs; read without :func:`here` where that is done in every event."""


def enter(world: World | None) -> None:
    """Everything below belongs to this world from now on."""
    global _world
    _world = world


def here() -> World:
    """The world that runs."""
    world: World = _world
    return world


class Lock:
    """Also stands for ``threading.RLock``: a thread may take it again."""

    def __init__(self) -> None:
        self._owner: Thread | None = None
        self._depth = 0
        self._waiting: list[tuple[Thread, int]] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = _world
        thread = world.thread
        if thread is None or world.closing:
            assert self._owner is None or world.closing, "something outside of threads takes a lock that one has"
            return True  # it lets go in the same event
        if self._owner is thread:
            self._depth += 1
            return True
        if world.yields and world.random.random() < world.yields:
            world.block(world.jitter())
        while self._owner is not None:
            if not blocking:
                return False
            self._waiting.append((thread, thread.token))
            world.block(None)
        self._owner, self._depth = thread, 1
        return True

    def release(self, *_: object) -> None:
        world = _world
        if self._owner is None or world.closing:
            return
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waiting:
                world.wake(*self._waiting.pop(0))

    __enter__, __exit__ = acquire, release

    def locked(self) -> bool:
        return self._owner is not None

    def let_go(self) -> int:
        """Gives it up whatever its depth, for a wait; returns the depth."""
        if self._owner is not _world.thread:
            return 0
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_again(self, depth: int) -> None:
        """The reverse of :meth:`let_go`."""
        if depth:
            self.acquire()
            self._depth = depth


class Condition:
    """As ``threading.Condition``."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or Lock()
        self._waiting: list[tuple[Thread, int]] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        world = _world
        thread = world.thread
        assert thread is not None, "something outside of threads waits"
        me = (thread, thread.token)
        self._waiting.append(me)
        depth, woken = self._lock.let_go(), False
        try:
            woken = bool(world.block(timeout))
        finally:
            if not woken and me in self._waiting:
                self._waiting.remove(me)
            self._lock.take_again(depth)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else _world.now + timeout
        while not (result := predicate()):
            left = None if end is None else end - _world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        woken, self._waiting = self._waiting[:n], self._waiting[n:]
        for thread, token in woken:
            _world.wake(thread, token)

    def notify_all(self) -> None:
        if self._waiting:
            self.notify(len(self._waiting))

    @property
    def is_waited_for(self) -> bool:
        """Whether a notification would reach anybody."""
        return bool(self._waiting)


class Event:
    """As ``threading.Event``."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._condition.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._condition.wait_for(lambda: self._is_set, timeout))


class ThreadOfProduct:
    """As ``threading.Thread``."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str = "",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name
        self.daemon = daemon
        self.ident: int | None = None
        self._target = target
        self._args = args
        self._kwargs = kwargs or {}
        self._thread: Thread | None = None

    def start(self) -> None:
        process = here().process
        assert process is not None
        self.ident = len(process.threads) + 1
        self._thread = process.spawn(self._run, self.name)
        self._thread.product = self  # type: ignore[attr-defined]

    def _run(self) -> None:
        assert self._target is not None
        self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.done

    def join(self, timeout: float | None = None) -> None:
        world = here()
        if self._thread is None or self._thread.done or world.thread is None:
            return
        self._thread.joiners.append((world.thread, world.thread.token))
        world.block(timeout)


class Local:
    """As ``threading.local``."""

    def __init__(self) -> None:
        vars(self)["_values"] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[_world.thread, name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._values[_world.thread, name] = value


class Threading:
    """In the place of the module ``threading``."""

    Lock = RLock = Lock
    Condition = Condition
    Event = Event
    Thread = ThreadOfProduct
    local = Local
    _main = ThreadOfProduct(name="main")
    TIMEOUT_MAX = real_threading.TIMEOUT_MAX
    __file__ = real_threading.__file__

    @staticmethod
    def current_thread() -> Any:
        thread = here().thread
        return getattr(thread, "product", thread)

    @classmethod
    def main_thread(cls) -> Any:
        return cls._main

    @staticmethod
    def enumerate() -> list[Any]:
        return []


class Time:
    """In the place of the module ``time``."""

    @staticmethod
    def monotonic() -> float:
        now: float = _world.now
        return now

    perf_counter = process_time = thread_time = monotonic

    @staticmethod
    def monotonic_ns() -> int:
        return int(_world.now * 1e9)

    perf_counter_ns = process_time_ns = thread_time_ns = monotonic_ns

    @staticmethod
    def time() -> float:
        world = here()
        offset = world.process.wall_offset_s if world.process is not None else 0.0
        return 1.7e9 + world.now + offset

    @staticmethod
    def time_ns() -> int:
        return int(Time.time() * 1e9)

    @staticmethod
    def sleep(seconds: float) -> None:
        here().block(seconds)

    strftime = real_time.strftime
    localtime = real_time.localtime


class SimpleQueue:
    """As ``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._items: collections.deque[Any] = collections.deque()
        self._condition = Condition()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._condition.notify()

    def get(self) -> Any:
        while not self._items:
            self._condition.wait()
        return self._items.popleft()


class Queue:
    """In the place of the module ``queue``."""

    SimpleQueue = SimpleQueue


class Future:
    """As ``concurrent.futures.Future``."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_done = False

    def done(self) -> bool:
        return self._is_done

    def cancelled(self) -> bool:
        return False

    def cancel(self) -> bool:
        return False

    def set_running_or_notify_cancel(self) -> bool:
        return True

    def set_result(self, result: Any) -> None:
        self._result, self._is_done = result, True
        self._condition.notify_all()

    def set_exception(self, error: BaseException) -> None:
        self._error, self._is_done = error, True
        self._condition.notify_all()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._condition.wait_for(self.done, timeout)
        assert self._is_done, "nothing of the product waits for a future with a timeout"
        return self._error

    def result(self, timeout: float | None = None) -> Any:
        if (error := self.exception(timeout)) is not None:
            raise error
        return self._result


class ThreadPoolExecutor:
    """As that of ``concurrent.futures``, with one thread."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "", initializer: Callable[[], Any] = bool) -> None:
        assert max_workers == 1
        self._begin = initializer
        self._work: SimpleQueue = SimpleQueue()
        self._thread = ThreadOfProduct(target=self._run, name=thread_name_prefix)

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future:
        if self._thread.ident is None:
            self._thread.start()
        future = Future()
        self._work.put((future, work, arguments))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self._thread.ident is not None:
            self._work.put(None)
            self._thread.join()

    def _run(self) -> None:
        self._begin()
        while (item := self._work.get()) is not None:
            future, work, arguments = item
            try:
                future.set_result(work(*arguments))
            except Exception as error:
                future.set_exception(error)


class Futures:
    """In the place of the module ``concurrent.futures``."""

    Future = Future
    ThreadPoolExecutor = ThreadPoolExecutor

    @staticmethod
    def wait(futures: Sequence[Any]) -> None:
        for future in futures:
            future._condition.wait_for(future.done)
