"""What every simulated worker runs: the real strategy, on data of which each example leaves an exact number behind.

Variable v of the model lies on ps v, where there are as many, and has an element for each example. The gradient of an
example is minus a power of eight in its element, at a learning rate of 1: digit k of element e, in octal, says how
often example e of epoch k was applied to that variable. Row e of each table, where there are tables, counts alike in
each of its columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from stratagem.errors import CheckpointError, FencedError, JobStoppedError, StratagemError, VariableError
from stratagem.nn import Constant, Embedding
from stratagem.strategy.parameter_server import ParameterServerStrategy
from stratagem.training.saving.checkpoint import Checkpoint
from stratagem.training.saving.manager import CheckpointManager
from stratagem.worker import background_writes
from stratagem.worker import runtime as worker_runtime
from tests.simulation.invariants import FROZEN, LOADED, checks
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

BASE = 8
HUGE = 2.0**100
"""Learning rate and eps of Adagrad: it is SGD at a learning rate of 1 then, to the last bit, and counts in its sums."""


class _LeftError(Exception):
    """A script's own error, which it catches outside of its loop."""


class Counters(torch.nn.Module):
    """An element for each example, in each variable; a row for each in each table, where there are tables: of two
    widths, so two groups. The ps make the rows of some of each width, the lead gives those of the others. Two are
    frozen: one is in a group of these, since the optimizer has it, the other one is a third group."""

    def __init__(self, num_variables: int, num_examples: int, has_table: bool) -> None:
        super().__init__()
        self.counts = torch.nn.ParameterList(torch.zeros(num_examples) for _ in range(num_variables))
        self.tables = torch.nn.ModuleList()
        if has_table:
            for width in (1, 2, 1, 2, 1):
                given = Embedding.from_pretrained(torch.zeros(num_examples, width), freeze=False)
                is_made = len(self.tables) in (0, 3, 4)
                self.tables.append(Embedding(num_examples, width, init=Constant(0.0)) if is_made else given)
            self.frozen = torch.nn.ModuleList(
                [
                    Embedding.from_pretrained(torch.full((num_examples, 1), FROZEN)),
                    Embedding(num_examples, 1, init=Constant(FROZEN)).requires_grad_(False),
                ]
            )

    def optimized(self) -> list[torch.nn.Parameter]:
        """What its optimizer is given."""
        return [each for name, each in self.named_parameters() if name != "frozen.1.weight"]


def run(cluster: Cluster, process: Process, train: Callable[[Cluster, Process], None]) -> int:
    """The life of a worker, whose script is ``train``; returns its exit code."""
    worker_runtime._newest = None  # the last one is of another process
    background_writes._unheard.clear()
    try:
        train(cluster, process)
    except JobStoppedError as stopped:
        code, message = stopped.exit_code, str(stopped)
    except FencedError as error:
        code, message = 1, str(error)
    except StratagemError as error:
        # As after several restarts: what ps have begun from was damaged since, and is read by and by.
        is_told = checks().ends_for_good(str(error))
        code = 2 if is_told or (isinstance(error, CheckpointError) and cluster.disk.flipped) else 1
        message = f"{type(error).__name__}: {error}"
        if "not in the same collective" in message or "cannot be brought together" in message:
            cluster.world.fail(message)  # all run the same script
        chief, is_wanted = cluster.chief_job, "is not wanted" not in message
        is_over = cluster.finished is not None or (chief is not None and chief.sessions.stopping is not None)
        # Or it gave ps, of which the first checkpoint with another model was damaged or could not be written, what was
        # counted since.
        is_damaged = isinstance(error, VariableError) and bool(cluster.disk.flipped or cluster.disk.has_refused)
        is_told = bool(is_told) or is_damaged or isinstance(error, CheckpointError)
        if is_wanted and not (cluster.job.min_workers or is_over or is_told):
            cluster.world.fail(f"{process.name} gives up: {message}")  # a script that fails before a step ends its job
    else:
        code, message = 0, ""
    if code:
        cluster.world.note(f"{process.name} gives up: {message}")
    strategy = process.globals.get("strategy")
    if strategy is not None:
        strategy._runtime.goodbye(code, message)
    return code


def train(cluster: Cluster, process: Process) -> None:
    """The script of a worker beside parameter servers."""
    job, world = cluster.job, cluster.world
    strategy = process.globals["strategy"] = ParameterServerStrategy(staleness=job.staleness, device="cpu")
    with strategy.scope():
        num_variables = job.num_variables // job.num_models
        models: Any = [Counters(num_variables, job.num_examples, job.has_table) for _ in range(job.num_models)]
    process.globals["model"] = torch.nn.ModuleList(models)
    model = models[0]
    if job.prepares_apart:
        process.globals["apart"] = apart = torch.nn.ParameterList(torch.zeros(2) for _ in range(job.num_ps))
        strategy.prepare(apart)
        world.block(job.step_s * world.random.random())
    parameters = list(model.counts)

    def make(trained: Any) -> Any:
        return torch.optim.Adagrad(trained, HUGE, eps=HUGE) if job.has_slots else torch.optim.SGD(trained, 1.0)

    optimizers = [make(each.optimized()) for each in models]
    optimizer = optimizers[0]

    def prepare(some: slice) -> None:
        for each, its in zip(models[some], optimizers[some], strict=True):
            strategy.prepare(each, its, gradients="sum")

    if job.num_optimizers == 1:
        prepare(slice(1 if job.prepares_late else None))
    else:
        half = len(parameters) // 2
        others: list[Any] = [make(part) for part in (parameters[:half], parameters[half:])]
        strategy.prepare(model, *others, gradients="sum")
    if job.loads:
        world.block(world.random.random())  # the first checkpoint may be taken before
        strategy.load_once(lambda: load([one for each in models for one in each.counts]))
    optimizers = optimizers if job.num_optimizers == 1 else others
    save = saver(cluster, strategy, models, optimizers) if job.saves else None
    data = TensorDataset(torch.arange(job.num_examples))
    datasets = [
        strategy.distribute_dataset(DataLoader(data, batch_size=job.batch_size, shuffle=True, drop_last=job.drop_last))
        for _ in range(job.num_datasets)
    ]

    num_taken = 0

    def steps(batch: list[torch.Tensor], scale: int) -> None:
        nonlocal num_taken
        is_last = (num_taken + 1) % job.accumulates == 0
        for other in others[: 1 if job.is_left_out(batch[0].tolist()) else 2]:
            if not num_taken:
                other.zero_grad()
            trained = [one for group in other.param_groups for one in group["params"]]
            gradient = torch.zeros(job.num_examples).index_fill_(0, batch[0], -scale)
            torch.autograd.backward(trained, [gradient] * len(trained))
            if is_last:
                other.step()
                if other is not others[-1]:
                    cluster.between_updates(process)
                    may_raise()
            cluster.compute(0, share=0.5)
        num_taken = 0 if is_last else num_taken + 1

    stays = ""

    def may_raise() -> None:
        if job.raises and process.name != stays and world.random.random() < job.breaks:
            raise _LeftError

    def step(batch: list[torch.Tensor], scale: int) -> None:
        nonlocal num_taken
        if not num_taken:
            optimizer.zero_grad()
        gradient = torch.zeros(job.num_examples).index_fill_(0, batch[0], -scale)
        trained, gradients = [*parameters], [gradient] * len(parameters)
        for table in world.random.sample([*model.tables], len(model.tables)):
            trained.append(table(batch[0]))
            gradients.append(torch.full_like(trained[-1], -scale))
        seen = [rows.detach() for rows in trained[len(parameters) :]]
        if seen:
            checks().read_frozen(torch.cat([table(batch[0]) for table in model.frozen]))
        weights = [each.detach()[batch[0]] for each in parameters] if seen else []
        torch.autograd.backward(trained, gradients)  # as of a loss, without what computes it
        may_raise()
        num_taken = (num_taken + 1) % job.accumulates
        if num_taken:
            return
        optimizer.step()
        if job.staleness == 0:
            for rows in seen:
                checks().trained_on(rows, weights)

    for epoch in range(job.epochs):
        if job.prepares_late and 0 < epoch < job.num_models:
            prepare(slice(epoch, epoch + 1))
        model, optimizer = models[epoch % job.num_models], optimizers[epoch % job.num_models]
        parameters = [*model.counts]
        stays = f"worker:{0 if job.staleness or job.returns else epoch % job.num_workers}"  # the job has so many
        batches = datasets[epoch % job.num_datasets]
        if job.peeks:
            peeked = iter(batches)
            next(peeked, None)
            if world.random.random() < 0.5:
                peeked.close()  # else the next pass leaves this one
        for batch in batches:
            cluster.compute(0)
            try:
                strategy.run(step if job.num_optimizers == 1 else steps, args=(batch, BASE**epoch))
            except _LeftError:
                num_taken = 0
                break
            if save is not None and world.random.random() < job.saves:
                save()
            if job.breaks and not job.raises and process.name != stays and world.random.random() < job.breaks:
                if job.returns:
                    return
                break
        num_taken *= job.keeps
        if job.meets:
            strategy.barrier()
        if job.reloads == epoch + 1:
            strategy.load_once(lambda: load([*models[0].counts[:1]]))


def load(parameters: list[torch.nn.Parameter]) -> None:
    """Other values, in this process."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(LOADED)


def saver(cluster: Cluster, strategy: ParameterServerStrategy, models: Any, given: Sequence[Any]) -> Callable[[], None]:
    """Begins with the newest checkpoint that scripts have saved, and saves others."""
    optimizers = {f"optimizer{index}": one for index, one in enumerate(given)}
    named = {f"model{index}": one for index, one in enumerate(models)}
    checkpoint = Checkpoint(strategy=strategy, **named, **optimizers)
    manager = CheckpointManager(checkpoint, cluster.own_dir, max_to_keep=2)
    manager.restore_or_initialize()

    def save() -> None:
        with contextlib.suppress(CheckpointError):  # the disk is full, say
            manager.save()

    return save
