"""Enums that take the member or its name, and nothing else. Pure, no I/O."""

from __future__ import annotations

import enum

from stratagem.errors import ConfigurationError


class NamedEnum(enum.Enum):
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
