"""Ends training when the loss is no number any more."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence

from stratagem.errors import NonFiniteGradientError
from stratagem.training.callbacks.base import Callback, LogsArgument

logger = logging.getLogger(__name__)


class TerminateOnNaN(Callback):
    """Ends training when the loss of the epoch so far is NaN or Inf.

    It reads the loss after each batch, which waits for the device. A NaN or Inf in a gradient, which under
    ``compile(nan="error")`` is an error, ends ``fit`` too, which then returns the epochs before; under parameter
    servers, where it is one worker's alone, it stays an error.
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
