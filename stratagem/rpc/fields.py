"""Converts between messages and dataclasses whose fields have the same names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, MutableSequence
from typing import Any, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def to_message(kind: type[M], value: Any, **others: Any) -> M:
    """A message with those fields that ``value`` has too, and with ``others``."""
    names = (name for name in kind.DESCRIPTOR.fields_by_name if name not in others and hasattr(value, name))
    return kind(**{name: getattr(value, name) for name in names}, **others)


def from_message(kind: type[T], *messages: Message, **others: Any) -> T:
    """A dataclass object: ``others``, and every other field from the first of ``messages`` that has it.

    A repeated field is a tuple, a map a dict.
    """
    for message in messages:
        for name in _shared(kind, type(message)):  # type: ignore[arg-type]
            if name not in others:
                others[name] = _plain(getattr(message, name))
    return kind(**others)


@functools.cache
def _shared(kind: type, message: type[Message]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.name in message.DESCRIPTOR.fields_by_name)


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(value) if isinstance(value, MutableSequence) else value
