"""Jobs as docker-compose projects on the engine that the docker command reaches; their files are in their folders."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stratagem.launch.actions import precedence_of
from stratagem.launch.manifests import compose
from stratagem.launch.manifests.pod import to_yaml
from stratagem.launch.submit.docker_cli import build, docker, forget, json_lines, num_cores, push, started
from stratagem.launch.submit.patience import POLL_S, TargetPatience
from stratagem.launch.submit.plan import JobPlan
from stratagem.launch.submit.record import JobRecord, JobState, Record

FILE = "compose.yaml"
_CLEAR_LINE = "\x1b[2K"
"""Before each line of a log, by Compose 2.26, whatever its output is."""


def show(plan: JobPlan) -> str:
    return to_yaml([compose.render(plan.workload())])


def submit(plan: JobPlan, folder: Path, record: Record) -> None:
    """Builds the image (and pushes it, where a registry is given) and starts the project."""
    assert plan.image is not None
    cores = num_cores()
    build(plan.image)
    try:
        image = push(plan.image.name) if plan.image.pushed else plan.image.name
        (folder / FILE).write_text(to_yaml([compose.render(plan.workload(image), cores)]))
        record(image, {"project": plan.id})
        _compose(folder, plan.id, ["up", "--detach", "--no-build", "--quiet-pull"], "start the job")
    except BaseException:  # Ctrl-C too
        if (folder / FILE).exists():
            _compose(folder, plan.id, ["down", "--volumes"], "remove what it had started")
        forget(plan.image.name)
        raise


def state(record: JobRecord, folder: Path) -> JobState:
    listed = _compose(folder, record.id, ["ps", "--all", "--format", "json"], "list the job's containers")
    containers = json_lines(listed)
    if not containers:
        return JobState("cancelled" if record.cancelled else "unknown", None, "its containers are gone")
    living = [
        str(one["Service"]) + ("" if one["State"] == "running" else f" ({one['State']})")
        for one in containers
        if one["State"] not in ("exited", "dead")
    ]
    if living:
        waits = all(one["State"] == "created" for one in containers)
        return JobState("pending" if waits else "running", None, ", ".join(sorted(living)))
    killed = [one["ID"] for one in containers if one["ExitCode"] == 137]
    if killed:
        said = docker(["inspect", "--format", "{{.State.OOMKilled}}", *killed], "look at containers").split()
        killed = [name for name, is_oom in zip(killed, said, strict=True) if is_oom == "true"]
    # Whoever was killed comes first: others may fail because it is away.
    first = min(containers, key=lambda one: (one["ID"] not in killed, _precedence(one)))
    detail = "" if first["ExitCode"] == 0 else f"{first['Service']} ended with exit code {first['ExitCode']}"
    detail += " (OOMKilled: it needs more memory)" if first["ID"] in killed else ""
    return JobState.ended(int(first["ExitCode"]), record.cancelled, detail)


def logs(record: JobRecord, folder: Path, follow: bool) -> Iterator[str]:
    """``follow``: to the end of the job, over connections to the engine that break."""
    shown: Counter[str] = Counter()  # lines of each container
    patience = TargetPatience()
    while True:
        over = not follow or patience.ask(lambda: state(record, folder)).is_over  # before it is read for the last time
        lines = Counter[str]()
        for line in _logs(record, folder, not over):
            container = line.partition("|")[0].strip()
            lines[container] += 1
            if lines[container] > shown[container]:
                yield line
        shown |= lines
        if over:
            return
        time.sleep(POLL_S)


def _logs(record: JobRecord, folder: Path, follow: bool) -> Iterator[str]:
    arguments = [*_project(folder, record.id), "logs", "--no-color", *(["--follow"] if follow else [])]
    with started(arguments, stdin=subprocess.DEVNULL, text=True, errors="replace") as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield line.rstrip("\n").removeprefix(_CLEAR_LINE)
        finally:
            process.terminate()


def cancel(record: JobRecord, folder: Path) -> None:
    """Stops the containers; their logs and the volume stay."""
    _compose(folder, record.id, ["stop"], "stop the job")


def remove(record: JobRecord, folder: Path) -> None:
    _compose(folder, record.id, ["down", "--volumes"], "remove the job")
    forget(record.image)


def _precedence(container: dict[str, Any]) -> tuple[bool, int]:
    return container["ExitCode"] == 0, precedence_of(str(container["Service"]).rpartition("-")[0])


def _project(folder: Path, job_id: str) -> list[str]:
    return ["compose", "--project-name", job_id, "--file", str(folder / FILE)]


def _compose(folder: Path, job_id: str, arguments: list[str], what: str) -> str:
    return docker([*_project(folder, job_id), *arguments], what)
