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
from collections.abc import Callable, Iterator
from typing import Any

from stratagem.checkpoint.durable import check_disk, hash_file
from stratagem.checkpoint.manifest import MANIFEST, Manifest
from stratagem.errors import CheckpointError

logger = logging.getLogger(__name__)

HOST = "host"
_NUMBERED = re.compile(r"^[^.].*-(\d{8,})$")
REMOVED = ".removed-"
"""How the name begins of one that is being removed."""


def read_step(path: pathlib.Path) -> int | None:
    """The number of a checkpoint: what its script called it, else what the chief did. None without a manifest."""
    own = Manifest.read(path / HOST) or Manifest.read(path)
    return None if own is None else own.step


def is_complete(path: pathlib.Path) -> bool:
    """Whether the manifest can be read and every file has the size that it says."""
    manifest = Manifest.read(path)
    return manifest is not None and _has_all_files(path, manifest)


def was_removed(path: pathlib.Path) -> bool:
    """Whether there is no checkpoint any more: training keeps the newest ones only."""
    return not (path / MANIFEST).exists()


def scan(directory: pathlib.Path) -> list[pathlib.Path]:
    """Complete checkpoints in a directory and in the folders in it, oldest (step, time of creation) first."""
    return [path for _, path in _found(directory)]


def incomplete(directory: pathlib.Path) -> list[pathlib.Path]:
    """Checkpoints in a directory that were committed and have lost a file, or a part of one, since."""
    committed = [path.parent for path in sorted(directory.glob(f"[!.]*/{MANIFEST}"))]
    return [path for path in committed if not is_complete(path) and not was_removed(path)]


def named(directory: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Complete checkpoints ``<name>-00000012`` in a directory, oldest first; others may keep theirs beside them."""
    return [path for path in scan(directory) if path.parent == directory and _is_named(path, name)]


def newest(directory: pathlib.Path, name: str = "") -> pathlib.Path | None:
    """The last of :func:`named`, or without a name of :func:`scan`."""
    return next(reversed(named(directory, name) if name else scan(directory)), None)


def newest_undamaged(
    directory: pathlib.Path, name: str, fits: Callable[[pathlib.Path], bool] = lambda path: True
) -> pathlib.Path | None:
    """The newest of :func:`named` that ``fits`` and whose checksums are right; the log names damaged ones that are
    newer, also those that have lost a file or a part of one. Raises CheckpointError: there are some, and every one is
    damaged."""
    cut = [path for path in incomplete(directory) if _is_named(path, name)]
    found = [path for path in (*named(directory, name), *cut) if fits(path)]
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        damage = find_damage(path)
        if not damage:
            return path
        if not path.exists():
            return newest_undamaged(directory, name, fits)  # a job that runs removed it, and has newer ones
        logger.warning("Skipped the checkpoint %s: %s", path, "; ".join(damage))
    if found:
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
    CheckpointError: nobody would look for one there, or under that name."""
    if (folder / MANIFEST).exists():
        raise CheckpointError(
            f"{folder} is itself a checkpoint, inside which no other would be found: save in {folder.parent}"
        )
    if name.startswith("."):
        raise CheckpointError(f"expected a name without a leading dot, with which it would not be found, got {name!r}")
    if step is None:
        names = [_NUMBERED.match(path.name) for path in folder.iterdir()] if folder.is_dir() else []
        step = max([*(int(name[1]) for name in names if name), *steps(folder)], default=0) + 1
    return {"path": str(folder / f"{name}-{step:08d}"), "step": step}


def _is_named(path: pathlib.Path, name: str) -> bool:
    return re.fullmatch(rf"{re.escape(name)}-\d{{8,}}", path.name) is not None


def _has_all_files(path: pathlib.Path, manifest: Manifest) -> bool:
    try:
        return all((path / file.name).stat().st_size == file.num_bytes for file in manifest.files)
    except OSError:
        return False


_Found = tuple[tuple[int, int, str, int], pathlib.Path]
"""Step, epoch of the chief and time of creation of a checkpoint, by which they are sorted, and where it is."""


def _found(directory: pathlib.Path) -> list[_Found]:
    """Looks again where one that was listed is gone: a job that trains removes it once there is a newer one, which came
    after the list."""
    while True:
        passed_by: list[pathlib.Path] = []
        found = sorted(_scan(directory, passed_by, depth=1))
        if not any(map(_is_gone, (*passed_by, *(path for _, path in found[-1:])))):
            return found


def _is_gone(path: pathlib.Path) -> bool:
    with contextlib.suppress(OSError):
        return not os.path.lexists(path) and path.name not in os.listdir(path.parent)
    return False


def _scan(directory: pathlib.Path, passed_by: list[pathlib.Path], depth: int) -> Iterator[_Found]:
    try:
        children = [path for path in directory.iterdir() if not path.name.startswith(".")]
    except OSError:
        return
    for path in children:
        if os.path.exists(path / MANIFEST):  # False of a folder that may not be looked into, as lost+found
            manifest = Manifest.read(path)  # once: a folder may have thousands, and every save looks at all
            if manifest is not None and _has_all_files(path, manifest):
                with contextlib.suppress(FileNotFoundError):  # it is being removed
                    written = (path / MANIFEST).stat().st_mtime_ns
                    step = (Manifest.read(path / HOST) or manifest).step
                    yield (step, manifest.chief_epoch, manifest.created[:19], written), path
                    continue
        elif depth and path.is_dir():
            yield from _scan(path, passed_by, depth - 1)
        passed_by.append(path)


def find_damage(path: pathlib.Path, is_certain: bool = False) -> list[str]:
    """What is wrong with a checkpoint, one line for each file; empty when every checksum is right. Raises
    UnreadableError: it has to be certain, and a file cannot be read now."""
    damage = []
    for part in (path, path / HOST):
        if part != path and not part.is_dir():
            continue
        manifest = Manifest.find(part) if is_certain else Manifest.read(part)
        if manifest is None:
            what = "cannot be read or was altered" if (part / MANIFEST).exists() else "is missing: it is not complete"
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
    checkpoint before it."""
    if damage := find_damage(path):
        raise CheckpointError(f"the checkpoint {path} is damaged: {'; '.join(damage)}. {offer(path)}")


def offer(path: pathlib.Path) -> str:
    """What to take instead of a checkpoint, in words: one beside it. In another folder it may be another job's."""
    beside = [other for other in scan(path.parent) if other.parent == path.parent and other != path]
    good = next((other for other in reversed(beside) if not find_damage(other)), None)
    return "There is no other checkpoint" if good is None else f"The last good checkpoint is {good}"


def remove(path: pathlib.Path) -> None:
    """Removes a checkpoint, at once for all who look for one; what a crash leaves of it the next save removes."""
    aside = path.with_name(f"{REMOVED}{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
