"""Jobs of the benchmarks, started as tests start them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from benchmarks import jobs
from tests import forks


@pytest.fixture
def forked(preloaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes are forks: what is asserted of them is not how long they take."""

    def start(command: Sequence[str], environment: Mapping[str, str], folder: str, output: int) -> forks.Popen:
        streams: dict[str, Any] = {"stdout": output, "stderr": output, "stdin": subprocess.DEVNULL}
        return forks.Popen(command, env=environment, cwd=folder, start_new_session=True, **streams)

    monkeypatch.setattr(jobs, "_start", start)


@pytest.fixture
def own_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process that a benchmark starts counts a loopback of its own (as root): other tests send too."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return
    start = jobs._start

    def apart(command: Sequence[str], *rest: Any) -> Any:
        return start(["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *command], *rest)

    monkeypatch.setattr(jobs, "_start", apart)
