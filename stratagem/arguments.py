"""Checks of what people give."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import NoneType
from typing import Any, SupportsFloat

from stratagem.errors import ConfigurationError


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """``value`` as an int, where it is one: of Python or of a library, no bool and no float.

    Args:
        name: of the argument, for the error.

    Raises:
        ConfigurationError: anything else.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ConfigurationError(f"expected {name} of at least {least}, a whole number, got {value!r}")
    return number


def whole_numbers(least: int = 1, **values: Any) -> None:
    """The same of several arguments by their names; None is taken for "not given"."""
    for name, value in values.items():
        if value is not None:
            whole_number(name, value, least)


def above_zero(**values: Any) -> None:
    """Each is a number above 0, or None for "not given".

    Raises:
        ConfigurationError: anything else, not-a-number included.
    """
    for name, value in values.items():
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, SupportsFloat) or not float(value) > 0
        ):
            raise ConfigurationError(f"expected {name} above 0 or None, got {value!r}")


def check_kind(value: Any, *kinds: type) -> None:
    """``value`` is of one of these classes.

    Raises:
        ConfigurationError: it is not.
    """
    if not isinstance(value, kinds):
        names = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
        raise ConfigurationError(f"expected {names}, got {value if isinstance(value, type) else type(value).__name__}")


def check_call(fn: Any, args: Any, kwargs: Any) -> None:
    """``fn(*args, **kwargs)`` can be meant.

    Raises:
        ConfigurationError: ``fn`` is nothing that is called, ``args`` no tuple or list, ``kwargs`` no mapping. A tensor
            or a string would be taken apart.
    """
    if not callable(fn):
        raise ConfigurationError(f"expected a function, got {type(fn).__name__}")
    if not isinstance(args, tuple | list):
        raise ConfigurationError(f"expected args as a tuple, (batch,) for one argument, got {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigurationError(f"expected kwargs as a dict, got {type(kwargs).__name__}")
