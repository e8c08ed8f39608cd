"""The end of a process by ``os._exit``, by which scripts leave what hangs at their end; Python tells nobody of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NoReturn

leave = os._exit
"""As it is without :func:`before_sudden_exit`."""
PATIENCE_S = 10.0
"""Seconds for what is to be done first: who calls ``os._exit`` may do so because something hangs."""


def before_sudden_exit(work: Callable[[int, str], object]) -> None:
    """Runs ``work`` when this process, not a forked child of it, ends by ``os._exit``, unless another was told before.

    Args:
        work: takes the exit code, and words for one that is not 0.
    """
    if os._exit is not leave:
        return
    process = os.getpid()

    def exit_now(status: int) -> NoReturn:
        os._exit = leave
        if os.getpid() == process:
            told = f"the script left by os._exit({status})" if status else ""
            thread = threading.Thread(target=work, args=(status, told), name="sudden-exit", daemon=True)
            thread.start()
            thread.join(PATIENCE_S)
        leave(status)

    os._exit = exit_now
