"""Workers that know their chief and nothing else, one of them beyond those that the chief waits for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.test_exactly_once import check_counts

SCRIPTS = Path(__file__).parent / "scripts"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ``stratagem ROLE …``; the processes end with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parents[2]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "stratagem.cli", *map(str, arguments)]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


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
    everybody = (chief, ps, first, second)
    readers = [threading.Thread(target=process.communicate) for process in everybody]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(100)
    assert [process.returncode for process in everybody] == [0, 0, 0, 0]
    check_counts(tmp_path / "out.pt", 2)


def test_a_worker_beyond_the_greatest_number_is_refused(start: Start) -> None:
    chief = start("chief", "--num-workers", 1, "--max-workers", 2, "--num-ps", 1)
    address = line_with(chief, "listening on").split()[-1]
    third = start("worker", "--task", "worker:2", "--chief", address, SCRIPTS / "count_examples.py")
    _, errors = third.communicate(timeout=100)
    assert third.returncode == 2
    assert "'worker:2' is not a task of this cluster" in errors and "Traceback" not in errors
