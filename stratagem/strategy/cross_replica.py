"""Combines the values of all replicas into one, for code outside of a step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.data.nested import map_values, outline, refilled, values_in
from stratagem.data.values import OnReplicas, PerReplica, local_values
from stratagem.errors import ConfigurationError
from stratagem.strategy.replicas.cross_device_ops import CrossDeviceOps, is_inexact
from stratagem.strategy.replicas.replica_threads import current_replica
from stratagem.strategy.replicas.tensor_operators import TensorOperators
from stratagem.worker.ring.communicator import Communicator


@dataclasses.dataclass(eq=False, repr=False)
class CrossReplica:
    """Reductions over the local replicas, then over those of other workers, who have to make the same calls; as
    :class:`~stratagem.strategy.base.Strategy` says it of its own."""

    _num_local: int = 1
    _ops: CrossDeviceOps | None = None
    """Reduces between them; needed for more than one."""
    _workers: Communicator | None = None
    """Collectives between workers; None: there is one."""
    _newest_shares: Callable[[], tuple[float, ...]] = tuple
    """How much each local replica counts in the newest step; empty: all the same."""

    def reduce(self, op: ReduceOp, value: Any, axis: int | None) -> Any:
        if axis not in (None, 0):
            raise ConfigurationError(f"expected axis None or 0, the batch, got {axis!r}: reduce other axes in the step")
        self._check_outside()
        is_one = isinstance(value, OnReplicas) and axis is None and not value.may_differ
        if (is_one or len(local_values(value)) == 1) and self._num_local > 1:
            if op is not ReduceOp.MEAN or axis is not None:
                instead = "give it what strategy.run or distribute_values_from_function returned"
                if isinstance(value, OnReplicas):
                    instead = "value() is what it has on all of them together"
                raise ConfigurationError(
                    f"reduce(ReduceOp.{op.name}) expects one value for each of the {self._num_local} local replicas, "
                    f"got {type(value).__name__}; {instead}"
                )
            value = PerReplica((value,) * self._num_local)
        one = self._over_replicas if axis is None else self._over_batch
        return self._structured(value, functools.partial(one, op))

    def reduce_mean(self, value: Any) -> Any:
        self._check_outside()
        if isinstance(value, dict | list | tuple):
            return map_values(value, self.reduce_mean)  # each may have shares of its own
        num_values = len(local_values(value))
        shares = value.shares if isinstance(value, PerReplica) else self._newest_shares()
        if len(shares) != num_values:  # a plain value beside several replicas is that of all of them
            shares = (1.0,) * num_values
        if any(map(math.isnan, shares)):
            raise ConfigurationError(
                "reduce_mean of a step that was given batches of several datasets, of which a replica's share differs: "
                "no one weight is right. Call strategy.set_weight(n) in the step, n the examples of the mean, or "
                "return values per example and take reduce(sg.ReduceOp.MEAN, …, axis=0)"
            )
        return self._structured(value, functools.partial(self._weighted_mean, shares))

    def gather(self, value: Any, axis: int) -> Any:
        self._check_outside()
        return self._structured(value, functools.partial(self._concatenated, axis))

    def _structured(self, value: Any, one: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Any:
        """Applies ``one`` to every place in the structure of the replicas' values."""
        parts = local_values(value)
        if any(outline(part) != outline(parts[0]) for part in parts):
            texts = ", ".join(dict.fromkeys(map(outline, parts)))
            raise ConfigurationError(f"expected values of one structure from all replicas, got {texts}")
        columns = zip(*([as_tensor(one).detach() for one in values_in(part)] for part in parts), strict=True)
        return refilled(parts[0], [one(column) for column in columns])

    def _check_outside(self) -> None:
        if self._num_local > 1 and current_replica() is not None:
            raise ConfigurationError(
                "strategy.reduce, reduce_mean and gather inside strategy.run: they combine the values of all replicas, "
                "and this is the step of one. Return the value and reduce what run returns, or use all_reduce and "
                "all_gather of sg.get_replica_context()"
            )

    def _over_replicas(self, op: ReduceOp, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        total = self._local(op, [operand(op, part) for part in parts])
        return total if self._workers is None else self._workers.all_reduce(total, op)

    def _over_batch(self, op: ReduceOp, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        for part in parts:
            if not part.dim():
                raise ConfigurationError("reduce(axis=0) expects values with a batch dimension, got a number")
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ConfigurationError(f"reduce(axis=0) takes SUM and MEAN, got {op.name}")
        dtype = parts[0].dtype
        is_short = dtype.is_floating_point and dtype.itemsize < 4  # 65,505 ones are too many for a float16
        total = self._local(ReduceOp.SUM, [part.sum(0, dtype=torch.float32 if is_short else None) for part in parts])
        count = torch.tensor(sum(part.shape[0] for part in parts), dtype=torch.float64)
        if self._workers is not None:
            total, count = self._workers.all_reduce(total), self._workers.all_reduce(count)
        result = total / count.to(total.device, total.dtype) if op is ReduceOp.MEAN else total
        return result.to(dtype) if is_short else result

    def _weighted_mean(self, shares: Sequence[float], parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if parts[0].is_complex():
            in_two = [torch.view_as_real(part.resolve_conj()) for part in parts]
            return torch.view_as_complex(self._weighted_mean(shares, in_two))
        # What a replica without examples says does not count, whatever it is.
        counted = [(part, share) for part, share in zip(parts, shares, strict=True) if share]
        home = counted[0][0] if counted else parts[0]
        for part, _ in counted:
            if part.shape != home.shape:
                raise ConfigurationError(
                    f"reduce_mean expects one mean from each replica, all of the same shape, got {list(home.shape)} "
                    f"and {list(part.shape)}: strategy.gather concatenates per-example values, and reduce(MEAN, "
                    "axis=0) takes their mean"
                )
        total = sum(
            (part.to(home.device).double() * share for part, share in counted),
            torch.zeros(home.shape, dtype=torch.float64, device=home.device),
        )
        if self._workers is None:
            mean = total / sum(shares)
        else:
            flat = torch.cat([total.flatten().cpu(), torch.tensor([sum(shares)], dtype=torch.float64)])
            everywhere = self._workers.all_reduce(flat)
            mean = (everywhere[:-1] / everywhere[-1]).view(home.shape)
        return mean.to(home.device, home.dtype if is_inexact(home) else torch.get_default_dtype())

    def _concatenated(self, axis: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        check_axis("gather", axis, parts)
        return concatenated(parts, axis, self._workers)[0]

    def _local(self, op: ReduceOp, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(parts) == 1 or self._ops is None:
            return parts[0].clone()  # the script may write to its own, or to the result
        return self._ops.all_reduce(op, parts)[0]


def as_tensor(value: Any) -> torch.Tensor:
    """A tensor or a number that a replica brings, as a tensor; a ConfigurationError where it is neither."""
    if isinstance(value, TensorOperators):
        return value.value()
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        without = "a step without a return statement gives None; let it return its loss. " if value is None else ""
        raise ConfigurationError(
            f"expected tensors and numbers from replicas, got {type(value).__name__}: {without}strategy.local_results "
            "returns anything as it is"
        ) from None


def operand(op: ReduceOp, part: torch.Tensor) -> torch.Tensor:
    """What is reduced: of booleans a SUM is their number, as ``torch.sum``; a MEAN of what can hold none is of torch's
    default dtype."""
    if op is ReduceOp.SUM and part.dtype is torch.bool:
        return part.to(torch.int64)
    return part.to(torch.get_default_dtype()) if op is ReduceOp.MEAN and not is_inexact(part) else part


def check_axis(who: str, axis: int, tensors: Iterable[torch.Tensor]) -> None:
    """Raises ConfigurationError where one has no such axis."""
    for tensor in tensors:
        if not -tensor.dim() <= axis < tensor.dim():
            raise ConfigurationError(
                f"{who} along axis {axis} expects tensors with that axis, got shape {list(tensor.shape)}"
            )


def concatenated(column: Sequence[torch.Tensor], axis: int, workers: Communicator | None) -> tuple[torch.Tensor, int]:
    """The tensors of all replicas of all workers in one, and where those of this worker begin; a ConfigurationError
    where dtypes or other axes differ. ``column``: one of each local replica."""

    def kept(tensor: torch.Tensor) -> tuple[torch.dtype, list[int]]:
        return tensor.dtype, [size for at, size in enumerate(tensor.shape) if at != axis % tensor.dim()]

    for replica, tensor in enumerate(column):
        if kept(tensor) != kept(column[0]):
            raise ConfigurationError(
                f"gathering along axis {axis} expects tensors of one dtype that differ along that axis alone, but "
                f"replica 0 has {list(column[0].shape)} {column[0].dtype} and replica {replica} has "
                f"{list(tensor.shape)} {tensor.dtype}"
            )
    local = torch.cat([tensor.to(column[0].device) for tensor in column], axis)
    if workers is None:
        return local, 0
    parts = workers.all_gather(local.movedim(axis, 0))
    return torch.cat(parts).movedim(0, axis), sum(part.shape[0] for part in parts[: workers.rank])
