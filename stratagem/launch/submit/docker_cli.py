"""Images by Docker's own command line, which has the user's logins, contexts and builders; see docs/design/run.md."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from stratagem.errors import ConfigurationError, SubmitError
from stratagem.launch.submit.plan import ImagePlan

NUM_LINES = 15
"""Of Docker's output in an error."""


def docker(arguments: Sequence[str], what: str) -> str:
    """Runs ``docker ARGUMENTS`` and returns its standard output. ``what`` it does ("push the image") is for the
    SubmitError when it fails, with its last lines; without a docker command it is a ConfigurationError."""
    try:
        done = subprocess.run(["docker", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except FileNotFoundError:
        raise _no_docker() from None
    if done.returncode:
        raise SubmitError(f"docker could not {what}: {_last(done.stderr or done.stdout)}")
    return done.stdout


def started(arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """``docker ARGUMENTS``, whose output comes through a pipe; ``options``: of ``Popen``. ConfigurationError: there is
    no docker command."""
    try:
        return subprocess.Popen(["docker", *arguments], stdout=subprocess.PIPE, **options)
    except FileNotFoundError:
        raise _no_docker() from None


def build(image: ImagePlan) -> None:
    """Builds the image, with the errors of :func:`docker`; the context goes through a pipe, so that nothing is written
    into the project."""
    _say(f"building the image {image.name}; the first build takes minutes")
    network = ["--network", image.network] if image.network else []
    arguments = ["build", "--progress=plain", *network, "--tag", image.name, "-"]
    environ = {**os.environ, "DOCKER_BUILDKIT": "1"}
    with started(arguments, stdin=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ) as process:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # docker says why
            image.context.write_tar(process.stdin, image.made)
            process.stdin.close()
        said = process.stdout.read().decode(errors="replace")
    if process.returncode:
        raise SubmitError(f"docker could not build the image: {_last(said)}")


def push(name: str) -> str:
    """Pushes an image and returns its name by digest: what runs is what was built. SubmitError: the registry refused
    it."""
    _say(f"pushing the image {name}")
    docker(["push", "--quiet", name], f"push the image {name}")
    repository = name.rpartition(":")[0]
    known = docker(["image", "inspect", "--format", "{{json .RepoDigests}}", name], f"find the image {name}")
    digests: list[str] = json.loads(known)
    return next((digest for digest in digests if digest.startswith(f"{repository}@")), name)


def forget(image: str) -> None:
    """Deletes an image of this engine, under all its names; its layers stay in the build cache for the next job."""
    if found := docker(["image", "ls", "--quiet", image], "list images").split():
        docker(["image", "rm", "--force", found[0]], f"remove the image {image}")


def num_cores() -> int:
    """Cores of the machine on which the engine runs."""
    return int(docker(["info", "--format", "{{.NCPU}}"], "reach its engine").strip())


def json_lines(text: str) -> list[dict[str, Any]]:
    """The objects of ``docker … --format json``: a list, or by version one object a line."""
    text = text.strip()
    if text.startswith("["):
        return list(json.loads(text))
    return [json.loads(line) for line in text.splitlines()]


def _say(what: str) -> None:
    print(f"stratagem: {what}", file=sys.stderr, flush=True)


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return "\n".join(lines[-NUM_LINES:])


def _no_docker() -> ConfigurationError:
    return ConfigurationError(
        "there is no docker command here: install Docker's command line (with compose and buildx), or choose "
        "target='local'"
    )
