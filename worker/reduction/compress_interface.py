"""What a compression of gradients is, and the state that all with error feedback share."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import torch

from stratagem.worker.ring.communicator import Communicator

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class BucketPart:
    """One gradient inside a bucket."""

    start: int
    """In elements from the begin of the bucket."""
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FullBucket:
    """A bucket whose gradients have come."""

    index: int
    parts: Sequence[BucketPart]
    """The gradients in it; elements between them are zeros."""
    source: torch.Tensor
    """Flat float32 in host memory, left as it is."""
    result: torch.Tensor
    """The same length; what lies between the parts is nobody's."""
    again: bool = False
    """This backward adds to the gradients of an earlier one, so it goes on from the state that left aside."""


class GradientCompression(abc.ABC):
    """Reduces float32 buckets with fewer bytes than an all-reduce. Every rank ends with identical bits.

    State is kept by bucket and changes only when the step commits (docs/protocol.md 22): what a backward computes
    stays aside until :meth:`commit`, so a backward whose gradients are dropped leaves no trace.
    """

    name: str

    @abc.abstractmethod
    def reduce(self, bucket: FullBucket, communicator: Communicator) -> None:
        """Writes the sum of all ranks' sources into the bucket's result, as well as it can. The bucket is the same one
        on every rank; this is a thread of the communicator."""

    @abc.abstractmethod
    def commit(self, buckets: Iterable[int]) -> None:
        """A step was made with the newest result of these buckets."""

    @abc.abstractmethod
    def reset(self) -> None:
        """The buckets were cut again: forgets all state."""


class Committed(Generic[T]):
    """A value for each bucket that changes when the step commits."""

    def __init__(self) -> None:
        self._now: dict[int, T] = {}
        self._aside: dict[int, T] = {}

    def get(self, bucket: int, again: bool, first: Callable[[], T]) -> T:
        """The value to begin a backward with; ``first()`` when there is none yet. It must not be written to."""
        if again and bucket in self._aside:
            return self._aside[bucket]
        return self._now[bucket] if bucket in self._now else first()

    def put(self, bucket: int, value: T) -> None:
        """The value after a backward."""
        self._aside[bucket] = value

    def commit(self, buckets: Iterable[int]) -> None:
        """The values of these buckets stand."""
        for bucket in buckets:
            if bucket in self._aside:
                self._now[bucket] = self._aside.pop(bucket)

    def clear(self) -> None:
        self._now.clear()
        self._aside.clear()


class ErrorFeedback(GradientCompression):
    """Compression that owes: what it leaves out of one step (the residual, on this rank alone) it adds to the next.

    Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019.
    """

    def __init__(self) -> None:
        self.residuals: Committed[torch.Tensor] = Committed()

    def owed(self, bucket: FullBucket) -> torch.Tensor:
        """The source plus the residual, in new memory."""
        return bucket.source + self.residuals.get(bucket.index, bucket.again, lambda: torch.zeros_like(bucket.source))

    def commit(self, buckets: Iterable[int]) -> None:
        self.residuals.commit(buckets)

    def reset(self) -> None:
        self.residuals.clear()
