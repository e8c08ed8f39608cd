"""Applies the faults of ``--chaos`` to the processes of a run, and records the cost of each."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem.cluster.task import TaskId
from stratagem.launch.chaos.events import ON_CONNECTIONS, STANDBY, ChaosEvent, connections, parse, word_of
from stratagem.launch.chaos.relay import Address, Relay, owner_of
from stratagem.launch.processes import TaskProcess
from stratagem.rpc.binding import free_port
from stratagem.rpc.status_view import StatusView

_CHIEF = TaskId("chief", 0)
SLOW_PERIOD_S = 0.2
"""A slowed process is stopped for a part of each."""


@dataclasses.dataclass
class Fired:
    event: ChaosEvent
    after_s: float
    """Seconds from the job's first step."""
    step: int
    """Of its target."""
    lost_before: int
    pid: int
    """Of the target, when it happened."""
    connections: int | None = None
    """That suffer."""
    updates_lost: int = 0
    """Until the next fault, or the end."""
    standstill_s: float = 0.0
    """The longest time without a step of anybody in that time, as far as the status tells (twice a second)."""
    resumed_s: float | None = None
    """Until the target (of a chief: anybody) made a step after the fault."""

    def record(self) -> dict[str, Any]:
        return {
            "event": self.event.text,
            "after_s": round(self.after_s, 1),
            "step": self.step,
            **({} if self.connections is None else {"connections": self.connections}),
            "updates_lost": self.updates_lost,
            "standstill_s": round(self.standstill_s, 1),
            "resumed_s": None if self.resumed_s is None else round(self.resumed_s, 1),
        }


class ChaosInjector:
    """The faults of one run: :meth:`tick` fires those that are due. ``has_copies``: whether a ps follows another.
    ConfigurationError: the text is wrong."""

    def __init__(self, text: str, tasks: tuple[TaskId, ...], say: Callable[[str], None], has_copies: bool) -> None:
        events, drawn = parse(text, tasks, has_copies)
        self.fired: list[Fired] = []
        self._waiting = events
        self._drawn = heapq.merge(*drawn, key=lambda event: event.at_s)
        self._next_drawn = next(self._drawn, None)
        self._say = say
        self._began_at = math.inf  # the first step
        self._moved_at = 0.0
        self._steps: dict[TaskId, int] = {}
        self._pids: dict[str, int] = {}
        self._paused: dict[TaskId, float] = {}  # until when
        self._slowed: dict[TaskId, tuple[float, float, float]] = {}  # since and until when, by which factor
        suffer = set() if not drawn else set(tasks)
        suffer |= {task for event in events if event.verb in ON_CONNECTIONS for task in event.targets}
        called = {server for _, server in connections(tasks)} & suffer
        self._binds = {task: f"127.0.0.1:{free_port()}" for task in called if task.type != "chief"}
        self._relays = {task: Relay(self._binds.get(task, ""), self._client_of) for task in called}

    def _client_of(self, client: Address, server: Address) -> str:
        return owner_of(client, server, self._pids)

    def bind(self, task: TaskId) -> tuple[str, str]:
        """Where a task is to listen, and what it is to say to others; empty: as ever."""
        return (self._binds[task], self._relays[task].address) if task in self._binds else ("", "")

    def chief_address(self, otherwise: str) -> str:
        """Where the tasks are to look for the chief: ``otherwise``, if nothing lies between."""
        return self._relays[_CHIEF].address if _CHIEF in self._relays else otherwise

    def chief_listens(self, address: str) -> None:
        if _CHIEF in self._relays:
            self._relays[_CHIEF].target = address

    def tick(self, now: float, status: StatusView | None, processes: Mapping[TaskId, TaskProcess]) -> float:
        """Fires what is due, and ends what has lasted; returns in how many seconds to come again. Of two chiefs among
        ``processes`` the one that serves is chief:0."""
        self._pids = {str(task): process.pid for task, process in processes.items()}
        if status is not None:
            self._watch(status, now)
            for event in self._due(now):
                self._fire(event, now, status, processes)
        ends = [*self._paused.items(), *((task, until) for task, (_, until, _) in self._slowed.items())]
        ended = {task for task, until in ends if now >= until}
        self._paused = {task: until for task, until in self._paused.items() if now < until}
        self._slowed = {task: slowed for task, slowed in self._slowed.items() if now < slowed[1]}
        for task in processes.keys() & (ended - self._paused.keys()):
            processes[task].send(signal.SIGCONT)
        return min([self._duty(now, processes), *(until - now for _, until in ends if now < until)])

    def let_go(self, processes: Mapping[TaskId, TaskProcess]) -> None:
        """The job does not run at present: whoever is stopped goes on, to end as it is told to."""
        for task in processes.keys() & {*self._paused, *self._slowed}:
            processes[task].send(signal.SIGCONT)

    def records(self, updates_lost: int) -> list[dict[str, Any]]:
        """What happened, in its order, and then what did not: that has no ``after_s``. ``updates_lost``: of the whole
        job, now that it is over."""
        for last in self.fired[-1:]:
            last.updates_lost = updates_lost - last.lost_before
        return [*(fired.record() for fired in self.fired), *({"event": each.text} for each in self._waiting)]

    def close(self) -> None:
        for relay in self._relays.values():
            relay.close()

    def _watch(self, status: StatusView, now: float) -> None:
        tasks = {TaskId.parse(task.task): task for task in status.tasks}
        steps = {name: task.step for name, task in tasks.items()}
        moved = {name for name, step in steps.items() if step != self._steps.get(name)}
        if moved:
            self._moved_at = now
            self._steps = steps
        if self._began_at == math.inf and any(steps.values()):
            self._began_at = self._moved_at = now
        if self.fired:
            last = self.fired[-1]
            last.standstill_s = max(last.standstill_s, now - max(self._moved_at, self._began_at + last.after_s))
            last.updates_lost = status.updates_lost - last.lost_before
        for fired in (each for each in self.fired if each.resumed_s is None):
            target, past_s = fired.event.targets[0], now - self._began_at - fired.after_s
            has_gone = fired.event.verb in ("kill", "stop") and target != STANDBY  # of which no status tells
            is_new = not has_gone or (target in tasks and tasks[target].pid != fired.pid)
            has_moved = bool(moved) if target.type == "chief" else target in moved
            if is_new and has_moved and past_s >= (fired.event.for_s or 0):
                fired.resumed_s = past_s

    def _due(self, now: float) -> list[ChaosEvent]:
        past_s = now - self._began_at
        due = [e for e in self._waiting if past_s >= e.at_s and self._step(e.targets[0]) >= (e.step or 0)]
        self._waiting = [event for event in self._waiting if event not in due]
        while self._next_drawn is not None and past_s >= self._next_drawn.at_s:
            due.append(self._next_drawn)
            self._next_drawn = next(self._drawn, None)
        return due

    def _step(self, task: TaskId) -> int:
        return max(self._steps.values(), default=0) if task.type == "chief" else self._steps.get(task, 0)

    def _fire(self, event: ChaosEvent, now: float, status: StatusView, processes: Mapping[TaskId, TaskProcess]) -> None:
        target = event.targets[0]
        if event.verb not in ON_CONNECTIONS and target not in processes:  # it has ended; or it is being started again
            self._say(f"chaos: {event.text} found no process of {target}")
            return
        step, pid = self._step(target), self._pids.get(str(target), 0)
        fired = Fired(event, now - self._began_at, step, status.updates_lost, pid)
        self.fired.append(fired)
        self._say(f"chaos: {event.text} ({word_of(target)} at step {step})")
        if event.verb in ON_CONNECTIONS:
            fired.connections = 0
            for server, client in itertools.permutations(event.targets):
                if (relay := self._relays.get(server)) is not None:
                    suffer = relay.hold if event.verb == "cut" else relay.reset
                    fired.connections += suffer(event.for_s or 0.0, str(client))
            return
        until = math.inf if event.for_s is None else now + event.for_s
        if event.verb == "slow":
            self._slowed[target] = now, until, event.factor
        elif event.verb == "pause":
            self._paused[target] = until
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGTERM, "pause": signal.SIGSTOP}
        if event.verb in signals:
            processes[target].send(signals[event.verb])

    def _duty(self, now: float, processes: Mapping[TaskId, TaskProcess]) -> float:
        """Stops and continues the slowed ones that are not paused."""
        again_s = 1.0
        for task, (since, _, factor) in self._slowed.items():
            if task not in processes or task in self._paused:
                continue
            place, run_s = (now - since) % SLOW_PERIOD_S, SLOW_PERIOD_S / factor
            processes[task].send(signal.SIGCONT if place < run_s else signal.SIGSTOP)
            again_s = min(again_s, (run_s if place < run_s else SLOW_PERIOD_S) - place)
        return again_s


def chaos_words(records: Sequence[Mapping[str, Any]]) -> str:
    """What the faults of a run cost, in a line."""
    fired = [record for record in records if "after_s" in record]
    words = [f"chaos: {len(fired)} of {len(records)} faults happened"]
    if fired:
        worst = max(fired, key=lambda record: float(record["standstill_s"]))
        lost = sum(record["updates_lost"] for record in fired)
        words += [f"longest standstill {worst['standstill_s']} s ({worst['event']})", f"{lost} updates lost"]
    left = [record["event"] for record in records if "after_s" not in record]
    return ", ".join(words) + (f"; the job was over before {'; '.join(left)}" if left else "")
