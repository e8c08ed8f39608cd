"""Values inside dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.data.nested import with_items


def leaves(value: Any) -> list[Any]:
    """What is not a dict, list or tuple, in order of appearance."""
    found: list[Any] = []
    map_leaves(found.append, value)
    return found


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with ``change(leaf)`` in the place of every leaf; types of containers are kept."""
    if isinstance(value, dict):
        return with_items(value, {key: map_leaves(change, item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(change, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_leaves(change, item) for item in value)
    return change(value)


def outline(value: Any) -> str:
    """The structure in words: equal texts mean equal structures. A leaf is "value"."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {outline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(outline, value))})"
    return "value"
