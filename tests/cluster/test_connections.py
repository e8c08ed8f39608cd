"""Connections that break, or go silent, between processes that live: nobody restarts, no update is lost."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.relay import Relay, relay
from tests.cluster.test_by_chief import SCRIPTS, Start, line_with, start
from tests.cluster.test_exactly_once import check_counts

__all__ = ["start"]


class Job:
    """Two workers and two ps that count examples; all reach the chief through a relay, and ps:1 too is behind one."""

    def __init__(self, start: Start, chief: subprocess.Popen[str], relays: list[Relay], folder: Path, **args: object):
        self.chief, (self.to_chief, self.to_ps), self.out = chief, relays, folder / "out.pt"
        common = ("--chief", self.to_chief.address, "--peer-timeout-s", 60)
        ps_port = self.to_ps._target[1]
        places = {0: (), 1: ("--bind", f"127.0.0.1:{ps_port}", "--advertise", self.to_ps.address)}
        self.tasks = [
            start("ps", "--task", f"ps:{index}", *common, *places[index], "--checkpoint-dir", folder / "checkpoints")
            for index in range(2)
        ]
        arguments = [part for name, value in args.items() for part in (f"--{name.replace('_', '-')}", value)]
        script = (SCRIPTS / "count_examples.py", "--out", self.out, *arguments)
        flags = ("--transport", "grpc", "--staleness", "inf")
        self.tasks += [start("worker", "--task", f"worker:{index}", *common, *flags, *script) for index in range(2)]
        self.logs = ["" for _ in self.tasks]
        self._readers = [
            threading.Thread(target=self._read, args=(number,), daemon=True) for number in range(len(self.tasks))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, number: int) -> None:
        stderr = self.tasks[number].stderr
        assert stderr is not None
        for line in stderr:
            self.logs[number] += line

    def finish(self) -> str:
        """The log of the chief; every process has ended well."""
        _, log = self.chief.communicate(timeout=100)
        assert [task.wait(20) for task in self.tasks] == [0, 0, 0, 0], "\n".join([log, *self.logs])
        assert self.chief.returncode == 0, log
        return log


def until_training(chief: subprocess.Popen[str]) -> None:
    line_with(chief, "Checkpoint of step 0")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@pytest.fixture
def relays(start: Start, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[Relay]]]:
    """A chief of two workers and two ps, its relay, and one for a ps that will come."""
    flags = ("--num-workers", 2, "--num-ps", 2, "--checkpoint-dir", tmp_path / "checkpoints")
    chief = start("chief", *flags, "--state-dir", tmp_path / "state")
    address = line_with(chief, "listening on").split()[-1]
    with relay(address) as to_chief, relay(f"127.0.0.1:{free_port()}") as to_ps:
        yield chief, [to_chief, to_ps]


@pytest.mark.parametrize("num_resets", [3, pytest.param(20, marks=pytest.mark.thorough)])
def test_connections_to_the_chief_that_are_reset_for_a_second_cost_nothing(
    start: Start, relays: tuple[subprocess.Popen[str], list[Relay]], tmp_path: Path, num_resets: int
) -> None:
    job = Job(start, *relays, tmp_path, examples=1000, epochs=1 + num_resets // 3, pause_s=0.05)
    until_training(job.chief)
    chance = random.Random(num_resets)
    num_before = 0
    for _ in range(num_resets):
        job.to_chief.reset(1.0)
        deadline = time.monotonic() + 3.0 + 2.0 * chance.random()  # two in a row would be one that lasts longer
        while time.monotonic() < deadline:
            assert job.chief.poll() is None, "the job is too short for this test"
            time.sleep(0.02)
        assert job.to_chief.num_reset > num_before
        num_before = job.to_chief.num_reset
    log = job.finish()
    assert "is lost" not in log.partition("The job ends")[0], log
    check_counts(job.out, 1 + num_resets // 3)


def test_a_ps_that_is_cut_off_for_eight_seconds_loses_nothing(
    start: Start, relays: tuple[subprocess.Popen[str], list[Relay]], tmp_path: Path
) -> None:
    job = Job(start, *relays, tmp_path, examples=1000, epochs=1, pause_s=0.02)
    until_training(job.chief)
    job.to_ps.silence(8.0)
    log = job.finish()
    assert "is lost" not in log.partition("The job ends")[0], log
    check_counts(job.out, 1)


def test_a_chief_that_is_told_to_leave_comes_back_to_the_same_tasks(
    start: Start, relays: tuple[subprocess.Popen[str], list[Relay]], tmp_path: Path
) -> None:
    job = Job(start, *relays, tmp_path, examples=1000, epochs=1, pause_s=0.02)
    until_training(job.chief)
    job.chief.send_signal(signal.SIGTERM)
    _, log = job.chief.communicate(timeout=60)
    assert job.chief.returncode == 143 and "the job goes on with the chief that is started in its place" in log
    host, port = job.to_chief._target
    flags = ("--num-workers", 2, "--num-ps", 2, "--checkpoint-dir", tmp_path / "checkpoints")
    job.chief = start("chief", "--bind", f"{host}:{port}", *flags, "--state-dir", tmp_path / "state")
    log = job.finish()
    assert log.count(" resumed at ") >= 4 and "is lost" not in log.partition("The job ends")[0], log
    check_counts(job.out, 1)
