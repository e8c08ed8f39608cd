"""The stages of a job: shown or submitted, recorded, followed, ended."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import importlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, cast

from stratagem.errors import ConfigurationError, SubmitError
from stratagem.launch.signals import unwinding
from stratagem.launch.submit.plan import JobPlan
from stratagem.launch.submit.record import JobRecord, JobState, JobStore, Record

POLL_S = 0.5
SETTLE_S = 30.0
"""Seconds that a job has to be over in once its log has ended."""


class Target(Protocol):
    """Where jobs run: the module ``<name>_target``."""

    def show(self, plan: JobPlan) -> str:
        """What would be submitted, for people."""

    def submit(self, plan: JobPlan, folder: Path, record: Record) -> None:
        """Makes the image, has the job recorded, and starts it. SubmitError: the target refused; nothing is left
        running."""

    def state(self, record: JobRecord, folder: Path) -> JobState:
        """Where the job stands."""

    def logs(self, record: JobRecord, folder: Path, follow: bool) -> Iterator[str]:
        """Lines of what the job has written, without line ends; to its end if ``follow``."""

    def cancel(self, record: JobRecord, folder: Path) -> None:
        """Tells the job to save and end."""

    def remove(self, record: JobRecord, folder: Path) -> None:
        """Deletes what the target still has of a job that is over."""


def target_of(name: str) -> Target:
    """The target of a name; loaded when it is needed."""
    return cast(Target, importlib.import_module(f"stratagem.launch.submit.{name}_target"))


def show(plan: JobPlan) -> str:
    """What `submit` would do, for people: image, context, and what goes to the target."""
    parts = [f"# job {plan.id}: {plan.request.chosen_strategy} on {plan.request.target}\n"]
    if plan.entry_point.source is not None:
        parts.append(f"# {plan.entry_point.path.name}, made from the notebook\n{plan.entry_point.source}")
    if plan.image is not None:
        parts.append(f"# Dockerfile of {plan.image.name}\n{plan.image.made['Dockerfile']}")
        parts.append(f"# context: {plan.image.context.words()}\n")
    parts.append(f"# for {plan.request.target}\n{target_of(plan.request.target).show(plan)}")
    return "\n".join(parts)


@unwinding()
def submit(plan: JobPlan, entry_point: str, store: JobStore) -> JobRecord:
    """Makes the image, writes the job's record and starts it. SubmitError: the target refused, or the disk is full;
    nothing is left."""
    request = plan.request
    record = JobRecord(
        id=plan.id,
        target=request.target,
        entry_point=entry_point,
        strategy=request.strategy_of_tasks,
        num_workers=request.num_workers,
        num_ps=request.ps_count,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        args=request.args,
        labels=request.labels,
    )

    def save(image: str, place: Mapping[str, str]) -> None:
        nonlocal record
        record = dataclasses.replace(record, image=image, place=place)
        store.save(record)

    folder = store.create(plan.id)
    try:
        target_of(request.target).submit(plan, folder, save)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SubmitError(
                f"the job was not started: its record cannot be written to {store.root} ({error.strerror}). Free "
                "some space there, or set XDG_STATE_HOME to another folder"
            ) from None
        raise
    return record


def state_of(record: JobRecord, store: JobStore) -> JobState:
    """Where a job stands. ConfigurationError: it has been removed, or its target cannot be asked."""
    state = target_of(record.target).state(record, store.folder(record.id))
    store.load(record.id)  # a job that somebody removes meanwhile looks like one that was never started
    return state


def logs_of(record: JobRecord, store: JobStore, follow: bool) -> Iterator[str]:
    """Lines that a job has written; to its end if ``follow``."""
    return target_of(record.target).logs(record, store.folder(record.id), follow)


@unwinding()
def follow(record: JobRecord, store: JobStore, show_line: Callable[[str], None]) -> JobState:
    """Shows a job's log to its end, and says how it ended."""
    for line in logs_of(record, store, follow=True):
        show_line(line)
    deadline = time.monotonic() + SETTLE_S
    while not (state := state_of(store.load(record.id), store)).is_over and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return state


def cancel(job_id: str, store: JobStore) -> JobState:
    """Tells a job to save and end; one that is over, or that nobody knows any more, stays as it is."""
    record = store.load(job_id)
    state = state_of(record, store)
    if state.is_over:
        return state
    record = dataclasses.replace(record, cancelled=True)
    store.save(record)
    target_of(record.target).cancel(record, store.folder(job_id))
    return state_of(record, store)


def remove(job_id: str, store: JobStore) -> None:
    """Forgets a job that is over (ConfigurationError: it runs), with its logs, volume and image."""
    record = store.load(job_id)
    try:
        state = state_of(record, store)
    except (SubmitError, ConfigurationError) as error:
        store.load(job_id)
        words = f"{error}\nIf that is gone for good, delete {store.folder(job_id)} to forget the job here"
        raise type(error)(words) from None
    if not state.is_over:
        raise ConfigurationError(f"the job {job_id} is {state.phase}: `stratagem jobs cancel {job_id}` first")
    target_of(record.target).remove(record, store.folder(job_id))
    store.remove(job_id)


def state_or_reason(record: JobRecord, store: JobStore) -> JobState:
    """As :func:`state_of`; a target that cannot be asked is said in words, so that a list shows the other jobs."""
    try:
        return state_of(record, store)
    except (SubmitError, ConfigurationError) as error:
        return JobState("unknown", None, str(error).splitlines()[0])
