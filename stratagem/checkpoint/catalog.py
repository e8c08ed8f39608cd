"""Finding checkpoints on disk, and seeing whether they are whole.

A checkpoint is a directory with a ``manifest.json`` that names every file with its size and SHA-256. It is complete
when the manifest and all files are there. The chief commits what parameter servers write in the same form
(``stratagem.ps.snapshot``); what they do not hold lies in such a checkpoint's ``host/``, a directory of that form too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from typing import Any

from stratagem.arguments import warn_once
from stratagem.checkpoint.durable import check_disk, hash_file, is_of_disk
from stratagem.checkpoint.manifest import MANIFEST, Manifest
from stratagem.errors import CheckpointError, UnreadableError

logger = logging.getLogger(__name__)

HOST = "host"
_NUMBERED = re.compile(r"^[^.].*-(\d{8,})$")
REMOVED = ".removed-"
"""How the name begins of one that is being removed."""


def read_step(path: pathlib.Path) -> int | None:
    """The number of a checkpoint: what its script called it, else what the chief did. None without a manifest. Raises
    UnreadableError: nobody can tell now."""
    own = Manifest.find(path / HOST) or Manifest.find(path)
    return None if own is None else own.step


def is_complete(path: pathlib.Path, is_certain: bool = False) -> bool:
    """Whether the manifest can be read and every file has the size that it says. Raises UnreadableError: it has to be
    certain, and nobody can tell now."""
    try:
        return _key_of(path) is not None
    except UnreadableError:
        if is_certain:
            raise
        return False


def was_removed(path: pathlib.Path) -> bool:
    """Whether there is no checkpoint any more: training keeps the newest ones only."""
    return not may_be_there(path / MANIFEST)


def scan(directory: pathlib.Path) -> list[pathlib.Path]:
    """Complete checkpoints in a directory and in the folders in it, oldest (step, time of creation) first."""
    return [path for _, path in _found(directory)]


def incomplete(directory: pathlib.Path) -> list[pathlib.Path]:
    """Checkpoints in a directory that were committed and have lost a file, or a part of one, since."""
    committed = [path.parent for path in sorted(directory.glob(f"[!.]*/{MANIFEST}"))]
    return [path for path in committed if not is_complete(path) and not was_removed(path)]


def named(directory: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Complete checkpoints ``<name>-00000012`` in a directory, oldest first; others may keep theirs beside them."""
    return [path for path in scan(directory) if _is_in(directory, path, name)]


def newest(directory: pathlib.Path, name: str = "", is_certain: bool = False) -> pathlib.Path | None:
    """The last of :func:`named`, or without a name of :func:`scan`. Raises UnreadableError: it has to be certain, and
    what cannot be read now may be a newer one."""
    passed_by: _PassedBy = {}
    found = [each for each in _found(directory, passed_by) if not name or _is_in(directory, each[1], name)]
    last, path = (found[-1][0][0], found[-1][1]) if found else (-1, None)
    for other, error in passed_by.items() if is_certain else ():
        numbered = _NUMBERED.match(other.name) if not name or _is_in(directory, other, name) else None
        is_newer = int(numbered[1]) >= last if numbered else path is None and not name and not _is_barred(error)
        if error is not None and (other == directory or is_newer):
            raise error
    return path


def newest_undamaged(
    directory: pathlib.Path, name: str, fits: Callable[[pathlib.Path], bool] = lambda path: True
) -> pathlib.Path | None:
    """The newest of :func:`named` that ``fits`` and whose checksums are right; the log names damaged ones that are
    newer, also those that have lost a file or a part of one. Raises CheckpointError: there are some, and every one is
    damaged. UnreadableError: one that may be whole, and the newest, cannot be read now."""
    whole = named(directory, name)
    others = [path for path in _children(directory) if _is_named(path, name) and path not in whole]
    found = [*whole, *(path for path in others if not was_removed(path))]
    damaged = 0
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        if not fits(path):
            continue
        damage = find_damage(path, is_certain=True)
        if not damage:
            return path
        if not may_be_there(path):
            return newest_undamaged(directory, name, fits)  # a job that runs removed it, and has newer ones
        logger.warning("Skipped the checkpoint %s: %s", path, "; ".join(damage))
        damaged += 1
    if damaged:
        raise CheckpointError(
            f"every checkpoint in {directory} is damaged; see the log for the files, and remove them to start afresh"
        )
    return None


def next_number(directory: str | os.PathLike[str], at_least: int) -> int:
    """``at_least``, or one more than the highest in a directory: no checkpoint is written over another."""
    return max([at_least, *(step + 1 for step in steps(pathlib.Path(directory)))])


def steps(directory: pathlib.Path) -> list[int]:
    return [step for (step, *_), _ in _found(directory)]


def choose(folder: pathlib.Path, name: str, step: int | None) -> dict[str, Any]:
    """Path and number of the next checkpoint in a folder; ``step``: its number, if the script says that. Raises
    CheckpointError: nobody would look for one there, or under that name. UnreadableError: nobody can tell now."""
    there = [path.name for path in _children(folder)]
    if MANIFEST in there:
        raise CheckpointError(
            f"{folder} is itself a checkpoint, inside which no other would be found: save in {folder.parent}"
        )
    if name.startswith("."):
        raise CheckpointError(f"expected a name without a leading dot, with which it would not be found, got {name!r}")
    if step is None:
        names = [_NUMBERED.match(each) for each in there]
        step = max([*(int(name[1]) for name in names if name), *steps(folder)], default=0) + 1
    return {"path": str(folder / f"{name}-{step:08d}"), "step": step}


def _is_named(path: pathlib.Path, name: str) -> bool:
    return re.fullmatch(rf"{re.escape(name)}-\d{{8,}}", path.name) is not None


def _is_in(directory: pathlib.Path, path: pathlib.Path, name: str) -> bool:
    return path.parent == directory and _is_named(path, name)


_Key = tuple[int, int, str, int]
"""Step, epoch of the chief and time of creation of a checkpoint, by which they are sorted."""
_Found = tuple[_Key, pathlib.Path]
_PassedBy = dict[pathlib.Path, UnreadableError | None]
"""What is no complete checkpoint, with the reason why nobody can tell now."""


def _key_of(path: pathlib.Path) -> _Key | None:
    """None: it is not complete. Raises UnreadableError: nobody can tell now."""
    manifest = Manifest.find(path)  # once: a folder may have thousands, and every save looks at all
    if manifest is None:
        return None
    try:
        if any((path / file.name).stat().st_size != file.num_bytes for file in manifest.files):
            return None
        written = (path / MANIFEST).stat().st_mtime_ns
    except OSError as error:
        check_disk(error, f"{path} cannot be read")
        return None
    return (Manifest.find(path / HOST) or manifest).step, manifest.chief_epoch, manifest.created[:19], written


def _is_barred(error: UnreadableError | None) -> bool:
    """Whether it is about what this process may not look into, as lost+found."""
    return error is not None and isinstance(error.__context__, PermissionError)


def is_folder(path: pathlib.Path) -> bool:
    """Raises UnreadableError: nobody can tell now."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        check_disk(error, f"{path} cannot be read")
        return False


def may_be_there(path: pathlib.Path) -> bool:
    """Not if the disk says that there is nothing; where it does not answer, there may be."""
    try:
        path.lstat()
    except OSError as error:
        return is_of_disk(error)
    return True


def _children(directory: pathlib.Path) -> list[pathlib.Path]:
    """What is in a directory, if there is one. Raises UnreadableError: nobody can tell now."""
    try:
        return sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    except OSError as error:
        check_disk(error, f"{directory} cannot be read")
        return []


def _found(directory: pathlib.Path, passed_by: _PassedBy | None = None) -> list[_Found]:
    """Looks again where one that was listed is gone: a job that trains removes it once there is a newer one, which came
    after the list. ``passed_by`` gets the others."""
    passed_by = {} if passed_by is None else passed_by
    while True:
        passed_by.clear()
        found = sorted(_scan(directory, passed_by, depth=1))
        if not any(map(_is_gone, (*passed_by, *(path for _, path in found[-1:])))):
            return found


def _is_gone(path: pathlib.Path) -> bool:
    with contextlib.suppress(OSError):
        return not os.path.lexists(path) and path.name not in os.listdir(path.parent)
    return False


def _scan(directory: pathlib.Path, passed_by: _PassedBy, depth: int) -> Iterator[_Found]:
    try:
        children = _children(directory)
    except UnreadableError as error:
        passed_by[directory] = error
        return
    for path in children:
        why = None
        if may_be_there(path / MANIFEST):
            try:
                if (key := _key_of(path)) is not None:
                    yield key, path
                    continue
            except UnreadableError as error:
                why = error
        elif depth and path.is_dir():
            yield from _scan(path, passed_by, depth - 1)
        passed_by.setdefault(path, why)


def find_damage(path: pathlib.Path, is_certain: bool = False) -> list[str]:
    """What is wrong with a checkpoint, one line for each file; empty when every checksum is right. Raises
    UnreadableError: it has to be certain, and a file cannot be read now."""
    damage = []
    for part in (path, path / HOST):
        if part != path and not may_be_there(part):
            continue
        manifest = Manifest.find(part) if is_certain else Manifest.read(part)
        if manifest is None:
            there = may_be_there(part / MANIFEST)
            what = "cannot be read or was altered" if there else "is missing: it is not complete"
            damage.append(f"{part / MANIFEST} {what}")
            continue
        for file in manifest.files:
            place = part / file.name
            try:
                found = place.stat().st_size
                if found != file.num_bytes:
                    damage.append(f"{place}: expected {file.num_bytes:,} bytes, found {found:,}")
                elif hash_file(place) != file.sha256:
                    damage.append(f"{place} was altered: its SHA-256 is not the one in the manifest")
            except FileNotFoundError:
                damage.append(f"{place} is missing")
            except OSError as error:
                if is_certain:
                    check_disk(error, f"{place} cannot be read")
                damage.append(f"{place} cannot be read: {error.strerror}")
    return damage


def check(path: pathlib.Path) -> None:
    """Refuses a checkpoint that is not whole. Raises CheckpointError: names the damaged files, and the newest good
    checkpoint before it. UnreadableError: nobody can tell now."""
    if damage := find_damage(path, is_certain=True):
        raise CheckpointError(f"the checkpoint {path} is damaged: {'; '.join(damage)}. {offer(path)}")


def offer(path: pathlib.Path) -> str:
    """What to take instead of a checkpoint, in words: one beside it. In another folder it may be another job's."""
    beside = [other for other in scan(path.parent) if other.parent == path.parent and other != path]
    good = next((other for other in reversed(beside) if not find_damage(other)), None)
    return "There is no other checkpoint" if good is None else f"The last good checkpoint is {good}"


def remove(path: pathlib.Path) -> None:
    """Removes a checkpoint, at once for all who look for one; what a crash leaves of it the next save removes. The log
    says, once, what this process cannot remove."""
    aside = path.with_name(f"{REMOVED}{secrets.token_hex(4)}")
    try:
        path.rename(aside)
        shutil.rmtree(aside)
    except FileNotFoundError:
        pass  # somebody else removed it
    except OSError as error:
        warn_once(
            logger,
            "cannot remove the old checkpoint %s: %s. The next save tries again; let this user delete there, or old "
            "ones fill the disk",
            path,
            error.strerror or error,
        )
    shutil.rmtree(aside, ignore_errors=True)
