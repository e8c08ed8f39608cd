"""Process 1 of a container: its child does the work. Tried in a process of any number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.cli import first_process

PROGRAM = """
import os, signal, sys
from stratagem.cli.first_process import fork_and_stand_by
parent = os.getpid()
fork_and_stand_by()
assert os.getppid() == parent
"""


WAIT = "import time\nwhile True: time.sleep(0.1)"
"""Until a handler raises. ``signal.pause()`` would not notice a signal that comes just before it."""


def start(work: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + work], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("work", "code"),
    [
        ("sys.exit(42)", 42),
        ("", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
    ],
)
def test_it_ends_as_its_child_does(work: str, code: int) -> None:
    process = start(work)
    process.communicate(timeout=60)
    assert process.returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_child(number: signal.Signals) -> None:
    process = start(f"signal.signal({int(number)}, lambda *_: sys.exit(7))\nprint('here', flush=True)\n{WAIT}")
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 7


def test_a_child_without_a_handler_dies_of_the_signal() -> None:
    process = start(f"print('here', flush=True)\n{WAIT}")
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_elsewhere_it_does_nothing() -> None:
    before = os.getpid()
    first_process.stand_by_if_first()
    assert os.getpid() == before


@pytest.mark.parametrize(
    ("code", "files", "words"),
    [
        (137, {"memory.events": "low 0\noom 1\noom_kill 1\n", "memory.max": "268435456\n"}, "memory limit of 256 MiB"),
        (137, {"memory.events": "low 0\noom_kill 0\n", "memory.max": "268435456\n"}, ""),
        (137, {"memory.events": "low 0\noom_kill 2\n", "memory.max": "max\n"}, ""),
        (
            137,
            {
                "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
                "memory/memory.limit_in_bytes": "67108864\n",
            },
            "memory limit of 64 MiB",
        ),
        (137, {}, ""),
        (134, {"pids.events": "max 3\n", "pids.max": "30\n"}, "limit of processes and threads (pids limit): 30"),
        (1, {"pids/pids.events": "max 1\n", "pids/pids.max": "9\n"}, "limit of processes and threads (pids limit): 9"),
        (1, {"pids.events": "max 0\n", "pids.max": "30\n"}, ""),
        (143, {"pids.events": "max 3\n", "pids.max": "30\n"}, ""),
    ],
)
def test_a_reached_limit_is_named(
    code: int, files: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(first_process, "_CGROUP", tmp_path)
    assert first_process._exceeded_limit(code) == words
