"""Real clusters: `stratagem run` in a child process, with faults on a schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forks

SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE_S = 240.0


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a job left behind."""

    code: int
    stdout: str
    stderr: str
    summary: dict[str, Any]
    faults: list[str]
    """Names of the faults that happened."""


class Cluster:
    """One `stratagem run`.

    Args:
        folder: where the job's files go.
        num_workers: workers.
        num_ps: parameter servers.
        script: name of a script in tests/cluster/scripts, or a path.
        arguments: its arguments.
        flags: further flags of `stratagem run`.
        faults: ``{"task": "worker:1", "step": 7, "action": "kill"}`` and so on; see scripts/faults.py.
    """

    def __init__(
        self,
        folder: Path,
        num_workers: int,
        num_ps: int,
        script: str | Path,
        arguments: Sequence[str] = (),
        flags: Sequence[str] = (),
        faults: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.folder = folder
        self.summary = folder / "summary.json"
        self.logs = folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(SCRIPTS.parents[2]),
            "STRATAGEM_CHECKPOINT_ROOTS": str(folder.parent),
            "TEST_FAULTS": json.dumps(list(faults)),
            "TEST_FAULTS_DIR": str(folder),
        }
        command = [sys.executable, "-m", "stratagem.cli", "run", "--workers", str(num_workers), "--ps", str(num_ps)]
        command += ["--summary", str(self.summary), "--log-dir", str(self.logs), "--state-dir", str(folder / "state")]
        command += [*flags, str(SCRIPTS / script), *arguments]
        self._out = (folder / "stdout").open("w")
        self._err = (folder / "stderr").open("w")
        self.process = forks.Popen(command, stdout=self._out, stderr=self._err, env=environment, start_new_session=True)

    @property
    def stderr(self) -> str:
        """What came on stderr so far."""
        return (self.folder / "stderr").read_text()

    def processes(self) -> list[psutil.Process]:
        """Every process of the job."""
        try:
            launcher = psutil.Process(self.process.pid)
            return [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def pid_of(self, task: str) -> int | None:
        """Process id of a task's newest life, from its command line."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if f"--task={task}" in " ".join(process.cmdline()).split() and process.pid != self.process.pid:
                    return process.pid
        return None

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Polls until ``condition()``; fails with the job's stderr after the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                pytest.fail(f"waited for {what} in vain (exit code {self.process.poll()}):\n{self.stderr}")
            time.sleep(0.05)

    def finish(self, timeout_s: float = DEADLINE_S) -> Finished:
        """Waits for the end of the job."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job did not end within {timeout_s} s:\n{self.stderr}")
        summary = json.loads(self.summary.read_text()) if self.summary.exists() else {}
        done = sorted(path.name for path in self.folder.glob("fault-*"))
        return Finished(code, (self.folder / "stdout").read_text(), self.stderr, summary, done)

    def succeed(self, timeout_s: float = DEADLINE_S) -> Finished:
        """Waits for the end of the job, which is to be a good one."""
        done = self.finish(timeout_s)
        assert done.code == 0, done.stderr
        return done

    def close(self) -> None:
        """Kills what is left."""
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait(60)
        self._out.close()
        self._err.close()


@pytest.fixture(scope="session", autouse=True)
def all_fork(preloaded: None) -> None:
    """What these tests start with :mod:`tests.forks`."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters: ``cluster(num_workers, num_ps, script, arguments, …)``; they end with the test."""
    started: list[Cluster] = []

    def start(num_workers: int, num_ps: int, script: str | Path, *arguments: object, **options: Any) -> Cluster:
        folder = tmp_path / f"job-{len(started)}"
        started.append(Cluster(folder, num_workers, num_ps, script, [str(a) for a in arguments], **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def tasks() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test starts by hand and puts in here; they end with the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()
