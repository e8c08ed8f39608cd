"""Resumes a ``fit`` that was killed or received SIGTERM."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Literal

from stratagem.arguments import checked, whole_number
from stratagem.checkpoint.catalog import newest
from stratagem.checkpoint.manifest import Manifest
from stratagem.errors import ConfigurationError, UnreadableError
from stratagem.training.callbacks.base import Callback, LogsArgument
from stratagem.training.preemption import GRACE_S, leave, say_it_resumes
from stratagem.training.saving.checkpoint import Checkpoint
from stratagem.training.saving.manager import CheckpointManager
from stratagem.worker import interrupts
from stratagem.worker.interrupts import preemption
from stratagem.worker.ring.communicator import any_says

logger = logging.getLogger(__name__)


@checked
class BackupAndRestore(Callback):
    """Saves what ``fit`` needs to resume, and resumes there when the script restarts.

    It saves the model, the optimizer, the epoch and step, the position in the data, random number generators, the
    epoch's counts so far, and the state of the other callbacks. When ``fit`` is done, the backup is removed.

    A SIGTERM or SIGINT to any worker while ``fit`` runs is a request to end. All workers finish the same step (or batch
    of the validation, which is later repeated from its start), save, and exit with code 143, which asks for a restart.
    A second signal ends the process at once.

    Parameter servers and their chief do this themselves (``stratagem run --checkpoint-dir``), so on them this callback
    does not save, and a worker that gets such a signal only finishes its step. A job that restarts as a whole resumes
    with its weights, the optimizer's state and its data; callbacks hear of the epochs that were over by
    ``on_epoch_missed``, with their logs, and the logs of the epoch that was cut are those of its rest.

    Args:
        backup_dir: folder of this backup alone: each ``fit`` of a script has its own, all but the last with
            ``delete_checkpoint=False``. Workers that run in step on several hosts share rank 0's. Any strategy without
            parameter servers can resume from it; under parameter servers ``fit`` refuses it (ConfigurationError).
        save_freq: "epoch", or a number of batches; a crash costs the work since the last backup.
        delete_checkpoint: False keeps the last backup; the next ``fit`` then has nothing left to do.
        save_before_preemption: False: signals end the process as if there were no such callback.
    """

    runs_last = True
    in_step = True

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Literal["epoch"] | int = "epoch",
        delete_checkpoint: bool = True,
        save_before_preemption: bool = True,
    ) -> None:
        self._folder = Path(backup_dir)
        self._every = save_freq if save_freq == "epoch" else whole_number("save_freq 'epoch' or a number", save_freq)
        self._deletes = delete_checkpoint
        self._hears_signals = save_before_preemption
        self._is_watching = False

    def on_train_begin(self, logs: LogsArgument = None) -> None:
        if self._hears_signals:
            interrupts.watch(GRACE_S)
            self._is_watching = True
        self._restore()

    def on_train_batch_end(self, batch: int, logs: LogsArgument = None) -> None:
        if self.model.is_mid_update:
            return  # gradients that wait for more are in no checkpoint
        if self._is_watching and preemption.is_due(self.model.strategy.communicator):
            leave(self.model.strategy, self._save)
        if self._every != "epoch" and self.model.num_steps % self._every == 0:
            self._save()

    def on_test_batch_end(self, batch: int, logs: LogsArgument = None) -> None:
        # Without a backward there is no collective that tells the others on its way.
        if self._is_watching and preemption.agree(self.model.strategy.communicator):
            leave(self.model.strategy, self._save)

    def on_epoch_end(self, epoch: int, logs: LogsArgument = None) -> None:
        path = self._save()
        if self._is_watching and preemption.agree(self.model.strategy.communicator):
            leave(self.model.strategy, lambda: path)

    def on_train_end(self, logs: LogsArgument = None) -> None:
        if self._is_watching and preemption.agree(self.model.strategy.communicator):
            leave(self.model.strategy, lambda: str(self._folder))  # the next run comes straight here
        if self._deletes and not self.model.has_servers and self.model.strategy.is_lead:
            self._remove()
        self.on_train_interrupted()

    def on_train_interrupted(self) -> None:
        if self._is_watching:
            self._is_watching = False
            interrupts.unwatch()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            left = newest(self._folder, "step", is_certain=True)
        except UnreadableError:
            left = self._folder
        if left is not None:
            logger.warning("%s could not be removed: remove it, or the next fit begins, and may end, there", left)

    def _restore(self) -> None:
        if self.model.has_servers:
            found = newest(self._folder, "step")
            saved = None if found is None else Manifest.read(found)
            if saved is not None and not saved.chief_epoch:
                raise ConfigurationError(
                    f"{found} is the backup of a training without parameter servers, but parameter servers resume "
                    "from their chief's checkpoints (--checkpoint-dir): finish that training under its strategy, or "
                    "start over with another backup_dir (model.load_weights of the backup before fit keeps its weights)"
                )
            logger.info(
                "BackupAndRestore: the chief and the parameter servers resume this job by themselves; if the whole job "
                "is restarted, callbacks hear of epochs that were over by on_epoch_missed, not by on_epoch_end"
            )
            return
        say_it_resumes()
        path = CheckpointManager(self._checkpoint(), self._folder).restore_or_initialize()
        if path is not None:
            position = self.model.position
            self.model.stop_training = position.is_over
            logger.info("Resuming at epoch %d, step %d, from %s", position.epoch + 1, position.step, path)

    def _save(self) -> str:
        model = self.model
        if model.has_servers:
            return ""
        workers, position = model.strategy.communicator, model.position
        if workers is None:
            position.is_over = model.stop_training
            position.is_trained |= position.is_over and position.step > 0  # it stops at once
        else:  # one of them alone may have said stop
            position.is_over = any_says(workers, model.stop_training)
        return self._checkpoint().write(self._folder)

    def _checkpoint(self) -> Checkpoint:
        model = self.model
        return Checkpoint(strategy=model.strategy, model=model.module, optimizer=model.optimizer, fit=model.position)
