"""The process in the background that is a local job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stratagem.launch.submit import local_target
from stratagem.launch.submit.background import EXIT_CODE, ORDER, OUTPUT
from stratagem.launch.submit.local_target import LocalTarget
from stratagem.launch.submit.record import JobRecord

PROGRAM = """
import sys
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
    deadline = time.monotonic() + 60
    while not (tmp_path / EXIT_CODE).exists():
        assert time.monotonic() < deadline, (tmp_path / OUTPUT).read_text()
        time.sleep(0.01)
    assert (tmp_path / EXIT_CODE).read_text() == "1"
    assert (tmp_path / OUTPUT).read_text().endswith("RuntimeError: a defect of the launcher\n")


def test_a_job_that_ends_as_it_is_cancelled_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    pids = [None, child]  # it lived when it was looked for
    monkeypatch.setattr(local_target, "_pid", lambda folder: pids.pop())
    record = JobRecord("j", "local", "t.py", "one", 1, 0, "2026-01-01", place={"host": os.uname().nodename})
    LocalTarget().cancel(record, tmp_path)
    assert not pids
