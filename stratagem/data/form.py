"""The form of a batch in words that travel, for a worker that has none of its own to cut down to size 0."""

from __future__ import annotations

import collections
import dataclasses
import json
import types
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from stratagem.data.nested import is_named_tuple, is_record, is_rows, is_sequence, leaves
from stratagem.errors import ConfigurationError


def form_of(batch: Any) -> Any:
    """What :func:`empty_of` needs to build a batch like ``batch`` with no examples; fit for JSON."""
    if isinstance(batch, Mapping):
        return {"dict": [[_key(key), form_of(value)] for key, value in batch.items()]}
    if is_named_tuple(batch):
        fields = {name: form_of(getattr(batch, name)) for name in batch._fields}
        return {"named tuple": type(batch).__name__, "fields": fields}
    if is_record(batch):
        names = [field.name for field in dataclasses.fields(batch)]
        return {"fields": {name: form_of(getattr(batch, name)) for name in names}}
    if is_sequence(batch):
        return {"tuple" if isinstance(batch, tuple) else "list": [form_of(item) for item in batch]}
    if isinstance(batch, torch.Tensor):
        rest: dict[str, Any] = {"shape": list(batch.shape[1:])} if batch.ndim else {"value": batch.item()}
        return {"tensor": str(batch.dtype).removeprefix("torch."), **rest}
    if is_rows(batch):
        return {"array": batch.dtype.str, "shape": list(batch.shape[1:])}
    if isinstance(batch, list | tuple):
        return {"tuple" if isinstance(batch, tuple) else "list": []}
    return {"value": batch if isinstance(batch, str | int | float | bool | None) else None}


def empty_of(form: Any) -> Any:
    """A batch of that form with no examples. A dataclass comes back as an object with the same attributes."""
    if "dict" in form:
        return {key: empty_of(item) for key, item in form["dict"]}
    if "named tuple" in form:
        kind: Any = collections.namedtuple(form["named tuple"], form["fields"])  # type: ignore[misc]
        return kind(*map(empty_of, form["fields"].values()))
    if "fields" in form:
        return types.SimpleNamespace(**{name: empty_of(item) for name, item in form["fields"].items()})
    if "tuple" in form:
        return tuple(map(empty_of, form["tuple"]))
    if "list" in form:
        return list(map(empty_of, form["list"]))
    if "tensor" in form:
        dtype = getattr(torch, form["tensor"])
        return (
            torch.empty(0, *form["shape"], dtype=dtype) if "shape" in form else torch.tensor(form["value"], dtype=dtype)
        )
    if "array" in form:
        return np.empty((0, *form["shape"]), np.dtype(form["array"]))
    return form["value"]


def fingerprint(batch: Any) -> int:
    """32 bits over the form and all values of ``batch``."""
    crc = zlib.crc32(json.dumps(form_of(batch)).encode())
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            data = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            data = leaf.tobytes()
        else:  # of other objects each process has its own
            values = leaf.ravel().tolist() if isinstance(leaf, np.ndarray) else leaf
            values = values if isinstance(values, list | tuple) else [values]
            data = repr([value for value in values if isinstance(value, str | int | float)]).encode()
        crc = zlib.crc32(data, crc)
    return crc


def _key(key: Any) -> str | int:
    if isinstance(key, str | int) and not isinstance(key, bool):
        return key
    raise ConfigurationError(f"expected a batch whose keys are strings or whole numbers, got {key!r}")
