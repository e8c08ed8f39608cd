"""What goes wrong with hosts, disks and chiefs, at moments that have a name, in storms, or after a long calm."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

from tests.simulation.cluster import Job
from tests.simulation.schedule import Fault, Moment
from tests.simulation.world import STANDBY

JOURNAL_FULL = 0.05
"""The share of jobs whose chief finds no room for its journal, for a moment or for seconds."""
NO_ROOM = 0.05
"""The share of jobs in which there is no room for checkpoints, for all or one ps, and somebody dies then."""
STANDS_BY = 0.05
"""The share of jobs with a second chief, which stands by."""
DIES_AGAIN = 0.03
"""The share of jobs whose chief dies again and again."""
UNREADABLE = 0.05
"""The share of jobs whose checkpoints cannot be read for a while, or whose folder is read-only, or loses a file."""
MOMENTS = (
    *3 * ("join", "over", "prepared", "initialized", "accepted", "checkpoint", "step", "close_step"),
    *("put_back", "restored", "roll_back", "lost", "routed", "untold", "steps_per_unit", "ending", "begun", "plan"),
    *2 * ("Fence", "CloseStep", "DescribeUnits", "HoldCommits", "AdmitUpdates", "SaveShards", "ReleaseCommits"),
    *2 * ("RestoreShards", "MarkLost", "TakeOver", "CreateVariables", "AssignValues", "CloseUnits", "StartStep"),
    *("NextUnits", "SaveCheckpoint", "Agree", "Session", "Hello", "Meet"),
    *4 * ("message Transfer",),
)
"""Records of the journal, each of which says that something has been decided, and methods of the services."""
MOMENTS_OF_RING = (
    *("join", "over", "ready", "taken_in", "taken_in", "Meet", "Meet", "OpenLane", "OpenLane", "Abort", "Abort"),
    *("TakeIn", "TakeIn", "GetPosition", "Session", "Agree", "OpenDataset", "Exchange"),
    *6 * ("message Exchange",),
)


def of_a_host(rng: random.Random, job: Job) -> Iterator[Fault]:
    """What processes that share a host, or a switch, suffer together: the power goes, for one host or for all, the host
    is cut off from all others, or all connections of the chief break some times in a row."""
    workers = [f"worker:{index}" for index in range(job.num_workers)]
    ps = [f"ps:{index}" for index in range(job.num_ps)]
    kind, at_s = rng.choice(("outage", "outage", "lost", "lost", "apart", "apart", "resets")), 0.3 + 2.5 * rng.random()
    host = [rng.choice(workers), *([rng.choice(ps)] if ps else []), *(["chief:0"] if rng.random() < 0.2 else [])]
    others = [task for task in ("chief:0", *workers, *ps) if task not in host]
    if kind in ("outage", "lost"):
        spread_s = rng.choice((0.0, 0.3))
        for task in [*host, *others] if kind == "outage" else host:
            yield Fault(at_s + spread_s * rng.random(), "crash" if task == "chief:0" else "kill", task)
    elif kind == "apart":
        for_s = rng.choice((0.5, 3.0, 8.0)) * rng.random()
        yield from (Fault(at_s, "cut", one, other, for_s) for one in host for other in others)
    else:
        for _ in range(rng.choice((1, 3))):
            yield from (Fault(at_s, "reset", "chief:0", task) for task in (*workers, *ps))
            at_s += 0.5 * rng.random()


def at_moments(
    rng: random.Random, job: Job, moments: Sequence[str], draw: Callable[[random.Random, Job], Fault]
) -> Iterator[Fault]:
    """What goes wrong, in most cases a death, goes wrong at one of ``moments`` or just after."""
    tasks = ["chief:0", *(f"worker:{i}" for i in range(job.num_workers)), *(f"ps:{i}" for i in range(job.num_ps))]
    for _ in range(rng.choice((1, 2, 3))):
        moment = _moment(rng, moments)
        task = rng.choice(("chief:0", rng.choice(tasks), rng.choice(tasks)))
        kind = "crash" if task == "chief:0" and rng.random() < 0.3 else "kill"
        fault = Fault(0.0, kind, task) if rng.random() < 0.6 else draw(rng, job)
        yield dataclasses.replace(fault, at_s=2 * rng.random(), moment=moment)


def _moment(rng: random.Random, moments: Sequence[str]) -> Moment:
    what, number = rng.choice(moments), rng.choice((1, 1, 2, 5))
    if what.startswith("message "):
        number = rng.randrange(1, 60)
    elif what[0].isupper() and rng.random() < 0.3:
        what = f"reply {what}"
    return Moment(what, number, rng.choice((0.0, 0.0, 0.01, 0.1)) * rng.random())


def storm(rng: random.Random, job: Job, draw: Callable[[random.Random, Job], Fault]) -> Iterator[Fault]:
    """Many faults, of which several fall together: what follows a fault is hit by the next."""
    times = [0.3 + 3 * rng.random() for _ in range(rng.choice((1, 2)))]
    for _ in range(rng.choice((3, 4, 6))):
        yield dataclasses.replace(draw(rng, job), at_s=rng.choice(times) + rng.choice((0.05, 0.5, 1.5)) * rng.random())
    if rng.random() < 0.5:
        yield from (dataclasses.replace(fault, at_s=fault.at_s / 2 + times[0]) for fault in of_a_host(rng, job))


def without_room(rng: random.Random, job: Job) -> Iterator[Fault]:
    """The disk of the checkpoints is full for all or for one ps, and meanwhile the chief, or a ps, dies."""
    if rng.random() < NO_ROOM:
        at_s, for_s = 0.3 + 2.5 * rng.random(), rng.choice((0.5, 3.0, 8.0)) * rng.random()
        moment = _moment(rng, MOMENTS) if rng.random() < 0.4 else None
        ps = [f"ps:{index}" for index in range(job.num_ps)]
        yield Fault(at_s, "disk full", rng.choice(("", rng.choice(ps))), for_s=for_s, moment=moment)
        yield Fault(at_s + for_s * rng.random(), "kill", rng.choice(("chief:0", "chief:0", rng.choice(ps))))


def dies_again(rng: random.Random) -> Iterator[Fault]:
    """The chief dies three times, at moments."""
    if rng.random() < DIES_AGAIN:
        for _ in range(3):
            yield Fault(3 * rng.random(), "kill", "chief:0", moment=_moment(rng, MOMENTS))


def journal_full(rng: random.Random) -> Iterator[Fault]:
    """The chief finds no room for its journal."""
    if rng.random() < JOURNAL_FULL:
        for_s = rng.choice((0.001, 0.3, 2.0)) * rng.random()
        moment = _moment(rng, MOMENTS) if rng.random() < 0.6 else None
        yield Fault(0.2 + 2.5 * rng.random(), "journal full", for_s=for_s, moment=moment)


def unreadable(rng: random.Random, job: Job) -> Iterator[Fault]:
    """The checkpoints cannot be read for a while, by all or by one task, or their folder is read-only, or one of them
    loses a file; and meanwhile the chief, or a ps, dies, which has to read them."""
    if rng.random() >= UNREADABLE:
        return
    at_s, for_s = 0.3 + 2.5 * rng.random(), rng.choice((3.0, 8.0, 60.0)) * rng.random()
    moment = _moment(rng, MOMENTS) if rng.random() < 0.3 else None
    ps = [f"ps:{index}" for index in range(job.num_ps)]
    kind, task = rng.choice((*3 * ("unreadable",), "read-only", "remove")), rng.choice(("", "chief:0", *ps, *ps))
    what = Fault(at_s, kind, moment=moment)
    yield what if kind == "remove" else dataclasses.replace(what, task=task, for_s=for_s)
    for _ in range(rng.choice((1, 1, 2))):
        late_s = min(for_s, 4.0) * 0.5 * rng.random()
        yield Fault(at_s + late_s, "kill", task or rng.choice(ps) if rng.random() < 0.7 else "chief:0")


def standing_by(seed: int, job: Job, faults: list[Fault], moments: Sequence[str]) -> tuple[Job, list[Fault]]:
    """In some jobs another chief stands by: the one that serves dies, leaves or stands still, both die, or some tasks
    do not reach it, or are not reached by it."""
    rng = random.Random(-41 * seed - 1)
    if rng.random() >= STANDS_BY:
        return job, faults
    job = dataclasses.replace(job, num_chiefs=2, reads_address=rng.random() < 0.5)
    job = dataclasses.replace(job, saves=0.0, loads=False, reloads=0)  # all may begin anew, as above
    tasks = [*(f"worker:{i}" for i in range(job.num_workers)), *(f"ps:{i}" for i in range(job.num_ps))]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at_s, for_s = 0.2 + 3 * rng.random(), rng.choice((0.5, 3.0, 9.0)) * rng.random()
        moment = _moment(rng, moments) if rng.random() < 0.4 else None
        kind = rng.choice(("kill", "kill", "kill", "crash", "leave", "pause", "apart", "both", "none"))
        if kind in ("both", "none"):  # the one that stands by, and the other soon after
            faults.append(Fault(at_s, rng.choice(("kill", "pause")), STANDBY, for_s=for_s, moment=moment))
            at_s += rng.choice((0.0, 0.1, 1.0)) * rng.random()
        if kind == "apart":
            way, reached = rng.choice(("cut", "cut one way")), rng.sample(tasks, rng.randint(1, len(tasks)))
            pairs = [("chief:0", task) if rng.random() < 0.5 else (task, "chief:0") for task in reached]
            faults += [Fault(at_s, way, *pair, for_s, moment=moment) for pair in pairs]
        elif kind != "none":
            kind = "kill" if kind == "both" else kind
            faults.append(Fault(at_s, kind, "chief:0", for_s=for_s if kind == "pause" else 0.0, moment=moment))
    return job, faults


def calm(seed: int, job: Job, faults: list[Fault]) -> tuple[Job, list[Fault]]:
    """The faults, in order. In every twentieth job nothing happens for a minute or more, and then the chief, or another
    task, dies too: longer than most of what the product calls a while."""
    rng = random.Random(-19 * seed - 1)
    if rng.random() < 0.05:
        job = dataclasses.replace(job, calm_s=rng.choice((40.0, 70.0, 130.0)), calm_at=rng.choice((1.0, 2.0)))
        job = dataclasses.replace(job, saves=0.0, loads=False, reloads=0)  # all may begin anew, as above
        tasks = ["chief:0", *(f"worker:{i}" for i in range(job.num_workers)), *(f"ps:{i}" for i in range(job.num_ps))]
        faults.append(Fault(job.calm_at, "kill", rng.choice(("chief:0", rng.choice(tasks)))))
        late_s = job.calm_s - 6.0 * rng.random()
        faults = [
            dataclasses.replace(fault, at_s=fault.at_s + late_s) if fault.at_s >= job.calm_at else fault
            for fault in faults
        ]
    return job, sorted(faults, key=lambda fault: fault.at_s)
