"""What every strategy is to a training script."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from stratagem.cluster.tf_config import placement_from_environment
from stratagem.data.distributed import DistributedDataset
from stratagem.errors import ConfigurationError
from stratagem.strategy.values import PerReplica, ReduceOp, local_values
from stratagem.worker.runtime import active_runtime

_current: contextvars.ContextVar[Strategy | None] = contextvars.ContextVar("strategy", default=None)


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What a script asked of ``prepare``; :meth:`Strategy.prepare` explains each."""

    gradients: Literal["mean", "sum"] = "mean"
    clip_norm: float | None = None
    nan: Literal["error", "skip"] = "error"
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        if self.gradients not in ("mean", "sum"):
            raise ConfigurationError(f"expected gradients='mean' or 'sum', got {self.gradients!r}")
        if self.nan not in ("error", "skip"):
            raise ConfigurationError(f"expected nan='error' or 'skip', got {self.nan!r}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigurationError(f"expected clip_norm above 0 or None, got {self.clip_norm!r}")


class Strategy:
    """How a training script is spread over devices and processes.

    The base class is the pass-through that :func:`get_strategy` gives outside any scope: one replica, nothing changed.
    """

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas whose gradients go into one update."""
        return 1

    @property
    def is_lead(self) -> bool:
        """Whether this process does what only one may do: progress bar, summaries, export."""
        return True

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this strategy the current one.

        Raises:
            ConfigurationError: another strategy's scope is open.
        """
        outer = _current.get()
        if outer is not None and outer is not self:
            raise ConfigurationError(
                f"cannot enter the scope of {type(self).__name__} inside the scope of {type(outer).__name__}; "
                "leave the outer one first"
            )
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    def prepare(
        self,
        *objects: Any,
        gradients: Literal["mean", "sum"] = "mean",
        clip_norm: float | None = None,
        nan: Literal["error", "skip"] = "error",
        sync_batchnorm: bool = False,
    ) -> Any:
        """Connects models, optimizers and schedulers to the strategy, in place.

        Args:
            objects: ``nn.Module``, ``torch.optim.Optimizer`` and scheduler objects.
            gradients: "mean": each loss is a mean over the examples of its batch; replicas are weighted by their share
                of the global batch. "sum": losses are divided by the global batch already; gradients are added.
            clip_norm: largest global norm of an optimizer's gradient, over all replicas and ps; None: no clipping.
            nan: "error": a NaN or Inf in a gradient raises ``NonFiniteGradientError``; "skip": the update is skipped
                and counted.
            sync_batchnorm: BatchNorm layers normalise over the batches of all replicas in sync, so that the result
                equals one process on the joined batch.

        Returns:
            the object, or the tuple of objects, in the order given.

        Raises:
            ConfigurationError: an object is none of these, or an argument is out of its range.
            UnsupportedOptimizerError: the strategy cannot run the optimizer.
        """
        for item in objects:
            if not isinstance(item, torch.nn.Module | torch.optim.Optimizer | LRScheduler):
                raise ConfigurationError(
                    f"prepare expects models, optimizers and schedulers, got {type(item).__name__}; "
                    "loaders go to distribute_dataset"
                )
        self._prepare(objects, Preparation(gradients, clip_norm, nan, sync_batchnorm))
        return objects[0] if len(objects) == 1 else objects

    def _prepare(self, objects: Sequence[Any], preparation: Preparation) -> None:
        """What a strategy does with what it was given."""

    def distribute_dataset(self, loader: DataLoader[Any]) -> DistributedDataset:
        """This task's part of a loader of GLOBAL batches; iterate over it once an epoch.

        Raises:
            ConfigurationError: the loader cannot be planned; says why.
        """
        raise ConfigurationError("distribute_dataset needs a strategy: build one, or enter its scope")

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls ``fn`` once for each local replica. Returns a :class:`PerReplica` of what it returned."""
        return PerReplica((fn(*args, **(kwargs or {})),))

    def reduce(self, op: ReduceOp, value: Any, axis: int | None = None) -> torch.Tensor:
        """Reduces a value over the local replicas; with ``axis=0`` over the batch as well.

        Args:
            op: SUM or MEAN. MEAN with an axis divides by the number of elements along it, over all replicas.
            value: a :class:`PerReplica` of tensors or numbers, or one of them.
            axis: None or 0.
        """
        parts = [torch.as_tensor(part) for part in local_values(value)]
        if axis is None:
            total = torch.stack(parts).sum(0)
            return total / len(parts) if op is ReduceOp.MEAN else total
        if axis != 0:
            raise ConfigurationError(f"expected axis None or 0, got {axis!r}")
        total = torch.stack([part.sum(0) for part in parts]).sum(0)
        return total / sum(part.shape[0] for part in parts) if op is ReduceOp.MEAN else total

    def reduce_mean(self, value: Any) -> torch.Tensor:
        """The mean of per-replica means, weighted by the replicas' shares, detached: the loss to print."""
        parts = [torch.as_tensor(part).detach() for part in local_values(value)]
        shares = value.shares if isinstance(value, PerReplica) and value.shares else (1.0,) * len(parts)
        pairs = [(part, share) for part, share in zip(parts, shares, strict=True) if share]
        total = sum(share for _, share in pairs)
        mean = torch.stack([part * (share / total) for part, share in pairs]).sum(0)
        if mean.numel() == 1:
            self._saw_loss(mean)
        return mean

    def _saw_loss(self, loss: torch.Tensor) -> None:
        """A loss for the progress display."""

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The local replicas' values."""
        return local_values(value)

    def set_weight(self, weight: float) -> None:
        """Says in a step, before backward, what the loss was divided by, when that is not the number of examples."""
        if not weight >= 0:
            raise ConfigurationError(f"expected a weight of at least 0, got {weight!r}")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates; nothing is sent."""
        yield

    def report(self, **metrics: float) -> None:
        """Named numbers for the progress display and ``--summary``."""

    @property
    def exposed_communication(self) -> float:
        """Part of the last steps' time that waited for communication, 0 to 1."""
        return 0.0


_default = Strategy()


def get_strategy() -> Strategy:
    """The strategy of the open scope; outside any scope the pass-through."""
    return _current.get() or _default


def has_strategy() -> bool:
    """Whether a scope is open."""
    return _current.get() is not None


def is_evaluator() -> bool:
    """Whether this process is the evaluator of a cluster, by TF_CONFIG."""
    placement = placement_from_environment(os.environ)
    return placement is not None and placement.task is not None and placement.task.type == "evaluator"


def is_lead() -> bool:
    """Whether this process does what only one may do. True for a process that trains alone."""
    runtime = active_runtime()
    return runtime is None or runtime.is_lead()
