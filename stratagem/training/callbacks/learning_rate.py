"""Learning rates that follow a schedule, or a value that stops improving."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.arguments import checked, whole_number
from stratagem.errors import ConfigurationError
from stratagem.training.callbacks.base import Callback, LogsArgument
from stratagem.training.callbacks.monitor import Mode, Monitor

logger = logging.getLogger(__name__)


@checked
class LearningRateScheduler(Callback):
    """Sets the learning rate before each epoch, and adds it to the epoch's logs as "learning_rate".

    Args:
        schedule: ``f(epoch, learning_rate)``, or ``f(epoch)`` if it takes no second argument, returns the learning
            rate of an epoch.
        verbose: 1: prints each new rate.
    """

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        self._schedule = schedule
        self._verbose = verbose
        self._takes_rate = _takes_two(schedule)
        self._epoch = -1

    def on_train_begin(self, logs: LogsArgument = None) -> None:
        self._epoch = -1

    def on_epoch_begin(self, epoch: int, logs: LogsArgument = None) -> None:
        if epoch == self._epoch:  # that is gone on with in its middle
            return
        self._epoch = epoch
        rate = self._schedule(epoch, self.model.learning_rate) if self._takes_rate else self._schedule(epoch)
        try:
            self.model.learning_rate = float(rate)
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"expected a schedule that gives a learning rate, got {rate!r} for epoch {epoch}"
            ) from None
        if self._verbose and self.model.strategy.is_lead:
            logger.info("epoch %d: learning rate %g", epoch + 1, rate)

    def on_epoch_end(self, epoch: int, logs: LogsArgument = None) -> None:
        if logs is not None:
            logs["learning_rate"] = self.model.learning_rate

    on_epoch_missed = on_epoch_begin  # the next rate may be one of this

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch = state["epoch"]


@checked
class ReduceLROnPlateau(Callback):
    """Lowers the learning rate when ``monitor`` has not improved for ``patience`` epochs.

    Args:
        monitor: a value of the epochs' logs.
        factor: the new learning rate is the old one times this, in each group of the optimizer.
        patience: number of epochs without improvement to tolerate.
        verbose: 1: prints each new learning rate.
        mode: whether less ("min") or more ("max") is better; "auto": by the name.
        min_delta: a smaller change is not an improvement.
        cooldown: epochs after a change that do not count.
        min_lr: lower limit.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: Mode = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        if not 0 < factor < 1:
            raise ConfigurationError(f"expected a factor between 0 and 1, got {factor!r}")
        self._arguments = monitor, mode, min_delta
        self._factor = factor
        self._patience = whole_number("patience", patience, 0)
        self._verbose = verbose
        self._cooldown = whole_number("cooldown", cooldown, 0)
        self._min_lr = min_lr
        self.on_train_begin()

    def on_train_begin(self, logs: LogsArgument = None) -> None:
        self._monitor = Monitor(*self._arguments)
        self._wait = self._cooling = 0

    def on_epoch_end(self, epoch: int, logs: LogsArgument = None) -> None:
        rate = self.model.learning_rate
        if logs is not None:
            logs["learning_rate"] = rate
        value = self._monitor.value(logs)
        if value is None:
            return
        if self._cooling:
            self._cooling, self._wait = self._cooling - 1, 0
        if self._monitor.improves(value):
            self._monitor.best, self._wait = value, 0
        elif not self._cooling:
            self._wait += 1
            if self._wait >= self._patience and self.model.lower_learning_rates(self._factor, self._min_lr):
                self._cooling, self._wait = self._cooldown, 0
                if self._verbose and self.model.strategy.is_lead:
                    logger.info("epoch %d: learning rate lowered to %g", epoch + 1, self.model.learning_rate)

    def on_epoch_missed(self, epoch: int, logs: LogsArgument = None) -> None:
        self.on_epoch_end(epoch, dict(logs or {}))

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._monitor.best, "wait": self._wait, "cooling": self._cooling}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._monitor.best, self._wait, self._cooling = state["best"], state["wait"], state["cooling"]


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(0, 0.0)
    except (TypeError, ValueError):  # it takes one, or is written in C
        return False
    return True
