"""Reading a checkpoint, whichever strategy wrote it, and saying what it holds."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import safetensors
import torch

from stratagem.arguments import checked, warn_once
from stratagem.checkpoint.catalog import HOST, check, may_be_there, newest, offer, read_step, was_removed
from stratagem.checkpoint.durable import check_disk, patiently, read_file
from stratagem.checkpoint.manifest import MANIFEST, Manifest
from stratagem.checkpoint.server_state import SavedRows, ServerState, has_server_state
from stratagem.checkpoint.tensor_file import DTYPES, open_tensors
from stratagem.checkpoint.tree import EncodedState, Json, decode, encode
from stratagem.errors import CheckpointError

logger = logging.getLogger(__name__)

DESCRIPTION = "host.json"
FORMAT = 1

MODEL, OPTIMIZER, VARIABLE, VALUE, OBJECT = "model", "optimizer", "variable", "value", "object"
"""What an object was."""
SERVED_OPTIMIZER = "optimizer on parameter servers"
"""Parameter servers wrote its slots; the rest is its param_groups and the names of its parameters there."""
CLASS = "class"
"""Key of the name of an optimizer's class in its state."""
LEASED = "leased dataset"
"""The chief knows its position."""

_SHOWN = ("strategy", "num_workers", "num_replicas_in_sync", "num_threads", "torch", "lane", "wire_dtype", "automatic")
"""The facts of a manifest that :func:`summarize` shows."""


@dataclasses.dataclass(frozen=True)
class SavedObject:
    """What a checkpoint tells of one object."""

    kind: str
    tree: Json
    files: tuple[str, ...]
    """Where its tensors are."""


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint on disk; nothing but its description has been read."""

    path: pathlib.Path
    step: int
    objects: Mapping[str, SavedObject]
    """By name; empty when it holds variables of parameter servers alone."""
    has_servers: bool
    """Whether parameter servers wrote a part of it."""
    folder: pathlib.Path
    """Where the files of ``objects`` are."""


def find(path: str | os.PathLike[str]) -> pathlib.Path:
    """The checkpoint that is meant: the path itself, or in a directory of checkpoints the newest complete one. Raises
    CheckpointError: there is none. UnreadableError: nobody can tell now."""
    folder = pathlib.Path(path)
    if not was_removed(folder):
        return folder
    found = newest(folder, is_certain=True)
    if found is None:
        if folder.is_file():
            raise CheckpointError(
                f"{folder} is a file, but a checkpoint is a folder: pass what torch.load (or safetensors) reads from "
                "it to load_state_dict"
            )
        what = "is not a complete checkpoint, and contains none" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}. {offer(folder)}")
    return found


def describe(path: pathlib.Path) -> SavedCheckpoint:
    """What a checkpoint holds. Raises CheckpointError: it is not complete, or its description cannot be read."""
    if Manifest.find(path) is None:
        raise CheckpointError(f"{path} is not complete: {path / MANIFEST} is missing or damaged. {offer(path)}")
    has_servers = has_server_state(path)
    folder = path / HOST if has_servers else path
    objects: dict[str, SavedObject] = {}
    if may_be_there(folder / DESCRIPTION) or not has_servers:
        own = Manifest.find(folder)
        try:
            content = json.loads(read_file(folder / DESCRIPTION))
            if content["format"] != FORMAT:
                raise CheckpointError(f"{folder / DESCRIPTION}: expected format {FORMAT}, got {content['format']}")
            listed = set() if own is None else {file.name for file in own.files}
            objects = {
                name: SavedObject(entry["state"]["kind"], entry["state"]["state"], tuple(entry["files"]))
                for name, entry in content["objects"].items()
            }
            if strange := {file for entry in objects.values() for file in entry.files} - listed:
                raise ValueError(f"it names {', '.join(sorted(strange))}, which the manifest does not")
        except (OSError, ValueError, KeyError, TypeError) as error:
            check_disk(error, f"{folder / DESCRIPTION} cannot be read")
            raise CheckpointError(f"{folder / DESCRIPTION} cannot be read: {error!r}. {offer(path)}") from None
    return SavedCheckpoint(path, read_step(path) or 0, objects, has_servers, folder)


def is_of_variables(path: pathlib.Path) -> bool:
    """Whether a complete checkpoint holds what parameter servers wrote alone: the chief took it by itself."""
    return has_server_state(path) and not may_be_there(path / HOST)


def read_states(saved: SavedCheckpoint, names: list[str], tables: Collection[str] = ()) -> dict[str, EncodedState]:
    """The states of these objects, whole: nothing in them refers to parameter servers any more, but for ``tables``,
    names of variables, whose rows :func:`kind_and_state` finds. Raises CheckpointError: one is not in the checkpoint,
    or a file is damaged."""
    missing = [name for name in names if name not in saved.objects]
    if missing:
        has = ", ".join(name for name in saved.objects if not name.startswith("_")) or "nothing"
        raise CheckpointError(
            f"the checkpoint {saved.path} has no {', '.join(missing)}; it has {has}. Name what it has: "
            "sg.Checkpoint(name=object).restore(path), or sg.load_checkpoint(path, name) for a plain state"
        )
    servers = ServerState(saved.path, tables) if saved.has_servers else None
    return {name: _read(saved, name, servers) for name in names}


def _read(saved: SavedCheckpoint, name: str, servers: ServerState | None) -> EncodedState:
    entry = saved.objects[name]
    tensors: dict[str, torch.Tensor] = {}
    for file in entry.files:
        try:
            with open_tensors(saved.folder / file) as source:
                tensors |= {key: source.get_tensor(key) for key in source.keys()}  # noqa: SIM118 - no mapping
        except (OSError, safetensors.SafetensorError) as error:
            check_disk(error, f"{saved.folder / file} cannot be read")
            raise CheckpointError(f"{saved.folder / file} cannot be read: {error}. {offer(saved.path)}") from None
    if servers is None:
        return EncodedState(entry.tree, tensors).of_kind(entry.kind)
    kind, value = entry.kind, decode(entry.tree, tensors, servers.variable)
    if kind == SERVED_OPTIMIZER:
        kind = OPTIMIZER
        groups = value["param_groups"]
        value["state"] = servers.optimizer_state(value.pop("variables"), groups)
    return encode(value, name, copy=False).of_kind(kind)


def kind_and_state(state: EncodedState, path: str = "") -> tuple[str, Any]:
    """What :func:`read_states` gave, as the object wants it; tables are :class:`SavedRows` of the checkpoint ``path``.
    CheckpointError: these cannot be read."""
    return state.tree["kind"], decode(state.tree["state"], state.tensors, partial(SavedRows, pathlib.Path(path)))


@checked
def load_checkpoint(path: str | os.PathLike[str], name: str | None = None) -> dict[str, Any]:
    """A model of a checkpoint as a plain ``state_dict``, whichever strategy wrote it.

    Args:
        path: the checkpoint, or a directory of checkpoints: then the newest complete one.
        name: name of the object in ``sg.Checkpoint(...)``; None: the only model.

    Raises:
        CheckpointError: there is no such model, or a file is damaged; then the last good checkpoint is named.
            An UnreadableError: its disk did not answer for ten seconds.
    """
    return patiently(lambda: _load(path, name))


def _load(path: str | os.PathLike[str], name: str | None) -> dict[str, Any]:
    found = find(path)
    check(found)
    saved = describe(found)
    models = [other for other, entry in saved.objects.items() if entry.kind == MODEL]
    if name is None and not saved.objects:
        variables = dict(ServerState(found).variables)
        layers = [name.rpartition(".")[0] for name in variables if name.endswith("num_batches_tracked")]
        if layers and saved.step:  # before the first update they are right
            warn_once(
                logger,
                "checkpoints that the chief takes by itself hold the running statistics of %s as they were at "
                "prepare, because the workers keep buffers: to evaluate with those of the training, let the script "
                "save (sg.Checkpoint on every worker, last at its end) and leave out --checkpoint-every-s",
                ", ".join(layers) or "the model",
            )
        return variables
    if name is None and len(models) != 1:
        raise CheckpointError(
            f"expected the name of an object in {found}: it has {len(models)} models among {', '.join(saved.objects)}"
        )
    kind, state = kind_and_state(read_states(saved, [name or models[0]])[name or models[0]])
    if kind == OPTIMIZER:
        state.pop(CLASS, None)
    if not isinstance(state, dict):
        raise CheckpointError(f"{name} in {found} is a {type(state).__name__}, not a state_dict")
    return state


@checked
def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Path of the newest complete checkpoint in a directory: the highest step, then the one written last. None if none.

    Incomplete ones (an interrupted save, a missing or truncated file) are skipped. Checksums are compared when
    a checkpoint is restored, or by ``stratagem checkpoint verify``.

    Raises:
        UnreadableError: the newest, or the directory, could not be read for ten seconds.
    """
    found = patiently(lambda: newest(pathlib.Path(directory), is_certain=True))
    return None if found is None else str(found)


def summarize(path: pathlib.Path) -> dict[str, Any]:
    """What a checkpoint holds, or the newest complete one in a directory of them, as plain values: step, time, files,
    objects and tensors. Raises CheckpointError: it is not complete, or a file cannot be read."""
    saved = describe(find(path))
    manifest = Manifest.read(saved.path)
    assert manifest is not None, "describe() read it"
    files: list[dict[str, Any]] = [{"name": file.name, "bytes": file.num_bytes} for file in manifest.files]
    facts = {**manifest.facts, "automatic": manifest.automatic}
    if saved.folder != saved.path and (host := Manifest.read(saved.folder)) is not None:
        files += [{"name": f"{HOST}/{file.name}", "bytes": file.num_bytes} for file in host.files]
        facts |= host.facts
    dtypes = {name: str(dtype).removeprefix("torch.") for dtype, name in DTYPES.items()}
    tensors = []
    for name in (file["name"] for file in files):
        if name.startswith("ps-") or not name.endswith(".safetensors"):
            continue  # rows of variables are listed whole below
        try:
            with open_tensors(saved.path / name) as source:
                for key in source.keys():  # noqa: SIM118 - no mapping
                    form = source.get_slice(key)
                    dtype = dtypes.get(form.get_dtype(), form.get_dtype())
                    tensors.append({"name": key, "dtype": dtype, "shape": list(form.get_shape()), "file": name})
        except (OSError, safetensors.SafetensorError) as error:
            check_disk(error, f"{saved.path / name} cannot be read")
            raise CheckpointError(f"{saved.path / name} cannot be read: {error}. {offer(saved.path)}") from None
    for key, value in ServerState(saved.path).forms().items() if saved.has_servers else ():
        dtype = str(value.dtype).removeprefix("torch.")
        tensors.append({"name": key, "dtype": dtype, "shape": list(value.shape), "file": "ps-*"})
    return {
        "path": str(saved.path),
        "step": saved.step,
        "created": manifest.created,
        "bytes": sum(file["bytes"] for file in files),
        "made_by": {key: facts[key] for key in _SHOWN if key in facts},
        "objects": {name: entry.kind for name, entry in saved.objects.items()},
        "files": files,
        "tensors": tensors,
    }
