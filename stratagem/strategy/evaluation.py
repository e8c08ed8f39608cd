"""Checkpoints for people who evaluate: read one as a plain ``state_dict``, or follow a job's as they appear."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch

from stratagem.cluster.config import EvaluatorConfig
from stratagem.cluster.sources import gather
from stratagem.errors import CheckpointError, ConfigurationError, JobStoppedError
from stratagem.ps.consolidate import consolidate
from stratagem.ps.snapshot import complete_checkpoints
from stratagem.rpc.logs import configure_logging
from stratagem.rpc.session import SessionClient

POLL_S = 0.5


@dataclasses.dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint that has just been committed."""

    step: int
    """Largest number of updates that any ps had applied."""
    path: Path
    state_dict: dict[str, torch.Tensor]
    """Every variable whole, by the name it has in the model's ``state_dict``."""


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """A committed checkpoint of any number of ps as a plain ``state_dict``.

    Args:
        path: the checkpoint ("…/step-00000100"), or a directory of checkpoints: then the newest complete one.

    Raises:
        CheckpointError: there is no complete checkpoint, or a file is damaged.
    """
    folder = Path(path)
    if not (folder / "manifest.json").exists():
        newest = next(complete_checkpoints(folder), None)
        if newest is None:
            raise CheckpointError(f"expected a complete checkpoint in {folder}, found none")
        folder = newest[0]
    return consolidate(folder)


def new_checkpoints() -> Iterator[NewCheckpoint]:
    """In an evaluator: each newest checkpoint of the job, until the job is over and the last one has been given.

    A checkpoint that is older than one already given is left out: a slow evaluator sees the newest.

    Raises:
        ConfigurationError: this process is no evaluator, or does not know the chief or the checkpoint directory.
        JobStoppedError: the job failed.
    """
    resolved, _ = gather("evaluator", os.environ)
    config = cast(EvaluatorConfig, resolved.config)
    if not config.chief:
        raise ConfigurationError("no chief is known to this evaluator: start it with `stratagem evaluator SCRIPT`")
    configure_logging(config.task, config.log_format)
    session = SessionClient(config.chief, config.task, "", chief_timeout_s=config.peer_timeout_s)
    session.start(config.start_timeout_s)
    given = -1
    try:
        while True:
            # Asked before the look: a checkpoint committed before the end is seen by the look after it.
            reason = session.wait_stopped(POLL_S)
            newest = next(complete_checkpoints(Path(config.checkpoint_dir)), None)
            if newest is not None and int(newest[1]["step"]) > given:
                given = int(newest[1]["step"])
                yield NewCheckpoint(given, newest[0], consolidate(newest[0]))
            elif reason is not None:
                break
    finally:
        session.goodbye(0)
    if not isinstance(reason, JobStoppedError) or reason.exit_code:
        raise reason
