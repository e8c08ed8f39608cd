"""Where the results of scenarios come from: this process, or real ones."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.conftest import Cluster
from tests.conformance.law import Scenario
from tests.conformance.run_scenarios import outcome
from tests.conformance.strategies import Column

Outcome = dict[str, Any]
XLA_S = 3600.0
"""Seconds for all scenarios of a column on torch_xla, which compiles each step of each."""


def in_this_process(column: Column, scenario: Scenario) -> list[Outcome]:
    """Runs a scenario on a fresh strategy."""
    assert column.build is not None
    with torch.random.fork_rng(devices=[]), contextlib.closing(column.build()) as strategy:
        return [outcome(scenario, strategy)]


class Launches:
    """Real processes, started once a session for all scenarios of a column, even when several pytest processes share
    the session.

    Args:
        folder: of the session, shared.
        wanted: by column: the scenarios that selected tests need.
    """

    def __init__(self, folder: Path, wanted: Mapping[Column, Sequence[Scenario]]) -> None:
        self._folder = folder
        self._wanted = wanted

    def outcomes(self, column: Column, scenario: Scenario) -> list[Outcome]:
        """Of each worker, in worker order."""
        alone = hasattr(scenario, "runs_alone")
        folder = self._folder / (f"{column.name}-{scenario.__name__}" if alone else column.name)
        wanted = [scenario] if alone else _in_order(self._wanted[column])
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "started").exists():
                (folder / "started").touch()
                _launch(column, folder, [name_of(one) for one in wanted])
        paths = [folder / f"{worker}.json" for worker in range(column.num_workers)]
        if not all(path.exists() for path in paths):
            pytest.fail(f"the processes of {column.name} left no results:\n{(folder / 'stderr').read_text()}")
        return [_read(path)[name_of(scenario)] for path in paths]

    def log(self, column: Column, task: str) -> str:
        """What a task such as "worker-0" wrote, once the processes of a column have run."""
        return (self._folder / column.name / "logs" / f"{task}.log").read_text()


@functools.cache
def _read(path: Path) -> dict[str, Outcome]:
    """What one worker wrote at its end, of each scenario; tests leave it as it is."""
    found: dict[str, Outcome] = json.loads(path.read_text())
    return found


def _in_order(scenarios: Sequence[Scenario]) -> list[Scenario]:
    together = [scenario for scenario in scenarios if not hasattr(scenario, "runs_alone")]
    return sorted(together, key=lambda scenario: getattr(scenario, "turn", 0))


def name_of(scenario: Scenario) -> str:
    """``module:function``."""
    return f"{scenario.__module__}:{scenario.__name__}"


def _launch(column: Column, folder: Path, names: Sequence[str]) -> None:
    script, arguments = Path(__file__).parent / "run_scenarios.py", ["--out", str(folder), *names]
    if column.num_xla_devices:
        _launch_on_xla(column.num_xla_devices, folder, [str(script), *arguments])
        return
    job = Cluster(
        folder,
        column.num_workers,
        column.num_ps,
        script,
        arguments,
        [*column.flags, "--threads", "1", "--max-restarts", "0"],
    )
    try:
        job.finish()
    finally:
        job.close()


def _launch_on_xla(num_devices: int, folder: Path, script: Sequence[str]) -> None:
    settings = {"PJRT_DEVICE": "CPU", "PYTHONPATH": str(Path(__file__).parents[2])}
    if num_devices > 1:
        settings["CPU_NUM_DEVICES"] = str(num_devices)
    command = [sys.executable, *script, f"--xla-devices={num_devices}"]
    with (folder / "stderr").open("w") as stderr:
        subprocess.run(command, env=os.environ | settings, stdout=stderr, stderr=stderr, timeout=XLA_S)
