"""Writing a checkpoint directory: beside its place, durably, then committed by one rename.

Writing happens in ``.draft-<nonce>``; a lock beside it tells a draft in the making from one whose writer died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import logging
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from typing import Self

from stratagem.arguments import warn_once
from stratagem.checkpoint.catalog import HOST, REMOVED, find_damage, offer
from stratagem.checkpoint.durable import set_aside, sync, write_durably
from stratagem.checkpoint.manifest import MANIFEST, Manifest, SavedFile, encode
from stratagem.errors import CheckpointError

logger = logging.getLogger(__name__)

DRAFT = ".draft-"


class Draft:
    """A folder in the making, to be put somewhere in ``parent``, which is made if need be; leaving the ``with`` block
    removes it, unless it was. Raises OSError: ``parent`` cannot be written."""

    def __init__(self, parent: pathlib.Path) -> None:
        self.nonce = secrets.token_hex(16)
        """By which others know that they see the same draft."""
        self.path = parent / f"{DRAFT}{self.nonce[:16]}"
        """Where it is made; parameter servers may write a checkpoint in there, see :meth:`CheckpointDraft.build_on`."""
        self._latest = self.path.with_suffix(".latest")
        parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(_lock_of(self.path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: nobody sweeps there either
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.path.mkdir()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes what was not committed. Closing twice does no harm."""
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        try:
            with contextlib.suppress(OSError):
                self.path.rmdir()  # empty, it goes even where no more files can be opened
            shutil.rmtree(self.path, ignore_errors=True)  # committed, it is somewhere else
            for path in (self._latest, _lock_of(self.path)):
                with contextlib.suppress(OSError):
                    os.unlink(path)
        finally:
            os.close(lock)  # whoever comes next removes what an interrupt has left


class CheckpointDraft(Draft):
    """A checkpoint in the making, to be committed in ``parent``. Raises CheckpointError: the directory cannot be
    written."""

    def __init__(self, parent: pathlib.Path) -> None:
        with self._writing(parent):
            super().__init__(parent)
        self.files: list[SavedFile] = []
        self._root = self._folder = self.path

    def add(self, name: str, write: Callable[[pathlib.Path], tuple[int, str]]) -> None:
        """Adds a file that ``write`` writes durably; it returns size and SHA-256. Raises CheckpointError: the disk is
        full, for example."""
        with self._writing(self._folder / name):
            self.files.append(SavedFile(name, *write(self._folder / name)))

    def build_on(self, checkpoint: pathlib.Path) -> None:
        """From now on, what is written becomes the ``host/`` of a checkpoint that parameter servers wrote in here.
        Raises CheckpointError: it cannot be written."""
        self._root, self._folder = checkpoint, checkpoint / HOST
        with self._writing(self._folder):
            self._folder.mkdir()

    def commit(
        self,
        target: pathlib.Path,
        manifest: Manifest,
        *,
        is_newest: bool,
        is_same: Callable[[pathlib.Path], bool],
        what: str = "another state",
    ) -> None:
        """Makes the draft a checkpoint by one rename. One that exists already is left as it is.

        Args:
            target: in the parent.
            manifest: of it; the time is filled in.
            is_newest: whether ``latest`` in the parent shall name it.
            is_same: whether the checkpoint that is there already is as good.
            what: the one that is there holds, if it is not.

        Raises:
            CheckpointError: it cannot be written, or another checkpoint has that name.
        """
        manifest = dataclasses.replace(manifest, created=datetime.datetime.now(datetime.UTC).isoformat())
        with self._writing(target):
            write_durably(self._folder / MANIFEST, encode(manifest.content()))
            for folder in dict.fromkeys((self._folder, self._root)):
                sync(folder)
            if is_newest:  # before the rename: a checkpoint that is there was written, whatever the disk is full of
                write_durably(self._latest, (target.name + "\n").encode())
            _set_aside_if_damaged(target)
            try:
                # A directory that is not empty is never replaced by a rename (POSIX): no checkpoint is ever lost.
                self._root.rename(target)
            except OSError as error:
                if not target.is_dir():
                    raise
                if not is_same(target):
                    raise CheckpointError(
                        f"cannot commit {target}: {error.strerror}, and it holds {what} than now. Checkpoints are "
                        "never overwritten: train on, name another step, or save into another directory"
                    ) from None
                return
            sync(target.parent)
        if is_newest:
            try:
                self._latest.replace(target.parent / "latest")
            except OSError as error:  # it is for people: the checkpoint is there without it
                names = target.parent / "latest"
                warn_once(logger, "%s names an older checkpoint than there is: %s", names, error.strerror or error)

    def has_files_of(self, target: pathlib.Path) -> bool:
        """Whether a checkpoint holds what this draft does, to the bit."""
        return _files_of(target) == _files_of(self._root)

    @contextlib.contextmanager
    def _writing(self, path: pathlib.Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror or error}. {offer(self.path)}") from None


def remove_unfinished(directory: pathlib.Path) -> list[pathlib.Path]:
    """Removes drafts whose writer is dead, and the rest of what somebody died removing; returns the drafts."""
    unlocked = [path for path in directory.glob(f"{DRAFT}*") if not path.suffix and not _lock_of(path).exists()]
    for path in (*directory.glob(f"{REMOVED}*"), *unlocked):  # a ps may have written into a draft as that was removed
        shutil.rmtree(path, ignore_errors=True)
    return remove_drafts(directory)


def remove_drafts(directory: pathlib.Path) -> list[pathlib.Path]:
    """Removes drafts whose writer is dead, and returns them."""
    removed = []
    for path in directory.glob(f"{DRAFT}*.lock"):
        draft = path.with_suffix("")
        try:
            lock = os.open(path, os.O_WRONLY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if draft.is_dir():
                logger.info("Removing the unfinished %s", draft)
                removed.append(draft)
            shutil.rmtree(draft, ignore_errors=True)
            draft.with_suffix(".latest").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        except OSError:
            continue  # somebody is writing it
        finally:
            os.close(lock)
    return removed


def _lock_of(draft: pathlib.Path) -> pathlib.Path:
    """There before the draft, and as long as it."""
    return draft.with_suffix(".lock")


def _set_aside_if_damaged(target: pathlib.Path) -> None:
    """Makes room where a damaged checkpoint lies; nothing of it is deleted. Raises UnreadableError: it may be whole."""
    if target.is_dir() and any(target.iterdir()) and (damage := find_damage(target, is_certain=True)):
        logger.warning("%s is damaged (%s) and is now %s", target, "; ".join(damage), set_aside(target))


def _files_of(path: pathlib.Path) -> list[set[SavedFile]]:
    return [set(found.files) for part in (path, path / HOST) if (found := Manifest.read(part)) is not None]
