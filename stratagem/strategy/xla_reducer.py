"""Gradients on XLA devices: when ``backward()`` returns, ``p.grad`` is the global gradient, still lazy.

As :mod:`stratagem.worker.reduction.reducer` (docs/protocol.md 15), but without buckets: XLA compiles the whole step and
overlaps by itself. All that crosses to the host is one small vector at the end of a backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

import torch

from stratagem.strategy.xla_group import XlaGroup
from stratagem.worker.preemption_request import preemption
from stratagem.worker.reduction.backward_status import BackwardStatus
from stratagem.worker.reduction.gradient_slot import ParameterGradient, WeakHook
from stratagem.worker.reduction.gradient_weight import Weight, WeightSum
from stratagem.worker.ring.communicator import Communicator


class XlaReducer:
    """Reduces the gradients of parameters over all replicas, whenever ``backward()`` reaches one of them.

    Args:
        parameters: the same on every replica, in the same order; dense gradients.
        group: sums on the device.
        communicator: over the same group, for what replicas tell each other first.
        weight: how much this replica counts; asked once in each backward.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        group: XlaGroup,
        communicator: Communicator,
        weight: Callable[[], Weight],
    ) -> None:
        self._group = group
        self._communicator = communicator
        self._weight = weight
        self._paused = 0
        self._pending_weights = WeightSum()
        self._num_reduced = 0
        self._backward: _XlaBackward | None = None
        self._slots = [_LazySlot(parameter, index) for index, parameter in enumerate(parameters)]
        for slot in self._slots:
            if slot.parameter.requires_grad:
                slot.parameter.register_hook(functools.partial(self._on_leaf, slot))
                slot.parameter.register_post_accumulate_grad_hook(WeakHook(self._on_gradient, slot))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards that begin inside add to this replica's pending gradients."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @property
    def has_pending(self) -> bool:
        """Whether ``no_sync`` has left gradients that are this replica's own."""
        return any(slot.pending and slot.parameter.grad is not None for slot in self._slots)

    def refresh(self) -> None:
        """Parameters that need gradients later stay out: XLA would have to compile the step again."""

    def committed(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """A step was made: its graph is sent off."""
        self._group.run_graph()

    def _on_leaf(self, slot: _LazySlot, _: torch.Tensor) -> None:
        """Runs before autograd adds to ``p.grad``; also for ``torch.autograd.grad`` of the parameter."""
        task = torch._C._current_graph_task_id()
        if self._backward is not None and self._backward.task != task:
            self._end(self._backward)  # a backward inside a backward
        if self._backward is None:
            self._backward = _XlaBackward(task)
            torch.autograd.Variable._execution_engine.queue_callback(_EndOfXlaBackward(self, self._backward))
        slot.take()

    def _on_gradient(self, slot: _LazySlot, parameter: torch.Tensor) -> None:
        """Runs after autograd added to ``p.grad``, which holds this backward's own gradient alone."""
        backward, delta = self._backward, parameter.grad
        if backward is None or delta is None:
            return
        if not backward.begun:
            self._begin(backward)
        parameter.grad = None
        slot.add(delta, backward.weight)

    def _begin(self, backward: _XlaBackward) -> None:
        pending = [slot for slot in self._slots if slot.pending]
        for slot in pending:
            slot.settle()
        if any(slot.pending for slot in pending):
            backward.weights = dataclasses.replace(self._pending_weights)
        backward.weight = self._weight()
        backward.weights.add(backward.weight)
        backward.local = self._paused > 0
        backward.begun = True

    def _end(self, backward: _XlaBackward) -> None:
        if backward is not self._backward:
            return
        try:
            if backward.begun and not backward.local:
                self._synchronise(backward)
            elif backward.begun:
                for slot in self._slots:
                    if slot.fired or (slot.taken and slot.pending):
                        slot.keep()
                self._pending_weights = backward.weights
        finally:
            self._backward = None
            for slot in self._slots:
                slot.restore()

    def _abandon(self, backward: _XlaBackward) -> None:
        """The backward raised; the other replicas wait for the word that it did."""
        if backward is not self._backward:
            return
        self._backward = None
        try:
            if backward.begun and not backward.local:
                self._exchange(backward, failed=True)
        finally:
            for slot in self._slots:
                slot.restore()

    def _synchronise(self, backward: _XlaBackward) -> None:
        tail, total = self._exchange(backward)
        merged = tail.decode(total, self._group.size)
        if merged.wants_end:
            preemption.hear()
        present = [slot for slot in self._slots if merged.present[slot.index]]
        gradients = [slot.contribution() for slot in present]
        self._group.sum_on_device(gradients)
        if merged.divisor:
            for gradient in gradients:
                gradient.div_(merged.divisor)
        reduced = {slot.index: gradient for slot, gradient in zip(present, gradients, strict=True)}
        for slot in self._slots:
            if slot.taken:
                slot.merge(reduced.get(slot.index))

    def _exchange(self, backward: _XlaBackward, failed: bool = False) -> tuple[BackwardStatus, torch.Tensor]:
        present = [slot.counted and (slot.fired or slot.pending) for slot in self._slots]
        tail = BackwardStatus(present, backward.weights, 0, 1, self._num_reduced, failed, preemption.requested)
        self._num_reduced += 1
        return tail, self._communicator.all_reduce(tail.encode(self._group.rank, self._group.size))


class _LazySlot(ParameterGradient):
    """The gradient is a tensor of its own."""

    _own: torch.Tensor | None = None
    _version = 0  # of _own, when it was last shown as p.grad

    @torch.no_grad()
    def add(self, delta: torch.Tensor, weight: Weight) -> None:
        """Takes in ``weight`` times this backward's own gradient."""
        own = delta.detach() * weight.scale if weight.scale else torch.zeros_like(delta)
        self._own = self._own + own if self._own is not None and (self.pending or self.fired) else own
        self._count(weight)

    def contribution(self) -> torch.Tensor:
        """What is summed in place: zeros where this replica has no gradient."""
        self.take()
        if self._own is None or not (self.fired or self.pending):
            return torch.zeros_like(self.parameter.detach())
        return self._own if self.fired else self._own.clone()

    def _adopt(self, grad: torch.Tensor) -> bool:
        changed = grad is not self._own or grad._version != self._version
        self._own = grad.detach()
        return changed and not bool(grad.any())

    def _local(self) -> torch.Tensor:
        assert self._own is not None
        self._version = self._own._version
        return self._own

    def _joined(self, reduced: torch.Tensor) -> torch.Tensor:
        self._own = None
        return reduced if self.stash is None else reduced.add_(self.stash.detach())


@dataclasses.dataclass(eq=False)
class _XlaBackward:
    """One run of autograd."""

    task: int
    """Of the engine; nested runs have their own."""
    begun: bool = False
    """Whether a gradient has come; all that follows has a meaning only then."""
    local: bool = False
    """Inside ``no_sync``."""
    weight: Weight = dataclasses.field(default_factory=lambda: Weight(1.0))
    weights: WeightSum = dataclasses.field(default_factory=WeightSum)
    """With those of the pending gradients that are reduced along."""


class _EndOfXlaBackward:
    """The engine calls it when a backward is done, and drops it uncalled when it failed."""

    def __init__(self, reducer: XlaReducer, backward: _XlaBackward) -> None:
        self._reducer = reducer
        self._backward = backward

    def __call__(self) -> None:
        self._reducer._end(self._backward)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the error of the backward is on its way; this one would hide it
            self._reducer._abandon(self._backward)
