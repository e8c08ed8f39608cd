"""The leak fixture can fail: each kind of leak is made on purpose in a pytest of its own."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests import conftest, forks

LEAKS = {
    "threads": "import threading\nthreading.Thread(target=threading.Event().wait, name='stray', daemon=True).start()",
    "child processes": "import subprocess, sys, warnings\n"
    "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
    "KEEP.append(child)",
    "file descriptors": "import socket\nKEEP.append(socket.socket())",
    "shared memory": "KEEP.append(SHM); open(SHM, 'w').close()",
    "environment": "import os\nos.environ['STRAY'] = '1'",
}
CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize("kind", LEAKS)
def test_a_leak_fails_the_test(kind: str, tmp_path: Path) -> None:
    shared = Path("/dev/shm") / f"stray-{tmp_path.name}"
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text().replace("_DEADLINE_S = 30.0", "_DEADLINE_S = 0.1"))
    body = "\n".join("    " + line for line in LEAKS[kind].splitlines())
    (tmp_path / "test_leak.py").write_text(f"KEEP = []\nSHM = {str(shared)!r}\n\ndef test_leak():\n{body}\n")
    try:
        flags = shlex.split("-m pytest -p no:cacheprovider -p no:kmock -c /dev/null --rootdir . .")
        run = forks.run([sys.executable, *flags], cwd=tmp_path, timeout=60)
    finally:
        shared.unlink(missing_ok=True)
    assert run.returncode == 1, run.stdout + run.stderr
    assert f"the test leaks {kind}:" in run.stdout
    assert "1 passed, 1 error" in run.stdout


def test_what_others_leave_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file whose process has ended since the test began, nor one of a process that runs."""
    old, new = (Path("/dev/shm") / f"stray-1-{name}" for name in ("old", "new"))
    try:
        old.touch()
        before = conftest._snapshot()
        new.touch()
        assert not conftest._leaked(before)
        monkeypatch.setattr("psutil.pid_exists", lambda pid: False)
        assert conftest._leaked(before) == {"shared memory": [str(new)]}
    finally:
        old.unlink(missing_ok=True)
        new.unlink(missing_ok=True)
