"""The process in the background that is a local job."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from stratagem.launch.submit.background import EXIT_CODE, ORDER, OUTPUT

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
