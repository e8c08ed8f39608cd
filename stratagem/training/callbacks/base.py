"""What a callback hears of."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar

from stratagem.training.model_state import ModelState

LogsArgument = MutableMapping[str, float] | None


class Callback:
    """Hears of the course of ``fit``, ``evaluate`` and ``predict``; the hooks are those of Keras.

    Every worker calls its own callbacks. Logs of epochs and tests are numbers of all workers where they run in step;
    logs of batches are of the local replicas since the epoch began, and are computed when a callback reads them,
    because that waits for the device. What a hook writes into the logs, the callbacks after it read.

    ``self.model.stop_training = True`` ends training: at once where there is one worker, else at the end of the epoch,
    and then on all of them.
    """

    model: ModelState
    """Whose training it is."""
    runs_last: ClassVar[bool] = False
    """Whether its hooks are called after those of all others."""
    params: Mapping[str, Any]
    """"epochs", "steps" (of an epoch, or None) and "verbose"."""

    def set_model(self, model: ModelState) -> None:
        """Called before all hooks."""
        self.model = model

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Called before all hooks."""
        self.params = params

    def state_dict(self) -> dict[str, Any]:
        """What has to be known to go on after an interruption; fit for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where ``state`` was saved."""

    def on_train_begin(self, logs: LogsArgument = None) -> None:
        """Training is about to begin."""

    def on_train_end(self, logs: LogsArgument = None) -> None:
        """Training is over; logs of the last epoch."""

    def on_train_interrupted(self) -> None:
        """An error or a signal ends training; it goes on its way after this. Not a hook of Keras."""

    def on_epoch_begin(self, epoch: int, logs: LogsArgument = None) -> None:
        """An epoch, from 0, is about to begin."""

    def on_epoch_end(self, epoch: int, logs: LogsArgument = None) -> None:
        """An epoch is over; its logs, also those of the validation ("val_loss")."""

    def on_epoch_missed(self, epoch: int, logs: LogsArgument = None) -> None:
        """Other workers of parameter servers have done all of an epoch; its logs of theirs. Not a hook of Keras."""

    def on_train_batch_begin(self, batch: int, logs: LogsArgument = None) -> None:
        """A step, from 0 in each epoch, is about to begin."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: LogsArgument = None) -> None:
        """A step is done."""
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: LogsArgument = None) -> None:
        """An older name of ``on_train_batch_begin``."""

    def on_batch_end(self, batch: int, logs: LogsArgument = None) -> None:
        """An older name of ``on_train_batch_end``."""

    def on_test_begin(self, logs: LogsArgument = None) -> None:
        """An evaluation is about to begin."""

    def on_test_end(self, logs: LogsArgument = None) -> None:
        """An evaluation is over; its logs."""

    def on_test_batch_begin(self, batch: int, logs: LogsArgument = None) -> None:
        """A batch is about to be evaluated."""

    def on_test_batch_end(self, batch: int, logs: LogsArgument = None) -> None:
        """A batch was evaluated."""

    def on_predict_begin(self, logs: LogsArgument = None) -> None:
        """A prediction is about to begin."""

    def on_predict_end(self, logs: LogsArgument = None) -> None:
        """A prediction is over."""

    def on_predict_batch_begin(self, batch: int, logs: LogsArgument = None) -> None:
        """A batch is about to be predicted."""

    def on_predict_batch_end(self, batch: int, logs: LogsArgument = None) -> None:
        """A batch was predicted; its outputs are ``logs["outputs"]``."""
