"""``manifest.json`` makes a directory a checkpoint: it names every file with size and SHA-256, and has a checksum."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Self

from stratagem.checkpoint.durable import check_disk, read_file
from stratagem.errors import UnreadableError

FORMAT = 1
MANIFEST = "manifest.json"

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading a file of JSON that is no manifest may raise."""


@dataclasses.dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint."""

    name: str
    num_bytes: int
    sha256: str
    ps: str = ""
    """Task of the parameter server that wrote it; empty: a training script did."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    """What its script called it; of one that the chief took, the largest number of updates applied by any ps."""
    files: tuple[SavedFile, ...]
    chief_epoch: int = 0
    """Process incarnation of the chief that committed it; 0: a script did."""
    automatic: bool = False
    """The chief took it by itself, and may remove it when newer ones are there."""
    created: str = ""
    """UTC, ISO 8601."""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The other fields of the JSON."""

    def content(self) -> dict[str, Any]:
        """The fields of the JSON."""
        own = {name: getattr(self, name) for name in _OWN}
        files = [{"ps": f.ps, "name": f.name, "bytes": f.num_bytes, "sha256": f.sha256} for f in self.files]
        return {**own, **self.facts, "files": files}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`content`. Raises KeyError: a field is missing. ValueError, TypeError: it cannot be."""
        files = tuple(
            SavedFile(str(f["name"]), int(f["bytes"]), str(f["sha256"]), str(f["ps"])) for f in content["files"]
        )
        return cls(
            step=int(content["step"]),
            files=files,
            chief_epoch=int(content.get("chief_epoch", 0)),
            automatic=bool(content.get("automatic")),
            created=str(content["created"]),
            facts={key: value for key, value in content.items() if key not in (*_OWN, "files", "format")},
        )

    @classmethod
    def read(cls, path: pathlib.Path) -> Self | None:
        """That of the checkpoint ``path``; None when there is none that can be read."""
        try:
            return cls.find(path)
        except UnreadableError:
            return None

    @classmethod
    def find(cls, path: pathlib.Path) -> Self | None:
        """That of the checkpoint ``path``; None when there is none, or it was altered. Raises UnreadableError: nobody
        can tell now."""
        try:
            return cls.of(read_content(path))
        except UNREADABLE as error:
            check_disk(error, f"{path / MANIFEST} cannot be read")
            return None


_OWN = ("step", "chief_epoch", "created", "automatic")


def read_content(path: pathlib.Path) -> dict[str, Any]:
    """The fields of the manifest of the checkpoint ``path``. Raises ValueError: it was altered, or is of another
    format. Any other of :data:`UNREADABLE`: it cannot be read."""
    content: dict[str, Any] = json.loads(read_file(path / MANIFEST))
    told = content.pop("checksum", None)
    if content["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT}, got {content['format']}")
    if told is not None and told != _checksum(content):
        raise ValueError("it was altered: its checksum differs")
    return content


def encode(content: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest with these fields."""
    told = {"format": FORMAT, **content}
    return json.dumps({**told, "checksum": _checksum(told)}, indent=1).encode()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
