"""Jobs as real processes: one that works, one that fails, and nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.training import jobs
from benchmarks.training.workloads import WORKLOADS

SMALL = dataclasses.replace(WORKLOADS["cnn"], warmup_steps=4, timed_steps=8)


def test_one_process_alone_really_trains() -> None:
    result = jobs.run_alone(SMALL)
    result.check(8)
    assert result.exposed_comm == 0.0
    assert result.cpu_s > 0


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
