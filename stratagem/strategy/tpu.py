"""TPUs, through torch_xla."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from stratagem.cluster.resolvers import ClusterResolver
from stratagem.cluster.units import Plan
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.strategy.synchronous import Reducer, SynchronousStrategy
from stratagem.strategy.xla_group import XlaGroup, check_torch_xla
from stratagem.strategy.xla_reducer import XlaReducer
from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.ring.communicator import Communicator, Position
from stratagem.worker.step_meter import StepMeter


class TPUStrategy(SynchronousStrategy):
    """Synchronous training on TPUs: one replica a process, each with the whole model on its own XLA device.

    NOT EXERCISED ON HARDWARE. The newest torch_xla at this writing is 2.9, and Stratagem needs a newer torch, for which
    there is none; a matching pair is required at run time. The tests run it on a stand-in for torch_xla.

    torch_xla starts the processes and knows where the TPUs are::

        def train(index):
            strategy = sg.TPUStrategy()
            ...

        torch_xla.launch(train)

    The graph of a step is sent off after each ``optimizer.step()``.

    Args:
        resolver: the cluster of hosts, if it should be checked that torch_xla has found replicas on all of them; None:
            what torch_xla has found is right.
        seed: seed of the order of the examples.

    Raises:
        ConfigurationError: torch_xla is not installed or does not match torch, or the cluster is another one.
    """

    communicator: Communicator

    def __init__(self, resolver: ClusterResolver | None = None, *, seed: int = 0) -> None:
        check_torch_xla()
        self._group = XlaGroup()
        _check_hosts(resolver, self._group.size)
        self.device = self._group.device
        self._seed = seed
        super().__init__((self.device,), StepMeter(), workers=Communicator(self._group, _explain))

    @property
    def is_lead(self) -> bool:
        return self._group.rank == 0

    def _before_placing(self, models: Sequence[nn.Module]) -> None:
        for model in models:
            _refuse_sparse(model)

    def _make_reducer(
        self,
        replica: int,
        models: Sequence[nn.Module],
        groups: Sequence[Sequence[nn.Parameter]],
        weight: Callable[[], Weight],
        early: bool,
    ) -> Reducer:
        parameters = self._fresh_parameters(replica, models, groups)
        return XlaReducer(parameters, self._group, self.communicator, weight)

    def _seed_of_dataset(self, ordinal: int, plan: Plan | None) -> int:
        return self._seed


def _check_hosts(resolver: ClusterResolver | None, num_replicas: int) -> None:
    cluster = resolver.cluster_spec() if resolver is not None else None
    if cluster is None:
        return
    if cluster.num_ps:
        raise ConfigurationError(
            f"TPUStrategy trains without parameter servers, but the cluster has {cluster.num_ps} ps; leave them out"
        )
    if num_replicas % cluster.num_workers:
        raise ConfigurationError(
            f"the cluster has {cluster.num_workers} workers, each a host with as many TPUs as the others, but "
            f"torch_xla has found {num_replicas} replicas; start the script with torch_xla.launch on every host"
        )


def _explain(error: CollectiveError, position: Position) -> CollectiveError:
    return CollectiveError(f"{error} (this replica is at {position})", error.rank)


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigurationError(f"XLA has no sparse gradients: give {name or 'the embedding'} sparse=False")
