"""Schedules that end after a number of steps, in jobs that make more: what a lost worker had of its batches is made up
for by further steps."""

from __future__ import annotations

import functools
import logging

import torch
from torch.optim.lr_scheduler import OneCycleLR

logger = logging.getLogger(__name__)


@functools.cache
def watch_one_cycles() -> None:
    """From now on each OneCycleLR, which raises after ``total_steps``, keeps its last settings then, also one that is
    not prepared."""
    get_lr = OneCycleLR.get_lr

    def stay_at_the_end(self: OneCycleLR) -> list[float | torch.Tensor]:
        if self.last_epoch <= self.total_steps:
            rates: list[float | torch.Tensor] = get_lr(self)
            return rates
        if self.last_epoch == self.total_steps + 1:
            kind = type(self).__name__
            logger.warning("%s stays where it ends: there are more updates than its %d steps", kind, self.total_steps)
        return [group["lr"] for group in self.optimizer.param_groups]

    OneCycleLR.get_lr = stay_at_the_end  # type: ignore[method-assign]
