"""The status page as Prometheus metrics. Pure: what the chief knows in, metric families out.

The number of tasks bounds the number of time series: no label holds a number, an address or changing text. Of the names
that a script reports, the first :data:`MAX_REPORTED` of a task count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from stratagem.measuring.measures import MEASURES, ROW_SHARE, STEPS, Kind, labels
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
    ("loss", "Newest loss that reduce_mean saw.", _WORKER, lambda t: t.loss),
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


def families(status: StatusView) -> Iterable[Metric]:
    """Every metric of a status page that has measures."""
    yield from _of_the_job(status)
    live = [task for task in status.tasks if task.state == "live"]
    up = GaugeMetricFamily("stratagem_task_up", "Whether the task is live.", labels=["task"])
    for task in status.tasks:
        up.add_metric([task.task], task.state == "live")
    yield up
    for rows, family in ((_OF_A_TASK, GaugeMetricFamily), (_COUNTED, CounterMetricFamily)):
        for name, meaning, types, value in rows:
            metric = family(f"stratagem_{name}", meaning, labels=["task"])
            for task in live:
                if (not types or _type(task) in types) and (number := value(task)) is not None:
                    metric.add_metric([task.task], number)
            yield metric
    yield _staleness(live)
    yield _reported(live)
    yield from _measured(live)


def _of_the_job(status: StatusView) -> Iterable[Metric]:
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
        "examples": ("Examples in accepted units; fewer when the job goes back to a checkpoint.", status.examples),
    }
    if (step := status.checkpoint_step) is not None:
        gauges["checkpoint_step"] = ("Step of the newest committed checkpoint.", step)
    for name, (meaning, value) in gauges.items():
        yield GaugeMetricFamily(f"stratagem_{name}", meaning, value=value)
    yield CounterMetricFamily(
        "stratagem_updates_lost", "Updates that a ps lost with its values.", value=status.updates_lost
    )


def _staleness(live: Iterable[TaskState]) -> Metric:
    clocks = {task.task: task.clock for task in live if task.clock}
    metric = GaugeMetricFamily(
        "stratagem_steps_ahead",
        "Steps ahead of the slowest live worker, where a staleness bound counts.",
        labels=["task"],
    )
    for name, clock in clocks.items():
        metric.add_metric([name], clock - min(clocks.values()))
    return metric


def _reported(live: Iterable[TaskState]) -> Metric:
    metric = GaugeMetricFamily("stratagem_reported", "Newest value of strategy.report.", labels=["task", "name"])
    for task in live:
        for name in sorted(task.metrics)[:MAX_REPORTED]:
            metric.add_metric([task.task, name], task.metrics[name])
    return metric


def _measured(live: Sequence[TaskState]) -> Iterable[Metric]:
    """What every process measures, under the names that all else uses; at most :data:`MAX_REPORTED` labels each."""
    for name, measure in MEASURES.items():
        if name in _NOT_SHOWN:
            continue
        family = GaugeMetricFamily if measure.kind is Kind.GAUGE else CounterMetricFamily
        metric = family(
            f"stratagem_{name}", measure.meaning, labels=["task", *([measure.label] if measure.label else [])]
        )
        for task in live:
            found = labels(task.measures, name) if measure.label else {"": task.measures.get(name)}
            for label in sorted(found)[:MAX_REPORTED]:
                if (number := found[label]) is not None:
                    metric.add_metric([task.task, *([label] if measure.label else [])], number)
        yield metric


def _type(task: TaskState) -> str:
    return task.task.partition(":")[0]
