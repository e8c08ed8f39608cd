"""Rings that heal: what their workers run, what must hold there, and the schedules of them.

A ring over the grpc lane is simulated like all calls. The script counts as :mod:`tests.simulation.script` does; the
gradient of the global batch is its sum or, where a job asks for means, the mean over the examples that counted.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

from stratagem.strategy.multi_worker_mirrored import MultiWorkerMirroredStrategy
from stratagem.strategy.replicas.context import get_replica_context
from stratagem.training.model import Model
from stratagem.worker.ring.healing import Healing
from stratagem.worker.ring.ring_member import RingMember
from tests.simulation import fits
from tests.simulation.script import BASE, Counters
from tests.simulation.threads import here
from tests.simulation.world import CHIEFS, START, Process, World

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster, Job


NUM_VALIDATED = 10
STANDSTILL_S = 30.0
"""Seconds in which some worker makes a step, whatever goes wrong: longer than two faults in a row last."""


class Made(NamedTuple):
    """A step, as one worker made it."""

    epoch: int
    before: torch.Tensor
    """The weights, a row a variable."""
    after: torch.Tensor

    @property
    def examples(self) -> list[int]:
        """Those that counted in it."""
        return [int(index) for index in (self.after - self.before)[0].nonzero()]


class Rings:
    """What must hold in one world.

    Args:
        world: where.
        cluster: the job.
        is_harmless: nothing happens to anybody but that connections are reset, now and then.
    """

    def __init__(self, world: World, cluster: Cluster, is_harmless: bool) -> None:
        self.world = world
        self.cluster = cluster
        self._is_harmless = is_harmless
        self._made: dict[int, dict[Process, Made]] = {}
        """By step and worker. What one made that was lost with it, or that the chief took for lost, counts nowhere."""
        self._newest_at = world.now
        self._validated: dict[int, dict[Process, float]] = {}
        """By epoch and worker: examples that it counted."""
        self.doomed: set[str] = set()
        """Workers that die in the moment in which the next backward is through for a first worker, and no other."""
        self.doomed_early: set[str] = set()
        """Workers that die in the moment in which the first ring has formed for a first worker."""
        self.doomed_admitting: list[tuple[str, float]] = []
        """Workers that die when a first one begins to admit a newcomer, or so many seconds later."""
        self._num_done = 0

    def admitting(self, healing: Healing) -> None:
        """A worker admits a newcomer, or is one."""
        if not healing.is_new:
            for task, later_s in self.doomed_admitting:
                self.world.after(later_s, None, self.cluster.tasks[task].kill)
            self.doomed_admitting.clear()

    def formed(self) -> None:
        """A worker has heard that its first ring has formed."""
        for task in self.doomed_early:
            self.world.after(0.0, None, self.cluster.tasks[task].kill)
        self.doomed_early.clear()

    def done(self, healing: Healing) -> None:
        """A worker has completed collectives that count together."""
        if healing._num_done > self._num_done and healing._is_training:
            self._num_done = healing._num_done
            for task in self.doomed:
                self.world.after(0.0, None, self.cluster.tasks[task].kill)
            self.doomed.clear()

    def made(self, step: int, made: Made) -> None:
        """A worker has made a step: it is the sum, or the mean, of the examples that counted."""
        change = made.after - made.before
        value = BASE**made.epoch / (len(made.examples) if self.cluster.job.is_mean else 1)
        every = torch.tensor([value * scale for scale in _scales(self.cluster.job)], dtype=torch.float64)
        if not torch.allclose(change[:, made.examples], every[:, None]):
            self.world.fail(f"step {step} of {self.world.process} is {change.tolist()}, not {value} for each example")
        if (stood_s := self.world.now - self._newest_at) > STANDSTILL_S + self.cluster.job.calm_s:
            self.world.fail(f"no step was made for {stood_s:.0f} s")
        self._newest_at = self.world.now
        assert self.world.process is not None
        self._made.setdefault(step, {})[self.world.process] = made

    def ended(self) -> None:
        """Everybody has finished, with the same weights, and each example of each epoch has counted once in them."""
        cluster, world, job = self.cluster, self.world, self.cluster.job
        if cluster.finished is None or not cluster.is_over:
            world.fail(f"not over after {world.now - START:.0f} s: {world.checks.waiting()}")  # type: ignore[attr-defined]
            return
        if cluster.finished != 0:
            stopping = cluster.chief_job.sessions.stopping
            reason = stopping.reason if stopping else "-"
            if "fewer than --min-workers" not in reason and "no worker is left that has the state" not in reason:
                world.fail(f"the job ended with {cluster.finished}: {reason}")
            return
        if self._is_harmless and any(process.exit_code for process in world.processes):
            world.fail("a connection that was reset has ended a process")
        # A chief that died as it ended the job begins another one.
        earlier = cluster.chief_job.journal.history.earlier_incarnations
        made_now = {
            step: {process: made for process, made in by_process.items() if _incarnation(process) > earlier}
            for step, by_process in self._made.items()
        }
        weights, counted = None, collections.Counter[tuple[int, int]]()
        for step in sorted((step for step, made in made_now.items() if made), reverse=True):
            whole = [made for process, made in made_now[step].items() if self._has_finished(process)]
            if any(not torch.equal(one.after, whole[0].after) for one in whole):
                world.fail(f"the workers differ after step {step}")
            at_step = whole or [*made_now[step].values()]
            chain = [made for made in at_step if weights is None or torch.equal(made.after, weights)]
            if not chain:
                if whole:
                    world.fail(f"what step {step} made is not what the next one began with")
                continue
            weights = chain[0].before
            counted.update((chain[0].epoch, example) for example in chain[0].examples)
        wrong = [
            (epoch, example, counted[epoch, example])
            for epoch in range(job.epochs)
            for example in range(job.num_examples)
            if counted[epoch, example] != 1
        ]
        if job.leaves_every:
            wrong = [each for each in wrong if each[2]]
        if wrong or weights is None or weights.any():
            world.fail(f"(epoch, example, how often it counted): {wrong}; the first weights: {weights}")
        self._check_validations()

    def _has_finished(self, process: Process) -> bool:
        """As one of the ring: who stood still in the last collective may come to its end by what it has, when the
        others have gone on without it."""
        if process.exit_code != 0:
            return False
        session = process.globals["strategy"]._runtime.session
        return bool(self.cluster.chief_job.sessions.fenced.get(session.task, 0) < session.incarnation)

    def _check_validations(self) -> None:
        """Who finishes has counted what the others have: all examples, but for those of a worker that was lost then."""
        is_whole = all(self._has_finished(process) for process in self.world.processes if process.name not in CHIEFS)
        for epoch, counts in self._validated.items():
            found = {count for process, count in counts.items() if self._has_finished(process)}
            if len(found) > 1 or any(count > NUM_VALIDATED or (is_whole and count < NUM_VALIDATED) for count in found):
                self.world.fail(f"epoch {epoch}: {found} of {NUM_VALIDATED} examples were counted in a validation")

    def validated(self, epoch: int, num_examples: float) -> None:
        """A worker has gone through the other dataset."""
        assert self.world.process is not None
        self._validated.setdefault(epoch, {})[self.world.process] = num_examples


def _incarnation(process: Process) -> int:
    return int(process.globals["strategy"]._runtime.session.incarnation)


def hooks() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Where the product is looked at; see :func:`tests.simulation.invariants.hooks`."""

    def on_done(real: Any) -> Any:
        def done(self: Any, *arguments: Any) -> None:
            real(self, *arguments)
            here().rings.done(self)  # type: ignore[attr-defined]

        return done

    def on_take_in(real: Any) -> Any:
        def take_in(self: Any, *arguments: Any) -> Any:
            here().rings.admitting(self)  # type: ignore[attr-defined]
            return real(self, *arguments)

        return take_in

    def on_start(real: Any) -> Any:
        def start(self: Any, *arguments: Any) -> Any:
            here().rings.formed()  # type: ignore[attr-defined]
            return real(self, *arguments)

        return start

    yield Healing, "_done", on_done
    yield Healing, "take_in", on_take_in
    yield RingMember, "_start", on_start


_backward = torch.autograd.backward


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """In the place of the autograd engine's: it calls back outside of the engine, whose state is that of one thread."""
    vars(here().thread).setdefault("ends", []).append(callback)


def backward(*arguments: Any, **named: Any) -> None:
    """In the place of ``torch.autograd.backward``."""
    _backward(*arguments, **named)
    for end in vars(here().thread).pop("ends", ()):
        end()


def _told(optimizer: torch.optim.Optimizer, rings: Rings, strategy: Any, epoch: Callable[[], int]) -> Any:
    """An optimizer whose steps are looked at."""
    parameters = optimizer.param_groups[0]["params"]
    before: list[torch.Tensor] = []

    def weights() -> torch.Tensor:
        return torch.stack([each.detach().clone() for each in parameters])

    optimizer.register_step_pre_hook(lambda *_: before.append(weights()))
    optimizer.register_step_post_hook(
        lambda *_: rings.made(strategy.communicator.step, Made(epoch(), before.pop(), weights()))
    )
    return optimizer


def train_fit(cluster: Cluster, process: Process) -> None:
    """The script of a worker of a ring that calls ``fit``."""
    job, steps = cluster.job, fits.Steps(cluster)
    rings: Rings = cluster.world.rings  # type: ignore[attr-defined]
    strategy = process.globals["strategy"] = MultiWorkerMirroredStrategy(devices="cpu")
    with strategy.scope():
        net = process.globals["model"] = fits.Counted(job.num_variables, job.num_examples, False).double()
        model = Model(net)
    fits.fit(
        cluster,
        process,
        model,
        lambda parameters: _told(torch.optim.SGD(parameters, 1.0), rings, strategy, lambda: steps.epoch),
        steps,
    )


def _scales(job: Job) -> list[float]:
    """By variable: how much an example counts in it. They differ, so that no checksum takes one for another."""
    return [1.0 if job.fits else 1.0 + index for index in range(job.num_variables)]


def train(cluster: Cluster, process: Process) -> None:
    """The script of a worker of a ring."""
    job, world = cluster.job, cluster.world
    rings: Rings = world.rings  # type: ignore[attr-defined]
    strategy = process.globals["strategy"] = MultiWorkerMirroredStrategy(devices="cpu")
    with strategy.scope():
        model: Any = Counters(job.num_variables, job.num_examples, False).double()
    process.globals["model"] = model
    now = [0]
    optimizer = _told(torch.optim.SGD(model.parameters(), 1.0), rings, strategy, lambda: now[0])
    strategy.prepare(model, optimizer, gradients="mean" if job.is_mean else "sum")
    data = TensorDataset(torch.arange(job.num_examples))
    batches = strategy.distribute_dataset(DataLoader(data, batch_size=job.batch_size, shuffle=True))
    parameters = list(model.counts)

    few = TensorDataset(torch.arange(NUM_VALIDATED))
    validation = strategy.distribute_dataset(DataLoader(few, batch_size=4)) if job.validates else ()

    def count(batch: list[torch.Tensor]) -> torch.Tensor:
        cluster.compute(0)
        return torch.tensor(float(len(batch[0])))

    def step(batch: list[torch.Tensor], epoch: int) -> None:
        now[0] = epoch
        optimizer.zero_grad()
        if job.validates:
            context = get_replica_context()
            assert context is not None
            context.all_reduce("sum", torch.tensor(len(batch[0])))
        share = BASE**epoch / (max(1, len(batch[0])) if job.is_mean else 1)
        gradient = torch.zeros(job.num_examples, dtype=torch.float64).index_fill_(0, batch[0], -share)
        torch.autograd.backward(parameters, [gradient * scale for scale in _scales(job)])
        optimizer.step()

    for epoch in range(batches.epoch, job.epochs):
        for batch in batches:
            cluster.compute(strategy.communicator.step)
            strategy.run(step, args=(batch, epoch))
            if job.leaves_every and strategy.communicator.step % job.leaves_every == 0:
                break
        if job.validates:
            counts = [strategy.reduce("sum", strategy.run(count, args=(batch,))) for batch in validation]
            rings.validated(epoch, float(sum(counts)))
