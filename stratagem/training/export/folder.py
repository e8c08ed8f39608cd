"""The folder of an exported model: written whole or not at all, with a checksum for each file."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stratagem.checkpoint.draft import DRAFT, Draft, remove_drafts
from stratagem.checkpoint.durable import hash_file, sync, way_out
from stratagem.errors import ExportError

PROGRAM = "model.pt2"
STATE_DICT = "state_dict.pt"
ONNX = "model.onnx"
METADATA = "metadata.json"
FORMAT = "stratagem-export"
VERSION = 1
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def writing(target: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Gives a folder to write files into and a description to fill in, and puts them in the place of ``target`` at the
    end; an earlier export is replaced. ExportError: ``target`` is something else than an earlier export, or cannot be
    written."""
    may_be_replaced = target.is_dir() and (_describe(target) is not None or not any(target.iterdir()))
    if target.exists() and not may_be_replaced:
        raise ExportError(f"expected a new folder or an earlier export to write to, but {target} is something else")
    remove_drafts(target.parent)
    try:
        with Draft(target.parent) as draft:
            description: dict[str, Any] = {}
            yield draft.path, description
            _commit(draft.path, description, target)
    except OSError as error:
        advice = way_out(error, "give another folder")
        raise ExportError(f"cannot write the export {target}: {error.strerror or error}; {advice}") from error


def read(folder: Path) -> dict[str, Any]:
    """What ``metadata.json`` of a folder says, after a look at every file. ExportError: this is no export, or of a
    newer format, or a file is missing or damaged; names the file."""
    description = _describe(folder)
    if description is None:
        what = ""
        if not folder.exists():
            what = ", which does not exist: only the lead writes it, and on parameter servers no worker waits for it; "
            what += "load it on the lead (sg.is_lead()), or on all after strategy.barrier()"
        raise ExportError(f"expected a folder that export_model wrote (with {METADATA}), got {folder}{what}")
    if description["format_version"] > VERSION:
        raise ExportError(
            f"{folder} has format {description['format_version']}; this Stratagem is older and reads up to {VERSION}"
        )
    for name, expected in description["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != expected["num_bytes"]:
            raise ExportError(f"{file} is missing or cut short: expected {expected['num_bytes']} bytes; export again")
        if hash_file(file) != expected["sha256"]:
            raise ExportError(f"{file} is damaged: its checksum is not the one in {METADATA}; export again")
    return description


def _describe(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_ours = isinstance(found, dict) and found.get("format") == FORMAT and {"format_version", "files"} <= found.keys()
    return found if is_ours else None


def _commit(draft: Path, description: dict[str, Any], target: Path) -> None:
    files = sorted(path for path in draft.iterdir() if path.is_file())
    table = {path.name: {"num_bytes": path.stat().st_size, "sha256": hash_file(path)} for path in files}
    head = {"format": FORMAT, "format_version": VERSION}
    text = json.dumps(head | description | {"files": table}, indent=1)
    (draft / METADATA).write_text(text + "\n", encoding="utf-8")
    for path in [*files, draft / METADATA, draft]:
        sync(path)
    # A folder that is not empty cannot be replaced by a rename (POSIX): the two change places, where they can.
    if not _exchange(draft, target):
        _replace(draft, target)
    sync(target.parent)


def _exchange(draft: Path, target: Path) -> bool:
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)  # of Linux
    paths = os.fsencode(draft.absolute()), os.fsencode(target.absolute())
    return exchange is not None and exchange(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0


def _replace(draft: Path, target: Path) -> None:
    """Where there is nothing yet; or on NFS, say: the earlier export steps aside for a moment."""
    aside = draft.with_name(draft.name.replace(DRAFT, ".old-"))
    if target.exists():
        target.rename(aside)
    try:
        draft.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)
