"""Finding checkpoints on disk, and seeing whether they are whole.

A checkpoint is a directory with a ``manifest.json`` that names every file with its size and SHA-256. It is complete
when the manifest and all files are there. The chief commits what parameter servers write in the same form
(``stratagem.ps.snapshot``); what they do not hold lies in such a checkpoint's ``host/``, a directory of that form too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from stratagem.checkpoint.durable import hash_file
from stratagem.checkpoint.manifest import MANIFEST, UNREADABLE, read_content
from stratagem.errors import CheckpointError

HOST = "host"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    created: str
    """UTC, ISO 8601."""
    files: Mapping[str, tuple[int, str]]
    """Bytes and SHA-256 of each."""
    facts: Mapping[str, Any]
    """The other fields of the JSON."""

    @property
    def automatic(self) -> bool:
        """Whether the chief took it by itself; it then removes it by itself."""
        return bool(self.facts.get("automatic"))


def read_manifest(path: pathlib.Path) -> Manifest | None:
    """The manifest of a checkpoint; None when there is none that can be read."""
    try:
        content = read_content(path)
        files = {str(file["name"]): (int(file["bytes"]), str(file["sha256"])) for file in content.pop("files")}
        return Manifest(int(content["step"]), str(content["created"]), files, content)
    except UNREADABLE:
        return None


def read_step(path: pathlib.Path) -> int | None:
    """The number of a checkpoint: what its script called it, else what the chief did. None without a manifest."""
    own = read_manifest(path / HOST) or read_manifest(path)
    return None if own is None else own.step


def is_complete(path: pathlib.Path) -> bool:
    """Whether the manifest can be read and every file has the size that it says."""
    manifest = read_manifest(path)
    return manifest is not None and all(_size(path / name) == size for name, (size, _) in manifest.files.items())


def was_removed(path: pathlib.Path) -> bool:
    """Whether there is no checkpoint any more: training keeps the newest ones only."""
    return not (path / MANIFEST).exists()


def scan(directory: pathlib.Path) -> list[pathlib.Path]:
    """Complete checkpoints in a directory and in the folders in it, oldest (step, time of creation) first."""
    return [path for _, path in sorted(_scan(directory, depth=1))]


def _scan(directory: pathlib.Path, depth: int) -> Iterator[tuple[tuple[int, int, str, int], pathlib.Path]]:
    try:
        children = [path for path in directory.iterdir() if not path.name.startswith(".") and path.is_dir()]
    except OSError:
        return
    for path in children:
        if (path / MANIFEST).exists():
            manifest = read_manifest(path)
            if manifest is not None and is_complete(path):
                try:
                    written = (path / MANIFEST).stat().st_mtime_ns
                except FileNotFoundError:  # it is being removed
                    continue
                chief_epoch = int(manifest.facts.get("chief_epoch", 0))
                yield (read_step(path) or 0, chief_epoch, manifest.created[:19], written), path
        elif depth:
            yield from _scan(path, depth - 1)


def find_damage(path: pathlib.Path) -> list[str]:
    """What is wrong with a checkpoint, one line for each file; empty when every checksum is right."""
    damage = []
    for part in (path, path / HOST):
        if part != path and not part.is_dir():
            continue
        manifest = read_manifest(part)
        if manifest is None:
            what = "cannot be read or was altered" if (part / MANIFEST).exists() else "is missing: it is not complete"
            damage.append(f"{part / MANIFEST} {what}")
            continue
        for name, (size, digest) in manifest.files.items():
            found = _size(part / name)
            if found is None:
                damage.append(f"{part / name} is missing")
            elif found != size:
                damage.append(f"{part / name}: expected {size:,} bytes, found {found:,}")
            elif _hash(part / name) != digest:
                damage.append(f"{part / name} was altered: its SHA-256 is not the one in the manifest")
    return damage


def check(path: pathlib.Path) -> None:
    """Refuses a checkpoint that is not whole.

    Raises:
        CheckpointError: names the damaged files, and the newest good checkpoint before it.
    """
    if damage := find_damage(path):
        raise CheckpointError(f"the checkpoint {path} is damaged: {'; '.join(damage)}. {offer(path)}")


def offer(path: pathlib.Path) -> str:
    """What to take instead of a checkpoint, in words."""
    parent = path.parent
    beside = scan(parent) or scan(parent.parent)
    return _offer([other for other in beside if other != path])


def remove(path: pathlib.Path) -> None:
    """Removes a checkpoint; without its manifest it is none any more, whatever a crash leaves of the rest."""
    with contextlib.suppress(OSError):
        (path / MANIFEST).unlink()
    shutil.rmtree(path, ignore_errors=True)


def offer_in(directory: pathlib.Path) -> str:
    """As :func:`offer`, for a checkpoint that could not be written there."""
    return _offer(scan(directory))


def _offer(candidates: list[pathlib.Path]) -> str:
    good = next((path for path in reversed(candidates) if not find_damage(path)), None)
    return "There is no other checkpoint." if good is None else f"The last good checkpoint is {good}"


def _size(path: pathlib.Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _hash(path: pathlib.Path) -> str:
    try:
        return hash_file(path)
    except OSError as error:
        return f"unreadable: {error.strerror}"
