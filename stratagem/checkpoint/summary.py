"""What a checkpoint holds, as plain values for people and programs."""

from __future__ import annotations

import pathlib
from typing import Any

import safetensors

from stratagem.checkpoint.catalog import HOST, offer
from stratagem.checkpoint.manifest import Manifest
from stratagem.checkpoint.reading import describe, find
from stratagem.checkpoint.server_state import ServerState
from stratagem.checkpoint.tensor_file import DTYPES
from stratagem.errors import CheckpointError

_MADE_BY = (
    "strategy",
    "num_workers",
    "num_replicas_in_sync",
    "num_threads",
    "torch",
    "lane",
    "wire_dtype",
    "automatic",
)
_NAMES = {name: str(dtype).removeprefix("torch.") for dtype, name in DTYPES.items()}


def summarize(path: pathlib.Path) -> dict[str, Any]:
    """Step, time, files, objects and tensors of a checkpoint, or of the newest complete one in a directory of them.

    Raises:
        CheckpointError: it is not complete, or a file cannot be read.
    """
    saved = describe(find(path))
    manifest = Manifest.read(saved.path)
    assert manifest is not None, "describe() read it"
    files: list[dict[str, Any]] = [{"name": file.name, "bytes": file.num_bytes} for file in manifest.files]
    facts = {**manifest.facts, "automatic": manifest.automatic}
    if saved.folder != saved.path and (host := Manifest.read(saved.folder)) is not None:
        files += [{"name": f"{HOST}/{file.name}", "bytes": file.num_bytes} for file in host.files]
        facts |= {key: value for key, value in host.facts.items() if key in _MADE_BY[:-1]}
    tensors = [entry for file in files if file["name"].endswith(".safetensors") for entry in _tensors(saved.path, file)]
    if saved.has_servers:
        tensors += [_entry(name, value, "ps-*") for name, value in ServerState(saved.path).forms().items()]
    return {
        "path": str(saved.path),
        "step": saved.step,
        "created": manifest.created,
        "bytes": sum(file["bytes"] for file in files),
        "made_by": {key: facts[key] for key in _MADE_BY if key in facts},
        "objects": {name: entry.kind for name, entry in saved.objects.items()},
        "files": files,
        "tensors": tensors,
    }


def _tensors(path: pathlib.Path, file: dict[str, Any]) -> list[dict[str, Any]]:
    name = file["name"]
    if name.startswith("ps-"):
        return []  # rows of variables, which are listed whole
    try:
        with safetensors.safe_open(path / name, "pt") as source:
            return [_entry(key, source.get_slice(key), name) for key in source.keys()]  # noqa: SIM118 - no mapping
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path / name} cannot be read: {error}. {offer(path)}") from None


def _entry(key: str, tensor: Any, file: str) -> dict[str, Any]:
    if hasattr(tensor, "get_shape"):  # a slice of a file, which names dtypes in its own way
        dtype = _NAMES.get(tensor.get_dtype(), tensor.get_dtype())
        return {"name": key, "dtype": dtype, "shape": list(tensor.get_shape()), "file": file}
    return {"name": key, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "file": file}
