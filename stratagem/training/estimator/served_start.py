"""Starting to train on parameter servers: from a checkpoint, in the middle of a job, or from nothing.

The lead's values become the job's where it has none yet (docs/protocol.md 13). So a checkpoint is read into the
modules before they are prepared: a worker that was started again then takes the live values, and the older ones of the
checkpoint are forgotten. The step at which the job started is a variable too. The lead creates it last, and whoever
has got it knows that the state of the optimizers is in place as well.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stratagem.checkpoint.catalog import newest_undamaged, read_step
from stratagem.checkpoint.reading import describe, kind_and_state, read_states
from stratagem.errors import CheckpointError
from stratagem.strategy.base import Strategy
from stratagem.training.estimator.objects import ModelObjects
from stratagem.training.estimator.run_config import CHECKPOINT_NAME

logger = logging.getLogger(__name__)


def prepare(strategy: Strategy, objects: ModelObjects, model_dir: Path, arguments: dict[str, Any]) -> int:
    """Prepares the objects; returns the updates that had been made when the job started.

    Raises:
        CheckpointError: there are checkpoints, and none can be restored.
    """
    path, step, states = _read_newest(model_dir, list(objects.made))
    for name, module in objects.modules.items():
        if name in states:
            module.load_state_dict(states[name])
    objects.prepare(strategy, True, arguments)
    for name in objects.optimizers:
        optimizer = objects.in_use[name]
        # A lead that joins a running job must not put old slots over the live ones.
        if name in states and (not strategy.is_lead or not optimizer.state_dict()["state"]):
            optimizer.load_state_dict(states[name])
    start = nn.Module()
    start.register_buffer("step", torch.tensor(step))
    strategy.prepare(start)
    job_step = int(start.get_buffer("step"))
    if path is not None:
        logger.info("The job goes on from step %d; the newest checkpoint is %s", job_step, path)
    return job_step


def _read_newest(model_dir: Path, names: list[str]) -> tuple[Path | None, int, dict[str, Any]]:
    """The newest checkpoint, its step and the states in it; None, 0 and none where there is none."""
    while (path := newest_undamaged(model_dir, CHECKPOINT_NAME)) is not None:
        try:
            states = read_states(describe(path), names)
            return path, read_step(path) or 0, {name: kind_and_state(state)[1] for name, state in states.items()}
        except CheckpointError:
            if path.exists():
                raise  # else the job that runs has newer ones, and removed it
    return None, 0, {}
