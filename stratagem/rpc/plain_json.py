"""JSON that every parser accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def to_json(content: Mapping[str, Any], indent: int | None = None) -> str:
    """One line unless indented. JSON knows no NaN: it is a string there, and so is an infinity."""
    separators = (",", ":") if indent is None else None
    return json.dumps(_plain(content), indent=indent, separators=separators, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
