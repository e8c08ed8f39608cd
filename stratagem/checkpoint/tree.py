"""States as JSON and tensors: what ``state_dict()`` returns, without pickle.

JSON keeps the structure. A tensor is a reference: ``{"$tensor": key}`` into the object's safetensors files, or
``{"$variable": name}`` to a variable that parameter servers wrote. What JSON does not know has a tag of its own.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from stratagem.checkpoint.tensor_file import DTYPES
from stratagem.errors import CheckpointError, ConfigurationError

Json = Any


@dataclasses.dataclass(frozen=True)
class StateOnServers:
    """Stands for a tensor that parameter servers write themselves."""

    variable: str


@dataclasses.dataclass
class EncodedState:
    """The state of one object, ready to be written."""

    tree: Json
    tensors: dict[str, torch.Tensor]
    """Contiguous, on the CPU, by key."""

    def of_kind(self, kind: str) -> EncodedState:
        """The same, as the state of an object of a kind (:mod:`stratagem.checkpoint.reading` has them)."""
        return EncodedState({"kind": kind, "state": self.tree}, self.tensors)


def encode(value: Any, name: str, *, copy: bool) -> EncodedState:
    """Takes a state apart. ``value``: dicts, lists, tuples, sets, tensors, arrays, numbers, strings, bytes, dtypes and
    devices; ``name``: of the object, for messages; ``copy``: whether later changes of its tensors must not show. Raises
    ConfigurationError: something that cannot be written without pickle; says where."""
    encoder = _Encoder(name, copy)
    return EncodedState(encoder.encode(value, ()), encoder.tensors)


class _Encoder:
    def __init__(self, name: str, copy: bool) -> None:
        self._name = name
        self._copy = copy
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, path: tuple[str, ...]) -> Json:
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int | float | np.integer | np.floating | np.bool_):
            plain = value.item() if isinstance(value, np.generic) else value
            return {"$float": str(plain)} if isinstance(plain, float) and not math.isfinite(plain) else plain
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            return {"$array": self._tensor(self._from_array(value, path), path)}
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, list):
            return [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
        if isinstance(value, tuple | set | frozenset):
            items = [self.encode(item, (*path, str(index))) for index, item in enumerate(value)]
            return {"$tuple" if isinstance(value, tuple) else "$set": items}
        if isinstance(value, bytes | bytearray):
            return {"$bytes": base64.b64encode(bytes(value)).decode()}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if isinstance(value, StateOnServers):
            return {"$variable": value.variable}
        raise ConfigurationError(
            f"the state of {self._name} holds a {type(value).__module__}.{type(value).__qualname__} at "
            f"{'/'.join(path) or 'its top'}, which cannot be written without pickle. A state_dict() in a checkpoint "
            "holds tensors, arrays, numbers, strings, and dicts, lists, tuples and sets of them"
        )

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Json:
        pairs = [(key, self.encode(item, (*path, str(key)))) for key, item in value.items()]
        if isinstance(value, collections.Counter):
            return {"$counter": [[self.encode(key, path), item] for key, item in pairs]}
        plain = all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs)
        tree = dict(pairs) if plain else {"$dict": [[self.encode(key, path), item] for key, item in pairs]}
        metadata = getattr(value, "_metadata", None)
        if metadata is None:
            return tree
        return {"$module": tree, "metadata": self.encode(dict(metadata), (*path, "metadata"))}

    def _from_array(self, value: np.ndarray[Any, Any], path: tuple[str, ...]) -> torch.Tensor:
        try:
            return torch.from_numpy(np.asarray(value, value.dtype.newbyteorder("="), order="C"))
        except TypeError:
            raise ConfigurationError(
                f"the state of {self._name} holds an array of {value.dtype} at {'/'.join(path)}; expected numbers"
            ) from None

    def _tensor(self, value: torch.Tensor, path: tuple[str, ...]) -> Json:
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            raise ConfigurationError(
                f"the state of {self._name} holds a tensor at {'/'.join(path)} that is not a plain dense one "
                f"({value.layout}, {value.dtype}, {value.device}); make it dense in state_dict()"
            )
        dense = value.detach().resolve_conj().resolve_neg()
        kept = dense.to("cpu", copy=self._copy).contiguous()
        key = "/".join(path) or "value"
        while key in self.tensors or key == "__metadata__":  # which safetensors has for itself
            key += "'"
        leaf: dict[str, Json] = {"$tensor": key}
        if kept.dtype not in DTYPES:  # the file knows fewer dtypes than torch: its bytes, then
            leaf |= {"dtype": str(kept.dtype).removeprefix("torch."), "shape": list(kept.shape)}
            kept = kept.reshape(-1).view(torch.uint8)
        self.tensors[key] = kept
        return leaf


def _no_variable(name: str) -> torch.Tensor:
    raise CheckpointError(f"variable {name} is not in the checkpoint: parameter servers should have written it")


def decode(tree: Json, tensors: Mapping[str, torch.Tensor], variable: Callable[[str], object] = _no_variable) -> Any:
    """The inverse of :func:`encode`; ``variable`` gives a variable of parameter servers by its name. Raises
    CheckpointError: a tag that this version does not know, or a tensor that is not there."""

    def of(value: Json) -> Any:  # calls no closure of itself, whose circle would keep every tensor
        return decode(value, tensors, variable)

    if isinstance(tree, list):
        return [of(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next((key for key in tree if key.startswith("$")), None)
    if tag is None:
        return {key: of(item) for key, item in tree.items()}
    content = tree[tag]
    if tag == "$tensor":
        if content not in tensors:
            raise CheckpointError(f"the checkpoint lacks the tensor {content}")
        found = tensors[content]
        return found.view(_dtype(tree["dtype"])).view(tree["shape"]) if "dtype" in tree else found
    if tag == "$variable":
        return variable(content)
    if tag == "$module":
        state = collections.OrderedDict(of(content))
        state._metadata = of(tree["metadata"])  # type: ignore[attr-defined]  # torch keeps it there
        return state
    if tag in _TAGS:
        return _TAGS[tag](of(content))
    raise CheckpointError(f"the checkpoint holds a value of kind {tag}; a newer version of Stratagem wrote it")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"expected the name of a torch dtype in the checkpoint, got {name!r}")
    return dtype


_TAGS: dict[str, Callable[[Any], Any]] = {
    "$array": lambda tensor: tensor.numpy(),
    "$bytes": base64.b64decode,
    "$counter": lambda pairs: collections.Counter(dict(pairs)),
    "$device": torch.device,
    "$dict": dict,
    "$dtype": _dtype,
    "$float": float,
    "$set": set,
    "$tuple": tuple,
}
