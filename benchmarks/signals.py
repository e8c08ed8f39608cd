"""SIGTERM as an exception, so that what a benchmark has made is removed before it ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Inside, the first SIGTERM raises ``SystemExit``, later ones are ignored; no effect beside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(EXIT_CODE)

    outer = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, outer)
