"""Jobs as real processes: one that works, one that fails, and nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import jobs
from benchmarks.jobs import JobFailedError, Task, run_job
from benchmarks.meter import meter_cases
from benchmarks.pull import pull_cases
from benchmarks.signals import EXIT_CODE, exit_on_sigterm
from benchmarks.training.jobs import run_alone, run_ddp, run_ps, run_ring
from benchmarks.training.workloads import WORKLOADS

SMALL = dataclasses.replace(WORKLOADS["cnn"], warmup_steps=16, timed_steps=8)
SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def python(code: str, **environment: str) -> Task:
    return Task([sys.executable, "-c", code], environment)


def still_running(code: str) -> list[list[str]]:
    commands = [child.cmdline() for child in psutil.Process(os.getpid()).children(recursive=True)]
    return [command for command in commands if code in command]


@pytest.mark.usefixtures("forked")
def test_one_process_alone_really_trains() -> None:
    result = run_alone(SMALL)
    result.check(8)
    assert result.exposed_comm == 0.0
    assert result.cpu_s > 0


@pytest.mark.thorough
@pytest.mark.usefixtures("forked")
def test_parameter_servers_really_train() -> None:
    result = run_ps(SMALL, num_workers=2, num_ps=2, lane="grpc")
    assert result.num_steps == 8  # of both workers; which of them made more is up to the machine
    assert result.weights_finite
    # Gradients there and weights back; the other worker may have made steps before the lead reads the counters.
    assert result.loopback_bytes > 8 * 4 * SMALL.num_parameters
    assert result.exposed_comm is None or 0 < result.exposed_comm <= 1


@pytest.mark.usefixtures("forked")
@pytest.mark.thorough
def test_a_ring_really_trains() -> None:
    result = run_ring(SMALL, num_workers=2, lane="tcp")
    result.check(8)
    assert result.loopback_bytes >= 8 * 4 * SMALL.num_parameters
    assert result.exposed_comm is not None and 0 < result.exposed_comm <= 1


@pytest.mark.thorough
@pytest.mark.parametrize("lane", ["gloo", "tcp"])
def test_ddp_really_trains(lane: str) -> None:
    result = run_ddp(SMALL, num_workers=2, lane=lane)
    result.check(8)
    assert result.loopback_bytes >= 8 * 4 * SMALL.num_parameters


@pytest.mark.thorough
@pytest.mark.usefixtures("own_loopback")
def test_pulls_of_a_cluster_pass_their_own_checks() -> None:
    (sample,), versions = pull_cases(SMALL)[0].measure()
    cold_bytes, unchanged_bytes = sample["cold_bytes"], sample["unchanged_bytes"]
    assert cold_bytes is not None and unchanged_bytes is not None and unchanged_bytes < cold_bytes / 10
    assert versions["grpcio"]


@pytest.mark.thorough
@pytest.mark.usefixtures("forked")
def test_blocks_of_steps_with_and_without_the_meter_pass_their_own_checks() -> None:
    for case in meter_cases(2):
        (sample,), _ = case.measure()
        low_us, meter_us, high_us = sample["low_us"], sample["meter_us"], sample["high_us"]
        assert low_us is not None and meter_us is not None and high_us is not None
        assert low_us <= meter_us <= high_us


def test_a_failed_job_shows_its_output() -> None:
    with pytest.raises(JobFailedError, match=r"(?s)exit code 1.*no weights today"):
        run_job([python("raise SystemExit('no weights today')")], Path.read_text)


def test_a_job_without_a_result_failed() -> None:
    with pytest.raises(JobFailedError, match=r"it left no result\.json"):
        run_job([python("")], Path.read_text)


def test_the_servers_end_with_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "END_TIMEOUT_S", 0.1)
    write = "import os, pathlib; pathlib.Path(os.environ['STRATAGEM_BENCHMARK_RESULT']).write_text(os.environ['NAME'])"
    tasks = [python(write, NAME="member"), python(SLEEPER)]
    assert run_job(tasks, Path.read_text) == "member"
    assert not still_running(SLEEPER)


def test_one_member_that_fails_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "END_TIMEOUT_S", 0.1)
    tasks = [python(SLEEPER), python("raise SystemExit(3)")]
    with pytest.raises(JobFailedError, match=r"exit code 3 \(process 1 of the job\)"):
        run_job(tasks, Path.read_text, num_members=2)
    assert not still_running(SLEEPER)


def test_a_job_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "JOB_TIMEOUT_S", 0.2)
    monkeypatch.setattr(jobs, "END_TIMEOUT_S", 0.1)
    with pytest.raises(JobFailedError, match=r"did not end in time \(1 of 1 processes still ran\)"):
        run_job([python(SLEEPER)], Path.read_text)
    assert not still_running(SLEEPER)


def test_free_addresses_are_distinct() -> None:
    assert len(set(jobs.free_addresses(5))) == 5


def test_sigterm_is_an_exception_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, exit_on_sigterm():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # does not interrupt the cleaning up
    assert ended.value.code == EXIT_CODE == 143
    assert signal.getsignal(signal.SIGTERM) is before
