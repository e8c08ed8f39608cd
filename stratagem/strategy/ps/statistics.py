"""Running statistics under parameter servers, which each worker keeps for itself."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from stratagem.cluster.units import IN_CHECKPOINTS
from stratagem.worker.chief_client import ChiefClient

logger = logging.getLogger(__name__)


def warn_of_lost_statistics(model: nn.Module, chief: ChiefClient, task: str, ordinal: int) -> Callable[[int], None]:
    """Returns what to call before each batch: before the first it says where running statistics begin anew, in a worker
    that starts again or in a job that resumes. ``ordinal``: the model's among what is prepared."""
    is_first = True

    def begin(_: int) -> None:
        nonlocal is_first
        if not is_first:
            return
        is_first = False
        seen = {
            name: int(module.num_batches_tracked)
            for name, module in model.named_modules()
            if isinstance(module, _NormBase) and module.training and module.num_batches_tracked is not None
        }
        if not seen:
            return
        num_batches = float(sum(seen.values()))
        topic = f"{IN_CHECKPOINTS}statistics of {task}", ordinal
        told = chief.logs(*topic)
        if told is None:
            chief.record_logs(*topic, {"batches": num_batches})
        elif told["batches"] == num_batches:  # else the script has restored them
            names = [*seen]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            logger.warning(
                "the running statistics of %s%s begin anew: the parameter servers keep the weights, each worker its "
                "buffers. Save them by sg.Checkpoint with the model, and restore it before the loop, or put the loop "
                "into sg.PreemptionCheckpointHandler",
                *(", ".join(names[:3]), more),
            )

    return begin
