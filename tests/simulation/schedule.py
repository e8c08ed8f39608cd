"""A run to the last bit: the job, the weather of network and disk, and the faults; and what comes of it."""

from __future__ import annotations

import dataclasses
import errno
import pathlib
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from stratagem.chief.journal.journal import Journal
from stratagem.chief.leasing import lease_book
from stratagem.chief.servers import servers
from stratagem.errors import ConfigurationError, JobStoppedError, JournalLostError
from tests.simulation import fits
from tests.simulation.cluster import Cluster, Job
from tests.simulation.copies import Copies
from tests.simulation.invariants import Invariants
from tests.simulation.network import Conditions
from tests.simulation.rings import Rings
from tests.simulation.threads import here
from tests.simulation.world import START, SimulationError, World


class Moment(NamedTuple):
    """When the chief writes a record of this kind into its journal, a request for this method arrives, or (``message``
    or ``reply`` and the method) a message of its stream arrives or its reply leaves: the next time, or a later one, and
    then ``soon_s``."""

    what: str
    number: int = 1
    soon_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.soon_s:.3f} after {self.what!r} the {self.number}. time from"


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
    moment: Moment | None = None
    """From then on waited for."""

    def __str__(self) -> str:
        who = f" {self.task}" + (f"-{self.other}" if self.other else "")
        how_many = f" to {self.number}" if self.number else ""
        when = f"{self.moment or 'at'} {self.at_s:.3f}"
        return f"{self.kind}{who}{how_many} {when}" + (f" for {self.for_s:.3f}" if self.for_s else "")


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


KILLS_OF_COPIED = ("kill copied", "kill ahead")


class _Faults:
    """Makes them happen."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._awaiting: list[Fault] = []

    def happened(self, what: str) -> None:
        """A moment that has a name has come."""
        waiting, self._awaiting = self._awaiting, []
        for fault in waiting:
            moment = fault.moment
            assert moment is not None
            left = moment._replace(number=moment.number - (moment.what == what))
            if left.number:
                self._awaiting.append(dataclasses.replace(fault, moment=left))
            else:
                self._world.after(left.soon_s, None, self._do, dataclasses.replace(fault, moment=None))

    def arrange(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self._world.after(fault.at_s, None, self._do, fault)

    def _do(self, fault: Fault) -> None:
        if self._cluster.finished is not None:
            return
        self._world.note(f"* {fault}")
        if fault.moment is not None:
            self._awaiting.append(fault)
            return
        kinds: dict[str, Callable[[Fault], None]] = {
            "kill": lambda fault: self._kill(fault.task),
            "kill copied": self._kill_copied,
            "kill ahead": lambda fault: self._world.copies.doomed.add(fault.task),  # type: ignore[attr-defined]
            "kill between": lambda fault: self._cluster.doomed_between.add(fault.task),
            "kill late": lambda fault: self._world.rings.doomed.add(fault.task),  # type: ignore[attr-defined]
            "kill admitting": self._kill_admitting,
            "kill early": lambda fault: self._world.rings.doomed_early.add(fault.task),  # type: ignore[attr-defined]
            "crash": self._crash,
            "pause": self._pause,
            "cut": lambda fault: self._cut(fault, both=True),
            "cut one way": lambda fault: self._cut(fault, both=False),
            "reset": lambda fault: self._cluster.network.reset(fault.task, fault.other),
            "clock": self._clock,
            "leave": self._leave,
            "disk full": self._disk_full,
            "journal full": self._journal_full,
            "read-only": self._read_only,
            "unreadable": self._unreadable,
            "flip": lambda fault: self._spoil(fault, self._cluster.disk.flip),
            "remove": lambda fault: self._spoil(fault, self._cluster.disk.remove),
            "scale": self._scale,
            "end": self._end,
            "drain": self._drain,
            "come": lambda fault: self._cluster.start_task(fault.task),
        }
        kinds[fault.kind](fault)

    def _kill(self, task: str) -> None:
        if task in self._cluster.tasks:
            self._cluster.tasks[task].kill()

    def _kill_admitting(self, fault: Fault) -> None:
        self._world.rings.doomed_admitting.append((fault.task, fault.for_s))  # type: ignore[attr-defined]

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

    def _drain(self, fault: Fault) -> None:
        """Everything is told to end, as on a node that is drained, and comes back."""
        for name in [*self._cluster.tasks]:
            later = {"ps": self._end, "chief": self._leave}.get(
                name.partition(":")[0], lambda one: self._kill(one.task)
            )
            one = dataclasses.replace(fault, task=name)
            self._world.after(0.3 * self._world.random.random(), None, later, one)

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
            except (ConfigurationError, JournalLostError):  # too early, or its disk is full
                self._world.after(0.2, None, self._scale, fault)
                return
            except JobStoppedError:
                return
            cluster.wanted[fault.task] = fault.number
            for index in range(fault.number):
                self._world.after(0.2 * self._world.random.random(), None, cluster.start_wanted, fault.task, index)

        self._world.after(0.0, chief, cluster.loop_of(chief).enter, ask)

    def _disk_full(self, fault: Fault) -> None:
        self._cluster.disk.full_until, self._cluster.disk.full_for = self._world.now + fault.for_s, fault.task
        self._cluster.disk.full_errno = errno.ENOSPC

    def _read_only(self, fault: Fault) -> None:
        self._disk_full(fault)
        self._cluster.disk.full_errno = errno.EROFS

    def _unreadable(self, fault: Fault) -> None:
        disk = self._cluster.disk
        disk.unreadable_until, disk.unreadable_for = self._world.now + fault.for_s, fault.task
        disk.was_unreadable_long |= fault.for_s > servers.READ_AGAIN_S
        disk.unreadable_errno = self._world.random.choice((errno.EIO, errno.EACCES))

    def _journal_full(self, fault: Fault) -> None:
        self._cluster.disk.state_full_until = self._world.now + fault.for_s

    def _spoil(self, fault: Fault, spoil: Callable[[pathlib.Path], None]) -> None:
        """Not between the moment in which ps find a checkpoint whole and that in which they have read it: as little as
        in their memory."""
        if self._cluster.finished is not None:
            return
        job, stores = self._cluster.chief_job, self._world.checks.stores.values()  # type: ignore[attr-defined]
        is_moving = job is not None and job.scaling._is_moving
        if is_moving or any(store.state.origin is not None and store.state.origin._rows for store in stores):
            self._world.after(0.1, None, self._spoil, fault, spoil)
            return
        files = sorted(path for path in (self._cluster.folder / "checkpoints").glob("step-*/*") if path.is_file())
        if files:
            spoil(self._world.random.choice(files))


def hooks() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Where the product is looked at; see :func:`tests.simulation.invariants.hooks`."""

    def on_write(real: Any) -> Any:
        def write(self: Any, kind: str, **named: Any) -> None:
            real(self, kind, **named)
            here().faults.happened(kind)  # type: ignore[attr-defined]

        return write

    yield Journal, "write", on_write


def _check_copies(schedule: Schedule, cluster: Cluster) -> None:
    """Ps that die one at a time, when another one has all of what they hold, cost no update; unless a worker ended too
    (it was silent, say), in the middle of an update of several batches, which nobody completes."""
    is_copied = all(fault.kind in KILLS_OF_COPIED for fault in schedule.faults)
    if cluster.job.accumulates > 1:
        workers = [each.name for each in cluster.world.processes if each.name.startswith("worker:")]
        is_copied = is_copied and len(workers) == len({*workers})
    if cluster.job.ps_replicas > 1 and is_copied and (num_lost := cluster.chief_job.journal.history.updates_lost):
        cluster.world.fail(f"{num_lost} updates are lost, though there were copies")


def _check_ends(schedule: Schedule, cluster: Cluster) -> None:
    """A ps that is told to end once, and nothing else goes wrong, costs no update; unless workers in step went on
    without it, since they train nothing that is there, and it takes all ps back with it. One without a part of a model
    may be said to lack what that was given, and of a batch that the second optimizer leaves out, its update."""
    job = cluster.job
    num_variables = job.num_variables // job.num_models
    if (
        job.alternates
        or (job.staleness == 0 and num_variables < job.num_ps)
        or (job.num_models > 1 and num_variables < max(job.num_ps, job.max_ps))
    ):
        return
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
    is_harmless = all(fault.kind == "reset" for fault in schedule.faults) and not schedule.conditions.reset
    rings = world.rings = Rings(world, cluster, is_harmless)  # type: ignore[attr-defined]
    faults = world.faults = _Faults(cluster)  # type: ignore[attr-defined]
    faults.arrange(schedule.faults)
    before(cluster)
    failure, num_asking = "", lease_book.NUM_ASKING
    try:
        lease_book.NUM_ASKING = 1 if schedule.job.leases_ahead else num_asking
        cluster.run()
        if schedule.job.min_workers:
            rings.ended()
        else:
            checks.ended()
            is_chief = (fault.task == "chief:0" or fault.kind == "drain" for fault in schedule.faults)
            fits.check_histories(cluster, any(is_chief))
            _check_ends(schedule, cluster)
            _check_copies(schedule, cluster)
        failure = world.failures[0] if world.failures else ""
    except SimulationError as error:
        failure = str(error)
    finally:
        lease_book.NUM_ASKING = num_asking
        cluster.close()
        checks.stores.clear()
    return Outcome(failure, world.trace, world.num_events, world.now - START, checks.num_checkpoints)
