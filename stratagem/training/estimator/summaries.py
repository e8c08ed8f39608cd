"""Scalars of a training and of evaluations, for TensorBoard."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)


@functools.cache
def _say_it_is_missing() -> None:
    logger.warning("TensorBoard is not installed: no summaries. pip install 'stratagem[tensorboard]'")


class Summaries:
    """Writes one file in a folder, which the first scalar makes, until it is closed or collected. Without TensorBoard
    says so once, writes nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def write(self, values: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                _say_it_is_missing()
                return
            self._writer = SummaryWriter(self._folder)
            self._end = weakref.finalize(self, self._writer.close)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._end()
            self._writer = None
