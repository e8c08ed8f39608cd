"""Buffers under parameter servers (running statistics, memory banks, codebooks): each worker keeps its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import nn

from stratagem.arguments import some_of
from stratagem.cluster.units import IN_CHECKPOINTS
from stratagem.strategy.model_parts import saved_buffers_of
from stratagem.worker.chief_client import ChiefClient

logger = logging.getLogger(__name__)

_BATCHES = 100
"""A buffer that so many batches leave as it is is none that training changes."""
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_SUMMED = {*_FLOATS, torch.int32, torch.int64, torch.uint8, torch.bool}


class LostBuffers:
    """Called before each batch: finds the buffers in the state dict that training changes, and says of them where they
    begin anew, in a worker that starts again or in a job that resumes. ``ordinal``: the model's among what is prepared.
    """

    def __init__(self, model: nn.Module, chief: ChiefClient, task: str, ordinal: int) -> None:
        self._model, self._chief = model, chief
        self._topic = f"{IN_CHECKPOINTS}buffers of {task}", ordinal
        self._num_batches = 0
        self._first: dict[str, tuple[torch.Tensor, int, float]] = {}
        """As the first batch found them: by name each, its version in torch's count, and its sum."""

    def __call__(self, _: int) -> None:
        if self._num_batches == 0:
            saved = set(map(id, saved_buffers_of(self._model)))
            self._first = {
                name: (buffer, buffer._version, _sum(buffer))
                for name, buffer in self._model.named_buffers()
                if id(buffer) in saved and buffer.dtype in _SUMMED and not buffer.is_inference()
            }
        elif self._first:
            buffers = self._model.named_buffers()
            now = [(name, buffer, *self._first[name]) for name, buffer in buffers if name in self._first]
            changed: list[str] = []
            if any(buffer is not old or buffer._version != version for _, buffer, old, version, _ in now):
                # Kernels count no version: not those of running statistics, beside which is a number of batches.
                changed = [name for name, buffer, _, _, total in now if _sum(buffer) != total]
            if changed:
                self._compare(changed)
            if changed or self._num_batches == _BATCHES:
                self._first = {}
        self._num_batches += 1

    def _compare(self, changed: Sequence[str]) -> None:
        # Observers of a range begin at infinities, the sum of which equals nothing.
        total = sum(filter(math.isfinite, (self._first[name][2] for name in changed)))
        told = self._chief.logs(*self._topic)
        if told is None:
            self._chief.record_logs(*self._topic, {"total": total})
        elif told["total"] == total:  # else the script has restored them
            logger.warning(
                "buffers begin anew (%s): the parameter servers keep the weights, each worker its buffers, such as "
                "running statistics. Save the model now and then by sg.CheckpointManager, and restore it before the "
                "loop; nothing else saves buffers here",
                some_of(changed),
            )


def _sum(buffer: torch.Tensor) -> float:
    return float(buffer.sum(dtype=torch.float64))
