"""SIGINT and SIGTERM as exceptions in the main thread, but never in the middle of gRPC's own code.

An exception between two lines of gRPC (after a call was made and before its thread runs, say) leaves a call that nobody
ends, and closing the channel then waits for it for ever. So a signal that arrives there is sent again a moment later.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

EXIT_TERMINATED = 143
AGAIN_S = 0.02


def install() -> None:
    """From now on SIGINT raises ``KeyboardInterrupt`` and SIGTERM ``SystemExit(143)``, at a safe moment."""
    signal.signal(signal.SIGINT, _on_signal)
    signal.signal(signal.SIGTERM, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if inside_grpc(frame):
        again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
    elif number == signal.SIGINT:
        raise KeyboardInterrupt
    else:
        raise SystemExit(EXIT_TERMINATED)


def inside_grpc(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs on behalf of gRPC's own code. Waiting on a condition does not: it may end early."""
    if frame is not None and frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "wait":
        return False
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "grpc":
            return True
        frame = frame.f_back
    return False
