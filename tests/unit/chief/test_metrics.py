"""The status page as metrics: names, values, and how many there can be."""

from __future__ import annotations

import math
import types
from typing import Any

import prometheus_client.exposition
import prometheus_client.openmetrics.exposition
import pytest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from stratagem.chief.monitoring import metrics as chief_metrics
from stratagem.chief.monitoring.metrics import MAX_REPORTED, Family, exposition, families
from stratagem.chief.web.story import COLUMNS, point_of
from stratagem.rpc.generated import chief_pb2
from stratagem.rpc.status_view import StatusView, TaskState, from_reply


def task(name: str, state: str = "live", **said: Any) -> TaskState:
    return TaskState(name, state, incarnation=3, heartbeat_age_s=0.5, pid=1, **said)


def status(*tasks: TaskState, checkpoint: str = "", stop_reason: str = "") -> StatusView:
    return StatusView(
        tasks=tasks,
        chief_epoch=2,
        ready=True,
        lead="worker:0",
        units_accepted=3,
        units_planned=9,
        epoch=4,
        examples=96,
        checkpoint=checkpoint,
        updates_lost=5,
        stop_reason=stop_reason,
    )


def samples(page: StatusView) -> dict[str, float]:
    """Each series as ``name{label=value}`` without the prefix, and its value."""
    found: dict[str, float] = {}
    text = exposition(families(page), prometheus_client.exposition.generate_latest).decode()
    metrics = list(text_string_to_metric_families(text))
    assert len({metric.name for metric in metrics}) == len(metrics), "a name twice"
    for metric in metrics:
        assert metric.documentation.endswith(".")
        for sample in metric.samples:
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            series = sample.name.removeprefix("stratagem_") + (f"{{{labels}}}" if labels else "")
            assert series not in found
            found[series] = sample.value
    return found


def test_the_job() -> None:
    found = samples(status(task("chief:0"), checkpoint="/c/step-00000120"))
    assert found["ready"] == 1 and found["ending"] == 0 and found["chief_epoch"] == 2 and found["epoch"] == 4
    assert (found["units_accepted"], found["units_planned"]) == (3, 9)
    assert (found["examples"], found["updates_lost_total"], found["checkpoint_step"]) == (96, 5, 120)
    assert "checkpoint_step" not in samples(status())
    assert samples(status(stop_reason="over"))["ending"] == 1


def test_tasks_by_state() -> None:
    found = samples(status(task("worker:0"), task("worker:1", "lost"), task("ps:0", "waiting")))
    assert found["tasks{state=live,type=worker}"] == 1 and found["tasks{state=lost,type=worker}"] == 1
    assert found["tasks{state=waiting,type=ps}"] == 1 and found["tasks{state=live,type=ps}"] == 0
    assert found["task_up{task=worker:0}"] == 1 and found["task_up{task=worker:1}"] == 0


def test_what_workers_and_ps_say() -> None:
    first: dict[str, Any] = {
        "step": 7,
        "examples": 224,
        "loss": 0.5,
        "step_s": 0.2,
        "exposed_s": 0.1,
        "skipped": 1,
        "waiting_s": 0.3,
    }
    page = status(
        task("worker:0", clock=7, units_held=2, **first),
        task("worker:1", clock=4, step=4),
        task("ps:0", step=11, store_epoch=2, bytes_held=4096),
    )
    found = samples(page)
    assert found["steps_total{task=worker:0}"] == 7 and found["worker_examples_total{task=worker:0}"] == 224
    assert found["loss{task=worker:0}"] == 0.5 and "loss{task=worker:1}" not in found
    assert found["step_seconds{task=worker:0}"] == 0.2 and found["step_exposed_seconds{task=worker:0}"] == 0.1
    assert "step_seconds{task=worker:1}" not in found, "it has no mean yet"
    assert found["steps_ahead{task=worker:0}"] == 3 and found["steps_ahead{task=worker:1}"] == 0
    assert found["clock{task=worker:1}"] == 4 and found["units_held{task=worker:0}"] == 2
    assert found["waiting_seconds{task=worker:0}"] == 0.3 and found["updates_skipped_total{task=worker:0}"] == 1
    assert found["updates_applied{task=ps:0}"] == 11 and found["bytes_held{task=ps:0}"] == 4096
    assert found["store_epoch{task=ps:0}"] == 2 and found["heartbeat_age_seconds{task=ps:0}"] == 0.5
    assert found["task_incarnation{task=ps:0}"] == 3
    ahead = samples(status(task("worker:0", clock=7), task("worker:1")))
    assert ahead["steps_ahead{task=worker:0}"] == 0 and "steps_ahead{task=worker:1}" not in ahead, (
        "nobody counts its steps"
    )
    assert point_of(0.0, status(task("worker:0"), task("worker:1")), 0, 0)[COLUMNS.index("ahead")] is None
    assert "steps_total{task=ps:0}" not in found and "bytes_held{task=worker:0}" not in found


def test_what_is_measured_has_the_names_of_the_table() -> None:
    measured = {"data_wait_s": 2.5, "peer_wait_s|ps:0": 1.0, "cores": 4.0, **{f"staleness|{n}": n for n in range(99)}}
    found = samples(status(task("worker:0", measures=measured)))
    assert found["data_wait_s_total{task=worker:0}"] == 2.5 and found["cores{task=worker:0}"] == 4
    assert found["peer_wait_s_total{peer=ps:0,task=worker:0}"] == 1
    assert len([series for series in found if series.startswith("staleness_total{")]) == MAX_REPORTED


ENCODERS = (
    prometheus_client.exposition.generate_latest,
    prometheus_client.openmetrics.exposition.generate_latest,
)


@pytest.mark.parametrize("encode", ENCODERS)
def test_rows_are_written_as_the_encoder_writes_samples(encode: Any) -> None:
    values = [0.0, -0.0, 3, True, 1e-9, 0.1, 999999.5, 1e6, 12345678, 1e22, -2e7, math.inf, -math.inf, math.nan]
    labels = ["ps:0", 'a "b" \\ c\nd', "100 %s", "é", ""]
    ours = Family("waited", 'Of a "test".', ("peer", "task"), is_counter=True)
    theirs = CounterMetricFamily("stratagem_waited", 'Of a "test".', labels=["task", "peer"])
    for value in values:
        for label in labels:
            ours.add(value, chief_metrics._escaped(label), "worker:0")
            theirs.add_metric(["worker:0", label], value)
    expected = encode(types.SimpleNamespace(collect=lambda: [theirs, type(theirs)("stratagem_none", "None.")]))
    assert exposition([ours, Family("none", "None.", is_counter=True)], encode) == expected


def test_what_hundreds_of_tasks_measure_is_split_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def escaped(label: str) -> str:
        asked.append(label)
        return label

    monkeypatch.setattr(chief_metrics, "_escaped", escaped)
    measured = {f"peer_wait_s|ps:{number}": 1.0 for number in range(8)} | {"data_wait_s": 1.0}
    found = samples(status(*(task(f"worker:{number}", measures=measured) for number in range(100))))
    assert found["peer_wait_s_total{peer=ps:7,task=worker:99}"] == 1 and len(asked) == len(measured)


def test_the_dead_say_nothing_more() -> None:
    found = samples(status(task("worker:0", "lost", clock=3, step=7, loss=1.0)))
    assert not {series for series in found if "worker:0" in series} - {"task_up{task=worker:0}"}


def test_a_script_that_reports_much_makes_no_more_series() -> None:
    reported = {f"name {number:03d}": 1.0 for number in range(1000)}
    found = samples(status(task("worker:0", metrics=reported)))
    assert len([series for series in found if series.startswith("reported{")]) == MAX_REPORTED
    assert found["reported{name=name 019,task=worker:0}"] == 1.0


def test_progress_comes_from_the_wire() -> None:
    message = chief_pb2.Progress(step=3, has_loss=True, loss=math.inf, metrics={"accuracy": 0.9}, bytes_held=8)
    tasks = [chief_pb2.TaskStatus(progress=message), chief_pb2.TaskStatus()]
    said, silent = from_reply(chief_pb2.GetStatusReply(tasks=tasks)).tasks
    assert (said.step, said.loss, said.metrics, said.bytes_held) == (3, math.inf, {"accuracy": 0.9}, 8)
    assert silent.loss is None
