"""Checkpoints during training."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any, Literal

from stratagem.arguments import checked, whole_number
from stratagem.checkpoint.catalog import next_number
from stratagem.errors import ConfigurationError
from stratagem.training.callbacks.base import Callback, LogsArgument
from stratagem.training.callbacks.monitor import Mode, Monitor
from stratagem.training.saving.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


@checked
class ModelCheckpoint(Callback):
    """Saves a checkpoint after each epoch, or every n-th batch; all workers save one together.

    ``Model.load_weights``, ``sg.Checkpoint.restore`` and ``sg.latest_checkpoint`` read it.
    On parameter servers the lead saves; an epoch whose batches were all taken by other workers has no checkpoint. There
    ``fit`` refuses a path at which their chief or a ps may not save, before its first step (ForbiddenError).

    Args:
        filepath: a folder for each checkpoint, which may contain "{epoch}" (from 1) and values of the logs:
            "runs/{epoch}-{val_loss:.2f}"; with a number of batches as ``save_freq`` also "{batch}" of the epoch, from
            1. Saving to the same path again replaces it.
        monitor: a value of the epochs' logs.
        verbose: 1: prints each save.
        save_best_only: only when ``monitor`` is better than ever.
        save_weights_only: without the optimizer's state.
        mode: whether less ("min") or more ("max") is better; "auto": by the name.
        save_freq: "epoch", or a number of batches.
        initial_value_threshold: value that ``monitor`` must improve on first; None: none.
    """

    in_step = True

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: Mode = "auto",
        save_freq: Literal["epoch"] | int = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        self._template = os.fspath(filepath)
        self._verbose = verbose
        self._best_only = save_best_only
        self._weights_only = save_weights_only
        self._every = save_freq if save_freq == "epoch" else whole_number("save_freq 'epoch' or a number", save_freq)
        self._monitor = Monitor(monitor, mode if save_best_only or mode != "auto" else "min")
        if initial_value_threshold is not None:
            self._monitor.best = initial_value_threshold
        self._named: dict[str, int] = {}
        self.last_path: str | None = None
        """Of the newest checkpoint."""
        if save_freq != "epoch":
            self.on_train_batch_end = self._end_batch  # type: ignore[method-assign]

    @property
    def best(self) -> float:
        """The best value so far; NaN before the first."""
        return self._monitor.best

    def on_train_begin(self, logs: LogsArgument = None) -> None:
        servers = self.model.strategy.servers
        if servers is not None and self.model.strategy.is_lead:  # the first save may be long after the first step
            servers.chief.check_folder(os.path.abspath(re.sub(r"{[^}]*}", "0", self._template)))

    def on_epoch_begin(self, epoch: int, logs: LogsArgument = None) -> None:
        self._named = {"epoch": epoch + 1}

    def on_epoch_end(self, epoch: int, logs: LogsArgument = None) -> None:
        if self._every == "epoch":
            self._consider(logs or {})

    def on_epoch_missed(self, epoch: int, logs: LogsArgument = None) -> None:
        value = self._monitor.value(logs) if self._best_only and self._every == "epoch" else None
        if value is not None and self._monitor.improves(value):
            self._monitor.best = value

    def _end_batch(self, batch: int, logs: LogsArgument = None) -> None:
        if self.model.num_steps % int(self._every) == 0:
            self._named["batch"] = batch + 1
            needs_logs = self._best_only or "{" in self._template.replace("{epoch", "").replace("{batch", "")
            self._consider(self.model.logs_of_all(logs or {}) if needs_logs else {})

    def _consider(self, logs: Mapping[str, float]) -> None:
        if self._best_only:
            value = self._monitor.value(logs)
            if value is None or not self._monitor.improves(value):
                return
            self._monitor.best = value
        # Under parameter servers the one that asks is enough; workers that run in step all have to take part.
        if self.model.strategy.communicator is None and not self.model.strategy.is_lead:
            return
        objects: dict[str, Any] = {"model": self.model.module}
        if not self._weights_only:
            objects["optimizer"] = self.model.optimizer
        path = self._path({**logs, **self._named})
        checkpoint = Checkpoint(strategy=self.model.strategy, **objects)
        self.last_path = checkpoint.write(path, step=next_number(path, self.model.num_steps))
        if self._verbose and self.model.strategy.is_lead:
            logger.info("epoch %d: saved %s", self._named["epoch"], self.last_path)

    def _path(self, values: Mapping[str, float]) -> str:
        try:
            return self._template.format(**values)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise ConfigurationError(
                f"the filepath {self._template!r} cannot be filled in ({error}); there are {', '.join(values)}"
            ) from None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "last_path": self.last_path}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._monitor.best, self.last_path = state["best"], state.get("last_path")
