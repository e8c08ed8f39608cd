"""A job's way: shown or submitted, recorded, followed, ended."""

from __future__ import annotations

import dataclasses
import datetime
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stratagem.errors import ConfigurationError, SubmitError
from stratagem.launch.submit.entry_point import find_entry_point
from stratagem.launch.submit.plan import JobPlan, make_plan
from stratagem.launch.submit.record import JobRecord, JobStore
from stratagem.launch.submit.request import JobRequest
from stratagem.launch.submit.state import JobState
from stratagem.launch.submit.target import target_of

POLL_S = 0.5
SETTLE_S = 30.0
"""Seconds that a job has to be over in once its log has ended."""


def plan_job(request: JobRequest, entry_point: str | Path | None) -> tuple[JobPlan, list[str]]:
    """Validates and plans; nothing has happened yet. Returns the plan, and what a person should know about it."""
    found = find_entry_point(entry_point)
    plan = make_plan(request, found, Path.cwd())
    notes = [found.note, *request.warnings(), plan.image.context.warning() if plan.image is not None else ""]
    return plan, [note for note in notes if note]


def show(plan: JobPlan) -> str:
    """What `submit` would do, for people: image, context, and what goes to the target."""
    parts = [f"# job {plan.id}: {plan.request.chosen_strategy} on {plan.request.target}\n"]
    if plan.entry_point.source is not None:
        parts.append(f"# {plan.entry_point.path.name}, made from the notebook\n{plan.entry_point.source}")
    if plan.image is not None:
        parts.append(f"# Dockerfile of {plan.image.name}\n{plan.image.dockerfile}")
        parts.append(f"# context: {plan.image.context.words()}\n")
    parts.append(f"# for {plan.request.target}\n{target_of(plan.request.target).show(plan)}")
    return "\n".join(parts)


def submit(plan: JobPlan, entry_point: str, store: JobStore) -> JobRecord:
    """Makes the image, starts the job and writes its record.

    Raises:
        SubmitError: the target refused; nothing is left.
    """
    request = plan.request
    folder = store.create(plan.id)
    try:
        image, place = target_of(request.target).submit(plan, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    record = JobRecord(
        id=plan.id,
        target=request.target,
        entry_point=entry_point,
        strategy=request.strategy_of_tasks,
        num_workers=request.num_workers,
        num_ps=request.ps_count,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        image=image,
        args=request.args,
        labels=request.labels,
        place=place,
    )
    store.save(record)
    return record


def state_of(record: JobRecord, store: JobStore) -> JobState:
    return target_of(record.target).state(record, store.folder(record.id))


def logs_of(record: JobRecord, store: JobStore, follow: bool) -> Iterator[str]:
    """Lines that a job has written; to its end if ``follow``."""
    return target_of(record.target).logs(record, store.folder(record.id), follow)


def follow(record: JobRecord, store: JobStore, show_line: Callable[[str], None]) -> JobState:
    """Shows a job's log to its end, and says how it ended."""
    for line in logs_of(record, store, follow=True):
        show_line(line)
    deadline = time.monotonic() + SETTLE_S
    while not (state := state_of(record, store)).is_over and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return state


def cancel(job_id: str, store: JobStore) -> JobState:
    """Tells a job to save and end; one that is over stays as it is."""
    record = store.load(job_id)
    state = state_of(record, store)
    if state.is_over:
        return state
    record = dataclasses.replace(record, cancelled=True)
    store.save(record)
    target_of(record.target).cancel(record, store.folder(job_id))
    return state_of(record, store)


def remove(job_id: str, store: JobStore) -> None:
    """Forgets a job that is over, with its logs, volume and image.

    Raises:
        ConfigurationError: it runs.
    """
    record = store.load(job_id)
    if not (state := state_of(record, store)).is_over and state.phase != "unknown":
        raise ConfigurationError(f"the job {job_id} is {state.phase}: `stratagem jobs cancel {job_id}` first")
    target_of(record.target).remove(record, store.folder(job_id))
    store.remove(job_id)


def state_or_reason(record: JobRecord, store: JobStore) -> JobState:
    """As :func:`state_of`; a target that cannot be asked is said in words, so that a list shows the other jobs."""
    try:
        return state_of(record, store)
    except (SubmitError, ConfigurationError) as error:
        return JobState("unknown", None, str(error).splitlines()[0])
