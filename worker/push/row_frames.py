"""Rows of several tables in one frame, whether they are asked for or their gradients are sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from stratagem.rpc.codec import NUMBER_BYTES
from stratagem.worker.push.layout import Numbers


class RowsThere(NamedTuple):
    """Some rows of one table on one ps."""

    local: Numbers
    """Their numbers in the flat tensor there."""
    rows: torch.Tensor
    """``(len(local), width)``: where they go, or their gradient; contiguous, on the CPU."""


def rows_in(max_bytes: int, like: torch.Tensor) -> int:
    """Rows, each with its number, that go into so many bytes. Rows are asked for by as many, so that their numbers are
    cut once a step. ``max_bytes``: of a frame; ``like``: rows of the table, ``(…, width)``."""
    return max(1, max_bytes // (NUMBER_BYTES + like.shape[1] * like.itemsize))


def frames_of(parts: Iterable[RowsThere], max_rows: int) -> Iterator[list[RowsThere]]:
    """Distributes parts, in their order and none longer than ``max_rows``, over frames of as many rows."""
    frame: list[RowsThere] = []
    num_rows = 0
    for part in parts:
        if frame and num_rows + len(part.local) > max_rows:
            yield frame
            frame, num_rows = [], 0
        frame.append(part)
        num_rows += len(part.local)
    if frame:
        yield frame


def numbers_of(frame: Sequence[RowsThere]) -> torch.Tensor:
    """The row numbers of a frame, one after the other."""
    return torch.from_numpy(frame[0].local if len(frame) == 1 else np.concatenate([part.local for part in frame]))
