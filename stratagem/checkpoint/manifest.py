"""``manifest.json`` makes a directory a checkpoint: it names every file with size and SHA-256, and has a checksum."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

FORMAT = 1
MANIFEST = "manifest.json"

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading a file of JSON that is no manifest may raise."""


def read_content(path: pathlib.Path) -> dict[str, Any]:
    """The fields of the manifest of the checkpoint ``path``.

    Raises:
        ValueError: it was altered, or is of another format. Any other of :data:`UNREADABLE`: it cannot be read.
    """
    content: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    told = content.pop("checksum", None)
    if content["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT}, got {content['format']}")
    if told is not None and told != _checksum(content):
        raise ValueError("it was altered: its checksum is another")
    return content


def encode(content: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest with these fields."""
    return json.dumps(
        {"format": FORMAT, **content, "checksum": _checksum({"format": FORMAT, **content})}, indent=1
    ).encode()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
