"""Checkpoint directories: begin, commit by one rename, find the newest, remove old ones.

A checkpoint is ``<directory>/step-00000100/``: per ps ``ps-<i>.safetensors`` (tensors by variable) and ``ps-<i>.json``
(rows, slots, units), and ``manifest.json``, which makes it complete. Nothing is ever written into one that is complete.
``latest`` is a text file for people; programs take the highest (step, chief epoch) among the manifests.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import pathlib
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem.checkpoint.durable import hash_file, set_aside, sync_directory, write_durably
from stratagem.checkpoint.manifest import MANIFEST, UNREADABLE, encode, read_content
from stratagem.chief.history import decode_positions, encode_positions
from stratagem.chief.servers import SavedFile
from stratagem.cluster.units import Plan, UnitBitmap
from stratagem.errors import CheckpointError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"\w[\w.-]*")
"""A name that a ps may report: of a file in the checkpoint's own folder."""


@dataclasses.dataclass(frozen=True)
class ServersManifest:
    """What a checkpoint says about itself."""

    step: int
    """Largest number of updates applied by any ps."""
    chief_epoch: int
    """Process incarnation of the chief that committed it."""
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
    def from_json(cls, value: Mapping[str, Any]) -> ServersManifest:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: a value cannot be.
            KeyError: a field is missing.
        """
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
class CheckpointDraft:
    """A checkpoint in the making."""

    directory: pathlib.Path
    """Where it will be committed."""
    path: pathlib.Path
    """Where it is written now."""
    nonce: str


def begin(directory: str, step: int, chief_epoch: int) -> CheckpointDraft:
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
    return CheckpointDraft(parent, path, nonce)


def commit(draft: CheckpointDraft, manifest: ServersManifest) -> pathlib.Path:
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
    write_durably(draft.path / MANIFEST, encode(manifest.to_json()))
    (draft.path / "nonce").unlink()
    sync_directory(draft.path)
    target = draft.directory / f"step-{manifest.step:08d}"
    try:
        # A directory that is not empty is never replaced by a rename (POSIX): no complete checkpoint is lost.
        if target.is_dir() and any(target.iterdir()) and not is_whole(target):
            logger.warning("%s is damaged and is now %s", target, set_aside(target))
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
    sync_directory(draft.directory)
    temporary = draft.directory / f".latest-{draft.nonce[:8]}"
    write_durably(temporary, (target.name + "\n").encode())
    temporary.replace(draft.directory / "latest")
    return target


def discard(draft: CheckpointDraft) -> None:
    """Removes a draft that will not be committed."""
    shutil.rmtree(draft.path, ignore_errors=True)


def sweep(directory: str) -> None:
    """Removes drafts that an earlier incarnation of the chief left behind."""
    parent = pathlib.Path(directory)
    for path in parent.glob(".tmp-*-*") if parent.is_dir() else ():
        logger.info("Removing the unfinished checkpoint %s", path)
        shutil.rmtree(path, ignore_errors=True)


def read(path: pathlib.Path) -> ServersManifest | None:
    """The manifest of a checkpoint; None when it is not complete."""
    try:
        return ServersManifest.from_json(read_content(path))
    except UNREADABLE:
        return None


def is_whole(path: pathlib.Path) -> bool:
    """Whether every file of a checkpoint has the checksum that its manifest tells."""
    manifest = read(path)
    try:
        return manifest is not None and all(
            hash_file(path / file.name) == file.sha256 for files in manifest.files.values() for file in files
        )
    except OSError:
        return False


def scan_all(directory: str) -> list[tuple[pathlib.Path, int, ServersManifest | None]]:
    """Newest first, what is or was a checkpoint: path, step and manifest; without one that can be read, by its name."""
    found = []
    for path in pathlib.Path(directory).absolute().glob(f"step-*/{MANIFEST}"):
        if named := _NAME.fullmatch(path.parent.name):
            manifest = read(path.parent)
            key = (manifest.step, manifest.chief_epoch) if manifest is not None else (int(named[1]), 0)
            found.append((key, path.parent, manifest))
    return [(path, key[0], manifest) for key, path, manifest in sorted(found, key=lambda each: each[0], reverse=True)]


def scan(directory: str) -> list[tuple[pathlib.Path, ServersManifest]]:
    """Complete checkpoints, oldest (step, chief epoch) first."""
    return [(path, manifest) for path, _, manifest in reversed(scan_all(directory)) if manifest is not None]


def newest(directory: str) -> tuple[pathlib.Path, ServersManifest] | None:
    """The complete checkpoint with the highest (step, chief epoch)."""
    return next(reversed(scan(directory)), None)


def prune(directory: str, keep: int) -> list[pathlib.Path]:
    """Removes automatic checkpoints beyond the newest ``keep`` complete ones; returns what was removed."""
    removed = [path for path, manifest in scan(directory)[:-keep] if manifest.automatic]
    for path in removed:
        # Without its manifest it is no checkpoint any more, whatever a crash leaves of the rest.
        (path / MANIFEST).unlink()
        shutil.rmtree(path, ignore_errors=True)
    return removed


def _digests(manifest: ServersManifest) -> dict[str, str]:
    files = [file for files in manifest.files.values() for file in files]
    return {file.name: file.sha256 for file in files if file.name.endswith(".safetensors")}
