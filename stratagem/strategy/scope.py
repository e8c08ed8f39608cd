"""Scopes of strategies: which are open in a thread."""

from __future__ import annotations

import contextlib
import contextvars
from typing import Any, Generic, TypeVar

from stratagem.errors import ConfigurationError

S = TypeVar("S")

_open: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("open_scopes", default=())


def strategy_in_scope() -> Any:
    """Whose scope is open; which strategy counts where none is (None): :mod:`stratagem.strategy.current`."""
    return (None, *_open.get())[-1]


class Scope(contextlib.ContextDecorator, Generic[S]):
    """Makes a strategy the current one while it is entered, which may be again and again."""

    def __init__(self, strategy: S) -> None:
        self._strategy = strategy

    def __enter__(self) -> S:
        outer = strategy_in_scope()
        if outer is not None and outer is not self._strategy:
            raise ConfigurationError(
                f"cannot enter the scope of {type(self._strategy).__name__} inside the scope of "
                f"{type(outer).__name__}; leave the outer one first"
            )
        _open.set((*_open.get(), self._strategy))
        return self._strategy

    def __exit__(self, *_: object) -> None:
        if strategy_in_scope() is not self._strategy:
            raise ConfigurationError(
                f"no scope of {type(self._strategy).__name__} is open here: leave it in the thread that entered it"
            )
        _open.set(_open.get()[:-1])
