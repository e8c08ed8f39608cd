"""What a seed decides: the job, the weather of network and disk, and the faults. And one run of that."""

from __future__ import annotations

import dataclasses
import math
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stratagem.cluster.backups import backup_of
from stratagem.errors import ConfigurationError, JobStoppedError
from tests.simulation.cluster import CHIEF, Cluster, Job
from tests.simulation.copies import Copies
from tests.simulation.invariants import Invariants
from tests.simulation.network import Conditions
from tests.simulation.world import SimulationError, World

START = 1000.0
GRACE_S = 30.0
"""Seconds after which a supervisor kills what it has told to end."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that goes wrong."""

    at_s: float
    """Since the start."""
    kind: str
    task: str = ""
    other: str = ""
    for_s: float = 0.0
    number: int = 0

    def __str__(self) -> str:
        who = f" {self.task}" + (f"-{self.other}" if self.other else "")
        how_many = f" to {self.number}" if self.number else ""
        return f"{self.kind}{who}{how_many} at {self.at_s:.3f}" + (f" for {self.for_s:.3f}" if self.for_s else "")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A run, to the last bit."""

    seed: int
    job: Job
    conditions: Conditions
    yields: float
    slow_disk_s: float
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        faults = "; ".join(map(str, self.faults)) or "no faults"
        return (
            f"seed {self.seed}: {self.job}, {self.conditions}, yields {self.yields}, disk {self.slow_disk_s}: {faults}"
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    failure: str
    """Empty: nothing failed."""
    trace: Sequence[str]
    num_events: int
    seconds: float
    """Of virtual time."""
    num_checkpoints: int = 0


def plan(seed: int, has_table: bool = False) -> Schedule:
    """The schedule of a seed; with a table, or perhaps without."""
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
    if job.staleness and job.num_ps > 1 and (copied := random.Random(-5 * seed - 1)).random() < 0.5:
        job, faults = _copied(copied, job, faults)
    forms = random.Random(-6 * seed - 1)
    if has_table or (forms.random() < 0.25 and not is_estranged):
        job = dataclasses.replace(job, has_table=True, num_variables=job.num_ps)
    job = dataclasses.replace(job, prepares_apart=forms.random() < 0.25)
    if forms.random() < 0.5 and job.num_variables > 1 and not (job.has_table or job.staleness):
        job = dataclasses.replace(job, num_optimizers=2)
    faults.sort(key=lambda fault: fault.at_s)
    return Schedule(seed, job, conditions, rng.choice((0.0, 0.05)), slow_disk_s, tuple(faults))


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


KILLS_OF_COPIED = ("kill copied", "kill ahead")
KINDS = (
    *("kill", "kill", "kill", "crash", "pause", "pause", "cut", "cut one way", "cut one way", "reset", "reset"),
    *("clock", "leave", "disk full", "flip"),
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


class _Faults:
    """Makes them happen."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world

    def arrange(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self._world.after(fault.at_s, None, self._do, fault)

    def _do(self, fault: Fault) -> None:
        if self._cluster.finished is not None:
            return
        self._world.note(f"* {fault}")
        kinds: dict[str, Callable[[Fault], None]] = {
            "kill": lambda fault: self._kill(fault.task),
            "kill copied": self._kill_copied,
            "kill ahead": lambda fault: self._world.copies.doomed.add(fault.task),  # type: ignore[attr-defined]
            "crash": self._crash,
            "pause": self._pause,
            "cut": lambda fault: self._cut(fault, both=True),
            "cut one way": lambda fault: self._cut(fault, both=False),
            "reset": lambda fault: self._cluster.network.reset(fault.task, fault.other),
            "clock": self._clock,
            "leave": self._leave,
            "disk full": self._disk_full,
            "flip": self._flip,
            "scale": self._scale,
            "end": self._end,
            "come": lambda fault: self._cluster.start_task(fault.task),
        }
        kinds[fault.kind](fault)

    def _kill(self, task: str) -> None:
        if task in self._cluster.tasks:
            self._cluster.tasks[task].kill()

    def _kill_copied(self, fault: Fault) -> None:
        """Once another ps has all of what this one holds, and so for every ps."""
        if self._world.copies.are_whole():  # type: ignore[attr-defined]
            self._kill(fault.task)
        elif self._cluster.finished is None:
            self._world.after(0.05, None, self._kill_copied, fault)

    def _crash(self, fault: Fault) -> None:
        self._kill(fault.task)
        if self._cluster.disk.crash(self._cluster.folder / "state" / "journal.jsonl"):
            self._world.checks.accepted.clear()  # type: ignore[attr-defined]  # what no ps can tell either comes again

    def _pause(self, fault: Fault) -> None:
        if fault.task in self._cluster.tasks:
            process = self._cluster.tasks[fault.task]
            process.paused_until = max(process.paused_until, self._world.now + fault.for_s)

    def _cut(self, fault: Fault, both: bool) -> None:
        network = self._cluster.network
        for source, target in ((fault.task, fault.other), (fault.other, fault.task))[: 2 if both else 1]:
            network.cut(source, target)
            self._world.after(fault.for_s, None, network.heal, source, target)

    def _clock(self, fault: Fault) -> None:
        if fault.task in self._cluster.tasks:
            self._cluster.tasks[fault.task].wall_offset_s += self._world.random.choice((-7200.0, -5.0, 30.0, 7200.0))

    def _leave(self, fault: Fault) -> None:
        chief = self._cluster.tasks.get("chief:0")
        if chief is not None and chief.alive and (leave := self._cluster.loop_of(chief).signals.get(signal.SIGTERM)):
            self._world.after(0.0, chief, self._cluster.loop_of(chief).enter, leave)

    def _end(self, fault: Fault) -> None:
        ps = self._cluster.tasks.get(fault.task)
        if ps is not None and ps.alive:
            self._world.after(0.0, ps, self._cluster.signal, ps)
            self._world.after(fault.for_s, ps, ps.kill)

    def _scale(self, fault: Fault) -> None:
        """Asks the chief, as `stratagem scale` does, and starts the tasks, as the launcher does."""
        cluster, chief = self._cluster, self._cluster.tasks.get("chief:0")
        if cluster.finished is not None:
            return
        if chief is None or not chief.alive or cluster.chief_job is None:
            self._world.after(0.2, None, self._scale, fault)
            return

        def ask() -> None:
            numbers = (fault.number, 0) if fault.task == "worker" else (0, fault.number)
            try:
                cluster.chief_job.scaling.scale(*numbers)
            except ConfigurationError:  # too early
                self._world.after(0.2, None, self._scale, fault)
                return
            except JobStoppedError:
                return
            cluster.wanted[fault.task] = fault.number
            for index in range(fault.number):
                self._world.after(0.2 * self._world.random.random(), None, cluster.start_wanted, fault.task, index)

        self._world.after(0.0, chief, cluster.loop_of(chief).enter, ask)

    def _disk_full(self, fault: Fault) -> None:
        self._cluster.disk.full_until = self._world.now + fault.for_s

    def _flip(self, fault: Fault) -> None:
        files = sorted(path for path in (self._cluster.folder / "checkpoints").glob("step-*/*") if path.is_file())
        if files:
            self._cluster.disk.flip(self._world.random.choice(files))


def _check_copies(schedule: Schedule, cluster: Cluster) -> None:
    """Ps that die one at a time, when another one has all of what they hold, cost no update."""
    is_copied = all(fault.kind in KILLS_OF_COPIED for fault in schedule.faults)
    if cluster.job.ps_replicas > 1 and is_copied and (num_lost := cluster.chief_job.journal.history.updates_lost):
        cluster.world.fail(f"{num_lost} updates are lost, though there were copies")


def _check_ends(schedule: Schedule, cluster: Cluster) -> None:
    """A ps that is told to end once, and nothing else goes wrong, costs no update."""
    ended = [fault.task for fault in schedule.faults if fault.kind == "end"]
    is_polite = all(fault.kind in ("end", "come") for fault in schedule.faults) and len(set(ended)) == len(ended)
    if is_polite and (num_lost := cluster.chief_job.journal.history.updates_lost):
        cluster.world.fail(f"{num_lost} updates are lost, though {', '.join(ended)} had time to hand over")


def run(schedule: Schedule, before: Callable[[Cluster], Any] = lambda cluster: None) -> Outcome:
    """Runs it, inside :func:`tests.simulation.install.installed`."""
    world = World(schedule.seed)
    random.seed(schedule.seed)  # for what the product leaves to chance
    world.yields = schedule.yields
    cluster = Cluster(world, schedule.job)
    cluster.network.conditions = schedule.conditions
    cluster.disk.slow = schedule.slow_disk_s
    checks = world.checks = Invariants(world, cluster)  # type: ignore[attr-defined]
    world.copies = Copies(checks)  # type: ignore[attr-defined]
    _Faults(cluster).arrange(schedule.faults)
    before(cluster)
    failure = ""
    try:
        cluster.run()
        checks.ended()
        _check_ends(schedule, cluster)
        _check_copies(schedule, cluster)
        failure = world.failures[0] if world.failures else ""
    except SimulationError as error:
        failure = str(error)
    finally:
        cluster.close()
        checks.stores.clear()
    return Outcome(failure, world.trace, world.num_events, world.now - START, checks.num_checkpoints)


assert CHIEF
