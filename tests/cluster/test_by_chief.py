"""Workers that know their chief and nothing else, one of them beyond those that the chief waits for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from stratagem.chief.journal.lock import NAME as LOCK
from stratagem.launch.status import fetch_status
from tests import forks
from tests.cluster.test_by_hand import free_addresses
from tests.cluster.test_exactly_once import check_counts
from tests.polling import until

SCRIPTS = Path(__file__).parent / "scripts"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ``stratagem ROLE …``; the processes end with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parents[2]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "stratagem.cli", *map(str, arguments)]
        started.append(forks.Popen(command, env=environment, stderr=subprocess.PIPE))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


class Logs:
    """Reads what processes log, for as long as they do."""

    def __init__(self, *processes: subprocess.Popen[str]) -> None:
        self._processes = processes
        self.texts = [""] * len(processes)
        self._threads = [threading.Thread(target=self._read, args=(index,)) for index in range(len(processes))]
        for thread in self._threads:
            thread.start()

    def _read(self, index: int) -> None:
        self.texts[index] = self._processes[index].communicate()[1]

    def finish(self) -> list[int | None]:
        """The exit codes of all."""
        for thread in self._threads:
            thread.join(100)
        return [process.returncode for process in self._processes]

    def __repr__(self) -> str:
        return "\n".join(self.texts)


def line_with(process: subprocess.Popen[str], words: str) -> str:
    """The next line of the log with these words; the test's own time limit is the deadline."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if words in line:
            return line
    pytest.fail(f"{words!r} did not come:\n{''.join(seen)}")


def test_a_worker_learns_the_cluster_from_its_chief(start: Start, tmp_path: Path) -> None:
    chief = start("chief", "--num-workers", 1, "--max-workers", 2, "--num-ps", 1)
    address = line_with(chief, "listening on").split()[-1]
    ps = start("ps", "--task", "ps:0", "--chief", address)
    script = (SCRIPTS / "count_examples.py", "--out", tmp_path / "out.pt")
    second = start("worker", "--task", "worker:1", "--chief", address, *script)
    line_with(chief, "worker:1 (incarnation")  # before the other: it must have a part in the work
    first = start("worker", "--task", "worker:0", "--chief", address, *script)
    logs = Logs(chief, ps, first, second)
    assert logs.finish() == [0, 0, 0, 0], logs
    check_counts(tmp_path / "out.pt", 2)


def test_a_worker_beyond_the_greatest_number_is_refused(start: Start) -> None:
    chief = start("chief", "--num-workers", 1, "--max-workers", 2, "--num-ps", 1)
    address = line_with(chief, "listening on").split()[-1]
    third = start("worker", "--task", "worker:2", "--chief", address, SCRIPTS / "count_examples.py")
    _, errors = third.communicate(timeout=240)
    assert third.returncode == 2
    assert "'worker:2' is not a task of this cluster" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("begins", "code"),
    [
        ("", 42),
        ("weight.sum().backward(); optimizer.step()", 1),
        ("from stratagem.errors import PeerUnavailableError as away; raise away('gone')", 1),
    ],
)
def test_under_a_supervisor_a_script_that_fails_before_the_first_step_is_not_to_be_tried_again(
    start: Start, tmp_path: Path, begins: str, code: int
) -> None:
    script = tmp_path / "train.py"
    first = "import torch\nweight = torch.nn.Parameter(torch.ones(2))\noptimizer = torch.optim.SGD([weight], 0.1)\n"
    script.write_text(f"{first}{begins}\nundefined()\n")
    chief = start("chief", "--num-workers", 1)
    address = line_with(chief, "listening on").split()[-1]
    worker = start("worker", "--task", "worker:0", "--chief", address, "--run-id", "uid", script)
    logs = Logs(worker)
    assert logs.finish() == [code], logs
    words = "PeerUnavailableError: gone" if "away" in begins else "NameError: name 'undefined' is not defined"
    assert f"worker:0: {words}" in logs.texts[0]
    assert ("the job has made no step yet" in logs.texts[0]) == (code == 42)
    if code == 42:
        logs = Logs(chief)
        assert logs.finish() == [42] and "worker:0 failed, and a restart would not help: NameError" in logs.texts[0]
    logs = Logs(start("worker", "--run-id", "uid", script))  # the script as the only process of a job
    assert logs.finish() == [code], logs


@pytest.mark.parametrize("in_file", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_chief_that_stands_by_takes_over(start: Start, tmp_path: Path, in_file: bool) -> None:
    first_address, second_address = free_addresses(2)
    state = ("--state-dir", tmp_path, "--num-workers", 2, "--num-ps", 1)
    chief = start("chief", *state, "--bind", first_address)
    line_with(chief, "listening on")
    standby = start("chief", *state, "--bind", second_address, "--standby")
    assert f"Standing by: the chief is process {chief.pid} on" in line_with(standby, "Standing by")
    where = f"file:{tmp_path}/chief.address" if in_file else f"{first_address},{second_address}"
    ps = start("ps", "--task", "ps:0", "--chief", where)
    script = (SCRIPTS / "count_examples.py", "--out", tmp_path / "out.pt", "--epochs", 3, "--pause-s", 0.05)
    workers = [start("worker", "--task", f"worker:{i}", "--chief", where, *script) for i in (0, 1)]
    until(lambda: max(task.step for task in fetch_status(where, 60.0).tasks) >= 5, deadline_s=100.0)
    chief.kill()
    logs = Logs(standby, ps, *workers)
    assert logs.finish() == [0, 0, 0, 0], logs
    assert "continues from the journal" in logs.texts[0], logs
    check_counts(tmp_path / "out.pt", 3)


@pytest.mark.thorough
def test_a_chief_that_stands_by_ends_with_the_job(start: Start, tmp_path: Path) -> None:
    (address,) = free_addresses(1)
    state = ("--state-dir", tmp_path, "--num-workers", 1, "--num-ps", 1)
    chief = start("chief", *state, "--bind", address)
    line_with(chief, "listening on")
    standby = start("chief", *state, "--standby")
    line_with(standby, "Standing by")
    second = start("chief", *state)
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 2 and "start it with --standby" in errors and "Traceback" not in errors, errors
    ps = start("ps", "--task", "ps:0", "--chief", address)
    worker = start("worker", "--task", "worker:0", "--chief", address, SCRIPTS / "count_examples.py")
    logs = Logs(chief, standby, ps, worker)
    assert logs.finish() == [0, 0, 0, 0], logs
    assert "is over, with exit code 0" in logs.texts[1], logs


@pytest.mark.thorough
def test_a_chief_that_lost_its_lock_acknowledges_nothing(start: Start, tmp_path: Path) -> None:
    state = ("--state-dir", tmp_path, "--num-workers", 1, "--num-ps", 1)
    chief = start("chief", *state)
    line_with(chief, "listening on")
    where = f"file:{tmp_path}/chief.address"
    ps = start("ps", "--task", "ps:0", "--chief", where)
    out, stop = tmp_path / "out.pt", tmp_path / "stop"
    script = (SCRIPTS / "count_examples.py", "--out", out, "--until", stop, "--pause-s", 0.05)
    worker = start("worker", "--task", "worker:0", "--chief", where, *script)
    line_with(chief, "Cluster is ready")
    (tmp_path / LOCK).unlink()  # by somebody who thought it was in the way
    second = start("chief", *state)
    line_with(second, "continues from the journal")
    stop.touch()
    logs = Logs(chief, second, ps, worker)
    assert logs.finish() == [143, 0, 0, 0], logs
    assert "was written by another chief" in logs.texts[0], logs
    check_counts(out, -int(next(iter(torch.load(out).values())).flatten()[0]))


@pytest.mark.thorough
def test_ps_come_and_go_by_themselves(start: Start, tmp_path: Path) -> None:
    out, stop, saved = tmp_path / "out.pt", tmp_path / "stop", ("--checkpoint-dir", tmp_path / "checkpoints")
    numbers = ("--num-workers", 2, "--num-ps", 1, "--max-ps", 3)
    chief = start("chief", *numbers, *saved, "--state-dir", tmp_path / "state")
    address = line_with(chief, "listening on").split()[-1]

    def start_ps(index: int) -> subprocess.Popen[str]:
        return start("ps", "--task", f"ps:{index}", "--chief", address, *saved)

    script = (SCRIPTS / "count_examples.py", "--examples", 200, "--pause-s", 0.02, "--until", stop, "--out", out)
    workers = [start("worker", "--task", f"worker:{i}", "--chief", address, *script) for i in (0, 1)]
    ps = {index: start_ps(index) for index in (0, 1, 2)}
    logs = [Logs(chief, *workers)]

    def wait_for(num_ps: int) -> None:
        """So many, and steps with them."""
        deadline, steps = time.monotonic() + 100, -1
        while True:
            assert time.monotonic() < deadline and chief.poll() is None, logs
            status = fetch_status(address, 60.0)
            newest = sum(task.step for task in status.workers)
            steps = steps if steps >= 0 or status.num_ps != num_ps else newest
            if status.num_ps == num_ps and newest > steps + 20 and not status.scaling:
                return
            time.sleep(0.05)

    wait_for(3)
    for index in (2, 1):  # at once, and so as one change or two
        ps[index].terminate()
    logs += [Logs(ps[index]) for index in (2, 1)]
    wait_for(1)
    ps[1] = start_ps(1)
    wait_for(2)
    ps[0].terminate()  # not the last one: the others wait for it
    logs.append(Logs(ps[0]))
    assert [log.finish() for log in logs[1:]] == [[143]] * 3, logs
    ps[0] = start_ps(0)
    wait_for(2)
    stop.touch()
    logs.append(Logs(ps[0], ps[1]))
    assert (logs[0].finish(), logs[-1].finish()) == ([0, 0, 0], [0, 0]), logs
    epochs = -int(next(iter(torch.load(out).values())).flatten()[0])
    check_counts(out, epochs)
    assert ": 0 updates lost" in logs[0].texts[0], "of ps:0"


def test_under_a_supervisor_the_chief_is_told_that_an_image_has_no_such_script(start: Start) -> None:
    chief = start("chief", "--num-workers", 2)
    address = line_with(chief, "listening on").split()[-1]
    logs = Logs(chief, start("worker", "--task", "worker:0", "--chief", address, "--run-id", "uid", "nowhere.py"))
    assert logs.finish() == [2, 2], logs
    assert all("there is no script 'nowhere.py'" in text for text in logs.texts)
