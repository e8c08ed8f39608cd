"""Writes that a script has started without waiting: one that fails after the script's end fails the script."""

from __future__ import annotations

from concurrent.futures import Future

_unheard: list[Future[None]] = []


def begun(writing: Future[None]) -> None:
    """A thread writes; whoever waits for it says so by :func:`heard`."""
    _unheard.append(writing)


def heard(writing: Future[None]) -> None:
    """The script hears of the end of this one."""
    if writing in _unheard:
        _unheard.remove(writing)


def failure() -> BaseException | None:
    """Waits for all that nobody has waited for; why the first of them failed, if one did."""
    errors = [writing.exception() for writing in _unheard]
    _unheard.clear()
    return next((error for error in errors if error is not None), None)
