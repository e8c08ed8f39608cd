"""The status page as Prometheus metrics. Pure: what the chief knows in, metric families out.

How many time series there are is bounded by the tasks of the cluster: no label holds a number, an address or text that
changes. Of the names that a script reports, the first :data:`MAX_REPORTED` of a task count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from stratagem.chief.monitoring.progress import TaskProgress
from stratagem.chief.monitoring.status import JobStatus, TaskReport

MAX_REPORTED = 20
STATES = ("waiting", "live", "lost", "done")

_Value = Callable[[TaskReport, TaskProgress], float | None]
_WORKER, _PS = ("worker",), ("ps",)
_OF_A_TASK: tuple[tuple[str, str, tuple[str, ...], _Value], ...] = (
    ("task_incarnation", "Process incarnation of the task; grows by a restart.", (), lambda t, p: t.member.incarnation),
    ("heartbeat_age_seconds", "Since the chief last heard of it.", ("worker", "ps"), lambda t, p: t.heartbeat_age_s),
    ("waiting_seconds", "Since it began to wait for another task; 0: it does not.", _WORKER, lambda t, p: p.waiting_s),
    ("step_seconds", "Mean of the last ten steps or so.", _WORKER, lambda t, p: p.step_s or None),
    (
        "step_exposed_seconds",
        "The part of step_seconds that waited for communication.",
        _WORKER,
        lambda t, p: p.exposed_s if p.step_s else None,
    ),
    ("loss", "Newest loss that reduce_mean saw.", _WORKER, lambda t, p: p.loss),
    ("units_held", "Units leased to the worker.", _WORKER, lambda t, p: t.units_held),
    ("clock", "Completed steps, as the staleness bound counts them.", _WORKER, lambda t, p: t.clock),
    ("store_epoch", "Grows when the ps goes back to a checkpoint.", _PS, lambda t, p: p.store_epoch),
    ("bytes_held", "Bytes of variables and of optimizer state.", _PS, lambda t, p: p.bytes_held),
)
"""Gauges of live tasks: name, meaning, types of tasks that have it (none: all), value."""
_COUNTED: tuple[tuple[str, str, tuple[str, ...], _Value], ...] = (
    ("steps", "Steps completed in this process.", _WORKER, lambda t, p: p.step),
    ("worker_examples", "Examples of these steps.", _WORKER, lambda t, p: p.examples),
    ("updates_skipped", "Updates skipped because of NaN or Inf.", _WORKER, lambda t, p: p.skipped),
    ("updates_applied", "Updates applied by the ps.", _PS, lambda t, p: p.step),
)


def families(status: JobStatus, progress: Mapping[str, TaskProgress]) -> Iterable[Metric]:
    """Every metric.

    Args:
        status: the status page.
        progress: what each task said last, by its id.
    """
    yield from _of_the_job(status)
    live = [task for task in status.tasks if task.state == "live"]
    shown = [(task, progress.get(task.member.task, TaskProgress())) for task in live]
    up = GaugeMetricFamily("stratagem_task_up", "Whether the task is live.", labels=["task"])
    for task in status.tasks:
        up.add_metric([task.member.task], task.state == "live")
    yield up
    for rows, family in ((_OF_A_TASK, GaugeMetricFamily), (_COUNTED, CounterMetricFamily)):
        for name, meaning, types, value in rows:
            metric = family(f"stratagem_{name}", meaning, labels=["task"])
            for task, said in shown:
                if (not types or _type(task) in types) and (number := value(task, said)) is not None:
                    metric.add_metric([task.member.task], number)
            yield metric
    yield _staleness(live)
    yield _reported(shown)


def _of_the_job(status: JobStatus) -> Iterable[Metric]:
    tasks = GaugeMetricFamily("stratagem_tasks", "Tasks by type and state.", labels=["type", "state"])
    counts = Counter((_type(task), task.state) for task in status.tasks)
    for kind in sorted({kind for kind, _ in counts}):
        for state in STATES:
            tasks.add_metric([kind, state], counts[kind, state])
    yield tasks
    gauges = {
        "ready": ("Whether the whole cluster has come up.", float(status.ready)),
        "ending": ("Whether the job is being ended.", float(bool(status.stop_reason))),
        "chief_epoch": ("Incarnation of the chief; grows by a restart.", status.chief_epoch),
        "epoch": ("Newest open epoch of the data, starting at 0.", status.epoch),
        "units_planned": ("Units of that epoch.", status.units_planned),
        "units_accepted": ("Those of them whose gradient was accepted.", status.units_accepted),
    }
    if (step := _step_of(status.checkpoint)) is not None:
        gauges["checkpoint_step"] = ("Step of the newest committed checkpoint.", step)
    for name, (meaning, value) in gauges.items():
        yield GaugeMetricFamily(f"stratagem_{name}", meaning, value=value)
    counters = {
        "examples": ("Examples in accepted units.", status.examples_accepted),
        "updates_lost": ("Updates that a ps lost with its values.", status.updates_lost),
    }
    for name, (meaning, value) in counters.items():
        yield CounterMetricFamily(f"stratagem_{name}", meaning, value=value)


def _staleness(live: Iterable[TaskReport]) -> Metric:
    clocks = {task.member.task: task.clock for task in live if _type(task) == "worker"}
    metric = GaugeMetricFamily("stratagem_steps_ahead", "Steps ahead of the slowest live worker.", labels=["task"])
    for name, clock in clocks.items():
        metric.add_metric([name], clock - min(clocks.values()))
    return metric


def _reported(shown: Iterable[tuple[TaskReport, TaskProgress]]) -> Metric:
    metric = GaugeMetricFamily("stratagem_reported", "Newest value of strategy.report.", labels=["task", "name"])
    for task, said in shown:
        for name in sorted(said.reported)[:MAX_REPORTED]:
            metric.add_metric([task.member.task, name], said.reported[name])
    return metric


def _type(task: TaskReport) -> str:
    return task.member.task.partition(":")[0]


def _step_of(checkpoint: str) -> int | None:
    """``".../step-00000100"``: 100."""
    found = re.search(r"step-(\d+)$", checkpoint)
    return int(found[1]) if found else None
