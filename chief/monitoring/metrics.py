"""The status page as Prometheus metrics. Pure: what the chief knows in, metric families out.

The number of tasks bounds the number of time series: no label holds a number, an address or changing text. Of the names
that a script reports, the first :data:`MAX_REPORTED` of a task count.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from stratagem.measuring.measures import MEASURES, ROW_SHARE, STEPS, Kind
from stratagem.rpc.status_view import StatusView, TaskState

MAX_REPORTED = 20
_NOT_SHOWN = (STEPS, ROW_SHARE)
"""Steps are shown elsewhere; labels that are numbers of rows would never end."""
STATES = ("waiting", "live", "lost", "done")

_Value = Callable[[TaskState], float | None]
_WORKER, _PS = ("worker",), ("ps",)
_OF_A_TASK: tuple[tuple[str, str, tuple[str, ...], _Value], ...] = (
    ("task_incarnation", "Process incarnation of the task; grows by a restart.", (), lambda t: t.incarnation),
    ("heartbeat_age_seconds", "Since the chief last heard of it.", ("worker", "ps"), lambda t: t.heartbeat_age_s),
    ("waiting_seconds", "Since it began to wait for another task; 0: it does not.", _WORKER, lambda t: t.waiting_s),
    ("step_seconds", "Mean of the last ten steps or so.", _WORKER, lambda t: t.step_s or None),
    (
        "step_exposed_seconds",
        "The part of step_seconds that waited for communication.",
        _WORKER,
        lambda t: t.exposed_s if t.step_s else None,
    ),
    ("loss", "Newest loss that reduce_mean saw, else the one reported.", _WORKER, lambda t: t.loss),
    ("units_held", "Units leased to the worker.", _WORKER, lambda t: t.units_held),
    ("clock", "Completed steps, as the staleness bound counts them.", _WORKER, lambda t: t.clock or None),
    ("store_epoch", "Grows when the ps goes back to a checkpoint.", _PS, lambda t: t.store_epoch),
    ("updates_applied", "Updates in its values; fewer when it goes back to a checkpoint.", _PS, lambda t: t.step),
    ("bytes_held", "Bytes of variables and of optimizer state.", _PS, lambda t: t.bytes_held),
)
"""Gauges of live tasks: name, meaning, types of tasks that have it (none: all), value."""
_COUNTED: tuple[tuple[str, str, tuple[str, ...], _Value], ...] = (
    ("steps", "Steps completed in this process.", _WORKER, lambda t: t.step),
    ("worker_examples", "Examples of these steps.", _WORKER, lambda t: t.examples),
    ("updates_skipped", "Updates skipped because of NaN or Inf.", _WORKER, lambda t: t.skipped),
)


class Family:
    """A metric with all its series, as rows: an object for each of tens of thousands would cost more than all else.

    ``labels``: in alphabetical order, as a series names them.
    """

    def __init__(self, name: str, meaning: str, labels: Sequence[str] = (), is_counter: bool = False) -> None:
        assert list(labels) == sorted(labels), labels
        self.name, self.labels = name, labels
        self.pattern = Metric(f"stratagem_{name}", meaning, "counter" if is_counter else "gauge")
        """The metric with one sample, of which every row makes another."""
        sample = f"stratagem_{name}{'_total' if is_counter else ''}"
        self.pattern.add_sample(sample, dict.fromkeys(labels, "%s"), 0.0)
        self.rows: list[tuple[str | float, ...]] = []

    def add(self, value: float, *labels: str) -> None:
        """One more series; a number below a million is written as Python does."""
        written = float(value) if abs(value) < 1e6 else floatToGoString(value)  # type: ignore[no-untyped-call]
        self.rows.append((*labels, written))


def exposition(found: Iterable[Family], encode: Callable[[Any], bytes]) -> bytes:
    """What ``encode``, of prometheus_client, would write of all rows. It writes one sample of each metric."""
    every = list(found)
    patterns = encode(types.SimpleNamespace(collect=lambda: [family.pattern for family in every]))
    rows = (family.rows for family in every)
    lines: list[str] = []
    for line in patterns.decode().splitlines(keepends=True):
        if line.startswith("#"):
            lines.append(line)
        else:
            series = f"{line.rpartition(' ')[0]} %s\n"
            lines += [series % row for row in next(rows)]
    return "".join(lines).encode()


def families(status: StatusView) -> Iterable[Family]:
    """Every metric of a status page that has measures."""
    yield from _of_the_job(status)
    live = [task for task in status.tasks if task.state == "live"]
    up = Family("task_up", "Whether the task is live.", ("task",))
    for task in status.tasks:
        up.add(task.state == "live", task.task)
    yield up
    for rows, is_counter in ((_OF_A_TASK, False), (_COUNTED, True)):
        for name, meaning, kinds, value in rows:
            family = Family(name, meaning, ("task",), is_counter)
            for task in live:
                if (not kinds or _type(task) in kinds) and (number := value(task)) is not None:
                    family.add(number, task.task)
            yield family
    yield _staleness(live)
    yield _reported(live)
    yield from _measured(live)


def _of_the_job(status: StatusView) -> Iterable[Family]:
    tasks = Family("tasks", "Tasks by type and state.", ("state", "type"))
    counts = Counter((_type(task), task.state) for task in status.tasks)
    for kind in sorted({kind for kind, _ in counts}):
        for state in STATES:
            tasks.add(counts[kind, state], state, kind)
    yield tasks
    gauges = {
        "ready": ("Whether the whole cluster has come up.", float(status.ready)),
        "ending": ("Whether the job is being ended.", float(bool(status.stop_reason))),
        "chief_epoch": ("Incarnation of the chief; grows by a restart.", status.chief_epoch),
        "epoch": ("Newest open epoch of the data, starting at 0.", status.epoch),
        "units_planned": ("Units of that epoch.", status.units_planned),
        "units_accepted": ("Those of them whose gradient was accepted.", status.units_accepted),
        "examples": ("Examples in accepted units; fewer when the job goes back to a checkpoint.", status.examples),
    }
    if (step := status.checkpoint_step) is not None:
        gauges["checkpoint_step"] = ("Step of the newest committed checkpoint.", step)
    for name, (meaning, value) in gauges.items():
        family = Family(name, meaning)
        family.add(value)
        yield family
    lost = Family("updates_lost", "Updates that a ps lost with its values.", is_counter=True)
    lost.add(status.updates_lost)
    yield lost


def _staleness(live: Iterable[TaskState]) -> Family:
    clocks = {task.task: task.clock for task in live if task.clock}
    family = Family("steps_ahead", "Steps ahead of the slowest live worker, where a staleness bound counts.", ("task",))
    slowest = min(clocks.values(), default=0)
    for name, clock in clocks.items():
        family.add(clock - slowest, name)
    return family


def _reported(live: Iterable[TaskState]) -> Family:
    family = Family("reported", "Newest value of strategy.report.", ("name", "task"))
    for task in live:
        for name in sorted(task.metrics)[:MAX_REPORTED]:
            family.add(task.metrics[name], _escaped(name), task.task)
    return family


def _measured(live: Sequence[TaskState]) -> Iterable[Family]:
    """What every process measures, under the names that all else uses; at most :data:`MAX_REPORTED` labels each."""
    found = {
        name: Family(
            name,
            measure.meaning,
            sorted({"task", measure.label or "task"}),
            is_counter=measure.kind is not Kind.GAUGE,
        )
        for name, measure in MEASURES.items()
        if name not in _NOT_SHOWN
    }
    known: dict[str, tuple[Family | None, str]] = {}  # hundreds of tasks have the same
    for task in live:
        counts: Counter[str] = Counter()
        for key in sorted(task.measures):
            if key not in known:
                name, bar, label = key.partition("|")
                is_one = name in found and bool(bar) == bool(label) == bool(MEASURES[name].label)
                known[key] = found[name] if is_one else None, _escaped(label)
            family, label = known[key]
            if family is None:
                continue
            if not label:
                family.add(task.measures[key], task.task)
            elif (number := counts[family.name]) < MAX_REPORTED:
                counts[family.name] = number + 1
                both = (task.task, label) if family.labels[0] == "task" else (label, task.task)
                family.add(task.measures[key], *both)
    return found.values()


def _type(task: TaskState) -> str:
    return task.task.partition(":")[0]


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
