"""``Model.fit`` beside parameter servers: its epochs, its histories, and the evaluation after each epoch.

The model counts as :mod:`tests.simulation.script` does: with a mean over a batch of B examples at a learning rate of B,
an update is the sum over its examples, exactly, where B is a power of two and divides their number. So it is with an
update of A batches at a rate of A times B: the error of a third of a power of two is rounded away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stratagem.strategy.parameter_server import ParameterServerStrategy
from stratagem.training.callbacks.base import Callback
from stratagem.training.model import Model
from stratagem.training.optimizers import OptimizerFactory
from tests.cluster.scripts.fit_counted import NumExamples
from tests.simulation.script import BASE, Counters
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

NUM_EVALUATED = 6


class Counted(Counters):
    """What each variable has for the examples of a batch, side by side."""

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        return torch.stack([each[examples] for each in self.counts], dim=1)


class Examples(Dataset[tuple[int, float]]):
    """Numbers of examples, and what each adds in this pass."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._pass = 0

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(BASE**self._pass)

    def set_epoch(self, epoch: int) -> None:
        """A pass begins."""
        self._pass = epoch


class Steps(Callback):
    """Batches take a while."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.epoch = 0

    def _wait(self) -> None:
        communicator = self.model.strategy.communicator
        self._cluster.compute(0 if communicator is None else communicator.step)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._wait()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._wait()


def train(cluster: Cluster, process: Process) -> None:
    """The script of a worker beside parameter servers."""
    job = cluster.job
    strategy = process.globals["strategy"] = ParameterServerStrategy(staleness=job.staleness, device="cpu")
    with strategy.scope():
        net = process.globals["model"] = Counted(job.num_variables, job.num_examples, False)
        model = Model(net)
    rate = float(job.batch_size * job.accumulates) if job.is_counted else 0.0
    fit(cluster, process, model, lambda parameters: torch.optim.SGD(parameters, rate), Steps(cluster))


def fit(cluster: Cluster, process: Process, model: Model, optimizer: OptimizerFactory, steps: Steps) -> None:
    """Trains a :class:`Counted` module, and keeps the history."""
    job = cluster.job
    loss, metrics = lambda outputs, added: -(outputs.sum(1) * added).mean(), {"number": NumExamples()}
    model.compile(optimizer, loss, metrics, accumulate_steps=job.accumulates)
    few = torch.arange(NUM_EVALUATED)
    history = model.fit(
        DataLoader(Examples(job.num_examples), batch_size=job.batch_size, shuffle=True),
        epochs=job.epochs,
        steps_per_epoch=job.steps_per_epoch or None,
        validation_data=DataLoader(TensorDataset(few, few), batch_size=2),
        callbacks=[steps],
        verbose=0,
    )
    process.globals["history"] = history.history


def check_histories(cluster: Cluster, may_lack: bool) -> None:
    """Each example counts once in the history of every epoch, on every worker that has come to its end.

    Args:
        may_lack: what was counted last may be lost, with the chief and a worker that it does not hear of again.
    """
    job = cluster.job
    expected = {"number": job.steps_per_epoch * job.batch_size or job.num_examples, "val_number": NUM_EVALUATED}
    workers = [process for process in cluster.world.processes if process.name.startswith("worker:")]
    # What a worker had committed of a step, or in an update of several batches, and did not live to report counts in
    # the weights alone: no ps takes it again.
    is_kept = job.staleness == 0 or job.accumulates > 1
    may_lack_slice = is_kept and any(process.exit_code != 0 for process in workers)
    for process in cluster.world.processes:
        if process.exit_code != 0 or (history := process.globals.get("history")) is None:
            continue
        for name, number in expected.items():
            may_lack_some = may_lack or (may_lack_slice and name == "number")
            if any(value > number or (value < number and not may_lack_some) for value in history.get(name, [])):
                cluster.world.fail(f"{process}: {name} is {history[name]}, and there are {number}")
