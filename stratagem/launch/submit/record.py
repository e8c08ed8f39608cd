"""A submitted job: how its tasks identify it, its record (a folder with a JSON file), and its state."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import pydantic

from stratagem.arguments import nearest
from stratagem.checkpoint.durable import replace_text
from stratagem.errors import ConfigurationError

FILE = "job.json"
Phase = Literal["pending", "running", "succeeded", "failed", "cancelled", "unknown"]
VARIABLES = ("STRATAGEM_JOB_ID", "STRATAGEM_JOB_TARGET", "STRATAGEM_JOB_IMAGE", "STRATAGEM_JOB_DIR")
"""Which job a task belongs to: the fields of :class:`~stratagem.launch.submit.job.Job`."""
_TASK_SIGNS = ("STRATAGEM_REPORT_FILE", "TF_CONFIG", "RANK")
"""A process that has one of them was started as a task, by `stratagem run`, torchrun or a cluster of one's own."""


def remote() -> bool:
    """Whether this process is part of a job: submitted by `run()`, or a task of a cluster."""
    return any(os.environ.get(name) for name in (VARIABLES[0], *_TASK_SIGNS))


@dataclasses.dataclass(frozen=True)
class JobState:
    """Where a job stands, as its target says."""

    phase: Phase
    exit_code: int | None = None
    """Of the job, once it is over; None where nobody knows it."""
    detail: str = ""
    """In words, where there is more to say."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for: it has ended, or nobody knows how it did."""
        return self.phase not in ("pending", "running")

    @classmethod
    def ended(cls, exit_code: int, cancelled: bool, detail: str = "") -> JobState:
        if exit_code == 0:
            return cls("succeeded", 0, detail)
        return cls("cancelled" if cancelled else "failed", exit_code, detail)


@dataclasses.dataclass(frozen=True)
class JobRecord:
    """A submitted job: what was asked for, and where it is. Whether it runs is asked of the target each time."""

    id: str
    target: str
    entry_point: str
    """Script, or notebook, as the user named it."""
    strategy: str
    num_workers: int
    num_ps: int
    created_at: str
    """ISO 8601, UTC."""
    image: str = ""
    """Image of the job, by digest once it has been pushed; empty for a local job."""
    args: tuple[str, ...] = ()
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    place: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What the target needs to find the job again."""
    cancelled: bool = False
    """Somebody asked for its end."""


Record = Callable[[str, Mapping[str, str]], None]
"""Writes the record of a job, by its image and what its target needs to find it again: before any of it runs, since who
submits may be killed."""


class JobStore:
    """The folder of all jobs: ``$XDG_STATE_HOME/stratagem/jobs``, where XDG_STATE_HOME is ``~/.local/state``."""

    def __init__(self) -> None:
        # By the XDG specification a relative path is none: it would be another in each folder.
        states = (os.environ.get("XDG_STATE_HOME", ""), os.path.expanduser("~/.local/state"))
        home = next(filter(os.path.isabs, states), None)
        if home is None:  # as a container's user has none that its image does not name
            raise ConfigurationError("jobs are kept at home, and this user has none: set HOME or XDG_STATE_HOME")
        self.root = Path(home, "stratagem", "jobs")

    def folder(self, job_id: str) -> Path:
        return self.root / job_id

    def create(self, job_id: str) -> Path:
        """Makes the folder of a new job, readable for its owner only. ConfigurationError: it cannot be made."""
        folder = self.folder(job_id)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
        except OSError as error:
            if folder.exists():
                raise
            raise self._refusal("kept", error) from None
        return folder

    def _refusal(self, what: str, error: OSError) -> ConfigurationError:
        words = f"jobs cannot be {what} in {self.root}: {error.strerror}; set XDG_STATE_HOME to another folder"
        return ConfigurationError(words)

    def save(self, record: JobRecord) -> None:
        """Writes a record in one piece."""
        replace_text(self.folder(record.id) / FILE, json.dumps(dataclasses.asdict(record), indent=2) + "\n")

    def load(self, job_id: str) -> JobRecord:
        """The record of a job. ConfigurationError: there is no such job (names the nearest), or its file is damaged."""
        if "/" in job_id or job_id.startswith("."):
            raise self._unknown(job_id)
        try:
            return _read(self.folder(job_id) / FILE)
        except (FileNotFoundError, NotADirectoryError):
            raise self._unknown(job_id) from None

    def _unknown(self, job_id: str) -> ConfigurationError:
        known = [record.id for record in self.all()]
        hint = nearest(job_id, known) if known else f"there are none in {self.root}"
        return ConfigurationError(f"unknown job {job_id!r}; {hint}")

    def all(self) -> list[JobRecord]:
        """Every job, the oldest first; a folder whose job was never submitted is passed over. ConfigurationError: the
        folder of all jobs cannot be read, or a record is damaged."""
        found = []
        try:
            for job_id in os.listdir(self.root):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # or somebody has removed it meanwhile
                    found.append(_read(self.folder(job_id) / FILE))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._refusal("read", error) from None
        return sorted(found, key=lambda record: (record.created_at, record.id))

    def remove(self, job_id: str) -> None:
        """Forgets a job, its record first: half a job is none. ConfigurationError: somebody else has forgotten it."""
        try:
            (self.folder(job_id) / FILE).unlink()
        except FileNotFoundError:
            raise self._unknown(job_id) from None
        shutil.rmtree(self.folder(job_id))


def _read(file: Path) -> JobRecord:
    try:
        return pydantic.TypeAdapter(JobRecord).validate_json(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from None
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = ": ".join([*map(str, first["loc"]), first["msg"].lower()])
        raise ConfigurationError(f"{file} is not a record of a job ({why}); delete its folder") from None
