"""Docker for tests: the engine that DOCKER_HOST names, one image of this tree, projects that leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 420.0
POLL_S = 0.2


def run(
    command: Sequence[str],
    *,
    code: int | None = 0,
    folder: Path = ROOT,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = DEADLINE_S,
    text: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; ``code`` is the exit code that is expected, None: any; ``text`` its input."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "DOCKER_BUILDKIT": "1", **(environ or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        input=text or "",
    )
    assert code is None or done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def need_engine() -> None:
    """Skips the test where no engine answers, unless TEST_DOCKER says that there must be one."""
    if os.environ.get("TEST_DOCKER"):
        return
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker engine answers (DOCKER_HOST); TEST_DOCKER=1 makes this a failure")


def wait_for(condition: Callable[[], object], what: str, words: Callable[[], str] = str) -> None:
    """Polls until ``condition()``; after the deadline fails with ``words()``."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited for {what} in vain:\n{words()}")
        time.sleep(POLL_S)


def copy_tree(target: Path) -> None:
    """What a clone of the working tree would hold."""
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]).stdout.split("\0")
    for name in filter(None, listed):
        source = ROOT / name
        if not source.is_symlink() and not source.is_file():
            continue  # deleted, and not committed yet
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target / name, follow_symlinks=False)


@contextlib.contextmanager
def built_image(clone: Path) -> Iterator[str]:
    """The image of a copy of this tree, built as a user builds it; its tag goes at the end."""
    name = f"stratagem-test:{os.getpid()}"
    environ = {"IMAGE": name, "BUILD_NETWORK": "host"}
    run(["docker", "compose", "build", "--quiet"], folder=clone, environ=environ, timeout_s=600)
    yield name
    run(["docker", "image", "rm", "--force", name], code=None)


def inspect(name: str) -> Any:
    """What the engine knows of a container or an image."""
    return json.loads(run(["docker", "inspect", name]).stdout)[0]


class Project:
    """One docker-compose project.

    Args:
        name: of the project.
        clone: the tree with docker-compose.yml.
        image: to use.
        overlays: names of files in deploy/compose.
        environ: variables for docker-compose.yml.
    """

    def __init__(
        self, name: str, clone: Path, image: str, overlays: Sequence[str] = (), environ: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._clone = clone
        self._environ = {"IMAGE": image, "BUILD_NETWORK": "host", "TENSORBOARD_PORT": "0", **(environ or {})}
        files = ["docker-compose.yml", *(f"deploy/compose/{overlay}.yml" for overlay in overlays)]
        self._command = ["docker", "compose", "-p", name, *(word for file in files for word in ("-f", file))]
        self._up: subprocess.Popen[str] | None = None
        self._output = clone / f"{name}.log"

    def compose(self, *arguments: str, code: int | None = 0) -> str:
        """Runs one command of docker compose; returns what it printed."""
        done = run([*self._command, *arguments], code=code, folder=self._clone, environ=self._environ)
        return done.stdout + done.stderr

    def up(self, *arguments: str) -> None:
        """Starts ``docker compose up`` beside the test."""
        environ = {**os.environ, **self._environ}
        with self._output.open("w") as output:
            self._up = subprocess.Popen(
                [*self._command, "up", *arguments],
                cwd=self._clone,
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
            )

    @property
    def output(self) -> str:
        """What ``docker compose up`` has printed."""
        return self._output.read_text()

    def wait_for(self, words: str) -> None:
        """Waits until the output has these words."""
        assert self._up is not None
        up = self._up

        def there() -> bool:
            over = up.poll() is not None
            if words in self.output:
                return True
            assert not over, f"it ended before {words!r} came:\n{self.output}"
            return False

        wait_for(there, words, lambda: self.output)

    def finish(self) -> int:
        """The exit code of ``docker compose up``."""
        assert self._up is not None
        try:
            return self._up.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"docker compose up did not end:\n{self.output}")

    def container(self, service: str, number: int = 1) -> Any:
        """What the engine knows of a container of a service."""
        return inspect(f"{self.name}-{service}-{number}")

    def in_volume(self, program: str, *arguments: str) -> str:
        """What a program of the image prints that sees the project's volume."""
        volume = f"{self.name}_training:/var/lib/stratagem"
        command = ["docker", "run", "--rm", "--network", "none", "-v", volume, "--entrypoint", program]
        return run([*command, self._environ["IMAGE"], *arguments]).stdout

    def close(self) -> None:
        """Removes everything of the project."""
        if self._up is not None and self._up.poll() is None:
            self._up.kill()
            self._up.wait()
        self.compose("--profile", "*", "down", "--volumes", "--timeout", "1", "--remove-orphans", code=None)
