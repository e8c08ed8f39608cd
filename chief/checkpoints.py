"""Checkpoint directories: begin, commit by one rename, find the newest, remove old ones.

A checkpoint is ``<directory>/step-00000100/``: per ps ``ps-<i>.safetensors`` (tensors by variable) and ``ps-<i>.json``
(rows, slots, units), and ``manifest.json``, which makes it complete. Nothing is ever written into one that is complete.
``latest`` is a text file for people; programs take the highest (step, chief epoch) among the manifests.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem.chief.history import decode_positions, encode_positions
from stratagem.chief.servers import SavedFile
from stratagem.cluster.units import Plan, UnitBitmap
from stratagem.errors import CheckpointError

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-\d{8,}")
_FILE = re.compile(r"\w[\w.-]*")
"""A name that a ps may report: of a file in the checkpoint's own folder."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    """Largest number of updates applied by any ps."""
    chief_epoch: int
    """Process life of the chief that committed it."""
    files: Mapping[str, Sequence[SavedFile]]
    """Files of each ps."""
    plans: Mapping[int, Plan]
    accepted: Mapping[tuple[int, int], UnitBitmap]
    """Accepted units of each (dataset, epoch): their updates are in the shards."""
    applied: Mapping[tuple[int, int], UnitBitmap]
    """Units that were not accepted but had an update in the shards."""
    next_step: int
    """Staleness 0: number of the step that is composed next."""
    automatic: bool
    """The chief took it by itself, and may remove it when newer ones are there."""
    created: str = ""
    """UTC, ISO 8601."""

    def to_json(self) -> dict[str, Any]:
        """The content of ``manifest.json``."""
        return {
            "format": FORMAT,
            "step": self.step,
            "chief_epoch": self.chief_epoch,
            "created": self.created,
            "automatic": self.automatic,
            "files": [
                {"ps": ps, "name": file.name, "bytes": file.num_bytes, "sha256": file.sha256}
                for ps, files in sorted(self.files.items())
                for file in files
            ],
            "next_step": self.next_step,
            "plans": [{"dataset": dataset, **_plan_to_json(plan)} for dataset, plan in sorted(self.plans.items())],
            "accepted": encode_positions(self.accepted),
            "applied": encode_positions(self.applied),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Manifest:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: another format.
            KeyError: a field is missing.
        """
        if value["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {value['format']}")
        files: dict[str, list[SavedFile]] = {}
        for file in value["files"]:
            files.setdefault(file["ps"], []).append(SavedFile(file["name"], file["bytes"], file["sha256"]))
        plans = {}
        for plan in value["plans"]:
            fields = {key: each for key, each in plan.items() if key != "dataset"}
            plans[plan["dataset"]] = Plan(**{**fields, "staleness": float(fields["staleness"])})
        return cls(
            step=value["step"],
            chief_epoch=value["chief_epoch"],
            files=files,
            plans=plans,
            accepted=decode_positions(value["accepted"]),
            applied=decode_positions(value["applied"]),
            next_step=value["next_step"],
            automatic=value["automatic"],
            created=value["created"],
        )


def _plan_to_json(plan: Plan) -> dict[str, Any]:
    """``staleness`` is written as a string, because JSON knows no infinity."""
    return {**dataclasses.asdict(plan), "staleness": str(plan.staleness)}


@dataclasses.dataclass(frozen=True)
class Draft:
    """A checkpoint in the making."""

    directory: pathlib.Path
    """Where it will be committed."""
    path: pathlib.Path
    """Where it is written now."""
    nonce: str


def begin(directory: str, step: int, chief_epoch: int) -> Draft:
    """Makes the directory that the ps write into, with a nonce that proves that they see the same file system.

    Raises:
        CheckpointError: the directory cannot be made.
    """
    parent = pathlib.Path(directory).absolute()
    nonce = secrets.token_hex(16)
    path = parent / f".tmp-{step}-{chief_epoch}-{nonce[:8]}"
    try:
        path.mkdir(parents=True)
        (path / "nonce").write_text(nonce)
    except OSError as error:
        raise CheckpointError(
            f"cannot make a checkpoint in {parent} ({error.strerror}); "
            "give a directory that the chief and every ps can write"
        ) from None
    return Draft(parent, path, nonce)


def commit(draft: Draft, manifest: Manifest) -> pathlib.Path:
    """Makes a draft a checkpoint by one rename; returns its path.

    When the same weights were committed at the same step before, that checkpoint is returned and the draft removed.

    Raises:
        CheckpointError: a file is missing or short, or a checkpoint of this step with other weights exists.
    """
    for files in manifest.files.values():
        for file in files:
            if not _FILE.fullmatch(file.name):
                raise CheckpointError(f"a ps reported a file of the name {file.name!r}, which is no plain name")
            written = draft.path / file.name
            if not written.is_file() or written.stat().st_size != file.num_bytes:
                raise CheckpointError(f"expected {file.num_bytes} bytes in {written}, which a ps reported as written")
    manifest = dataclasses.replace(manifest, created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    _write_durably(draft.path / MANIFEST, json.dumps(manifest.to_json(), indent=1))
    (draft.path / "nonce").unlink()
    _sync_directory(draft.path)
    target = draft.directory / f"step-{manifest.step:08d}"
    try:
        # A directory that is not empty is never replaced by a rename (POSIX): no complete checkpoint is lost.
        draft.path.rename(target)
    except OSError as error:
        existing = read(target)
        if existing is None or _digests(existing) != _digests(manifest):
            raise CheckpointError(
                f"cannot commit {target}: {error.strerror}, and it holds other weights than now. Train on, or save "
                "into another directory; checkpoints are never overwritten."
            ) from None
        discard(draft)
        return target
    _sync_directory(draft.directory)
    temporary = draft.directory / f".latest-{draft.nonce[:8]}"
    _write_durably(temporary, target.name + "\n")
    temporary.replace(draft.directory / "latest")
    return target


def discard(draft: Draft) -> None:
    """Removes a draft that will not be committed."""
    shutil.rmtree(draft.path, ignore_errors=True)


def sweep(directory: str) -> None:
    """Removes drafts that an earlier life of the chief left behind."""
    parent = pathlib.Path(directory)
    for path in parent.glob(".tmp-*-*") if parent.is_dir() else ():
        logger.info("Removing the unfinished checkpoint %s", path)
        shutil.rmtree(path, ignore_errors=True)


def read(path: pathlib.Path) -> Manifest | None:
    """The manifest of a checkpoint; None when it is not complete."""
    try:
        return Manifest.from_json(json.loads((path / MANIFEST).read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def scan(directory: str) -> list[tuple[pathlib.Path, Manifest]]:
    """Complete checkpoints, oldest (step, chief epoch) first."""
    parent = pathlib.Path(directory).absolute()
    if not parent.is_dir():
        return []
    paths = [path for path in parent.iterdir() if _NAME.fullmatch(path.name)]
    found = [(path, manifest) for path in paths if (manifest := read(path)) is not None]
    return sorted(found, key=lambda each: (each[1].step, each[1].chief_epoch))


def newest(directory: str) -> tuple[pathlib.Path, Manifest] | None:
    """The complete checkpoint with the highest (step, chief epoch)."""
    return max(scan(directory), key=lambda each: (each[1].step, each[1].chief_epoch), default=None)


def prune(directory: str, keep: int) -> list[pathlib.Path]:
    """Removes automatic checkpoints beyond the newest ``keep`` complete ones; returns what was removed."""
    removed = [path for path, manifest in scan(directory)[:-keep] if manifest.automatic]
    for path in removed:
        # Without its manifest it is no checkpoint any more, whatever a crash leaves of the rest.
        (path / MANIFEST).unlink()
        shutil.rmtree(path, ignore_errors=True)
    return removed


def _digests(manifest: Manifest) -> dict[str, str]:
    files = [file for files in manifest.files.values() for file in files]
    return {file.name: file.sha256 for file in files if file.name.endswith(".safetensors")}


def _write_durably(path: pathlib.Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: pathlib.Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
