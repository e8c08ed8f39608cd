"""The current strategy: that of the open scope, else the default of the process."""

from __future__ import annotations

from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.strategy.scope import strategy_in_scope

_default: list[Strategy] = []
"""Where no scope is open: the pass-through, and behind it what ``set_strategy`` was given."""


def pass_through(strategy: Strategy) -> None:
    """Says which strategy is the pass-through; ``stratagem.strategy.default`` does."""
    _default[:1] = (strategy,)


def current_strategy() -> Strategy:
    """The strategy of the open scope; outside any scope what ``set_strategy`` was given, or the pass-through."""
    return strategy_in_scope() or _default[-1]


def has_current_strategy() -> bool:
    """Whether a scope is open, or ``set_strategy`` was given something; see ``has_strategy``, which may make one."""
    return strategy_in_scope() is not None or len(_default) > 1


def set_strategy(strategy: Strategy | None) -> None:
    """Makes a strategy the default: the current one wherever no scope is open, in every thread of this process.

    Args:
        strategy: the new default; None restores the pass-through.

    Raises:
        ConfigurationError: a scope is open, or the argument is not a strategy.
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise ConfigurationError(f"expected a strategy or None, got {strategy!r}; for example sg.MirroredStrategy()")
    if (outer := strategy_in_scope()) is not None:
        raise ConfigurationError(
            f"set_strategy sets the strategy that applies outside of scopes, but the scope of {type(outer).__name__} "
            "is open: leave it first"
        )
    _default[1:] = () if strategy is None else (strategy,)
