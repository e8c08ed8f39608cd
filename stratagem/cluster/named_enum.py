"""Enums that take the member or its name, and nothing else. Pure, no I/O."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Any

from stratagem.errors import ConfigurationError


class _OneOf(enum.EnumType):
    def __call__(cls: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(value, Hashable):  # Python would ask for the truth of "==", of which an array has several
            cls._missing_(value)
        return super().__call__(value, *args, **kwargs)


class NamedEnum(enum.Enum, metaclass=_OneOf):
    """Base of the enums of the public API: ``Kind(given)`` accepts everything a caller may pass.

    ``Kind(Kind.SUM)``, ``Kind("SUM")`` and ``Kind("sum")`` are ``Kind.SUM``; the text of a value counts as a name.
    ConfigurationError: anything else.
    """

    __hash__ = object.__hash__  # a member is equal to itself alone; Enum's own is written in Python

    @classmethod
    def _missing_(cls, value: object) -> NamedEnum:
        for name, member in cls.__members__.items():  # aliases too
            if isinstance(value, str) and value.lower() in (name.lower(), member.value):
                return member
        choices = ", ".join(member.name for member in cls)
        raise ConfigurationError(f"expected {cls.__name__} of {choices} (the member or its name), got {value!r}")
