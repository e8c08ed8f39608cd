"""Reads a checkpoint made by any number of parameter servers as one plain state dict: torch and safetensors alone."""

from __future__ import annotations

import json
import pathlib

import safetensors
import torch

from stratagem.errors import CheckpointError


def consolidate(directory: str | pathlib.Path, slot: str = "") -> dict[str, torch.Tensor]:
    """Every variable of a checkpoint under its own name, whole.

    Args:
        directory: a committed checkpoint ("…/step-00000100").
        slot: name of an optimizer slot ("exp_avg") to read instead of weights; variables without it are left out.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged; names the variable or file.
    """
    path = pathlib.Path(directory)
    parts = sorted(path.glob("ps-*.json"))
    if not parts or not (path / "manifest.json").exists():
        raise CheckpointError(f"expected a committed checkpoint (manifest.json and ps-*.json) in {path}")
    state: dict[str, torch.Tensor] = {}
    rows: dict[str, int] = {}
    for part in parts:
        stem = part.name.removesuffix(".json")
        source = path / (f"{stem}.slots.safetensors" if slot else f"{stem}.safetensors")
        try:
            groups = json.loads(part.read_text())["groups"]
            wanted = [shard for group in groups if not slot or slot in group["slots"] for shard in group["shards"]]
            if not wanted:
                continue
            with safetensors.safe_open(source, "pt") as tensors:
                for shard in wanted:
                    name, shape = shard["variable"], tuple(shard["shape"])
                    tensor = tensors.get_tensor(f"slot/{slot}/{shard['key']}" if slot else shard["key"])
                    whole = state.setdefault(name, torch.empty(shape, dtype=tensor.dtype))
                    target = whole.narrow(0, shard["first_row"], shard["num_rows"]) if shape else whole
                    target.copy_(tensor)
                    rows[name] = rows.get(name, 0) + shard["num_rows"]
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{source} cannot be read: {error!r}") from None
    for name, tensor in state.items():
        expected = tensor.shape[0] if tensor.dim() else 1
        if rows[name] != expected:
            raise CheckpointError(f"checkpoint {path}: expected {expected} rows of variable {name}, found {rows[name]}")
    return state
