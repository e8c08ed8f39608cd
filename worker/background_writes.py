"""Writes that a script has started without waiting: one that fails after the script's end fails the script."""

from __future__ import annotations

import logging
import pathlib
import threading
from collections.abc import Callable
from concurrent.futures import Future

logger = logging.getLogger(__name__)
_unheard: dict[Future[None], pathlib.Path] = {}


def begin(writing: Future[None], write: Callable[[], None], path: pathlib.Path) -> None:
    """Calls ``write`` in a thread of its own, which also ends when nobody waits for it, and not if ``writing`` was
    cancelled before; whoever waits for it says so by :func:`heard`. No executor: those take nothing once the
    interpreter shuts down, when ``atexit`` may still save."""

    def run() -> None:
        if not writing.set_running_or_notify_cancel():
            return
        try:
            write()
            logger.info("Checkpoint %s", path)
        except BaseException as error:
            logger.error("No checkpoint %s: %s", path, error)
            writing.set_exception(error)
        else:
            writing.set_result(None)

    _unheard[writing] = path.resolve()
    threading.Thread(target=run, name="checkpoint writer").start()


def heard(writing: Future[None]) -> None:
    """The script hears of the end of this one."""
    _unheard.pop(writing, None)


def settle(folder: pathlib.Path) -> None:
    """Returns when nothing is being written there, or in it, whichever object of the script began it: a cell that was
    interrupted makes new ones. Those that wait for it hear how it ended."""
    folder = folder.resolve()
    for writing, path in [*_unheard.items()]:
        if folder in (path, path.parent) and not writing.cancelled():
            writing.exception()


def failure() -> BaseException | None:
    """Waits for all that nobody has waited for; why the first of them failed, if one did."""
    errors = [writing.exception() for writing in _unheard if not writing.cancelled()]
    _unheard.clear()
    return next((error for error in errors if error is not None), None)
