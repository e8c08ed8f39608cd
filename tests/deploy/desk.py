"""Where somebody sits who submits jobs: a project folder, the records of its jobs, a notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.deploy.containers import DEADLINE_S, ROOT, run
from tests.notebooks import EXECUTE, notebook_of


class Desk:
    """A project folder and the records of its jobs.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        self.folder.mkdir()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("STRATAGEM_")}
        self.environ = environ | {"XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT)}

    def stratagem(self, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Runs a command of ours in the project."""
        return run(
            [sys.executable, "-m", "stratagem.cli", *arguments], folder=self.folder, environ=self.environ, code=code
        )

    def execute(self, *cells: str) -> str:
        """What these cells print in a kernel; the project is its folder."""
        (self.folder / "work.ipynb").write_text(notebook_of(*cells))
        command = [sys.executable, "-c", EXECUTE, "work.ipynb", str(DEADLINE_S)]
        return run(command, folder=self.folder, environ=self.environ).stdout

    def jobs(self) -> list[dict[str, Any]]:
        """What `stratagem jobs list` knows."""
        return [json.loads(line) for line in self.stratagem("jobs", "list", "--json").stdout.splitlines()]


def answers(url: str) -> bool:
    """Whether a server is there."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.URLError:
        return False
