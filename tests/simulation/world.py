"""Virtual time, and processes whose every action is an event of one queue: what a seed decides, happens again."""

from __future__ import annotations

import contextlib
import random
import re
import traceback
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import greenlet
import torch

MAX_EVENTS_AT_ONCE = 50_000
"""Events in which time may stand still."""


STANDBY = "standby:0"
"""The name of a chief that stands by, or has just been started, while another one has that of the chief."""
CHIEFS = ("chief:0", STANDBY)
START = 1000.0
"""What monotonic clocks say when a world begins."""


class SimulationError(AssertionError):
    """An invariant does not hold."""


class Process:
    """One process of the cluster: threads, servers, and a name for messages.

    Args:
        world: where it lives.
        name: of the task.
        address: host:port where others reach it.
    """

    def __init__(self, world: World, name: str, address: str) -> None:
        self.world = world
        self.name = name
        self.address = address
        self.pid = int(address.rpartition(":")[2])
        self.alive = True
        self.paused_until = 0.0
        self.wall_offset_s = 0.0
        self.threads: list[Thread] = []
        self.on_death: list[Callable[[], None]] = []
        self.exit_code: int | None = None
        self.globals: dict[str, Any] = {}
        """What the product keeps once in a process."""
        world.processes.append(self)

    def kill(self) -> None:
        """As ``kill -9``: nothing of it runs any more, not even what would tidy up."""
        if self.alive:
            self.alive = False
            for tell in self.on_death:
                tell()

    def end(self, exit_code: int) -> None:
        """It ends by itself."""
        if self.alive:
            self.exit_code = exit_code
            self.kill()

    def spawn(self, run: Callable[[], None], name: str = "") -> Thread:
        """Starts a thread."""
        thread = Thread(self, run, name)
        thread.start()
        return thread

    def __repr__(self) -> str:
        return self.name


class Thread:
    """A thread of a process: a greenlet, which runs until it waits.

    Args:
        process: whose it is.
        run: what it does.
        name: for people.
    """

    def __init__(self, process: Process, run: Callable[[], None], name: str = "") -> None:
        self.process = process
        self.name = name
        self.done = False
        self.joiners: list[tuple[Thread, int]] = []
        self.token = 0
        """Grows with each wait, so that a wake-up that comes late wakes nobody."""
        self._run = run
        self.green: Any = None

    def start(self) -> None:
        """Lets it run from the next event on."""
        self.green = greenlet.greenlet(self._main, self.process.world.hub)
        self.process.threads.append(self)
        self.process.world.after(self.process.world.jitter(), self.process, self._resume, None)

    def _resume(self, value: Any) -> None:
        world = self.process.world
        world.thread = self
        self.green.switch(value)
        world.thread = None

    def _main(self, _: Any) -> None:
        world = self.process.world
        torch._C._set_grad_enabled(True)
        try:
            self._run()
        except greenlet.GreenletExit:
            pass
        except Exception as error:
            if not world.closing:
                world.thread_failed(self, error)
        finally:
            self.done = True
            if not world.closing:
                for thread, token in self.joiners:
                    world.wake(thread, token)
                self.process.threads.remove(self)


class World:
    """The queue of events.

    Args:
        seed: decides everything.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = START
        self.processes: list[Process] = []
        self.process: Process | None = None
        """Whose event is being done."""
        self.thread: Thread | None = None
        """The thread that runs; None: the queue itself, or the loop of a chief."""
        self.closing = False
        self.trace: list[str] = []
        self.num_events = 0
        self.failures: list[str] = []
        self.yields = 0.0
        """How often a thread that takes a lock lets another one go first."""
        self._queue: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self._num = 0
        self._at_once = 0
        self.hub: Any = greenlet.getcurrent()

    def note(self, text: str) -> None:
        """A line of the story that a failed schedule tells."""
        text = re.sub(r"/\S*?simulation-[\w-]+|(?<=draft-)\w+", "", text)  # names that differ each time
        self.trace.append(f"{self.now - START:9.4f} {text}")

    def jitter(self) -> float:
        """What the scheduler of an operating system takes, in seconds."""
        return self.random.random() * 3e-5

    def after(self, delay_s: float, process: Process | None, run: Callable[..., None], *arguments: Any) -> None:
        """Has ``run`` called in so many seconds, unless its process is dead by then."""
        self._num = number = self._num + 1
        heappush(self._queue, (self.now + delay_s, number, process, run, arguments))

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Works through the events until ``done()``, at most to a time."""
        queue = self._queue
        while queue and not done():
            at, number, process, run, arguments = heappop(queue)
            if at > until:
                return
            if at > self.now:
                self.now, self._at_once = at, 0
            self._at_once += 1
            if self._at_once > MAX_EVENTS_AT_ONCE:
                raise SimulationError(f"time stands still at {at - START:.4f} s: {process} calls {run}")
            if process is not None:
                if not process.alive:
                    continue
                if process.paused_until > self.now:  # in the order of before, also where two pauses overlap
                    heappush(queue, (process.paused_until, number, process, run, arguments))
                    continue
            self.process = process
            self.num_events += 1
            run(*arguments)
            self.process = None
            if self.failures:
                raise SimulationError(self.failures[0])

    def fail(self, text: str) -> None:
        """An invariant does not hold; the run ends after this event."""
        self.note(f"FAILED {text}")
        self.failures.append(text)

    def thread_failed(self, thread: Thread, error: Exception) -> None:
        """A thread of the product ended with an error that nobody caught."""
        self.trace += traceback.format_exception(error)[-6:]
        self.fail(f"{thread.process} {thread.name}: {type(error).__name__}: {error}")

    # -- waiting ---------------------------------------------------------------------------------------------

    def block(self, timeout_s: float | None = None) -> bool:
        """The thread that runs waits. Returns whether it was woken, else its time is over."""
        thread = self.thread
        if self.closing or thread is None:
            if self.closing:
                raise greenlet.GreenletExit
            raise SimulationError("something outside of threads waits")
        process = thread.process
        if timeout_s is not None and timeout_s < 1e8:
            self.after(max(0.0, timeout_s), process, self._continue, thread, thread.token, False)
        self.thread = None
        has_grad = torch.is_grad_enabled()  # torch knows one thread here
        try:
            woken = self.hub.switch()
        finally:
            torch._C._set_grad_enabled(has_grad)
            if not self.closing and process.alive:
                self.thread, self.process = thread, process
        if self.closing or not process.alive:
            raise greenlet.GreenletExit
        return bool(woken)

    def interrupt(self, thread: Thread, error: BaseException) -> None:
        """A signal: the thread raises this where it waits."""
        if thread.green and not thread.done and thread.process.alive:
            thread.token += 1
            self.thread = thread
            thread.green.throw(error)
            self.thread = None

    def wake(self, thread: Thread, token: int) -> None:
        """Ends a wait."""
        self.after(self.jitter(), thread.process, self._continue, thread, token, True)

    def _continue(self, thread: Thread, token: int, woken: bool) -> None:
        if thread.token == token and not thread.done:
            thread.token += 1
            self.thread = thread
            thread.green.switch(woken)
            self.thread = None

    def close(self) -> None:
        """Ends what is left of all threads, without any effect."""
        self.closing = True
        for process in self.processes:
            for thread in list(process.threads):
                if thread.green and not thread.done:
                    self.thread = thread
                    with contextlib.suppress(BaseException):
                        thread.green.throw(greenlet.GreenletExit)
        self.thread = None
        self._queue.clear()
        self.processes.clear()
