"""What a step function can ask about its replica, and how it reaches the others."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from stratagem.arguments import known_arguments
from stratagem.cluster.communication import ReduceOp
from stratagem.data.nested import map_values, outline, refilled, values_in
from stratagem.data.values import PerReplica, part_of_replica
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.strategy.cross_replica import as_tensor, check_axis, concatenated, operand
from stratagem.strategy.current import current_strategy, has_current_strategy
from stratagem.strategy.prepared import created_inside, created_outside
from stratagem.strategy.replicas.cross_device_ops import CrossDeviceOps, is_inexact
from stratagem.strategy.replicas.mirrored import OnlyReplica
from stratagem.strategy.replicas.replica_threads import RUN_INSIDE_RUN, ReplicaThreads
from stratagem.tensorflow_names import WithWaysOut
from stratagem.worker.ring.communicator import Communicator

T = TypeVar("T")


class _Here(enum.Enum):
    """Where a thread is, if in no replica."""

    OUTSIDE = enum.auto()
    CROSS_REPLICA = enum.auto()
    """In a function that runs once for all replicas of a step."""


_here: contextvars.ContextVar[ReplicaContext | _Here] = contextvars.ContextVar("replica", default=_Here.OUTSIDE)


def get_replica_context() -> ReplicaContext | None:
    """The replica whose step runs here; None in cross-replica context. Outside any scope, the only replica.

    Cross-replica context is inside ``strategy.scope()``, outside ``strategy.run``, and inside the function of
    ``merge_call``.
    """
    here = _here.get()
    if isinstance(here, ReplicaContext):
        return here
    if here is _Here.CROSS_REPLICA or has_current_strategy():
        return None
    return ReplicaContext(current_strategy())


def replica_of(strategy: Strategy) -> ReplicaContext | None:
    """The replica of a strategy whose step runs here; None: code here is for all of its replicas."""
    here = get_replica_context()
    return here if here is not None and here.strategy is strategy else None


@functools.cache
def watch_torch() -> None:
    """From now on strategies hear of each step of an optimizer or an average in a replica, and of each parameter."""
    register_optimizer_step_pre_hook(_before_step)
    register_module_parameter_registration_hook(_on_parameter)
    update = AveragedModel.update_parameters

    @functools.wraps(update)
    def update_parameters(self: AveragedModel, model: torch.nn.Module) -> None:
        here = _here.get()
        if isinstance(here, ReplicaContext) and here._replica_threads is not None:  # else nobody shares it
            here.strategy.prepared.check_average(self)  # type: ignore[union-attr]
            for check in self._forward_pre_hooks.values():
                if isinstance(check, OnlyReplica):
                    check(self, ())
        update(self, model)

    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    here = _here.get()
    if isinstance(here, ReplicaContext) and here.strategy.prepared is not None:
        here.strategy.prepared.check_step(optimizer, here._replica)


def _on_parameter(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    if _here.get() is not _Here.OUTSIDE:
        return
    if (prepared := (strategy := current_strategy()).prepared) is not None:
        prepared.created(module, name)
        created_inside(module, strategy)
    else:
        created_outside(module)


def in_cross_replica_context() -> bool:
    """Whether this code runs once for all replicas together; see :func:`get_replica_context`."""
    return get_replica_context() is None


@dataclasses.dataclass(eq=False, repr=False)
class ReplicaContext(WithWaysOut):
    """One replica of a step, as the step sees it.

    All replicas must make the joint calls in the same order; a mismatch is an error that names both calls. Values may
    be tensors, numbers, and dicts, lists and tuples of them, with the same structure on every replica.
    """

    strategy: Strategy
    """The strategy whose step runs."""
    _replica_threads: ReplicaThreads | None = None
    """The replicas of this process; None: there is only one, in the calling thread."""
    _replica: int = 0
    """Local index of this replica."""
    _ops: CrossDeviceOps | None = None
    """Reduces within the process; only with several replicas."""
    _own: Communicator | None = None
    """Collectives of this replica. Those queued are completed before the replicas meet, so that every worker
    makes its collectives in the same order."""

    @property
    def replica_id_in_sync_group(self) -> int:
        """Index of this replica, from 0, among those of all workers."""
        return self.strategy.first_replica_id + self._replica

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of all workers."""
        return self.strategy.num_replicas_in_sync

    def call(self, work: Callable[[], T]) -> T:
        """Calls ``work``; meanwhile this is the current context, and its strategy the current strategy."""
        is_inside = _here.get() is not _Here.OUTSIDE
        if is_inside and current_strategy() is self.strategy:  # ReplicaThreads refuses it where there are several
            raise ConfigurationError(RUN_INSIDE_RUN)
        return _called(self, self.strategy, work)

    @known_arguments
    def all_reduce(self, op: ReduceOp | str, value: Any) -> Any:
        """The reduction of all replicas' values, on every replica, as tensors; the mean of integers has torch's
        default dtype.

        Gradients pass through SUM and MEAN and are reduced the same way: in each replica's backward they are
        the sum, or mean, of the gradients from all replicas' losses. Other reductions carry no gradient.

        Raises:
            ConfigurationError: values that cannot be reduced, or of different shapes.
            CollectiveError: another replica makes a different call, or has failed.
        """
        op = ReduceOp(op)
        value = map_values(value, lambda leaf: operand(op, as_tensor(leaf)))
        if self._is_alone:
            return value
        what = f"all_reduce {op.value} of {outline(value)}"
        if op in (ReduceOp.SUM, ReduceOp.MEAN):
            results = _ReplicaAllReduce.apply(self, op, what, *values_in(value))  # type: ignore[no-untyped-call]
        else:
            results = self._reduce(op, what, [leaf.detach() for leaf in values_in(value)])
        return refilled(value, results)

    @known_arguments
    def all_gather(self, value: Any, axis: int) -> Any:
        """The concatenation of all replicas' tensors along ``axis``, in replica order, on every replica.

        Lengths along the axis may differ. Gradients pass: each replica gets those of its own part, summed over all.

        Raises:
            ConfigurationError: a number or a tensor without that axis, or shapes that differ elsewhere.
            CollectiveError: another replica makes a different call, or has failed.
        """
        value = map_values(value, as_tensor)
        check_axis("all_gather", axis, values_in(value))
        if self._is_alone:
            return value
        what = f"all_gather along axis {axis} of {outline(value)}"
        results = _AllGather.apply(self, axis, what, *values_in(value))  # type: ignore[no-untyped-call]
        return refilled(value, results)

    @known_arguments
    def merge_call(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """All replicas of the process meet, and ``fn(strategy, *args, **kwargs)`` runs once, in cross-replica context.

        Args:
            fn: gets each argument as a :class:`PerReplica` of the replicas' arguments.
            args: this replica's.
            kwargs: this replica's.

        Returns:
            what ``fn`` returned, with each :class:`PerReplica` in it replaced by this replica's value.

        Raises:
            CollectiveError: another replica makes a different call, or has failed.
        """
        kwargs = kwargs or {}
        name = getattr(fn, "__qualname__", type(fn).__name__)
        what = f"merge_call of {name} with {len(args)} arguments" + "".join(f", {key}" for key in kwargs)

        def decide(values: list[tuple[Sequence[Any], Mapping[str, Any]]]) -> list[Any]:
            merged = [PerReplica(column) for column in zip(*(its for its, _ in values), strict=True)]
            named = {key: PerReplica(tuple(its[key] for _, its in values)) for key in kwargs}
            with self.strategy.interrupted():
                result = fn(self.strategy, *merged, **named)
            return [part_of_replica(result, replica) for replica in range(len(values))]

        return self._merge(what, (tuple(args), kwargs), decide)

    @property
    def _is_alone(self) -> bool:
        if self._replica_threads is not None or self.strategy.communicator is not None:
            return False
        if self.num_replicas_in_sync > 1:
            raise ConfigurationError(
                f"the replicas of {type(self.strategy).__name__} do not synchronize within a step: they only add up "
                "gradients; use MultiWorkerMirroredStrategy (--strategy ring) for collectives in a step"
            )
        return True

    def _merge(self, what: str, value: Any, decide: Callable[[list[Any]], list[Any]]) -> Any:
        """``decide`` runs once, in cross-replica context: from the local replicas' values to one result each."""

        def cross(values: list[Any]) -> list[Any]:
            return _called(_Here.CROSS_REPLICA, self.strategy, lambda: decide(values))

        if self._replica_threads is not None:
            if self._own is not None:
                with self._replica_threads.waiting():
                    self._own.submit(lambda: None).result()
            return self._replica_threads.meet(what, value, cross)
        return cross([value])[0]

    def _reduce(self, op: ReduceOp, what: str, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        def decide(values: list[Sequence[torch.Tensor]]) -> list[Any]:
            columns = [list(column) for column in zip(*values, strict=True)]
            if self._ops is not None:
                columns = self._ops.all_reduce_many(op, columns)
            if (workers := self.strategy.communicator) is not None:
                for column in columns:  # local replicas have the same values
                    total = workers.all_reduce(column[0], op)
                    column[:] = [total, *(total.to(other.device, copy=True) for other in column[1:])]
            return list(zip(*columns, strict=True)) if columns else [()] * len(values)

        return cast(Sequence[torch.Tensor], self._merge(what, tensors, decide))

    def _gather(
        self, axis: int, what: str, tensors: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
        """Each tensor of all replicas in one, and where in it this replica's own begins."""

        def decide(values: list[Sequence[torch.Tensor]]) -> list[Any]:
            columns = list(zip(*values, strict=True))
            wholes = [concatenated(column, axis, self.strategy.communicator) for column in columns]
            results = []
            for replica, own in enumerate(values):
                copies = [whole.to(one.device, copy=True) for (whole, _), one in zip(wholes, own, strict=True)]
                before = [sum(one.shape[axis] for one in column[:replica]) for column in columns]
                starts = [first + length for (_, first), length in zip(wholes, before, strict=True)]
                results.append((copies, starts))
            return results

        return cast("tuple[Sequence[torch.Tensor], Sequence[int]]", self._merge(what, tensors, decide))


def run_alone(
    strategy: Strategy, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> PerReplica[Any]:
    """``Strategy.run`` where the only replica of this process is in the calling thread."""
    own = part_of_replica(list(args), 0), part_of_replica(dict(kwargs), 0) if kwargs else {}
    running: contextlib.AbstractContextManager[object] = strategy.prepared or contextlib.nullcontext()

    def step() -> PerReplica[Any]:
        with running:
            return PerReplica((fn(*own[0], **own[1]),))

    return ReplicaContext(strategy).call(step)


class _ReplicaAllReduce(torch.autograd.Function):
    """The loss of the job is the sum of all replicas' losses, so the gradient of a sum is the sum of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, context: ReplicaContext, op: ReduceOp, what: str, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.context, ctx.op, ctx.what = context, op, what
        return _marked(ctx, context._reduce(op, what, [tensor.detach() for tensor in tensors]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, *_reduced_gradients(ctx, ctx.op, gradients)


class _AllGather(torch.autograd.Function):
    """Every replica's loss depends on every replica's part."""

    @staticmethod
    def forward(
        ctx: Any, context: ReplicaContext, axis: int, what: str, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results, starts = context._gather(axis, what, [tensor.detach() for tensor in tensors])
        ctx.context, ctx.axis, ctx.what = context, axis, what
        ctx.parts = [(start, tensor.shape[axis]) for start, tensor in zip(starts, tensors, strict=True)]
        return _marked(ctx, results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        wholes = _reduced_gradients(ctx, ReduceOp.SUM, [gradient.contiguous() for gradient in gradients])
        parts = zip(wholes, ctx.parts, strict=True)
        return None, None, None, *(None if whole is None else whole.narrow(ctx.axis, *part) for whole, part in parts)


def _marked(ctx: Any, results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results of a function, those that cannot have a gradient marked as such."""
    ctx.mark_non_differentiable(*(result for result in results if not is_inexact(result)))
    return tuple(results)


def _reduced_gradients(ctx: Any, op: ReduceOp, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Over all replicas, in the backward of what they made together; None where there cannot be one."""
    passing = [gradient for gradient in gradients if is_inexact(gradient)]
    results = iter(ctx.context._reduce(op, f"gradient of {ctx.what}", passing))
    return [next(results) if is_inexact(gradient) else None for gradient in gradients]


def _called(here: ReplicaContext | _Here, strategy: Strategy, work: Callable[[], T]) -> T:
    """Calls ``work``; meanwhile this is where the thread is, and the strategy is the current one. In a copy of the
    context variables, which an interrupt cannot fail to leave, as it can the end of a ``with`` block."""

    def inside() -> T:
        if current_strategy() is not strategy:
            strategy.scope().__enter__()
        _here.set(here)
        return work()

    return contextvars.copy_context().run(inside)
