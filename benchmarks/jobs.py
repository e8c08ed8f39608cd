"""Starts one job as real processes, waits for its result, and leaves no process behind."""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.job_files import RESULT_VARIABLE, ROOT_VARIABLE
from benchmarks.signals import exit_on_sigterm
from stratagem.rpc import heap
from stratagem.rpc.binding import free_port

ROOT = Path(__file__).resolve().parents[1]
Result = TypeVar("Result")
JOB_TIMEOUT_S = 300.0
END_TIMEOUT_S = 2.0
"""For a process to end on SIGTERM, before it is killed."""
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


class JobFailedError(Exception):
    """A job ended with an error or wrote no result; the message holds the end of its output."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One process of a job."""

    command: Sequence[str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What it gets beside what all processes of all jobs get."""


def gpus(device: str) -> dict[str, str]:
    """The environment of a task that computes on ``device``: "cuda" shows it the GPUs, which no other task sees."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(torch.cuda.device_count())))} if device == "cuda" else {}


def python_module(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command that runs a module of this folder, for example "training.alone_job"."""
    return [python, "-m", f"benchmarks.{module}", *arguments]


def stratagem_run(script: str, arguments: Sequence[str], *options: str) -> list[str]:
    """The command that runs a script of this folder on a cluster of its own: a chief, workers, ps."""
    command = [sys.executable, "-m", "stratagem.cli", "run", "--max-restarts", "0", "--threads", "1", *options]
    return [*command, str(ROOT / "benchmarks" / script), *arguments]


def free_addresses(count: int) -> list[str]:
    """Loopback addresses, for systems that cannot report a port that they chose."""
    return [f"127.0.0.1:{free_port()}" for _ in range(count)]


def run_job(tasks: Sequence[Task], read: Callable[[Path], Result], num_members: int = 1) -> Result:
    """Runs the processes of a job, and reads its result.

    Args:
        tasks: the members first, then servers, which run until they are ended.
        read: reads what the job left at the path that :data:`RESULT_VARIABLE` named.
        num_members: how many tasks end by themselves; the job is over when they have, or when one of them failed.

    Raises:
        JobFailedError: a member failed, did not end in time, or nothing was written.
    """
    with exit_on_sigterm(), tempfile.TemporaryDirectory(prefix="stratagem-benchmark-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        common = {RESULT_VARIABLE: str(result), ROOT_VARIABLE: str(os.getpid()), "PYTHONPATH": str(ROOT), **THREADS}
        common |= heap.ENVIRONMENT  # every system gets what `stratagem run` gives ours; torch alone gains most
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with log.open("wb") as output:
                for task in tasks:
                    environment = {**os.environ, **common, **task.environment}
                    processes.append(_start(task.command, environment, folder, output.fileno()))
            state = _wait(processes[:num_members])
        finally:
            _end(processes)
        try:
            if state is None:
                return read(result)
        except FileNotFoundError as error:
            state = f"left no {Path(error.filename).name}"
        tail = log.read_text(errors="replace")[-4000:]
        raise JobFailedError(f"expected a result from {' '.join(tasks[0].command)}; it {state}. Its output:\n{tail}")


def _start(command: Sequence[str], environment: Mapping[str, str], folder: str, output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=environment, cwd=folder, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def _wait(members: Sequence[subprocess.Popen[bytes]]) -> str | None:
    """Waits until all members have ended well (None), or one did not (how)."""
    deadline = time.monotonic() + JOB_TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        for member in members:
            selector.register(os.pidfd_open(member.pid), selectors.EVENT_READ, member)
        try:
            while running := selector.get_map():
                ended = selector.select(max(0.0, deadline - time.monotonic()))
                if not ended:
                    return f"did not end in time ({len(running)} of {len(members)} processes still ran)"
                for key, _ in ended:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    if exit_code := key.data.wait():
                        return f"ended with exit code {exit_code} (process {members.index(key.data)} of the job)"
            return None
        finally:
            for key in list(selector.get_map().values()):
                os.close(key.fd)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends processes with all they started: politely first, so that a launcher can end its own children."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + END_TIMEOUT_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
