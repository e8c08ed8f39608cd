"""What a call is refused with, for scenarios that expect it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.errors import StratagemError


def refusal(call: Callable[[], Any]) -> dict[str, str]:
    """The class of the error that ``call`` raises, and its text with its notes; "none" when it raises none."""
    try:
        call()
    except StratagemError as error:
        return {"error": type(error).__name__, "text": "\n".join([str(error), *getattr(error, "__notes__", [])])}
    return {"error": "none", "text": ""}


def said(call: Callable[[], Any]) -> str:
    """The text alone; empty when it raises none."""
    return refusal(call)["text"]
