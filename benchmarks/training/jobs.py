"""Starts one training job as real processes, waits for its result, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.training.result import RESULT_VARIABLE, ROOT_VARIABLE, JobResult, read_result
from benchmarks.training.workloads import Workload
from stratagem.rpc import heap

ROOT = Path(__file__).resolve().parents[2]
Result = TypeVar("Result")
JOB_TIMEOUT_S = 300.0
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


class JobFailedError(Exception):
    """A job ended with an error or wrote no result; the message holds the end of its output."""


def run_alone(workload: Workload) -> JobResult:
    """One process, plain PyTorch, no communication: the compute floor."""
    return _run_job([_script("alone_job", workload, sys.executable)], [{}], read_result)


def run_stratagem(workload: Workload, num_workers: int, num_ps: int) -> JobResult:
    """A chief, ``num_ps`` parameter servers and ``num_workers`` workers through ``stratagem run``."""
    arguments = [workload.name, str(workload.warmup_steps), str(workload.timed_steps)]
    command = _stratagem_run("training/stratagem_job.py", arguments, num_workers, num_ps)
    return _run_job([command], [{}], read_result)


def run_script(script: str, arguments: Sequence[str], *, num_workers: int, num_ps: int) -> str:
    """Runs a script of this folder through ``stratagem run``; returns the text that it left as its result."""
    return _run_job([_stratagem_run(script, arguments, num_workers, num_ps)], [{}], Path.read_text)


def _stratagem_run(script: str, arguments: Sequence[str], num_workers: int, num_ps: int) -> list[str]:
    options = ["--workers", str(num_workers), "--ps", str(num_ps), "--strategy", "ps", "--max-restarts", "0"]
    return [sys.executable, "-m", "stratagem.cli", "run", *options, str(ROOT / "benchmarks" / script), *arguments]


def run_tensorflow(workload: Workload, num_workers: int, num_ps: int, python: str) -> JobResult:
    """A coordinator, ``num_ps`` parameter servers and ``num_workers`` workers of TensorFlow over gRPC."""
    addresses = iter(_free_addresses(num_workers + num_ps + 1))
    cluster = {
        "chief": [next(addresses)],
        "worker": [next(addresses) for _ in range(num_workers)],
        "ps": [next(addresses) for _ in range(num_ps)],
    }
    tasks = [(role, index) for role, members in cluster.items() for index in range(len(members))]
    environments = [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})} for role, index in tasks
    ]
    return _run_job([_script("tensorflow_job", workload, python)] * len(tasks), environments, read_result)


def _script(module: str, workload: Workload, python: str) -> list[str]:
    steps = [str(workload.warmup_steps), str(workload.timed_steps)]
    return [python, "-m", f"benchmarks.training.{module}", workload.name, *steps]


def _free_addresses(count: int) -> list[str]:
    """Loopback addresses that were free a moment ago; TensorFlow has no way to report a port that it chose."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


def _run_job(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], read: Callable[[Path], Result]
) -> Result:
    """Runs the processes until the first one ends, ends the others, and reads the result file."""
    with tempfile.TemporaryDirectory(prefix="stratagem-benchmark-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        common = {RESULT_VARIABLE: str(result), ROOT_VARIABLE: str(os.getpid()), "PYTHONPATH": str(ROOT), **THREADS}
        common |= heap.ENVIRONMENT  # every system gets what `stratagem run` gives ours; torch alone gains most
        with log.open("wb") as output:
            processes = [
                subprocess.Popen(
                    command,
                    env={**os.environ, **common, **own},
                    cwd=folder,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                for command, own in zip(commands, environments, strict=True)
            ]
            try:
                exit_code = processes[0].wait(JOB_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                exit_code = None
            finally:
                for process in processes:
                    _end(process)
        if exit_code != 0 or not result.exists():
            tail = log.read_text(errors="replace")[-4000:]
            state = "did not end in time" if exit_code is None else f"ended with exit code {exit_code}"
            raise JobFailedError(f"expected a result from {' '.join(commands[0])}; it {state}. Its output:\n{tail}")
        return read(result)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all it started: politely first, so that a launcher can end its own children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
