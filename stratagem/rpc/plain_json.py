"""JSON that every parser accepts."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def to_json(content: object, indent: int | None = None) -> str:
    """One line unless indented; an object of a dataclass is its fields. JSON knows no NaN: it is a string there, and so
    is an infinity."""
    options: dict[str, Any] = {"indent": indent, "separators": (",", ":") if indent is None else None}
    try:
        return json.dumps(content, default=_simpler, allow_nan=False, **options)
    except ValueError:  # there is a NaN somewhere: to look for it takes as long again
        return json.dumps(_plain(content), **options)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str | int | None):
        return value
    simple = value if isinstance(value, dict | list | tuple) else _simpler(value)
    if isinstance(simple, dict):
        return {str(key): _plain(one) for key, one in simple.items()}
    return [_plain(one) for one in simple]


def _simpler(value: Any) -> dict[str, Any] | list[Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"expected what JSON knows, got {type(value).__name__}")
