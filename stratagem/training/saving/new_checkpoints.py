"""The checkpoints of a running job, as they appear: for its evaluator."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch

from stratagem.checkpoint.catalog import newest, read_step, was_removed
from stratagem.checkpoint.durable import patiently
from stratagem.checkpoint.reading import load_checkpoint
from stratagem.cluster.config import EvaluatorConfig
from stratagem.cluster.sources import gather
from stratagem.errors import CheckpointError, ConfigurationError, JobStoppedError, StratagemError, UnreadableError
from stratagem.rpc.logs import configure_logging
from stratagem.rpc.security import security_of
from stratagem.rpc.session import SessionClient

logger = logging.getLogger(__name__)

POLL_S = 0.5


@dataclasses.dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint that has just been committed."""

    step: int
    """What the script called it; of one that the chief took by itself, the largest number of updates on any ps."""
    path: Path
    state_dict: dict[str, torch.Tensor]
    """Of the only model: every variable whole, by the name it has in the model's ``state_dict``."""


class JobWatch:
    """In an evaluator: the job that it belongs to, for as long as the ``with`` block lasts. Checkpoints appear in
    ``checkpoint_dir``, or where the configuration of this evaluator says. ConfigurationError: this process is no
    evaluator, or does not know the chief or the checkpoint directory."""

    def __init__(self, checkpoint_dir: str | None = None) -> None:
        resolved, _ = gather("evaluator", os.environ, {"checkpoint_dir": checkpoint_dir})
        config = cast(EvaluatorConfig, resolved.config)
        if not config.chief:
            raise ConfigurationError("no chief is known to this evaluator: start it with `stratagem evaluator SCRIPT`")
        configure_logging(config.task, config.log_format)
        self.checkpoint_dir = config.checkpoint_dir
        self._start_timeout_s = config.start_timeout_s
        self._session = SessionClient(
            config.chief, config.task, "", chief_timeout_s=config.peer_timeout_s, security=security_of(config)
        )

    def __enter__(self) -> JobWatch:
        with contextlib.suppress(JobStoppedError):  # it is over already: what it has saved is looked at all the same
            self._session.start(self._start_timeout_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        has_failed = isinstance(error, Exception)  # a script that leaves the loop of new_checkpoints() has not
        self._session.goodbye(int(has_failed), f"{type(error).__name__}: {error}" if has_failed else "")

    def over(self) -> StratagemError | None:
        """Why the job is over; None when it still runs after :data:`POLL_S` seconds."""
        return self._session.wait_stopped(POLL_S)

    def look(self, folder: Path, name: str = "") -> tuple[StratagemError | None, Path | None, int | None]:
        """:meth:`over`, then the newest checkpoint in a folder and its number: one committed before the end is seen.
        It looks again for as long as the job runs and the disk does not answer. UnreadableError: the job is over."""

        def find() -> tuple[Path | None, int | None]:
            path = newest(folder, name, is_certain=True)
            return path, None if path is None else read_step(path)

        while True:
            reason = self.over()
            try:
                return reason, *patiently(find)
            except UnreadableError:
                if reason is not None:
                    raise


def new_checkpoints() -> Iterator[NewCheckpoint]:
    """In an evaluator: yields each newest checkpoint of the job, until the job is over and the last one was yielded.

    It skips a checkpoint that is older than one already yielded, so a slow evaluator sees only the newest. It also
    skips a damaged one (the log says so), and one that the chief removed while it was read, because newer ones exist.
    If there was none at all, the log says where it looked for them.

    Raises:
        ConfigurationError: this process is not an evaluator, or does not know the chief or the checkpoint directory.
        JobStoppedError: the job failed.
        UnreadableError: the job is over, and its last checkpoint could not be looked for.
    """
    given = -1
    with JobWatch() as job:
        while True:
            reason, path, step = job.look(Path(job.checkpoint_dir))
            if path is not None and step is not None and step > given:
                try:
                    state_dict = load_checkpoint(path)
                except CheckpointError as error:
                    if was_removed(path) or (reason is None and isinstance(error, UnreadableError)):
                        continue
                    logger.error("Skipped a checkpoint: %s", error)
                else:
                    yield NewCheckpoint(step, path, state_dict)
                given = step
            elif reason is not None:
                break
    if not isinstance(reason, JobStoppedError) or reason.exit_code:
        raise reason
    if given < 0:
        logger.warning(
            "no checkpoint was in %s: start the job with --checkpoint-dir (`python train.py`: every task with "
            "STRATAGEM_CHECKPOINT_DIR) where its script saves",
            job.checkpoint_dir,
        )
