"""Workers and parameter servers come and go while training runs, and every example of every epoch is applied once."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import stratagem as sg
from stratagem.errors import PeerUnavailableError
from stratagem.launch.status import ask_to_scale, fetch_status
from stratagem.rpc.status_view import StatusView
from tests import forks
from tests.cluster.test_exactly_once import check_counts

Start = Callable[..., Any]
ROOT = str(Path(__file__).parents[2])


def address_of(job: Any) -> str:
    """Of the chief of a job that runs."""
    job.wait_for(lambda: "Checkpoint of step 0" in job.stderr, "the first checkpoint")
    found = re.search(r"\[chief:0\].*listening on (\S+)", job.stderr)
    assert found is not None, job.stderr
    return found.group(1)


def start_scale(address: str, *arguments: object) -> forks.Popen:
    command = [sys.executable, "-m", "stratagem.cli", "scale", "--chief", address, *map(str, arguments)]
    return forks.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": ROOT})


def scale(address: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    process = start_scale(address, *arguments)
    out, error = process.communicate(timeout=240)
    return subprocess.CompletedProcess("scale", process.returncode, out, error)


def steps_of(job: Any, address: str, task: str) -> Callable[[int], bool]:
    """Whether a task has made so many steps more than now."""

    def step() -> int:
        with contextlib.suppress(PeerUnavailableError):
            status: StatusView = fetch_status(address, 5.0)
            return next((each.step for each in status.tasks if each.task == task), 0)
        return 0

    before = step()
    return lambda more: step() >= before + more


def number_of_ps(address: str) -> int:
    """That serve; 0: the chief is away."""
    try:
        return fetch_status(address, 5.0).num_ps
    except PeerUnavailableError:
        return 0


def check(job: Any, num_restarts: int = 0) -> None:
    """The job has ended well, with each example of its epochs applied once, and nobody else was started again."""
    done = job.succeed()
    assert (done.summary["restarts"], done.summary["updates_lost"]) == (num_restarts, 0), done.stderr
    tasks = {name: task["exit_codes"] for name, task in done.summary["tasks"].items()}
    assert tasks.pop("chief:0") == [-signal.SIGKILL] * num_restarts + [0]
    assert {code for codes in tasks.values() for code in codes} == {0}, tasks
    state = sg.load_checkpoint(done.summary["checkpoint"])
    epochs = -int(next(iter(state.values())).flatten()[0])
    assert epochs > 0
    check_counts(state, epochs)


@pytest.mark.thorough
def test_workers_come_and_go(cluster: Start, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    job = cluster(1, 1, "count_examples.py", "--examples", 200, "--pause-s", 0.02, "--until", stop)
    address = address_of(job)
    more = scale(address, "--workers", 3)
    assert (more.returncode, more.stdout) == (0, "3 workers, 1 ps\n"), more.stderr
    assert "The target is 3 workers and 1 ps" in job.stderr
    newest = steps_of(job, address, "worker:2")
    job.wait_for(lambda: newest(5), "steps of worker:2")
    fewer = scale(address, "--workers", 2)
    assert (fewer.returncode, fewer.stdout) == (0, "2 workers, 1 ps\n"), fewer.stderr
    assert "the job continues with 2 workers, and without worker:2" in job.stderr
    again = scale(address, "--workers", 3)
    assert again.returncode == 0, again.stderr
    newest = steps_of(job, address, "worker:2")
    job.wait_for(lambda: newest(5), "steps of the next worker:2")
    stop.touch()
    check(job)


@pytest.mark.thorough
def test_a_worker_that_ends_and_is_wanted_again_before_the_launcher_hears_of_either(
    cluster: Start, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    job = cluster(2, 1, "count_examples.py", "--examples", 200, "--pause-s", 0.02, "--until", stop)
    address = address_of(job)
    newest = steps_of(job, address, "worker:1")
    job.wait_for(lambda: newest(1), "steps of worker:1")
    job.process.send_signal(signal.SIGSTOP)
    fewer = scale(address, "--workers", 1)
    ask_to_scale(address, 2, 0, 60.0)
    job.process.send_signal(signal.SIGCONT)
    assert fewer.returncode == 0, fewer.stderr
    newest = steps_of(job, address, "worker:1")
    job.wait_for(lambda: newest(5), "steps of the next worker:1")
    stop.touch()
    check(job)


@pytest.mark.parametrize("arguments", [(), pytest.param(("--table",), marks=pytest.mark.thorough)])
def test_parameter_servers_come_and_go(cluster: Start, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    stop = tmp_path / "stop"
    options = ("--examples", 400, "--pause-s", 0.02, "--until", stop, *arguments)
    job = cluster(2, 1, "count_examples.py", *options)
    address = address_of(job)
    for num_ps in (3, 2):
        newest = steps_of(job, address, "worker:1")
        job.wait_for(lambda newest=newest: newest(5), "steps")
        done = scale(address, "--ps", num_ps)
        assert (done.returncode, done.stdout) == (0, f"2 workers, {num_ps} ps\n"), done.stderr + job.stderr
    newest = steps_of(job, address, "worker:1")
    job.wait_for(lambda: newest(20), "steps with 2 ps")
    stop.touch()
    check(job)
    stalls = re.findall(r"commits were held for ([\d.]+) s", job.stderr)
    print(f"commits were held for {stalls} s")
    assert len(stalls) == 2
    assert not re.findall(r"\d [WE] \S+: .*", job.stderr), "nobody is warned of what was asked for"
    assert "Exiting: the others have what ps:2 held; the job has 2 ps now" in job.stderr


@pytest.mark.thorough
def test_a_number_that_is_asked_for_while_the_last_one_is_being_left(cluster: Start, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    job = cluster(2, 1, "count_examples.py", "--examples", 200, "--pause-s", 0.02, "--until", stop)
    address = address_of(job)
    for num_ps in (2, 1, 2):  # at once: the launcher may not have seen ps:1 end, nor that it was to
        ask_to_scale(address, 0, num_ps, 60.0)
        job.wait_for(lambda num_ps=num_ps: number_of_ps(address) == num_ps, f"{num_ps} ps")
    stop.touch()
    check(job)


def kill_while_the_number_changes(cluster: Start, stop: Path, kills: Sequence[tuple[int, str, str]]) -> Any:
    """A job whose number of ps is changed; each time a task is killed when the log has certain words.

    Args:
        cluster: the fixture.
        stop: a file that ends the job.
        kills: the number, the words (empty: at once) and the task.
    """
    options = ("--examples", 400, "--pause-s", 0.02, "--until", stop)
    job = cluster(2, 1, "count_examples.py", *options, flags=["--max-restarts", "9"])
    address = address_of(job)
    for num_ps, moment, task in kills:
        newest = steps_of(job, address, "worker:1")
        job.wait_for(lambda newest=newest: newest(5), "steps")
        before, pid = job.stderr.count(moment), job.pid_of(task)
        ask_to_scale(address, 0, num_ps, 60.0)
        job.wait_for(  # a change without an update since the last has its checkpoint already, and may be over
            lambda m=moment, b=before, n=num_ps: not m or job.stderr.count(m) > b or number_of_ps(address) == n, moment
        )
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        job.wait_for(lambda num_ps=num_ps: number_of_ps(address) == num_ps, f"{num_ps} ps")
    newest = steps_of(job, address, "worker:1")
    job.wait_for(lambda: newest(20), "steps with the last number of ps")
    stop.touch()
    return job


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_chief_is_killed_while_the_number_changes(cluster: Start, tmp_path: Path) -> None:
    moments = ("The target is", "Checkpoint of step", "Begins from", "The target is", "Begins from", "")
    kills = [(num_ps, moment, "chief:0") for num_ps, moment in zip((3, 2, 3, 1, 2, 3), moments, strict=True)]
    check(kill_while_the_number_changes(cluster, tmp_path / "stop", kills), num_restarts=len(kills))


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_ps_is_killed_while_the_number_changes(cluster: Start, tmp_path: Path) -> None:
    kills = [(3, "The target is", "ps:0"), (2, "Checkpoint of step", "ps:1"), (3, "Begins from", "ps:0")]
    done = kill_while_the_number_changes(cluster, tmp_path / "stop", kills).succeed()
    state = sg.load_checkpoint(done.summary["checkpoint"])
    most = max(-float(value.min()) for value in state.values())
    lacking = sum(float((value + most).sum()) for value in state.values())
    print(f"{done.summary['updates_lost']} updates lost; {lacking:.0f} of {most:.0f} times all rows are lacking")
    assert lacking <= 2 * 4 * done.summary["updates_lost"], "of batches of 4, in two variables, which one ps may hold"


def check_ended(job: Any, ended: Mapping[str, Sequence[int]]) -> int:
    """The job has ended well, and only these were started again, after these exit codes; the updates that are lost,
    which are as many as are lacking."""
    done = job.succeed()
    codes = {name: task["exit_codes"] for name, task in done.summary["tasks"].items()}
    assert codes == {task: [*ended.get(task, ()), 0] for task in codes}, done.stderr
    state = sg.load_checkpoint(done.summary["checkpoint"])
    most = max(-float(value.min()) for value in state.values())
    lacking = sum(float((value + most).sum()) for value in state.values())
    lost = int(done.summary["updates_lost"])
    assert lacking == 4 * lost, f"{lost} updates of 4 examples lost, {lacking} lacking: {done.stderr}"
    return lost


@pytest.mark.thorough
@pytest.mark.parametrize("staleness", ["inf", "1", "0"])
def test_a_ps_that_is_told_to_end_loses_nothing(cluster: Start, tmp_path: Path, staleness: str) -> None:
    stop = tmp_path / "stop"
    options = ("--examples", 400, "--pause-s", 0.02, "--until", stop)
    job = cluster(2, 2, "count_examples.py", *options, flags=["--max-restarts", "9", "--staleness", staleness])
    address = address_of(job)
    closed = signal.SIGTERM if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else signal.SIGHUP  # under nohup
    for task, number in (("ps:1", closed), ("ps:0", signal.SIGTERM)):
        newest, pid = steps_of(job, address, "worker:1"), job.pid_of(task)
        job.wait_for(lambda newest=newest: newest(20), "steps")
        os.kill(pid, number)
        job.wait_for(lambda pid=pid, task=task: job.pid_of(task) not in (None, pid), f"another process of {task}")
    newest = steps_of(job, address, "worker:1")
    job.wait_for(lambda: newest(20), "steps after that")
    stop.touch()
    assert check_ended(job, {"ps:0": [143], "ps:1": [143]}) == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "second",
    [pytest.param(signal.SIGTERM, id="told again"), pytest.param(signal.SIGKILL, id="killed")],
)
def test_a_ps_that_has_no_time_to_end_in_order_counts_what_is_lost(
    cluster: Start, tmp_path: Path, second: signal.Signals
) -> None:
    stop = tmp_path / "stop"
    options = ("--examples", 400, "--pause-s", 0.02, "--until", stop)
    job = cluster(2, 2, "count_examples.py", *options)
    address = address_of(job)
    newest = steps_of(job, address, "worker:1")
    job.wait_for(lambda: newest(20), "steps")
    chief, ps = psutil.Process(job.pid_of("chief:0")), psutil.Process(job.pid_of("ps:1"))
    chief.suspend()  # nobody takes a checkpoint
    ps.send_signal(signal.SIGTERM)
    job.wait_for(lambda: "Shutting down once" in job.stderr, "what it says")
    ps.send_signal(second)
    job.wait_for(lambda: "ps:1 ended" in job.stderr, "its end")
    chief.resume()
    newest = steps_of(job, address, "worker:1")
    job.wait_for(lambda: newest(20), "steps after that")
    stop.touch()
    assert check_ended(job, {"ps:1": [143 if second == signal.SIGTERM else -signal.SIGKILL]}) > 0
