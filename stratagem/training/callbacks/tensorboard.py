"""Logs of epochs and batches, and an Estimator's scalars, as TensorBoard's event files."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stratagem.arguments import checked, warn_once
from stratagem.checkpoint.durable import way_out
from stratagem.errors import ConfigurationError
from stratagem.measuring import measures
from stratagem.training.callbacks.base import Callback, LogsArgument
from stratagem.worker.step_meter import active_meter

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

_MISSING = "TensorBoard is not installed: pip install 'stratagem[tensorboard]'"
AGAIN_S = 30.0


@checked
class TensorBoard(Callback):
    """Writes scalars, on the lead: epoch values as "epoch_loss" and so on, in folders "train" and "validation", and
    the time of each phase as "phases/data_wait_s" and so on.

    Args:
        log_dir: folder of the run.
        update_freq: "epoch"; "batch" or a number n: also write "batch_loss" and so on after every, or every n-th,
            batch, from the lead's own replicas. Reading them waits for the device.

    Raises:
        ConfigurationError: TensorBoard is not installed.
    """

    def __init__(
        self, log_dir: str | os.PathLike[str] = "logs", update_freq: Literal["epoch", "batch"] | int = "epoch"
    ) -> None:
        if update_freq not in ("epoch", "batch") and (isinstance(update_freq, str) or update_freq < 1):
            raise ConfigurationError(f"expected update_freq 'epoch', 'batch' or a number, got {update_freq!r}")
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            raise ConfigurationError(_MISSING) from None
        self._every = {"epoch": 0, "batch": 1}.get(update_freq, 0) if isinstance(update_freq, str) else update_freq
        self._train, self._validation = (Summaries(Path(log_dir, part)) for part in ("train", "validation"))
        self._measured: dict[str, float] = {}
        if self._every:
            self.on_train_batch_end = self._write_batch  # type: ignore[method-assign]

    def on_epoch_begin(self, epoch: int, logs: LogsArgument = None) -> None:
        meter = active_meter()
        self._measured = {} if meter is None else meter.values()

    def on_epoch_end(self, epoch: int, logs: LogsArgument = None) -> None:
        if self.model.strategy.is_lead:
            meter = active_meter()
            values = {} if meter is None else meter.values()
            for name, seconds in measures.since(values, self._measured).items():
                if name in measures.PHASES:
                    self._train.add(f"phases/{name}", seconds, epoch)
            self.on_epoch_missed(epoch, {"learning_rate": self.model.learning_rate, **(logs or {})})

    def on_epoch_missed(self, epoch: int, logs: LogsArgument = None) -> None:
        if not self.model.strategy.is_lead:
            return
        for name, value in (logs or {}).items():
            part = self._validation if name.startswith("val_") else self._train
            part.add(f"epoch_{name.removeprefix('val_')}", value, epoch)
        self._train.flush()
        self._validation.flush()

    def on_test_end(self, logs: LogsArgument = None) -> None:
        if self.model.is_fitting or not self.model.strategy.is_lead:
            return
        for name, value in (logs or {}).items():
            self._validation.add(f"evaluation_{name}", value, self.model.num_steps)
        self._close()

    def _write_batch(self, batch: int, logs: LogsArgument = None) -> None:
        step = self.model.num_steps
        if step % self._every == 0 and self.model.strategy.is_lead:
            for name, value in (logs or {}).items():
                self._train.add(f"batch_{name}", value, step)

    def _close(self, logs: LogsArgument = None) -> None:
        self._train.close()
        self._validation.close()

    on_train_end = on_train_interrupted = _close


class Summaries:
    """Writes one file in a folder, which the first scalar makes, until it is closed or collected. Without TensorBoard
    says so once, writes nothing. Where it cannot be written, as on a full disk, says so once, and goes on with another
    file :data:`AGAIN_S` later, without the scalars of the time between."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._next_s = 0.0

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.add(name, value, step)
        self.flush()

    def add(self, name: str, value: float, step: int) -> None:
        with self._going_on():
            if self._writer is None:
                if time.monotonic() < self._next_s:
                    return
                try:
                    from torch.utils.tensorboard import SummaryWriter
                except ImportError:
                    warn_once(logger, f"no summaries: {_MISSING}")
                    return
                self._writer = SummaryWriter(self._folder)
                self._end = weakref.finalize(self, self._writer.close)
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        if self._writer is not None:
            with self._going_on():
                self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            with self._going_on():
                self._end()
            self._writer = None

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            advice = way_out(error, "name another folder, or make this one writable")
            warn_once(logger, f"no summaries in {self._folder} at present: {error.strerror}; {advice}")
            self._next_s = time.monotonic() + AGAIN_S
            if self._writer is not None:
                self._end.detach()
                self._writer = None
