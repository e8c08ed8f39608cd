"""A job outlives its output: a full disk takes nothing else, a reader or a terminal that goes away ends it in order."""

from __future__ import annotations

import errno
import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.launch.local import run_local
from stratagem.launch.plan import Launch, LocalJob

SAVES = """
import signal, sys, time
from pathlib import Path

def save(*_):
    time.sleep(0.3)
    Path("saved").touch()
    sys.exit(143)

signal.signal(signal.SIGTERM, save)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    print("result", flush=True)
    time.sleep(0.01)
Path("done").touch()
"""
HANGS_UP = """
import signal, sys, time
from pathlib import Path
from stratagem.cli.roles import _hang_up_ends

told = []
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGTERM, lambda *_: told.append("SIGTERM"))
with _hang_up_ends():
    print("ready", flush=True)
    while not told:
        time.sleep(0.01)
    signal.raise_signal(signal.SIGHUP)
    print("step", flush=True)
    Path("saved").write_text(" ".join(told))
signal.raise_signal(signal.SIGHUP)
"""


def run(folder: Path, stdout: io.TextIOWrapper, seconds: float) -> tuple[int, str]:
    """A script of that many seconds, and what the launcher said."""
    script, said = folder / "train.py", io.StringIO()
    script.write_text(SAVES)
    command = (sys.executable, str(script), str(seconds))
    launch = Launch(command, {**os.environ})
    code = run_local(LocalJob(script=script), launch_for=lambda *_: launch, stdout=stdout, stderr=said)
    return code, said.getvalue()


def test_a_full_disk_does_not_end_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open("/dev/full", "w") as full:
        code, said = run(tmp_path, full, 0.1)
    assert (tmp_path / "done").exists() and code == 1
    assert f"the standard output is incomplete: {os.strerror(errno.ENOSPC)}" in said


def test_a_reader_that_goes_away_ends_the_job_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        code, said = run(tmp_path, pipe, 60)
    assert (tmp_path / "saved").exists() and code == 143, said


def test_a_task_whose_terminal_closes_is_told_once_and_may_print(tmp_path: Path) -> None:
    """Also when the second word of it comes as the task ends: by then its role has left its own part."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", HANGS_UP], cwd=tmp_path, stdout=theirs, stderr=theirs) as task:
        said = b""
        while not said.endswith(b"\n"):  # the whole line: one that is cut in its middle is an error of the print
            said += os.read(ours, 100)
        os.close(theirs)
        os.close(ours)
        task.send_signal(signal.SIGHUP)
        assert task.wait(60) == 0
    assert (tmp_path / "saved").read_text() == "SIGTERM"
