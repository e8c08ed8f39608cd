"""What a job reports, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from benchmarks import chief, job_files, meter
from benchmarks.pull import PullResult, WrongPullError
from benchmarks.pull import to_sample as pull_sample
from benchmarks.training import result as results
from benchmarks.training.cases import ps_cases, step_cases, to_sample, to_step_sample, train_cases
from benchmarks.training.result import InvalidResultError, JobResult, mean_of_ends, read_result
from benchmarks.training.workloads import EMPTY, WORKLOADS, workload_on
from benchmarks.window import Window

GOOD = JobResult(
    num_steps=80,
    elapsed_s=2.0,
    cpu_s=4.0,
    loopback_bytes=800,
    first_loss=2.3,
    last_loss=0.5,
    weights_finite=True,
    exposed_comm=0.25,
    versions={"torch": "2"},
)


def test_a_result_comes_back_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    monkeypatch.setenv(job_files.RESULT_VARIABLE, str(path))
    results.write_steps(50)
    results.write_steps(30)
    losses = [2.5] * 5 + [1.0] * 20 + [0.5] * 5
    results.write_result(Window(2.0, 4.0, 800), losses, True, 0.25, {"torch": "2"})
    assert read_result(path) == dataclasses.replace(GOOD, first_loss=2.5)
    results.write_steps(10, weights_checksum=7)
    assert read_result(path).num_different_weights == 2


def test_metrics_of_a_window() -> None:
    assert to_sample(GOOD, WORKLOADS["cnn"]) == {
        "worker_steps_per_s": 40.0,
        "examples_per_s": 2560.0,
        "exposed_comm": 0.25,
        "bytes_per_step": 10.0,
        "cpu_s_per_step": 0.05,
        "worker_cpu_s_per_step": None,
        "ps_cpu_s_per_step": None,
        "chief_cpu_s_per_step": None,
    }


def test_metrics_of_an_empty_step_are_told_by_role() -> None:
    ours = dataclasses.replace(GOOD, cpu_s_by_role={"worker": 2.0, "ps": 1.0})
    assert to_step_sample(ours) == {
        "step_us": 25_000.0,
        "cpu_us": 50_000.0,
        "worker_cpu_us": 25_000.0,
        "ps_cpu_us": 12_500.0,
        "chief_cpu_us": None,
    }


def test_real_training_passes() -> None:
    GOOD.check(80)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_steps": 79}, "expected 80 worker-steps, the job made 79"),
        ({"last_loss": 2.3}, "falling loss"),
        ({"last_loss": float("nan")}, "falling loss"),
        ({"weights_finite": False}, "NaN or Inf"),
        ({"num_different_weights": 2}, "ended with 2 sets of weights"),
    ],
)
def test_anything_else_is_refused(change: dict[str, float], reason: str) -> None:
    with pytest.raises(InvalidResultError, match=reason):
        dataclasses.replace(GOOD, **change).check(80)  # type: ignore[arg-type]  # one field, of its own type


def test_means_of_short_and_long_lists() -> None:
    assert mean_of_ends([4.0, 2.0]) == (4.0, 2.0)
    assert mean_of_ends([4.0, 3.0, 2.0]) == (4.0, 2.0)
    assert mean_of_ends([4.0]) == (4.0, 4.0)
    assert all(math.isnan(mean) for mean in mean_of_ends([]))
    assert mean_of_ends([9.0, 9.0, 1.0, 1.0], width=2) == (9.0, 1.0)


@pytest.mark.parametrize(("python", "systems"), [(None, 3), ("/somewhere/python", 4)])
def test_rows_of_ps_have_the_columns_of_the_rules(python: str | None, systems: int) -> None:
    cases = ps_cases(WORKLOADS["dense"], ["shm", "grpc"], python)
    assert len(cases) == systems
    assert cases[0].identities[0]["system"] == "stratagem"
    for case in cases:
        assert list(case.identities[0]) == ["benchmark", "system", "workload", "lane", "workers", "ps"]


def test_rows_of_ps_under_tls_stand_beside_those_in_the_clear() -> None:
    cases = ps_cases(WORKLOADS["dense"], ["shm", "tcp"], None, tls=True)
    lanes = [case.identities[0]["lane"] for case in cases]
    assert lanes == ["shm", "shm+tls", "tcp", "tcp+tls", None]


def test_rows_of_step() -> None:
    rows = [case.identities[0] for case in step_cases(["shm", "grpc"], EMPTY, in_step=True)]
    assert [(row["system"], row["lane"], row["workers"], row["ps"]) for row in rows] == [
        ("stratagem", "shm", 1, 1),
        ("stratagem", "grpc", 1, 1),
        ("stratagem in step", "shm", 2, 1),
        ("stratagem in step", "grpc", 2, 1),
        ("bare sockets", "tcp", 1, 1),
        ("torch alone", None, 1, 0),
    ]


def test_rows_on_a_gpu_say_so_and_leave_out_who_has_none_there() -> None:
    cases = [
        *step_cases(["shm"], workload_on("empty", "cuda"), in_step=False),
        *ps_cases(workload_on("sparse", "cuda"), ["shm"], "/somewhere/python"),
        *train_cases(workload_on("dense", "cuda"), 2, ["shm"], ddp=True, tf_python="/somewhere/python"),
    ]
    assert all(case.identities[0]["device"] == "cuda" for case in cases)
    systems = [str(case.identities[0]["system"]) for case in cases]
    assert systems == [*["stratagem", "torch alone"] * 2, "stratagem", "ddp", "ddp", "torch alone"]


def test_rows_of_train() -> None:
    def systems(workload: str, tf_python: str | None) -> list[tuple[object, object, object]]:
        cases = train_cases(WORKLOADS[workload], 4, ["shm", "tcp"], ddp=True, tf_python=tf_python)
        return [tuple(case.identities[0][name] for name in ("system", "lane", "workers")) for case in cases]  # type: ignore[misc]

    ours = [("stratagem", "shm", 4), ("stratagem", "tcp", 4), ("ddp", "gloo", 4), ("ddp", "shm", 4), ("ddp", "tcp", 4)]
    assert systems("dense", "/somewhere/python") == [*ours, ("tensorflow", "grpc", 4), ("torch alone", None, 1)]
    assert systems("charlm", "/somewhere/python") == [*ours, ("torch alone", None, 1)]


def test_pairs_of_blocks_say_what_the_meter_costs_a_step() -> None:
    good = meter.PairedResult([(5_200_000, 110_000)] * 4, [(5_000_000, 100_000)] * 4, meter.WARMUP_STEPS + 21)
    sample = meter.to_sample(good, 4)
    assert (sample["step_us"], sample["meter_us"], sample["percent"], sample["meter_cpu_us"]) == (1000, 40, 4, 2)
    assert (sample["low_us"], sample["high_us"]) == (40, 40)
    with pytest.raises(meter.WrongMeterError, match="84 steps counted, got 4 and 4 blocks and 64 steps"):
        meter.to_sample(dataclasses.replace(good, num_counted=meter.WARMUP_STEPS), 4)
    with pytest.raises(meter.WrongMeterError, match="got 3 and 4 blocks"):
        meter.to_sample(dataclasses.replace(good, counted=good.counted[:3]), 4)


def test_the_interval_of_a_median_holds_it_and_narrows() -> None:
    few, many = (meter.median_between([float(each % 100) for each in range(num)]) for num in (100, 1600))
    assert few[0] == many[0] == 49.5
    assert few[1] < many[1] < 49.5 < many[2] < few[2]


def test_a_pull_that_is_wrong_is_refused() -> None:
    workload = WORKLOADS["cnn"]
    good = PullResult(0.1, 0.001, 4.2 * workload.num_parameters, 2000.0, True)
    assert pull_sample(good, workload)["times_cheaper"] == pytest.approx(100.0)
    with pytest.raises(WrongPullError, match="brought others"):
        pull_sample(dataclasses.replace(good, weights_equal=False), workload)
    with pytest.raises(WrongPullError, match="nearly none"):
        pull_sample(dataclasses.replace(good, unchanged_bytes=good.cold_bytes), workload)


def test_a_chief_is_charged_for_each_unit() -> None:
    result = chief.ChiefResult(10.0, 2000, 200, 0.5, 0.001, 0.02, is_exact=True)
    assert chief.to_sample(result) == pytest.approx(
        {
            "units_per_s": 200.0,
            "cpu_ms_per_unit": 0.25,
            "chief_cpu": 0.05,
            "calls_per_s": 20.0,
            "p50_ms": 1.0,
            "p99_ms": 20.0,
        }
    )
    with pytest.raises(chief.WrongCountError, match="exactly the units that workers trained"):
        chief.to_sample(dataclasses.replace(result, is_exact=False))
