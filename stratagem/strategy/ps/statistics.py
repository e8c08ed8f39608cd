"""Running statistics under parameter servers, which each worker keeps for itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from stratagem.arguments import some_of
from stratagem.cluster.units import IN_CHECKPOINTS
from stratagem.worker.chief_client import ChiefClient

logger = logging.getLogger(__name__)


def warn_of_lost_statistics(model: nn.Module, chief: ChiefClient, task: str, ordinal: int) -> Callable[[int], None]:
    """Returns what to call before each batch: before the first it says where running statistics begin anew, in a worker
    that starts again or in a job that resumes. ``ordinal``: the model's among what is prepared."""
    norms: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and module.num_batches_tracked is not None
    }

    def begin(_: int) -> None:
        names = [name for name, module in norms.items() if module.training]
        if not names:  # frozen, or the script evaluates first
            return
        num_batches = float(sum(int(norms[name].num_batches_tracked) for name in names))
        norms.clear()
        topic = f"{IN_CHECKPOINTS}statistics of {task}", ordinal
        told = chief.logs(*topic)
        if told is None:
            chief.record_logs(*topic, {"batches": num_batches})
        elif told["batches"] == num_batches:  # else the script has restored them
            logger.warning(
                "the running statistics of %s begin anew: the parameter servers keep the weights, each worker its "
                "buffers. Save the model now and then by sg.CheckpointManager, and restore it before the loop; nothing "
                "else saves buffers here",
                some_of(names),
            )

    return begin
