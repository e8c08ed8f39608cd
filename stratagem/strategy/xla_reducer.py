"""Gradients on XLA devices: when ``backward()`` returns, ``p.grad`` is the global gradient, still lazy.

As :mod:`stratagem.worker.reduction.reducer` (docs/protocol.md 15), but without buckets: XLA compiles the whole step and
overlaps by itself. All that crosses to the host is one small vector at the end of a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from stratagem.strategy.xla_group import XlaGroup
from stratagem.worker.preemption_request import preemption
from stratagem.worker.reduction.backward import Backward, BackwardReducer
from stratagem.worker.reduction.backward_status import BackwardStatus
from stratagem.worker.reduction.gradient_slot import OwnSlot
from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.step_meter import StepMeter


class XlaReducer(BackwardReducer[Backward]):
    """Reduces the gradients of parameters over all replicas, whenever ``backward()`` reaches one of them.

    Args:
        parameters: the same on every replica, in the same order; dense gradients.
        communicator: over the same group, for what replicas tell each other first.
        weight: how much this replica counts; asked once in each backward.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        group: XlaGroup,
        communicator: Communicator,
        weight: Callable[[], Weight],
        meter: StepMeter,
    ) -> None:
        super().__init__(weight, meter, Backward)
        self._group = group
        self._communicator = communicator
        self._slots: list[_LazySlot] = [_LazySlot(parameter, index) for index, parameter in enumerate(parameters)]
        for slot in self._slots:
            if slot.parameter.requires_grad:
                self._hook(slot)

    def refresh(self) -> None:
        """Parameters that need gradients later stay out: XLA would have to compile the step again."""

    def committed(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """A step was made: its graph is sent off."""
        self._group.run_graph()

    def _synchronise(self, backward: Backward) -> None:
        status, total = self._exchange(backward)
        merged = status.decode(total, self._group.size)
        if merged.wants_end:
            preemption.agreed = True
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

    def _tell_failure(self, backward: Backward) -> None:
        self._exchange(backward, failed=True)

    def _exchange(self, backward: Backward, failed: bool = False) -> tuple[BackwardStatus, torch.Tensor]:
        status = BackwardStatus(
            self._present(), backward.weights, 0, 1, self._num_reduced, failed, preemption.requested
        )
        self._num_reduced += 1
        return status, self._communicator.all_reduce(status.encode(self._group.rank, self._group.size))


class _LazySlot(OwnSlot):
    """The gradient is lazy."""

    def contribution(self) -> torch.Tensor:
        """What is summed in place: zeros where this replica has no gradient."""
        self.take()
        if self._own is None or not (self.fired or self.pending):
            return torch.zeros_like(self.parameter.detach())
        return self._own if self.fired else self._own.clone()
