"""What a seed decides: the job, the weather of network and disk, and the faults; several at once: ``mishaps.py``."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator

from stratagem.cluster.membership import backup_of
from tests.simulation.cluster import Job
from tests.simulation.mishaps import (
    MOMENTS,
    MOMENTS_OF_RING,
    at_moments,
    calm,
    dies_again,
    journal_full,
    of_a_host,
    standing_by,
    storm,
    unreadable,
    without_room,
)
from tests.simulation.network import Conditions
from tests.simulation.schedule import KILLS_OF_COPIED, Fault, Schedule

GRACE_S = 30.0
"""Seconds after which a supervisor kills what it has told to end."""
MEETS = 0.15
"""The share of jobs whose workers meet after each epoch."""
BREAKS = 0.15
"""The share of jobs in which workers leave passes before their end."""
PASSES = 0.1
"""The share of jobs that train on two datasets in turn, of those that look at a batch before each pass, of those that
drop what is less than a batch, and of those whose batches are single examples."""
ALTERNATES = 0.5
"""The share of jobs with two optimizers, above staleness 0, of which the second one leaves batches out."""
RETURNS = 0.2
"""The share of these in which their scripts end with it."""
RAISES = 0.3
"""The share of these in which it is an error that they catch."""
IN_PARTS = 0.3
"""The share of fits whose epochs are parts of passes."""
ADMITS = 0.1
"""The share of rings in which workers die as others admit a newcomer."""
AT_MOMENTS = 0.2
"""The share of jobs in which something goes wrong at a moment that has a name."""
FORMS = ("", "table", "models", "copies", "fit", "ring", "storm", "ring-storm")


def form_of(seed: int) -> str:
    """Of the schedule of a seed, where no form is asked for: every fifth is a ring, every tenth calls ``fit``; every
    twentieth or so is a storm."""
    if seed % 5 == 0:
        return "ring-storm" if seed % 50 == 20 else "ring"
    return "fit" if seed % 10 == 7 else "storm" if seed % 25 == 13 else ""


def plan(seed: int, form: str = "") -> Schedule:
    """The schedule of a seed.

    Args:
        form: "table": the job has one for sure; "models": it trains two in turn; "copies": of what each ps holds
            another one has a copy; "fit": workers call ``Model.fit``; "ring": it is one of a ring that heals; "storm",
            "ring-storm": with :func:`storm`;
            empty: as the seed says.
    """
    form = form or form_of(seed)
    if form.startswith("ring"):
        return _plan_ring(seed, form == "ring-storm")
    rng = random.Random(seed)
    staleness = rng.choice((math.inf, math.inf, 0.0, 0.0, 1.0, 3.0))
    num_workers, num_ps = rng.choice((1, 2, 2, 3)), rng.choice((1, 2, 2))
    job = Job(
        num_workers=num_workers,
        num_ps=num_ps,
        num_variables=1 if random.Random(-4 * seed - 1).random() < 0.15 else num_ps,
        num_examples=rng.choice((8, 12, 18)),
        batch_size=rng.choice((2, 3)),
        epochs=rng.choice((1, 2)),
        staleness=staleness,
        checkpoint_every_s=rng.choice((0.0, 0.3, 1.0)),
    )
    conditions = Conditions(
        delay_s=rng.choice((0.0005, 0.002, 0.01)),
        slow=rng.choice((0.0, 0.0, 0.02)),
        reset=rng.choice((0.0, 0.0, 0.002)),
        duplicate=rng.choice((0.0, 0.0, 0.05)),
    )
    slow_disk_s = rng.choice((0.0, 0.0, 0.05))
    faults = [_fault(rng, job) for _ in range(rng.choice((0, 1, 2, 3)))]
    if is_estranged := rng.random() < 0.1:
        job = dataclasses.replace(job, session_timeout_s=1.0, step_s=2.0)
        faults += _estranged(rng, job)
    if ends := [*_ends(random.Random(-2 * seed - 1), job)]:
        faults += ends
        max_ps = 3 if random.Random(-3 * seed - 1).random() < 0.5 else 0
        job = dataclasses.replace(job, epochs=job.epochs + 2, max_ps=max_ps)
    if changes := [*_changes(random.Random(-seed - 1), job)]:
        faults += changes
        job = dataclasses.replace(job, epochs=job.epochs + 2)
    if form == "copies":
        job = dataclasses.replace(job, staleness=job.staleness or math.inf, num_ps=2, max_ps=0)
    copied = random.Random(-5 * seed - 1)
    if job.staleness and job.num_ps > 1 and (copied.random() < 0.5 or form == "copies"):
        job, faults = _copied(copied, job, faults)
    forms = random.Random(-6 * seed - 1)
    if form == "table" or (forms.random() < 0.25 and not is_estranged):
        job = dataclasses.replace(job, has_table=True, num_variables=job.num_ps)
    job = dataclasses.replace(job, prepares_apart=forms.random() < 0.25)
    models = random.Random(-26 * seed - 1)
    if form != "fit" and (models.random() < 0.1 or form == "models") and not (job.has_table and form == "table"):
        # On each ps some of each: one without a part of a model may be said to lack what that was given.
        is_late, num_models = models.random() < 0.5, models.choice((2, 2, 3))
        num_variables, epochs = num_models * max(3, job.num_variables), max(num_models + 1, job.epochs)
        job = dataclasses.replace(job, has_table=False, num_models=num_models, num_variables=num_variables)
        job = dataclasses.replace(job, epochs=epochs, prepares_late=is_late)
    share = 0.5 if job.ps_replicas == 1 else 0.2
    can_have_two = job.num_variables > 1 and job.num_models == 1 and not job.has_table and form != "fit"
    if forms.random() < share and can_have_two:
        # Of the variables on a ps, both may have one.
        each = random.Random(-16 * seed - 1).choice((1, 2) if job.staleness else (1, 1, 1, 2))
        job = dataclasses.replace(job, num_optimizers=2, num_variables=each * job.num_variables)
        if not job.staleness and seed % 2 == 0:  # a checkpoint falls between the two
            job = dataclasses.replace(job, checkpoint_every_s=0.3)
        if (between := random.Random(-23 * seed - 1)).random() < 0.4:
            worker = f"worker:{between.randrange(job.num_workers)}"
            faults = [*faults, Fault(2.5 * between.random(), "kill between", worker)]
    scripts = random.Random(-15 * seed - 1)
    saves, loads = scripts.choice((0.0, 0.0, 0.0, 0.0, 0.1, 0.3)), scripts.random() < 0.2
    if form != "fit":
        can_load = not job.has_table and job.epochs < 8 and not job.prepares_late
        job = dataclasses.replace(job, saves=0.0 if job.prepares_late else saves, loads=loads and can_load)
        if can_load and not loads and scripts.random() < 0.5 and job.num_models == 1:
            job = dataclasses.replace(job, reloads=scripts.randrange(job.epochs))
    else:
        num_examples = random.Random(-7 * seed - 1).choice((8, 12, 16))
        job = dataclasses.replace(job, fits=True, has_table=False, num_optimizers=1, prepares_apart=False)
        parts = random.Random(-28 * seed - 1)
        steps_per_epoch = parts.randrange(1, num_examples // 2) if parts.random() < IN_PARTS else 0
        job = dataclasses.replace(job, num_examples=num_examples, batch_size=2, steps_per_epoch=steps_per_epoch)
    share = 0.1 if job.has_table or job.saves else 0.3 if job.staleness or job.fits else 0.15
    if (job.num_optimizers > 1 and not job.staleness) or job.loads or job.reloads:
        share = 0.0
    if (batches := random.Random((-33 if job.fits else -21) * seed - 1)).random() < share:
        job = dataclasses.replace(job, accumulates=batches.choice((2, 2, 3)))
        if job.fits:
            job = dataclasses.replace(job, steps_per_epoch=_accepted(job))
        else:
            size = 2 if job.staleness else 6  # at staleness 0 a slice for each
            job = dataclasses.replace(job, num_examples=18, batch_size=size)
        # Workers die between an update and the closing of its batches.
        if job.ps_replicas == 1 and (job.staleness or batches.random() < 0.5):
            job = dataclasses.replace(job, num_workers=max(2, job.num_workers), epochs=job.epochs + 1)
            workers = [f"worker:{batches.randrange(job.num_workers)}" for _ in range(batches.choice((1, 2, 3)))]
            faults += [Fault(0.5 + 2 * batches.random(), "kill", worker) for worker in workers]
    if not job.staleness:
        job = dataclasses.replace(job, leases_ahead=random.Random(-32 * seed - 1).random() < 0.5)
    if not (job.fits or job.loads or job.reloads):
        job = dataclasses.replace(job, has_slots=random.Random(-22 * seed - 1).random() < 0.3)
    if not job.fits:
        passes = random.Random(-27 * seed - 1)
        job = dataclasses.replace(job, meets=passes.random() < MEETS)
        if passes.random() < BREAKS:
            job = dataclasses.replace(job, breaks=passes.choice((0.1, 0.3)), returns=passes.random() < RETURNS)
            job = dataclasses.replace(job, reloads=0)  # of the epochs before that all is trained
            raises = random.Random(-30 * seed - 1).random() < RAISES
            job = dataclasses.replace(job, raises=raises and not job.returns)
        keeps = job.accumulates > 1 and job.staleness > 0 and job.num_models == 1
        if keeps and random.Random(-31 * seed - 1).random() < 0.5:
            job = dataclasses.replace(job, keeps=True, has_slots=False)  # an update may have an example twice
        if (habits := random.Random(-29 * seed - 1)).random() < PASSES:
            job = dataclasses.replace(job, num_datasets=2, epochs=max(2, job.epochs))
        job = dataclasses.replace(job, peeks=habits.random() < PASSES, drop_last=habits.random() < PASSES)
        if habits.random() < PASSES and job.accumulates == 1:
            job = dataclasses.replace(job, batch_size=1)
    # Not where a script ends its pass between two updates: until it has made both of a batch, one is all of it.
    if job.num_optimizers > 1 and job.staleness and job.accumulates == job.ps_replicas == 1 and not job.raises:
        job = dataclasses.replace(job, alternates=random.Random(-34 * seed - 1).random() < ALTERNATES)
    if (drains := random.Random(-17 * seed - 1)).random() < 0.06:
        faults.append(Fault(0.3 + 2.5 * drains.random(), "drain", for_s=GRACE_S))
        # A script that begins anew with all others restores what it saved itself, and loads once more; it is warned.
        job = dataclasses.replace(job, saves=0.0, loads=False, reloads=0)
    if (hosts := random.Random(-18 * seed - 1)).random() < 0.1:
        faults += of_a_host(hosts, job)
        job = dataclasses.replace(job, saves=0.0, loads=False, reloads=0)  # all may begin anew, as above
    if (moments := random.Random(-25 * seed - 1)).random() < AT_MOMENTS:
        faults += at_moments(moments, job, MOMENTS, _fault)
        job = dataclasses.replace(job, saves=0.0, loads=False, reloads=0)  # as above
    if again := [*dies_again(random.Random(-39 * seed - 1))]:
        faults += again
        job = dataclasses.replace(job, saves=0.0, loads=False, reloads=0)  # as above
    faults += journal_full(random.Random(-40 * seed - 1))
    if form == "storm":
        faults += storm(random.Random(-20 * seed - 1), job, _fault)
        job = dataclasses.replace(job, saves=0.0, loads=False, reloads=0)  # as above
    faults += without_room(random.Random(-42 * seed - 1), job)
    faults += unreadable(random.Random(-43 * seed - 1), job)
    job, faults = standing_by(seed, job, faults, MOMENTS)
    job, faults = calm(seed, job, faults)
    return Schedule(seed, job, conditions, rng.choice((0.0, 0.05)), slow_disk_s, tuple(faults))


def _accepted(job: Job) -> int:
    """``steps_per_epoch`` of a fit that accumulates: no update may be of two passes."""
    num_batches = job.num_examples // job.batch_size
    if not job.steps_per_epoch or num_batches % job.steps_per_epoch == 0:
        return job.steps_per_epoch
    return 0 if num_batches % job.accumulates else job.steps_per_epoch // job.accumulates * job.accumulates


def _plan_ring(seed: int, is_storm: bool) -> Schedule:
    """Workers die, stand still, are cut off from the chief and from each other, further ones come; the chief is gone
    for a while."""
    rng = random.Random(seed)
    num_workers = rng.choice((2, 3, 3, 4))
    job = Job(
        num_workers=num_workers,
        num_ps=0,
        num_variables=rng.choice((1, 2)) * random.Random(-14 * seed - 1).choice((1, 1, 3)),
        num_examples=rng.choice((8, 12, 18, 25)),
        batch_size=rng.choice((2, 3, 4, 6)),
        epochs=rng.choice((1, 2, 3)),
        step_s=rng.choice((0.03, 0.1, 0.3)),
        min_workers=rng.choice((1, 1, 2)),
        max_workers=num_workers + rng.choice((0, 0, 2)),
        is_mean=rng.random() < 0.5,
        validates=random.Random(-8 * seed - 1).random() < 0.5,
        leaves_every=random.Random(-9 * seed - 1).choice((0, 0, 0, 3, 5)),
        checkpoints=False,
    )
    conditions = Conditions(
        delay_s=rng.choice((0.0005, 0.002, 0.01)),
        slow=rng.choice((0.0, 0.0, 0.02)),
        duplicate=random.Random(-11 * seed - 1).choice((0.0, 0.0, 0.05)),
        reset=random.Random(-13 * seed - 1).choice((0.0, 0.0, 0.0, 0.002, 0.004)),
    )
    faults = [_ring_fault(rng, job) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    if (between := random.Random(-12 * seed - 1)).random() < 0.5:
        faults = faults if between.random() < 0.7 else []
        for _ in range(between.choice((1, 2, 3))):
            faults += _faults_between(between, job)
    if random.Random(-16 * seed - 1).random() < 0.1:
        faults.append(Fault(0.0, "kill early", "worker:0"))
    if (admits := random.Random(-24 * seed - 1)).random() < ADMITS:
        faults += _admissions(admits, job)
    if (hosts := random.Random(-18 * seed - 1)).random() < 0.1:
        faults += of_a_host(hosts, job)
    if (moments := random.Random(-25 * seed - 1)).random() < AT_MOMENTS:
        faults += at_moments(moments, job, MOMENTS_OF_RING, _ring_fault)
    if is_storm:
        faults += storm(random.Random(-20 * seed - 1), job, _ring_fault)
    if random.Random(-10 * seed - 1).random() < 0.25:
        job = dataclasses.replace(job, fits=True, is_mean=True, leaves_every=0)
    job, faults = standing_by(seed, job, faults, MOMENTS_OF_RING)
    job, faults = calm(seed, job, faults)
    slow_disk_s = rng.choice((0.0, 0.0, 0.05))
    return Schedule(seed, job, conditions, 0.0, slow_disk_s, tuple(faults))


def _ring_fault(rng: random.Random, job: Job) -> Fault:
    at_s = 0.3 + 3 * rng.random()
    kind = rng.choice(KINDS_OF_RING)
    worker = f"worker:{rng.randrange(job.num_workers)}"
    if kind == "come":
        return Fault(at_s, kind, f"worker:{job.max_workers - 1}")
    if kind == "leave":
        return Fault(at_s, kind, "chief:0")
    if kind == "kill chief":
        return Fault(at_s, "kill", "chief:0")
    if kind in ("kill", "kill late"):
        return Fault(at_s, kind, worker)
    if kind == "pause":
        return Fault(at_s, kind, worker, for_s=rng.choice((0.5, 2.0, 9.0)) * rng.random())
    one, other = rng.sample(("chief:0", worker), 2)
    for_s = rng.choice((0.3, 2.0, 5.0, 12.0)) * rng.random() if kind != "reset" else 0.0
    return Fault(at_s, kind, one, other, for_s)


def _faults_between(rng: random.Random, job: Job) -> Iterator[Fault]:
    """Two workers of a ring lose their connections, some times in a row; or they are cut off from each other."""
    one, other = rng.sample([f"worker:{index}" for index in range(job.num_workers)], 2)
    kind, at_s = rng.choice(("reset", "reset", "reset", "cut", "cut one way")), 0.3 + 3 * rng.random()
    if kind != "reset":
        yield Fault(at_s, kind, one, other, rng.choice((0.3, 2.0, 5.0)) * rng.random())
        return
    for _ in range(rng.choice((1, 1, 2, 4))):
        yield Fault(at_s, kind, one, other)
        at_s += 0.2 * rng.random()


def _admissions(rng: random.Random, job: Job) -> Iterator[Fault]:
    """A worker dies, and when the ring admits the one that is started in its place others die one soon after another:
    some have finished the step then, and some have not."""
    workers = [f"worker:{index}" for index in range(job.num_workers)]
    rng.shuffle(workers)
    yield Fault(0.2 + rng.random(), rng.choice(("kill", "kill late")), workers[0])
    soon_s = rng.choice((0.02, 0.1, 0.3))
    for worker in workers[: rng.choice((1, 2, 2, 3))]:
        yield Fault(0.1, "kill admitting", worker, for_s=soon_s * rng.random() * rng.choice((0, 1, 1)))


def _changes(rng: random.Random, job: Job) -> Iterator[Fault]:
    """Other numbers of ps or workers, in every third job that can have them."""
    for _ in range(rng.choice((0, 0, 0, 0, 1, 2)) if job.staleness else 0):
        kind = rng.choice(("ps", "ps", "worker"))
        yield Fault(0.2 + 2.5 * rng.random(), "scale", kind, number=rng.choice((1, 2, 3)))


def _ends(rng: random.Random, job: Job) -> Iterator[Fault]:
    """In every third job ps are told to end, and killed when they take too long; where their number follows those that
    are there, further ones come, too."""
    for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 1, 2))):
        yield Fault(0.2 + 1.5 * rng.random(), "end", f"ps:{rng.randrange(job.num_ps)}", for_s=GRACE_S)
    if rng.random() < 0.1:
        yield Fault(0.2 + 1.0 * rng.random(), "come", f"ps:{job.num_ps}")


def _copied(rng: random.Random, job: Job, faults: list[Fault]) -> tuple[Job, list[Fault]]:
    """The job with a copy of what each ps holds: ps die when all copies are whole, and nothing else goes wrong; or
    anything does, and a ps dies that has just been cut off from its copy."""
    num_ps = rng.choice((2, 2, 3))
    num_variables = job.num_variables if job.num_variables == 1 else num_ps
    job = dataclasses.replace(job, ps_replicas=2, num_ps=num_ps, num_variables=num_variables, max_ps=0)
    if rng.random() < 0.5:
        times = [0.2 + 3 * rng.random() for _ in range(rng.choice((1, 2, 3)))]
        kill, ahead = KILLS_OF_COPIED
        faults = [Fault(at_s, kill, f"ps:{rng.randrange(num_ps)}") for at_s in times]
        if rng.random() < 0.5:  # when several workers commit at once
            job = dataclasses.replace(job, num_workers=3, step_s=0.03)
            faults = [dataclasses.replace(fault, kind=ahead, at_s=fault.at_s / 3) for fault in faults]
        return dataclasses.replace(job, epochs=job.epochs + 2), faults
    faults = [fault for fault in faults if fault.kind != "come" and (fault.kind, fault.task) != ("scale", "ps")]
    if rng.random() < 0.8:
        at_s, ps = 0.5 + 2 * rng.random(), f"ps:{rng.randrange(num_ps)}"
        kind, for_s = rng.choice(("reset", "cut", "cut one way")), 3 * rng.random()
        faults += [
            Fault(at_s, kind, ps, backup_of(ps, num_ps), for_s),
            Fault(at_s + (0.1 if kind == "reset" else 0.5) * rng.random(), "kill", ps),
        ]
    return job, faults


KINDS = (
    *("kill", "kill", "kill", "crash", "pause", "pause", "cut", "cut one way", "cut one way", "reset", "reset"),
    *("clock", "leave", "disk full", "flip"),
)


KINDS_OF_RING = (
    *("kill", "kill", "kill", "kill late", "kill late", "kill chief", "pause", "pause"),
    *("come", "cut", "cut one way", "reset", "leave"),
)


def _fault(rng: random.Random, job: Job) -> Fault:
    kind = rng.choice(KINDS)
    tasks = ["chief:0", *(f"worker:{i}" for i in range(job.num_workers)), *(f"ps:{i}" for i in range(job.num_ps))]
    at_s = 0.1 + 2.5 * rng.random()
    if kind in ("cut", "cut one way", "reset"):
        task, other = rng.sample(tasks, 2)
        return Fault(
            at_s, kind, task, other, rng.choice((0.3, 2.0, 5.0, 12.0)) * rng.random() if kind != "reset" else 0.0
        )
    if kind in ("crash", "leave"):
        return Fault(at_s, kind, "chief:0")
    if kind == "disk full":
        return Fault(at_s, kind, for_s=3 * rng.random())
    if kind == "flip":
        return Fault(at_s, kind)
    task = rng.choice(tasks)
    return Fault(at_s, kind, task, for_s=rng.choice((0.5, 2.0, 9.0)) * rng.random() if kind == "pause" else 0.0)


def _estranged(rng: random.Random, job: Job) -> list[Fault]:
    """The chief takes a worker for dead that works on and looks for its ps again: only fences keep it out."""
    at_s, for_s = 0.3 + 3 * rng.random(), rng.choice((3.0, 6.0, 12.0)) * rng.random()
    worker, ps = f"worker:{rng.randrange(job.num_workers)}", f"ps:{rng.randrange(job.num_ps)}"
    return [
        Fault(at_s, rng.choice(("cut", "cut one way")), "chief:0", worker, for_s),
        Fault(at_s + for_s * rng.random(), "reset", worker, ps),
    ]
