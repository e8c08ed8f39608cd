"""Makes a schedule that fails small: fewer faults, an easier network, a smaller job, as long as it fails alike."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from tests.simulation.network import Conditions
from tests.simulation.schedule import Outcome, Schedule, run

MAX_TRIES = 120


def kind_of(failure: str) -> str:
    """What two failures of one cause have in common: their words, without numbers."""
    return re.sub(r"\d[\d.]*|/\S+|\[.*", "N", failure)[:60]


def shrink(schedule: Schedule, outcome: Outcome) -> tuple[Schedule, Outcome]:
    """A smaller schedule that fails alike, and what came of it."""
    kind, tries = kind_of(outcome.failure), 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(schedule):
            tries += 1
            if tries > MAX_TRIES:
                return schedule, outcome
            found = run(candidate)
            if kind_of(found.failure) == kind:
                schedule, outcome, is_smaller = candidate, found, True
                break
    return schedule, outcome


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules that are smaller in one respect."""
    faults, job = schedule.faults, schedule.job
    for index in range(len(faults)):
        yield dataclasses.replace(schedule, faults=faults[:index] + faults[index + 1 :])
    calm = Conditions(delay_s=schedule.conditions.delay_s)
    for name in ("slow", "reset", "duplicate"):
        if getattr(schedule.conditions, name):
            yield dataclasses.replace(
                schedule, conditions=dataclasses.replace(schedule.conditions, **{name: getattr(calm, name)})
            )
    if schedule.yields:
        yield dataclasses.replace(schedule, yields=0.0)
    if schedule.slow_disk_s:
        yield dataclasses.replace(schedule, slow_disk_s=0.0)
    if job.num_optimizers > 1:
        yield dataclasses.replace(schedule, job=dataclasses.replace(job, num_optimizers=1))
    if job.accumulates > 1:
        yield dataclasses.replace(schedule, job=dataclasses.replace(job, accumulates=1))
    parts = ("meets", "returns", "raises", "keeps", "breaks", "steps_per_epoch", "peeks", "drop_last", "leases_ahead")
    for name in ("prepares_apart", "prepares_late", "saves", "loads", "reloads", *parts):
        if getattr(job, name):
            yield dataclasses.replace(schedule, job=dataclasses.replace(job, **{name: type(getattr(job, name))()}))
    if job.has_table:
        yield dataclasses.replace(schedule, job=dataclasses.replace(job, has_table=False))
    alone = () if job.has_table or job.num_optimizers > 1 else (("num_variables",),)  # each ps has a variable then
    fewer = (*alone, ("num_ps", "num_variables")) if job.num_models == 1 else ()
    for names in (("epochs",), ("num_workers",), ("num_chiefs",), *fewer):
        if all(getattr(job, name) > (job.ps_replicas if name == "num_ps" else 1) for name in names):
            yield dataclasses.replace(
                schedule, job=dataclasses.replace(job, **{name: getattr(job, name) - 1 for name in names})
            )
