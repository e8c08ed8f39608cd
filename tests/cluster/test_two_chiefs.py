"""`stratagem run --chiefs 2`: one chief serves, one stands by; whichever is lost, the job does not notice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stratagem.errors import PeerUnavailableError
from stratagem.launch.status import fetch_status
from stratagem.rpc.status_view import StatusView
from tests.cluster.conftest import Cluster
from tests.cluster.test_exactly_once import check_counts
from tests.cluster.test_scale import start_scale

FLAGS = ["--chiefs", "2", "--max-restarts", "20"]


class Chiefs:
    """The two of a job, as its status tells of them."""

    def __init__(self, job: Cluster) -> None:
        self.job = job

    @property
    def address(self) -> str:
        """As ``--chief`` takes it; empty: none has served yet."""
        return next((f"file:{found}" for found in self.job.folder.glob("state/*/chief/chief.address")), "")

    def status(self) -> StatusView:
        try:
            return fetch_status(self.address, 10.0) if self.address else StatusView()
        except PeerUnavailableError:
            return StatusView()

    def pids(self, *gone: int) -> tuple[int, int]:
        """Of the one that serves and of the one that stands by, when both do and training goes on.

        Args:
            gone: or will be: neither is one of these.
        """
        first, last = StatusView(), StatusView()

        def goes_on() -> bool:
            nonlocal first, last
            last = self.status()
            pids = {task.pid for task in last.tasks} | {int(pid) for pid in last.standby.split()[1:2]}
            if last.chief_epoch != first.chief_epoch or not last.standby or pids.intersection(gone):
                first = last
            steps = [sum(task.step for task in status.workers) for status in (first, last)]
            return bool(last.standby) and steps[1] > steps[0]

        self.job.wait_for(goes_on, "a chief, one that stands by, and steps")
        return next(task.pid for task in last.tasks if task.task == "chief:0"), int(last.standby.split()[1])


@pytest.mark.thorough
def test_chiefs_come_and_go(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    out, stop = tmp_path / "out.pt", tmp_path / "stop"
    arguments = ["--examples", 200, "--pause-s", 0.02, "--until", stop, "--out", out]
    job = cluster(2, 2, "count_examples.py", *arguments, flags=FLAGS)
    chiefs = Chiefs(job)
    serving, standby = chiefs.pids()
    for signum in (signal.SIGKILL, signal.SIGTERM):
        os.kill(serving, signum)
        before, (serving, standby) = standby, chiefs.pids(serving)
        assert serving == before, "the one that stood by serves"
        os.kill(standby, signum)
        before, (serving, standby) = serving, chiefs.pids(standby)
        assert serving == before, "nobody else does"

    os.kill(serving, signal.SIGSTOP)  # it keeps the lock: who stands still may come back
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        assert chiefs.status().chief_epoch in (0, 3), "nobody takes over"
    os.kill(serving, signal.SIGCONT)
    assert chiefs.pids() == (serving, standby)

    for pid in (standby, serving):
        os.kill(pid, signal.SIGKILL)
    chiefs.pids(serving, standby)
    stop.touch()
    done = job.succeed()
    others = {task: told["exit_codes"] for task, told in done.summary["tasks"].items() if "chief" not in task}
    assert others == {"ps:0": [0], "ps:1": [0], "worker:0": [0], "worker:1": [0]}, done.stderr
    serves, stands_by, takeovers = done.summary["chief"].values()
    assert {serves, stands_by} == {"chief:0", "chief:1"} and takeovers >= 2, done.summary["chief"]
    assert done.summary["restarts"] == 6 and done.summary["updates_lost"] == 0, done.summary
    check_counts(out, -int(next(iter(torch.load(out).values())).flatten()[0]))


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_other_chief_goes_on_with_a_scale(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    out, stop = tmp_path / "out.pt", tmp_path / "stop"
    arguments = ["--examples", 200, "--pause-s", 0.02, "--until", stop, "--out", out]
    job = cluster(2, 1, "count_examples.py", *arguments, flags=FLAGS)
    chiefs, killed = Chiefs(job), 0
    for numbers, moment in (
        (("--ps", 3), "Checkpoint of step"),
        (("--ps", 1), "Begins from"),
        (("--workers", 4), "The target is"),
        (("--workers", 1, "--ps", 2), "The target is"),
    ):
        serving, _ = chiefs.pids(killed)
        said_before = (moment, job.stderr.count(moment))
        asked = start_scale(chiefs.address, *numbers)
        job.wait_for(lambda said=said_before: job.stderr.count(said[0]) > said[1], moment)  # type: ignore[misc]
        os.kill(serving, signal.SIGKILL)
        killed = serving
        said, error = asked.communicate(timeout=120)
        assert asked.returncode == 0, error + job.stderr
        wanted = dict(zip(numbers[::2], numbers[1::2], strict=True))
        assert said.endswith(f"{wanted.get('--ps', 1)} ps\n"), said
    chiefs.pids(killed)
    stop.touch()
    done = job.succeed()
    others = [told["exit_codes"] for task, told in done.summary["tasks"].items() if "chief" not in task]
    assert {code for codes in others for code in codes} == {0} and done.summary["updates_lost"] == 0, done.stderr
    assert done.summary["chief"]["takeovers"] == 4, done.summary["chief"]
    check_counts(out, -int(next(iter(torch.load(out).values())).flatten()[0]))


@pytest.mark.thorough
@pytest.mark.parametrize("num_ps", [1, 0], ids=["ps", "ring"])
def test_chaos_reaches_the_chief_that_serves(cluster: Callable[..., Cluster], tmp_path: Path, num_ps: int) -> None:
    out, faults = tmp_path / "out.pt", "kill chief@step=20; kill standby@step=200; kill chief@step=400"
    arguments = ["--examples", 200, "--pause-s", 0.02, "--epochs", 14, "--out", out]
    done = cluster(2, num_ps, "count_examples.py", *arguments, flags=[*FLAGS, "--chaos", faults]).succeed()
    assert [fault.get("updates_lost") for fault in done.summary["chaos"]] == [0, 0, 0], done.stderr
    assert done.summary["chief"]["takeovers"] == 2, done.stderr
    check_counts(out, 14)
