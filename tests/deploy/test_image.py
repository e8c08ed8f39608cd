"""The image: who it runs as, what it needs to write, how it ends."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.containers import inspect, run, wait_for

pytestmark = pytest.mark.timeout(600)

LOCKED = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
GRACE_S = 60


@pytest.fixture
def name() -> Iterator[str]:
    """Of a container, which goes with the test."""
    chosen = f"stratagem-test-{os.getpid()}-{time.monotonic_ns()}"
    yield chosen
    run(["docker", "rm", "--force", "--volumes", chosen], code=None)


def test_who_it_is(image: str) -> None:
    config = inspect(image)["Config"]
    assert config["User"] == "10001:10001" and config["Entrypoint"] == ["stratagem"]
    assert config["StopSignal"] == "SIGTERM" and config["Healthcheck"]["Test"] == ["CMD", "stratagem", "health"]
    assert config["Labels"]["org.opencontainers.image.title"] == "stratagem"
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", run(["docker", "run", "--rm", *LOCKED, image, "version"]).stdout)
    listing = run(
        [
            "docker",
            "run",
            "--rm",
            "--entrypoint",
            "sh",
            image,
            "-c",
            "ls -A /app; ls -A /build",
        ],
        code=None,
    )
    assert listing.stdout.split() == ["examples"], "more came into the image than it needs"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["chief", "--num-workers", "1", "--bind", "127.0.0.1:2222"], "listening on"),
        (["ps", "--task", "ps:0", "--chief", "127.0.0.1:1", "--bind", "127.0.0.1:2222"], "Listening on"),
        (["worker", "--chief", "127.0.0.1:1", "examples/digits.py"], ""),  # still starting: nobody has a handler yet
    ],
    ids=["chief", "ps", "worker"],
)
def test_sigterm_ends_it(image: str, name: str, command: list[str], words: str) -> None:
    run(["docker", "run", "--detach", "--name", name, *LOCKED, image, *command])

    def log() -> str:
        done = run(["docker", "logs", name])
        return done.stdout + done.stderr

    # Process 1 stands by once there is a second one.
    wait_for(lambda: len(run(["docker", "top", name]).stdout.splitlines()) >= 3 and words in log(), words, log)
    begun = time.monotonic()
    run(["docker", "stop", "--time", str(GRACE_S), name])
    assert inspect(name)["State"]["ExitCode"] == 143, log()
    assert time.monotonic() - begun < GRACE_S


def test_orphans_do_not_stay_zombies(image: str, name: str, tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "for _ in range(3):\n"
        '    subprocess.run([sys.executable, \'-c\', \'import os; os.fork() or os.execlp("sleep", "sleep", "0.1")\'])\n'
        "def states():\n"
        "    lines = [path.read_text() for path in pathlib.Path('/proc').glob('[0-9]*/stat')]\n"
        "    return [line.split(') ')[-1][0] for line in lines if '(sleep)' in line]\n"
        "print('orphans', len(states()))\n"
        "deadline = time.monotonic() + 30\n"
        "while states() and time.monotonic() < deadline:\n"
        "    time.sleep(0.05)\n"
        "print('left', len(states()))\n"
    )
    mount = f"{script}:/app/orphans.py:ro"
    tmp_path.chmod(0o755)
    script.chmod(0o644)
    done = run(
        ["docker", "run", "--name", name, *LOCKED, "-v", mount, image, "worker", "--strategy", "one", "orphans.py"]
    )
    orphans, left = re.findall(r"(?:orphans|left) (\d+)", done.stdout)
    assert int(orphans) > 0 and left == "0"


def test_a_container_without_memory_says_so(image: str, name: str) -> None:
    memory = ["--memory", "64m", "--memory-swap", "64m"]
    command = ["ps", "--task", "ps:0", "--chief", "127.0.0.1:1", "--bind", "127.0.0.1:2222"]
    done = run(["docker", "run", "--name", name, *LOCKED, *memory, image, *command], code=137)
    assert "its container reached its memory limit of 64 MiB" in done.stderr
    state = inspect(name)["State"]
    assert state["OOMKilled"] and state["ExitCode"] == 137


def test_a_container_without_threads_says_so(image: str, name: str) -> None:
    command = ["chief", "--num-workers", "1", "--bind", "127.0.0.1:2222"]
    done = run(["docker", "run", "--name", name, *LOCKED, "--pids-limit", "5", image, *command], code=None)
    assert "its container reached its limit of processes and threads (pids limit): 5" in done.stderr
    assert done.returncode not in (0, 137, 143)


def test_a_full_disk_ends_the_job_with_the_reason(image: str, name: str) -> None:
    room = ["--tmpfs", "/small:size=64k,uid=10001"]
    command = ["run", "--workers", "1", "--ps", "1", "--checkpoint-dir", "/small/checkpoints", "examples/digits.py"]
    done = run(["docker", "run", "--name", name, *LOCKED, *room, image, *command], code=None)
    assert done.returncode not in (0, 137), done.stderr
    assert "No space left on device" in done.stderr
