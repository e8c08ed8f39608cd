"""Where the results of scenarios come from: this process, threads on the stand-in for torch_xla, or real processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import stratagem as sg
from tests.cluster.conftest import Cluster
from tests.conformance.law import Scenario
from tests.conformance.run_scenarios import outcome
from tests.conformance.strategies import Column
from tests.unit.strategy.fake_torch_xla import FakeXla

Outcome = dict[str, Any]


def in_this_process(column: Column, scenario: Scenario) -> list[Outcome]:
    """Runs a scenario on a fresh strategy."""
    assert column.build is not None
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as monkeypatch:
        if column.on_stand_in:
            xla = FakeXla(monkeypatch, column.num_workers)
            build: Callable[[], sg.Strategy] = column.build
            return xla.launch(lambda _: outcome(scenario, build()))
        with contextlib.closing(column.build()) as strategy:
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
        return [json.loads(path.read_text())[name_of(scenario)] for path in paths]

    def log(self, column: Column, task: str) -> str:
        """What a task such as "worker-0" wrote, once the processes of a column have run."""
        return (self._folder / column.name / "logs" / f"{task}.log").read_text()


def _in_order(scenarios: Sequence[Scenario]) -> list[Scenario]:
    together = [scenario for scenario in scenarios if not hasattr(scenario, "runs_alone")]
    return sorted(together, key=lambda scenario: getattr(scenario, "turn", 0))


def name_of(scenario: Scenario) -> str:
    """``module:function``."""
    return f"{scenario.__module__}:{scenario.__name__}"


def _launch(column: Column, folder: Path, names: Sequence[str]) -> None:
    job = Cluster(
        folder,
        column.num_workers,
        column.num_ps,
        Path(__file__).parent / "run_scenarios.py",
        ["--out", str(folder), *names],
        [*column.flags, "--threads", "1", "--max-restarts", "0"],
    )
    try:
        job.finish()
    finally:
        job.close()
