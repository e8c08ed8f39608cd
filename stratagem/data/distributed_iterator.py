"""A pass over a distributed dataset."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from stratagem.tensorflow_names import WithWaysOut


class DistributedIterator(WithWaysOut, Iterator[Any]):
    """Gives the batches of this task, one a step. Given up, it leaves the pass, as a loop does that ends early."""

    def __init__(self, batches: Generator[Any]) -> None:
        self._batches = batches
        self.close = batches.close

    def __next__(self) -> Any:
        return next(self._batches)

    def get_next(self) -> Any:
        """TensorFlow's name for ``next()``; there are no more where it raises StopIteration."""
        return next(self)
