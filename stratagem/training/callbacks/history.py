"""What came of each epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratagem.errors import ConfigurationError
from stratagem.training.callbacks.base import Callback, LogsArgument


class History(Callback):
    """Keeps the logs of the epochs; ``fit`` returns it."""

    def __init__(self) -> None:
        self.history: dict[str, list[float]] = {}
        """By name in the logs: a value for each epoch."""
        self.epoch: list[int] = []

    def on_train_begin(self, logs: LogsArgument = None) -> None:
        self.history, self.epoch = {}, []

    def on_epoch_end(self, epoch: int, logs: LogsArgument = None) -> None:
        self.epoch.append(epoch)
        logs = {} if logs is None else logs
        for name, value in logs.items():
            try:
                number = float(value)
            except (TypeError, ValueError, RuntimeError, OverflowError):
                raise ConfigurationError(
                    f"logs[{name!r}] is a {type(value).__name__}, put there by a callback, and logs hold one number by "
                    "each name: keep anything else in the callback itself"
                ) from None
            logs[name] = number  # what shows it can read tensors and truth values by this alone
            self.history.setdefault(name, []).append(number)

    on_epoch_missed = on_epoch_end

    def state_dict(self) -> dict[str, Any]:
        return {"history": {name: list(values) for name, values in self.history.items()}, "epoch": list(self.epoch)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history = {name: list(values) for name, values in state["history"].items()}
        self.epoch = list(state["epoch"])
