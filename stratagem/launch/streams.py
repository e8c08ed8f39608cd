"""Our standard streams, if their disk is full, or their reader or terminal is gone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import IO, Any


def lead_nowhere(stream: IO[str]) -> None:
    """Whatever is still to be written to a stream that cannot be written to, also as Python ends, is dropped."""
    with contextlib.suppress(OSError), open(os.devnull, "w") as null:  # one that is no file
        os.dup2(null.fileno(), stream.fileno())


class LastingStream:
    """A stream that leads nowhere from the first write on that fails, so that a job does not die of it."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        with self._lasting():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._lasting():
            self._stream.flush()

    @contextlib.contextmanager
    def _lasting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            lead_nowhere(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
