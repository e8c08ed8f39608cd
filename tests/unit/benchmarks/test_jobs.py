"""Jobs as real processes: one that works, one that fails, and nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.pull import pull_cases
from benchmarks.training import jobs
from benchmarks.training.workloads import WORKLOADS

SMALL = dataclasses.replace(WORKLOADS["cnn"], warmup_steps=4, timed_steps=8)


def test_one_process_alone_really_trains() -> None:
    result = jobs.run_alone(SMALL)
    result.check(8)
    assert result.exposed_comm == 0.0
    assert result.cpu_s > 0


def test_a_cluster_really_trains() -> None:
    result = jobs.run_stratagem(SMALL, num_workers=2, num_ps=2)
    assert result.num_steps == 8  # of both workers; which of them made more is up to the machine
    assert result.weights_finite
    assert result.loopback_bytes >= 8 * 2 * 4 * SMALL.num_parameters  # gradients there, weights back
    assert result.exposed_comm is None or 0 < result.exposed_comm <= 1


def test_pulls_of_a_cluster_pass_their_own_checks() -> None:
    sample, versions = pull_cases(SMALL)[0].measure()
    cold_bytes, unchanged_bytes = sample["cold_bytes"], sample["unchanged_bytes"]
    assert cold_bytes is not None and unchanged_bytes is not None and unchanged_bytes < cold_bytes / 10
    assert versions["grpcio"]


def test_a_failed_job_shows_its_output() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no weights today')"]
    with pytest.raises(jobs.JobFailedError, match=r"(?s)exit code 1.*no weights today"):
        jobs._run_job([command], [{}], Path.read_text)


def test_a_job_without_a_result_failed() -> None:
    with pytest.raises(jobs.JobFailedError, match="exit code 0"):
        jobs._run_job([[sys.executable, "-c", ""]], [{}], Path.read_text)


def test_the_servers_end_with_the_first_process() -> None:
    first = "import os, pathlib; pathlib.Path(os.environ['STRATAGEM_BENCHMARK_RESULT']).write_text(os.environ['NAME'])"
    server = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    commands = [[sys.executable, "-c", first], [sys.executable, "-c", server]]
    assert jobs._run_job(commands, [{"NAME": "first"}, {}], Path.read_text) == "first"
    left = [child.cmdline() for child in psutil.Process(os.getpid()).children(recursive=True)]
    assert not [command for command in left if server in command]


def test_free_addresses_are_distinct() -> None:
    assert len(set(jobs._free_addresses(5))) == 5
