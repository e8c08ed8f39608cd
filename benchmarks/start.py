"""The ``start`` benchmark: what a small job costs from the command to its end, nearly all of it starting processes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.jobs import JOB_TIMEOUT_S, ROOT, THREADS, JobFailedError
from benchmarks.runner import Case, Sample, Value
from stratagem.rpc import heap

NUM_STEPS = 20
"""Of torchrun's job, on each of two processes."""


def start_cases() -> list[Case]:
    """The demo on 2 workers and 2 ps, which must reach its accuracy, and a few steps of a tiny model by torchrun."""
    digits = [str(ROOT / "examples/digits.py"), "--batch-size", "64", "--lr", "4e-3", "--min-accuracy", "0.97"]
    demo = ["--workers", "2", "--ps", "2", *digits]
    ddp = ["--standalone", "--nproc-per-node", "2", str(ROOT / "benchmarks/start_job.py"), str(NUM_STEPS)]
    return [
        _case("stratagem", "make demo", [sys.executable, "-m", "stratagem.cli", "run", *demo]),
        _case("torchrun", f"{NUM_STEPS} steps of DDP", [sys.executable, "-m", "torch.distributed.run", *ddp]),
    ]


def _case(system: str, job: str, command: Sequence[str]) -> Case:
    identity: dict[str, Value] = {"benchmark": "start", "system": system, "job": job}
    return Case.of_ours(identity, functools.partial(run_to_end, command))


def run_to_end(command: Sequence[str]) -> Sample:
    """Seconds of one job: of the clock, and of the CPU in all its processes.

    Raises:
        JobFailedError: it ended with another code than 0; with the end of its output.
    """
    environment = {**os.environ, **THREADS, **heap.ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(prefix="stratagem-benchmark-") as folder:
        begin, before = time.perf_counter(), os.times()
        ended = subprocess.run(
            command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=JOB_TIMEOUT_S, check=False,
        )  # fmt: skip
        wall_s, after = time.perf_counter() - begin, os.times()
    if ended.returncode:
        raise JobFailedError(f"{' '.join(command)} ended with exit code {ended.returncode}:\n{ended.stdout[-4000:]}")
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall_s": wall_s, "cpu_s": cpu_s}
