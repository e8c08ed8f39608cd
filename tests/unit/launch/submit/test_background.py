"""The process in the background that is a local job."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stratagem.errors import ConfigurationError, SubmitError
from stratagem.launch.submit import local_target, submission
from stratagem.launch.submit.background import ALIVE, EXIT_CODE, ORDER, OUTPUT
from stratagem.launch.submit.entry_point import EntryPoint
from stratagem.launch.submit.plan import JobPlan, make_plan
from stratagem.launch.submit.record import JobRecord, JobStore
from stratagem.launch.submit.request import JobRequest
from tests.polling import until

PROGRAM = """
import sys
import time
from pathlib import Path
import stratagem.cli.__main__ as cli
from stratagem.launch.submit.background import main

def fail():
    raise RuntimeError("a defect of the launcher")

cli.main = fail
sys.exit(main(Path(sys.argv[1])))
"""


def test_a_launcher_that_fails_with_a_traceback_has_an_exit_code(tmp_path: Path) -> None:
    (tmp_path / ORDER).write_text(json.dumps(["train.py"]))
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, timeout=60, capture_output=True)
    until((tmp_path / EXIT_CODE).exists, (tmp_path / OUTPUT).read_text)
    assert (tmp_path / EXIT_CODE).read_text() == "1"
    assert (tmp_path / OUTPUT).read_text().endswith("RuntimeError: a defect of the launcher\n")


def test_a_job_starts_although_somebody_looks_whether_it_lives(tmp_path: Path) -> None:
    (tmp_path / ORDER).write_text(json.dumps(["train.py"]))
    with (tmp_path / ALIVE).open("w") as looked:
        fcntl.flock(looked, fcntl.LOCK_SH)
        with subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)]) as process:
            waits = f":{os.fstat(looked.fileno()).st_ino} 0 EOF"
            until(lambda: process.poll() is not None or Path("/proc/locks").read_text().count(waits) == 2)
            assert process.poll() is None
            fcntl.flock(looked, fcntl.LOCK_UN)
            assert process.wait(60) == 0
    until((tmp_path / EXIT_CODE).exists)


def test_a_job_that_dies_before_it_has_said_its_id_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / ALIVE).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        dies = iter([lambda: fcntl.flock(held, fcntl.LOCK_UN)])
        monkeypatch.setattr(time, "sleep", lambda _: next(dies)())
        assert local_target._pid(tmp_path) is None


def test_a_job_that_ends_as_it_is_cancelled_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    pids = [None, child]  # it lived when it was looked for
    monkeypatch.setattr(local_target, "_pid", lambda folder: pids.pop())
    record = JobRecord("j", "local", "t.py", "one", 1, 0, "2026-01-01", place={"host": os.uname().nodename})
    local_target.cancel(record, tmp_path)
    assert not pids


class FullStore(JobStore):
    def save(self, record: JobRecord) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobPlan:
    """Of a local job that runs for a minute."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    script = tmp_path / "train.py"
    script.write_text("import time; time.sleep(60)")
    return make_plan(JobRequest(target="local"), EntryPoint(script), tmp_path)


def test_a_job_whose_record_cannot_be_written_does_not_run(plan: JobPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran, and `stratagem jobs` did not know it."""
    store = FullStore()
    monkeypatch.setattr(sys, "executable", shutil.which("false"))  # a process that starts says so
    with pytest.raises(SubmitError, match=r"No space left on device.*some space there"):
        submission.submit(plan, "train.py", store)
    assert not list(store.root.iterdir())


def test_a_job_that_cannot_be_written_does_not_run(plan: JobPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(local_target, "_arguments", full)
    with pytest.raises(SubmitError, match=r"No space left on device.*some space there"):
        submission.submit(plan, "train.py", JobStore())
    assert not list(JobStore().root.iterdir())


@pytest.mark.parametrize(("left", "words"), [("exit_code.partial", "could not be written"), ("other", "was killed")])
def test_a_job_without_an_exit_code_says_why(left: str, words: str, tmp_path: Path) -> None:
    for name in (ALIVE, left):
        (tmp_path / name).touch()
    record = JobRecord("j", "local", "t.py", "one", 1, 0, "2026-01-01", place={"host": os.uname().nodename})
    state = local_target.state(record, tmp_path)
    assert (state.phase, state.exit_code) == ("failed", None) and words in state.detail


def test_of_two_who_remove_a_job_at_once_one_learns_that_it_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    store, both = JobStore(), threading.Barrier(2)

    def remove(job_id: str) -> str:
        both.wait(60)
        try:
            submission.remove(job_id, store)
        except ConfigurationError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as people:
        for job_id in map(str, range(10)):
            folder = store.create(job_id)
            store.save(
                JobRecord(job_id, "local", "t.py", "one", 1, 0, "2026-01-01", place={"host": os.uname().nodename})
            )
            for name, text in {**dict.fromkeys(map(str, range(200)), ""), ALIVE: "1", EXIT_CODE: "0"}.items():
                (folder / name).write_text(text)
            words = sorted(people.map(remove, [job_id, job_id]))
            assert words == ["", f"unknown job {job_id!r}; there are none in {store.root}"]
            assert os.listdir(store.root) == []


def test_a_job_is_known_before_it_runs(plan: JobPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who submitted it may be killed at any moment; it ran on, and `stratagem jobs` did not know it."""
    store = JobStore()
    child = os.fork()
    if not child:
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: os._exit(0))  # as if killed
        try:
            submission.submit(plan, "train.py", store)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    (record,) = store.all()
    assert submission.state_of(record, store).phase == "pending"
    assert not list(submission.logs_of(record, store, follow=True))
    assert submission.cancel(record.id, store).phase == "cancelled"
    submission.remove(record.id, store)
    assert not store.all()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_who_is_told_to_end_while_he_submits_leaves_nothing(
    signum: signal.Signals, plan: JobPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.fork()
    if not child:
        signal.signal(signum, signal.SIG_DFL)  # whatever these tests were started by
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: os.kill(os.getpid(), signum))
        try:
            submission.submit(plan, "train.py", JobStore())
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signum
    assert not list(JobStore().root.iterdir())


def test_a_job_whose_process_does_not_start_is_no_traceback(plan: JobPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(SubmitError, match=r"did not start \(exit code 1\)"):
        submission.submit(plan, "train.py", JobStore())
    assert not list(JobStore().root.iterdir())
