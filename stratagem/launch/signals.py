"""Signals as bytes in a pipe, so that one ``select`` waits for everything."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def heard(fd: int) -> list[int]:
    """SIGINT, SIGTERM, SIGHUP and SIGQUIT that have come into the pipe since the last call (SIGCHLD only wakes)."""
    try:
        return [signum for signum in os.read(fd, 256) if signum in _HEARD]
    except BlockingIOError:
        return []


@contextlib.contextmanager
def signal_pipe() -> Iterator[int]:
    """Routes SIGINT, SIGTERM, SIGQUIT, SIGCHLD, and SIGHUP where nohup has not set it aside, of this process into a
    pipe; main thread only."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {signum: signal.getsignal(signum) for signum in (*_HEARD, signal.SIGCHLD)}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]
    fd_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        for signum in before:
            signal.signal(signum, lambda *_: None)  # the byte in the pipe says it all
        yield reading
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(fd_before)
        os.close(reading)
        os.close(writing)


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """SIGTERM and SIGHUP that would end this process at once raise SystemExit, as Ctrl-C raises KeyboardInterrupt: what
    was begun is taken back. In another thread than the main one they stay as they are."""
    mine = threading.current_thread() is threading.main_thread()
    signals = [each for each in (signal.SIGTERM, signal.SIGHUP) if mine and signal.getsignal(each) == signal.SIG_DFL]
    for signum in signals:
        signal.signal(signum, lambda came, _: sys.exit(128 + came))
    try:
        yield
    finally:
        for signum in signals:
            signal.signal(signum, signal.SIG_DFL)
