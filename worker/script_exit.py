"""How a script leaves: by ``os._exit`` or by ``sys.exit``, of whose code Python tells nobody."""

from __future__ import annotations

import builtins
import os
import sys
import threading
from collections.abc import Callable
from typing import ClassVar, NoReturn

leave = os._exit
"""As it is without :func:`before_sudden_exit`."""
PATIENCE_S = 10.0
"""Seconds for what is to be done first: who calls ``os._exit`` may do so because something hangs."""


def before_sudden_exit(work: Callable[[int, str], object]) -> None:
    """Runs ``work`` when this process, not a forked child of it, ends by ``os._exit``, unless another was told before.
    ``work`` takes the exit code, and words for one that is not 0."""
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


class _Exit(SystemExit):
    """Of ``sys.exit``. One that nobody has caught is let go by Python itself, when no function runs any more."""

    uncaught: ClassVar[list[object]] = []
    """The code of that one."""

    def __del__(self) -> None:
        if sys._getframe().f_back is None:
            self.uncaught.append(self.code)


def watch_exit() -> Callable[[], tuple[int, str]]:
    """Returns a function for the end of this process: the exit code by which it ends, and words for one that is not 0.

    It sees ``sys.exit``, and ``exit`` and ``quit`` of a script. Of a ``raise SystemExit(3)`` Python tells nobody.
    """

    def leave_by(status: object = None, /) -> NoReturn:
        is_main = threading.current_thread() is threading.main_thread()
        raise (_Exit if is_main else SystemExit)(status)  # of a thread's end threading is silent for that class alone

    sys.exit = leave_by
    if not hasattr(sys, "ps1"):  # where one types, they say how to leave
        for name in ("exit", "quit"):
            setattr(builtins, name, leave_by)

    def told() -> tuple[int, str]:
        status = _Exit.uncaught[-1] if _Exit.uncaught else None
        code = status & 0xFF if isinstance(status, int) else int(status is not None)
        return code, f"the script left by sys.exit({status!r})" if code else ""

    return told
