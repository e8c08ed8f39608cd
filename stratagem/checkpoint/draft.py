"""Writing a checkpoint directory: beside its place, durably, then committed by one rename.

Writing happens in ``.draft-<nonce>``; a lock beside it tells a draft in the making from one whose writer died.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from stratagem.checkpoint.catalog import HOST, find_damage, offer_in, read_manifest
from stratagem.checkpoint.durable import set_aside, sync_directory, write_durably
from stratagem.checkpoint.manifest import MANIFEST, encode
from stratagem.checkpoint.tensor_file import write_tensors
from stratagem.errors import CheckpointError

logger = logging.getLogger(__name__)


class FilesDraft:
    """A checkpoint in the making; leaving the ``with`` block removes it, unless it was committed.

    Args:
        parent: the directory it will be committed in; made if need be.

    Raises:
        CheckpointError: the directory cannot be written.
    """

    def __init__(self, parent: pathlib.Path) -> None:
        self.path = parent / f".draft-{secrets.token_hex(8)}"
        """Where it is made; parameter servers may write a checkpoint in there, see :meth:`build_on`."""
        self._root = self._folder = self.path
        self._files: dict[str, tuple[int, str]] = {}
        with self._writing(parent):
            parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(f"{self.path}.lock", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            with self._writing(parent):
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                self.path.mkdir()
        except CheckpointError:
            self.__exit__()
            raise

    def __enter__(self) -> FilesDraft:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # committed, it is somewhere else
        with contextlib.suppress(OSError):
            os.unlink(f"{self.path}.lock")
        os.close(self._lock)

    def add_tensors(self, stem: str, tensors: Mapping[str, torch.Tensor], max_file_bytes: int) -> list[str]:
        """Writes tensors durably into a file, or several of at most that size (or of one tensor). Returns their names.

        Raises:
            CheckpointError: the disk is full, for example.
        """
        parts: list[dict[str, torch.Tensor]] = []
        room = 0
        for key, tensor in tensors.items():
            if not parts or tensor.nbytes > room:
                parts.append({})
                room = max_file_bytes
            parts[-1][key] = tensor
            room -= tensor.nbytes
        names = [f"{stem}.safetensors" if len(parts) == 1 else f"{stem}-{i:05d}.safetensors" for i in range(len(parts))]
        for name, part in zip(names, parts, strict=True):
            with self._writing(self._folder / name):
                self._files[name] = write_tensors(self._folder / name, part)
        return names

    def add_json(self, name: str, value: Any) -> None:
        """Writes JSON durably.

        Raises:
            CheckpointError: it cannot be written.
        """
        data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
        with self._writing(self._folder / name):
            write_durably(self._folder / name, data)
        self._files[name] = len(data), hashlib.sha256(data).hexdigest()

    def build_on(self, checkpoint: pathlib.Path) -> None:
        """From now on, what is written becomes the ``host/`` of a checkpoint that parameter servers wrote in here.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._root, self._folder = checkpoint, checkpoint / HOST
        with self._writing(self._folder):
            self._folder.mkdir()

    def commit(
        self, target: pathlib.Path, step: int, facts: Mapping[str, Any], *, is_newest: bool, first_wins: bool = False
    ) -> None:
        """Makes the draft a checkpoint by one rename. An equal one that exists already is left as it is.

        Args:
            target: in the parent.
            step: its number.
            facts: further fields of the manifest.
            is_newest: whether ``latest`` in the parent shall name it.
            first_wins: whether another one may be there already, and stays.

        Raises:
            CheckpointError: it cannot be written, or another checkpoint has that name.
        """
        files = [{"ps": "", "name": name, "bytes": n, "sha256": digest} for name, (n, digest) in self._files.items()]
        created = datetime.datetime.now(datetime.UTC).isoformat()
        content = {"step": step, "chief_epoch": 0, "created": created, "automatic": False}
        content |= {**facts, "files": files}
        with self._writing(target):
            write_durably(self._folder / MANIFEST, encode(content))
            sync_directory(self._folder)
            if self._root != self._folder:
                sync_directory(self._root)
            _set_aside_if_damaged(target)
            try:
                # A directory that is not empty is never replaced by a rename (POSIX): no checkpoint is ever lost.
                self._root.rename(target)
            except OSError as error:
                if not target.is_dir():
                    raise
                if not first_wins and _files_of(target) != _files_of(self._root):
                    raise CheckpointError(
                        f"cannot commit {target}: {error.strerror}, and it holds another state than now. Checkpoints "
                        "are never overwritten: train on, name another step, or save into another directory"
                    ) from None
                return
            sync_directory(target.parent)
            if is_newest:
                write_durably(self.path.with_suffix(".latest"), (target.name + "\n").encode())
                self.path.with_suffix(".latest").replace(target.parent / "latest")

    @contextlib.contextmanager
    def _writing(self, path: pathlib.Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot write {path}: {error.strerror or error}. {offer_in(self.path.parent)}"
            ) from None


def sweep(directory: pathlib.Path) -> list[pathlib.Path]:
    """Removes drafts whose writer is dead; returns them."""
    removed = []
    for path in directory.glob(".draft-*.lock"):
        draft = path.with_suffix("")
        try:
            lock = os.open(path, os.O_WRONLY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if draft.is_dir():
                logger.info("Removing the unfinished checkpoint %s", draft)
                removed.append(draft)
            shutil.rmtree(draft, ignore_errors=True)
            draft.with_suffix(".latest").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            continue  # somebody is writing it
        finally:
            os.close(lock)
    return removed


def _set_aside_if_damaged(target: pathlib.Path) -> None:
    """Makes room where a damaged checkpoint lies; nothing of it is deleted."""
    if target.is_dir() and any(target.iterdir()) and (damage := find_damage(target)):
        logger.warning("%s is damaged (%s) and is now %s", target, "; ".join(damage), set_aside(target))


def _files_of(path: pathlib.Path) -> list[Mapping[str, tuple[int, str]]]:
    return [found.files for part in (path, path / HOST) if (found := read_manifest(part)) is not None]
