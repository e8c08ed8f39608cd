"""How a script knows that it already runs in a job."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

_ID, _TARGET, _IMAGE, _DIR = "STRATAGEM_JOB_ID", "STRATAGEM_JOB_TARGET", "STRATAGEM_JOB_IMAGE", "STRATAGEM_JOB_DIR"
_TASK_SIGNS = ("STRATAGEM_REPORT_FILE", "TF_CONFIG", "RANK")
"""A process that has one of them was started as a task, by `stratagem run`, torchrun or a cluster of one's own."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A submitted job."""

    id: str
    """What `stratagem jobs` knows it by; empty in a job that was started without `run()`, and after a dry run."""
    target: str
    """local, compose or kubernetes."""
    docker_image: str = ""
    """Image of the tasks, by digest where it has been pushed; empty for a local job."""
    folder: str = ""
    """What is written here stays after the job: inside it the volume of all tasks, or locally the job's folder; for
    who submitted it, the folder of its record."""


def job_variables(job: Job) -> dict[str, str]:
    return {_ID: job.id, _TARGET: job.target, _IMAGE: job.docker_image, _DIR: job.folder}


def runs_in_job(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for name in (_ID, *_TASK_SIGNS))


def remote() -> bool:
    """Whether this process is part of a job: what `run()` submitted, or a task of a cluster."""
    return runs_in_job(os.environ)


def own_job(environ: Mapping[str, str]) -> Job:
    return Job(*(environ.get(name, "") for name in (_ID, _TARGET, _IMAGE, _DIR)))
