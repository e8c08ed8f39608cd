"""Ends training when a value stops improving, or the loss is no longer a number."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from stratagem.arguments import checked, whole_number
from stratagem.errors import ConfigurationError, NonFiniteGradientError
from stratagem.training.callbacks.base import Callback, LogsArgument
from stratagem.training.callbacks.monitor import Mode, Monitor

logger = logging.getLogger(__name__)


@checked
class EarlyStopping(Callback):
    """Ends training when ``monitor`` has not improved for ``patience`` epochs.

    Args:
        monitor: a value of the epochs' logs.
        min_delta: a smaller change is not an improvement.
        patience: number of epochs without improvement to tolerate.
        verbose: 1: prints when it stops.
        mode: whether less ("min") or more ("max") is better; "auto": by the name.
        baseline: value to improve on first; None: none.
        restore_best_weights: at the end the model has the weights of its best epoch instead of its last; if all values
            are NaN, of its first.
        start_from_epoch: epochs before this one do not count.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        verbose: int = 0,
        mode: Mode = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        self._arguments = monitor, mode, min_delta
        self._patience = whole_number("patience", patience, 0)
        self._verbose = verbose
        self._baseline = baseline
        self._restores = self.in_step = restore_best_weights
        self._first_epoch = start_from_epoch
        self._start()

    @property
    def best(self) -> float:
        """The best value so far; NaN before the first."""
        return self._monitor.best

    def _start(self) -> None:
        self._monitor = Monitor(*self._arguments)
        self._weights: dict[str, Any] | None = None
        self.wait, self.best_epoch, self.stopped_epoch = 0, -1, -1

    def on_train_begin(self, logs: LogsArgument = None) -> None:
        if self._restores and any(weight.device.type == "meta" for weight in self.model.module.parameters()):
            raise ConfigurationError(
                "restore_best_weights keeps a copy of all weights, but no process holds the tables on parameter "
                "servers: add ModelCheckpoint(path, monitor=..., save_best_only=True), and at the end call "
                "model.load_weights(path)"
            )
        self._start()

    def on_epoch_end(self, epoch: int, logs: LogsArgument = None) -> None:
        value = self._monitor.value(logs) if epoch >= self._first_epoch else None
        if value is None:
            return
        self.wait += 1
        improves = self._monitor.improves(value)
        if improves or self.best_epoch < 0:  # the first one stands until a better one comes, also if it is NaN
            self._monitor.best, self.best_epoch = value, epoch
            if self._restores:
                with self.model.strategy.averaged_buffers(self.model.module):  # as they were evaluated
                    self._weights = {
                        name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
                        for name, value in self.model.module.state_dict().items()
                    }
        if improves:
            if self._baseline is None or self._monitor.improves(value, self._baseline):
                self.wait = 0
        elif self.wait >= self._patience and epoch > 0:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def on_epoch_missed(self, epoch: int, logs: LogsArgument = None) -> None:
        restores, self._restores = self._restores, False  # the weights are of a later epoch
        self.on_epoch_end(epoch, logs)
        self._restores = restores
        if self.best_epoch == epoch:
            self._weights = None

    def on_train_end(self, logs: LogsArgument = None) -> None:
        if self.stopped_epoch >= 0 and self._verbose and self.model.strategy.is_lead:
            logger.info(
                "epoch %d: stopped early; %s was best, %g, in epoch %d",
                self.stopped_epoch + 1, self._monitor.name, self.best, self.best_epoch + 1,
            )  # fmt: skip
        if self._weights is not None:
            self.model.load_state_dict(self._weights)
            self._weights = None
        elif self._restores and (servers := self.model.strategy.servers) is not None:
            logger.warning(
                "this worker was started after the best epoch and does not have its weights: if it is the lead, the "
                "model keeps the last ones; ModelCheckpoint(path, monitor=..., save_best_only=True) keeps the best on "
                "disk"
            )
            servers.load_once(None, call="load_once()")  # what others load they load all together

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_epoch": self.best_epoch,
            "wait": self.wait,
            "stopped_epoch": self.stopped_epoch,
            "weights": self._weights,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._monitor.best, self.best_epoch, self.wait = state["best"], state["best_epoch"], state["wait"]
        self.stopped_epoch, self._weights = state["stopped_epoch"], state["weights"]


class TerminateOnNaN(Callback):
    """Ends training when the loss of the epoch so far is NaN or Inf.

    It reads the loss after each batch, which waits for the device. A NaN or Inf in a gradient, an error under
    ``compile(nan="error")``, also ends ``fit``, which then returns the epochs before. On parameter servers it
    remains an error, because it is one worker's alone.
    """

    def on_train_batch_end(self, batch: int, logs: LogsArgument = None) -> None:
        loss = (logs or {}).get("loss", 0.0)
        if not math.isfinite(loss):
            logger.warning("batch %d: the loss is %s, training ends", batch, loss)
            self.model.stop_training = True


@contextlib.contextmanager
def ended_by_nan(callbacks: Sequence[Callback], has_servers: bool) -> Iterator[None]:
    """Around training: a gradient with a NaN or Inf ends it without an error where a callback asks for that."""
    try:
        yield
    except NonFiniteGradientError as error:
        if has_servers or not any(isinstance(callback, TerminateOnNaN) for callback in callbacks):
            raise
        logger.warning("training ends: %s", error)
