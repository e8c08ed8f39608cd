"""A job: the chief, parameter servers and workers of the product, and who starts them again."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from stratagem.chief import __main__ as chief_main
from stratagem.chief.membership.session import SessionState
from stratagem.cluster.config import ChiefConfig, PsConfig, WorkerConfig
from stratagem.cluster.exit_codes import EXIT_PREEMPTED
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import JournalLostError
from stratagem.launch.supervisor import AWAY_S
from stratagem.ps import __main__ as ps_main
from stratagem.worker import runtime as worker_runtime
from tests.simulation import fits, rings, script
from tests.simulation.disk import Disk
from tests.simulation.loop import Loop
from tests.simulation.network import AioChannel, Channel, Network, Server
from tests.simulation.threads import enter, here
from tests.simulation.world import CHIEFS, STANDBY, START, Process, World

CHIEF, OTHER_CHIEF = "10.0.0.1:7000", "10.0.0.3:7001"
DEADLINE_S = 400.0
"""Virtual seconds in which every job has to be over."""

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained, and by whom."""

    num_workers: int = 2
    num_ps: int = 2
    num_variables: int = 2
    """Each lies whole on one ps, while there are as many."""
    has_table: bool = False
    """There is a table as well, with a row for each example; then each ps has a variable, too."""
    num_optimizers: int = 1
    """Of two, each has half of the variables, and the second one steps on a batch after the first."""
    alternates: bool = False
    """The second one steps on half of the batches only (:meth:`is_left_out`), as a GAN's generator does."""
    has_slots: bool = False
    """Optimizers keep a sum of squares beside each weight, which changes no update."""
    accumulates: int = 1
    """Batches of an update; what is left at the end of a pass is in none, or (``keeps``) in the first of the next."""
    keeps: bool = False
    num_models: int = 1
    """Trained in turn, an epoch each; each has its share of the variables and an optimizer."""
    prepares_late: bool = False
    """Those after the first are prepared when their turn comes."""
    prepares_apart: bool = False
    """Another model, which nothing changes, is prepared first."""
    fits: bool = False
    """Workers call ``Model.fit``, with a validation after each epoch."""
    steps_per_epoch: int = 0
    """Batches of an epoch of ``Model.fit``, fewer than there are; 0: all."""
    ps_replicas: int = 1
    max_ps: int = 0
    num_chiefs: int = 1
    """Of two one stands by, and takes the other's place at another address."""
    reads_address: bool = False
    """Tasks read where the chief is from the file in the folder of its journal; else they know both addresses."""
    num_datasets: int = 1
    """Of two each has every second pass; ``epochs`` counts the passes over all."""
    peeks: bool = False
    """Before each pass all workers take the first batch of one that they leave."""
    num_examples: int = 24
    batch_size: int = 2
    drop_last: bool = False
    epochs: int = 2
    staleness: float = float("inf")
    leases_ahead: bool = False
    """At staleness 0 workers lease as many steps ahead as in asynchronous training, however few they are."""
    step_s: float = 0.1
    """Seconds a step takes, at most."""
    calm_s: float = 0.0
    """So long the scripts do nothing, all at the same time, before a step; 0: they never do."""
    calm_at: float = 0.0
    """The second in which that is, or (of a ring, whose workers wait for each other) the step."""
    session_timeout_s: float = 6.0
    checkpoint_every_s: float = 0.0
    checkpoints: bool = True
    saves: float = 0.0
    """The share of steps after which a worker saves a checkpoint of its own; it begins with the newest of these."""
    loads: bool = False
    """Workers load other values once their model is prepared."""
    reloads: int = 0
    """After so many epochs they load the first variable; 0: they do not."""
    meets: bool = False
    """Workers call ``barrier()`` after each epoch."""
    breaks: float = 0.0
    """The share of batches after which a worker leaves its pass; one stays: the first, or each in turn."""
    returns: bool = False
    """It leaves the script with it."""
    raises: bool = False
    """It leaves the pass by an error between backward and update, or between two updates, which the script catches."""
    min_workers: int = 0
    """Above 0 there are no ps: a ring that goes on while it has so many workers."""
    max_workers: int = 0
    is_mean: bool = False
    """A ring's gradients are means over the global batch, not sums."""
    validates: bool = False
    """A ring counts the examples of another dataset after each epoch, and those of each batch before its backward."""
    leaves_every: int = 0
    """A ring's pass is left with each step whose number is a multiple of this; 0: never."""

    @property
    def is_counted(self) -> bool:
        """Whether the weights say which examples were applied: not where a step is the mean of those that are left."""
        return not (self.fits and self.staleness == 0)

    def is_left_out(self, examples: Sequence[int]) -> bool:
        """Whether the second optimizer makes no update of a batch."""
        return self.alternates and sum(examples) % 2 == 1

    def key_of(self, number: int) -> tuple[int, int]:
        """(dataset, epoch) of a pass of the script that trains, as the product counts."""
        return 1 + number % self.num_datasets, number // self.num_datasets * (1 + self.peeks) + self.peeks

    def pass_of(self, key: tuple[int, int]) -> int:
        """The pass of the script that a dataset and its epoch are; below 0: one that is left before anything is
        trained, as -1 before pass 0."""
        dataset, epoch = key
        number = epoch // (1 + self.peeks) * self.num_datasets + dataset - 1
        return ~number if self.peeks and epoch % 2 == 0 else number


COLLECT_EVERY = 8
"""Jobs whose objects are thrown away together."""
LOOK_AGAIN_EVERY = 256
"""Jobs after which also that is looked through which was still in use then: it is in use for good, most of it."""


def remove_leftovers() -> None:
    """Removes the folders of simulators that were killed."""
    for folder in pathlib.Path(MEMORY).glob("simulation-*-*"):
        if not psutil.pid_exists(int(folder.name.split("-")[1])):
            shutil.rmtree(folder, ignore_errors=True)


class Cluster:
    """All processes of a job.

    Args:
        world: where it runs.
        job: what is trained.
    """

    _num_closed = 0

    def __init__(self, world: World, job: Job) -> None:
        self.world = world
        self.job = job
        self.network = Network(world)
        self.tasks: dict[str, Process] = {}
        self.chief_job: Any = None
        self.finished: int | None = None
        self.served: set[str] = set()
        """The ps that ended well: what they held is the result, whoever is started in their place."""
        self.wanted: dict[str, int] = {"ps": job.max_ps} if job.max_ps else {}
        """How many tasks of a kind were asked for while the job ran."""
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"simulation-{os.getpid()}-", dir=MEMORY))
        self.disk = Disk(self.folder)
        world.disk = self.disk  # type: ignore[attr-defined]
        world.cluster = self  # type: ignore[attr-defined]
        self.calm_until = 0.0
        """When what is calm goes on; 0: it has not been yet."""
        self.doomed_between: set[str] = set()
        """Workers that die at the next :meth:`between_updates`."""
        self.dismissed: set[str] = set()
        """Tasks that ended because fewer were wanted."""
        self._loops: dict[Process, Loop] = {}
        self._num_started = 0

    @property
    def checkpoint_dir(self) -> str:
        return str(self.folder / "checkpoints") if self.job.checkpoints else ""

    def compute(self, step: int, share: float = 1.0) -> None:
        """What the script of a worker does for a step, which takes a while."""
        job, world = self.job, self.world
        world.block(job.step_s * world.random.random() * share)
        if job.calm_s and (step == job.calm_at if job.min_workers else world.now >= START + job.calm_at):
            self.calm_until = self.calm_until or world.now + job.calm_s
            if self.calm_until > world.now:
                world.block(self.calm_until - world.now)

    def between_updates(self, process: Process) -> None:
        """A worker has made an update of its batch, and another one follows; or it dies here."""
        if process.name in self.doomed_between:
            self.doomed_between.discard(process.name)
            self.world.after(0.0, None, process.kill)
            self.world.block()

    # -- processes -------------------------------------------------------------------------------------------

    @property
    def own_dir(self) -> str:
        """Where scripts save."""
        return str(self.folder / "own")

    def start(self) -> None:
        """Starts all tasks."""
        names = [*(f"ps:{i}" for i in range(self.job.num_ps)), *(f"worker:{i}" for i in range(self.job.num_workers))]
        for name in [*CHIEFS[: self.job.num_chiefs], *names]:
            self.world.after(self.world.random.random() * 0.2, None, self.start_task, name)
        if self.job.calm_s:  # else nobody has time to miss it
            self.world.after(1.0, None, self._end_lost)

    def start_wanted(self, kind: str, index: int) -> None:
        """Starts a task that is wanted, unless its work is done."""
        name = f"{kind}:{index}"
        ended = name in self.tasks and self.tasks[name].exit_code == 0
        if index < self.wanted.get(kind, 0) and not (ended and name not in self.dismissed):
            self.dismissed.discard(name)
            self.start_task(name)

    def start_task(self, name: str) -> None:
        """Starts a task, unless it is there or nobody needs it any more; beside a chief that is there, another."""
        if name == "chief:0" and self.job.num_chiefs > 1 and name in self.tasks and self.tasks[name].alive:
            name = STANDBY
        if self.finished is not None or (name in self.tasks and self.tasks[name].alive):
            return
        self._num_started += 1
        kind = name.partition(":")[0]
        is_chief = name in CHIEFS
        address = self._chief_address() if is_chief else f"10.0.0.2:{8000 + self._num_started}"
        process = Process(self.world, name, address)
        if name in self.tasks:
            process.wall_offset_s = self.tasks[name].wall_offset_s
        self.tasks[name] = process
        process.on_death.append(lambda: self._died(process))
        self.world.note(f"{name} starts")
        if is_chief:
            self._start_chief(process)
        elif kind == "ps":
            process.spawn(lambda: process.end(ps_main.run(self._ps_config(name))), "main")
        else:
            is_ring = self.job.min_workers > 0
            if self.job.fits:
                train = rings.train_fit if is_ring else fits.train
            else:
                train = rings.train if is_ring else script.train
            process.spawn(lambda: process.end(script.run(self, process, train)), "main")

    def _chief_address(self) -> str:
        """Of the next one: where the other is not, or where none has been."""
        if self.job.reads_address:
            return f"10.0.0.1:{7000 + self._num_started}"
        taken = [self.tasks[name].address for name in CHIEFS if name in self.tasks and self.tasks[name].alive]
        return OTHER_CHIEF if CHIEF in taken else CHIEF

    def _takes_place(self, process: Process) -> None:
        """A chief that stood by serves: the faults of the chief are its own from now on."""
        if process.name == STANDBY:
            other = self.tasks.pop("chief:0", None)
            self.tasks["chief:0"], process.name = self.tasks.pop(STANDBY), "chief:0"
            if other is not None:
                self.tasks[STANDBY], other.name = other, STANDBY
            self.world.note(f"{process.name} is {process.address} now")

    def _end_lost(self) -> None:
        """As `stratagem run` does: a worker that the chief has lost and that does not end is killed."""
        chief, now = self.tasks.get("chief:0"), self.world.now
        sessions = self.chief_job.sessions.tasks if chief is not None and chief.alive and self.chief_job else {}
        for name, process in [*self.tasks.items()]:
            session = sessions.get(name)
            if session is None or session.task.type != "worker" or session.pid != process.pid:
                continue
            if process.alive and session.state is SessionState.LOST and now > session.lost_at + AWAY_S:
                process.kill()
        if self.finished is None:
            self.world.after(1.0, None, self._end_lost)

    def _start_chief(self, process: Process) -> None:
        loop = Loop(process, self.network.try_connection, lambda: self.disk.slow * self.world.random.random())
        self._loops[process] = loop
        job = self.job
        config = ChiefConfig(
            bind=CHIEF,
            num_workers=job.num_workers,
            min_workers=job.min_workers,
            max_workers=job.max_workers,
            num_ps=job.num_ps,
            ps_replicas=job.ps_replicas,
            max_ps=job.max_ps,
            insecure=True,
            state_dir=str(self.folder / "state"),
            standby=job.num_chiefs > 1,
            checkpoint_dir=self.checkpoint_dir,
            checkpoint_every_s=job.checkpoint_every_s,
            checkpoint_roots=self.own_dir,
            session_timeout_s=job.session_timeout_s,
            session_grace_s=job.session_timeout_s / 2,
            heartbeat_interval_s=min(0.5, job.session_timeout_s / 4),
        )

        async def serve() -> None:
            try:
                process.globals["exit_code"] = await chief_main.serve(config)
            except JournalLostError:  # as it starts; a supervisor starts it again
                process.globals["exit_code"] = EXIT_PREEMPTED
            except Exception as error:
                if self.world.closing:
                    return
                self.world.fail(f"the chief failed: {type(error).__name__}: {error}")
                return
            process.end(process.globals["exit_code"])

        def begin() -> None:
            loop.create_task(serve())

        self.world.after(0.0, process, loop.enter, begin)

    @property
    def _said_address(self) -> str:
        """Where tasks look for the chief."""
        if self.job.num_chiefs == 1:
            return CHIEF
        return f"file:{self.folder}/state/chief.address" if self.job.reads_address else f"{CHIEF},{OTHER_CHIEF}"

    def _ps_config(self, name: str) -> PsConfig:
        return PsConfig(
            task=name,
            bind="10.0.0.2:0",
            chief=self._said_address,
            insecure=True,
            transport="grpc",
            checkpoint_dir=self.checkpoint_dir,
            checkpoint_roots=self.own_dir,
            max_store_bytes=1 << 30,
        )

    def join_as(self, resolver: Any) -> tuple[WorkerConfig, ClusterSpec]:
        """In the place of ``stratagem.strategy.roles.join_as``: who the worker is that asks."""
        assert self.world.process is not None
        job = self.job
        config = WorkerConfig(
            task=self.world.process.name,
            bind="10.0.0.2:0",
            chief=self._said_address,
            insecure=True,
            transport="grpc",
            chunk_bytes=64,
            collective_timeout_s=60.0,
            checkpoint_dir=self.checkpoint_dir,
        )
        own = int(self.world.process.name.partition(":")[2]) + 1
        workers = tuple(f"10.0.0.2:{7100 + i}" for i in range(max(job.num_workers, own)))
        ps = tuple(f"10.0.0.2:{7200 + i}" for i in range(job.num_ps))
        return config, ClusterSpec(chief=(CHIEF,), worker=workers, ps=ps)

    def _died(self, process: Process) -> None:
        code = process.exit_code
        self.world.note(f"{process.name} {'is dead' if code is None else f'ends with {code}'}")
        self.network.process_died(process)
        kind, _, index = process.name.partition(":")
        stopping = None if self.chief_job is None else self.chief_job.sessions.stopping
        if stopping is not None and stopping.exit_code not in (0, 143):  # of the next job nobody has asked for others
            self._want_all()
            if not self.tasks["chief:0"].alive and self.tasks["chief:0"].exit_code is None:
                for name in [name for name, each in self.tasks.items() if each.exit_code == 0]:  # it begins that
                    self.world.after(0.2 * self.world.random.random(), None, self.start_task, name)
        wanted = self._num_wanted(kind)
        if kind == "ps" and self.chief_job is not None:  # needed until others have its rows
            wanted = max(wanted, self.chief_job.sessions.num_ps)
        if int(index) >= wanted:
            self.dismissed.add(process.name)
            return
        if code == 0 and (kind != "ps" or stopping is not None):
            self.served.add(process.name)
        if process.name in CHIEFS and code is not None and code != 143:
            self._job_ended(process, code)
        elif code != 0 or process.name.startswith("ps:"):
            again_s = 0.1 + 2 * self.world.random.random() ** 2
            self.world.after(again_s, None, lambda: self.start_task(process.name))  # a chief's may be another by then

    def _job_ended(self, process: Process, code: int) -> None:
        """So says a chief: with 0 one that stands by says the same, else the launcher ends it."""
        if self.finished is None:
            self.finished = code
        elif self.finished == 0 and code:
            self.world.fail(f"{process} ended with {code}, though the job had ended with 0")
        for name in CHIEFS if code else ():
            if name in self.tasks:
                self.tasks[name].kill()

    def _want_all(self) -> None:
        self.wanted = {"ps": self.job.max_ps} if self.job.max_ps else {}
        for name in sorted(self.dismissed):
            kind, _, index = name.partition(":")
            if int(index) < self._num_wanted(kind):
                self.world.after(0.2 * self.world.random.random(), None, self.start_task, name)
                self.dismissed.discard(name)

    def _num_wanted(self, kind: str) -> int:
        return self.wanted.get(kind, {"ps": self.job.num_ps, "worker": self.job.num_workers}.get(kind, 1))

    def signal(self, ps: Process) -> None:
        """SIGTERM to a ps."""
        for thread in ps.threads[:1]:
            self.world.interrupt(thread, ps_main._Terminated())

    def loop_of(self, chief: Process) -> Loop:
        """Its event loop."""
        return self._loops[chief]

    # -- what stands in the place of gRPC -----------------------------------------------------------------------

    def serve(self, bind: str, register: Callable[[Any], None], **_: Any) -> Any:
        """In the place of ``stratagem.rpc.server.serve``."""
        process = self.world.process
        assert process is not None
        server = Server(self.network, process)
        register(server)
        return _Running(server)

    async def serve_aio(self, bind: str, register: Callable[[Any], None], **_: Any) -> Any:
        """In the place of ``stratagem.rpc.server.serve_aio``."""
        process = self.world.process
        assert process is not None
        loop: Any = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        self._takes_place(process)
        server = Server(self.network, process, loop)
        server.is_stopped = lambda: self.chief_job.finished.done()
        register(server)
        return _Running(server)

    def connect(self, address: str, peer: str = "", *_: Any, **__: Any) -> Channel:
        """In the place of ``stratagem.rpc.channels.connect``."""
        assert self.world.process is not None
        return Channel(self.network, self.world.process, address)

    def connect_aio(self, address: str, peer: str = "", *_: Any, **__: Any) -> AioChannel:
        """In the place of ``stratagem.rpc.channels.connect_aio``."""
        assert self.world.process is not None
        return AioChannel(self.network, self.world.process, address)

    # -- the run ---------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """The chief has ended, and everybody else has."""
        return self.finished is not None and not any(process.alive for process in self.tasks.values())

    def run(self) -> None:
        """Until all is over, or the deadline."""
        enter(self.world)
        worker_runtime._newest = None
        self.start()
        self.world.run(
            self.world.now + DEADLINE_S + self.job.calm_s, lambda: self.finished is not None and self.is_over
        )

    def close(self) -> None:
        """Ends everything."""
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # what is thrown away must not tidy up
        known = [process.globals.get(name) for process in self.world.processes for name in ("model", "apart")]
        self.world.close()
        for parameter in (parameter for model in known if model is not None for parameter in model.parameters()):
            for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
                if hooks:  # a circle through torch, which no collector sees
                    hooks.clear()
        for loop in self._loops.values():
            loop.close()
        self.tasks.clear()
        self._loops.clear()
        self.network.servers.clear()
        self.network.calls.clear()
        self.chief_job = None
        Cluster._num_closed += 1
        if Cluster._num_closed % COLLECT_EVERY == 0:  # what generators do at their end must be in no world that runs
            gc.collect(0 if Cluster._num_closed % LOOK_AGAIN_EVERY else 2)
        sys.unraisablehook = hook
        worker_runtime._newest = None
        shutil.rmtree(self.folder, ignore_errors=True)


class _Running:
    """A server that listens, of either kind."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.address = server.process.address

    def set_serving(self, serving: bool) -> Any:
        return _Nothing()

    def stop(self, grace_s: float = 1.0) -> Any:
        return _Nothing()


class _Nothing:
    """Awaited or not."""

    def __await__(self) -> Any:
        return iter(())


def cluster() -> Cluster:
    """The cluster that runs."""
    found: Cluster = here().cluster  # type: ignore[attr-defined]
    return found
