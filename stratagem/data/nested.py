"""Batches as people write them: tensors in lists, tuples, named tuples, mappings and dataclasses, any depth.

The examples of a batch lie along the first dimension of its tensors and numpy arrays. A list of plain values (names,
say) that is as long as the batch has one for each example, and so has a tuple of texts, which torch's own collate_fn
makes of them. Everything else belongs to the batch as a whole.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import json
import logging
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from stratagem.arguments import warn_once
from stratagem.errors import ConfigurationError

logger = logging.getLogger(__name__)


def map_leaves(batch: Any, change: Callable[[Any], Any]) -> Any:
    """``batch`` with every leaf changed. A leaf is what is no container; a list or tuple of plain values is one."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if type(batch) in (list, tuple) and batch and all([type(item) is torch.Tensor for item in batch]):
        return type(batch)([change(item) for item in batch])  # as most batches are
    if isinstance(batch, Mapping) or is_named_tuple(batch) or is_record(batch) or is_sequence(batch):
        return _with_each(batch, lambda item: map_leaves(item, change))
    return change(batch)


def map_values(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with everything changed that is not a dict, list or tuple: what a step takes and returns.

    Other than for :func:`map_leaves`, plain values in lists are changed one by one, and dataclass objects as a whole.
    Names in a dict come in the order of the alphabet: each process may have put them in in its own.
    """
    if type(value) in (list, tuple):
        return type(value)([map_values(item, change) for item in value])  # as most are
    if isinstance(value, dict):
        changed = {key: map_values(value[key], change) for key in _in_order(value)}
        return with_items(value, {key: changed[key] for key in value})
    if isinstance(value, list | tuple):
        return _with_each(value, lambda item: map_values(item, change))
    return change(value)


def values_in(value: Any) -> list[Any]:
    """What :func:`map_values` changes, in order."""
    found: list[Any] = []
    map_values(value, found.append)
    return found


def refilled(value: Any, values: Iterable[Any]) -> Any:
    """``value`` with these in the place of :func:`values_in` it."""
    following = iter(values)
    return map_values(value, lambda _: next(following))


class CopiedAsDict(collections.UserDict[str, Any]):
    """A mapping of its own kind: a copy of it, and what it is joined into, is a plain dict of what it says then."""

    def __copy__(self) -> dict[str, Any]:  # type: ignore[override]
        return dict(self)

    copy = __copy__  # type: ignore[assignment]

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {**other, **self}

    def __ior__(self, other: Mapping[str, Any]) -> Self:  # type: ignore[override]
        self.update(other)
        return self


def outline(value: Any) -> str:
    """The structure in words: equal texts mean equal structures. A value is "value"."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {outline(value[key])}" for key in _in_order(value)) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(outline, value))})"
    return "value"


def _in_order(mapping: Mapping[Any, Any]) -> Iterable[Any]:
    return sorted(mapping) if all(isinstance(key, str) for key in mapping) else mapping


def _with_each(container: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same kind, each item of which is changed."""
    if isinstance(container, Mapping):
        return with_items(container, {key: change(item) for key, item in container.items()})
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return type(container)(*map(change, container))
    if is_record(container):
        names = [field.name for field in dataclasses.fields(container) if field.init]
        return dataclasses.replace(container, **{name: change(getattr(container, name)) for name in names})
    kind = tuple if isinstance(container, torch.Size) else type(container)  # which holds nothing but numbers
    return kind(map(change, container))


def with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """``items`` in a mapping like ``mapping`` (a defaultdict keeps its factory); a dict, where that cannot change."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return items
    clone = copy.copy(mapping)
    for key, item in items.items():  # a Counter's update would add
        clone[key] = item
    return clone


def is_named_tuple(batch: Any) -> bool:
    """A named tuple; one that can move itself to a device (PackedSequence) is a leaf."""
    return isinstance(batch, tuple) and hasattr(batch, "_fields") and not hasattr(batch, "to")


def is_record(batch: Any) -> bool:
    """A dataclass object; one that can move itself to a device is a leaf."""
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type) and not hasattr(batch, "to")


def is_sequence(batch: Any) -> bool:
    """A list or tuple that holds more than plain values."""
    return isinstance(batch, list | tuple) and not hasattr(batch, "_fields") and any(map(_is_more, batch))


def _is_more(item: Any) -> bool:
    return isinstance(item, torch.Tensor | np.ndarray | Mapping | list | tuple) or is_record(item) or has_to(item)


def is_rows(leaf: Any) -> bool:
    """Whether its first dimension are the examples; a ConfigurationError where torch does not say how long that is."""
    if isinstance(leaf, torch.Tensor) and leaf.is_nested and leaf.layout is torch.strided:
        raise ConfigurationError(
            "a nested tensor of layout torch.strided does not say its size: make it with layout=torch.jagged "
            "(torch.nested.nested_tensor(rows, layout=torch.jagged))"
        )
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def has_to(leaf: Any) -> bool:
    """Whether a leaf is an object that can move itself to a device."""
    return callable(getattr(leaf, "to", None)) and not isinstance(leaf, torch.Tensor | type)


def leaves(batch: Any) -> list[Any]:
    """What :func:`map_leaves` changes, in order. Nothing is built anew: a dataclass may check what it is made of."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if is_record(batch):
        batch = [getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init]
    elif not (isinstance(batch, Mapping) or is_named_tuple(batch) or is_sequence(batch)):
        return [batch]
    items = batch.values() if isinstance(batch, Mapping) else batch
    return [leaf for item in items for leaf in leaves(item)]


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))


def on_cpu(leaf: Any) -> Any:
    """A tensor without its history, on the CPU; anything else as it is."""
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def num_examples(batch: Any) -> int:
    """Examples in ``batch``; a ConfigurationError where there is no telling."""
    found = leaves(batch)
    rows = [leaf for leaf in found if is_rows(leaf)]
    counts = {len(leaf) for leaf in rows or found if rows or isinstance(leaf, list | tuple)}
    if len(counts) == 1:
        return counts.pop()
    if counts:
        some = (rows or found)[:4]
        shapes = ", ".join(str(list(leaf.shape)) if is_rows(leaf) else f"{len(leaf)} values" for leaf in some)
        if num_more := len(rows or found) - len(some):
            shapes += f" and {num_more} more"
        raise ConfigurationError(
            f"expected a batch whose tensors share their first dimension, the examples, got {shapes}; "
            "a DataLoader over a map-style dataset takes what its collate_fn makes, in any form; otherwise let "
            "distribute_datasets_from_function give nested tensors, torch.nested.nested_tensor_from_jagged(values, "
            "offsets)"
        )
    raise ConfigurationError(
        f"expected a batch with tensors or arrays in lists, tuples, dicts or dataclasses, got {type(batch).__name__}; "
        "their first dimension says how many examples there are"
    )


def is_example(batch: Any) -> bool:
    """Whether it looks like one example (features and a label), and no batch: one tensor beside single numbers."""
    found = leaves(batch)
    rest = [leaf for leaf in found if not is_rows(leaf)]
    has_numbers = any(isinstance(leaf, torch.Tensor | np.generic | int | float) for leaf in rest)
    return has_numbers and len(found) == len(rest) + 1


def part_of(batch: Any, start: int, stop: int) -> Any:
    """Examples ``start`` … ``stop``-1 of ``batch``; tensors and arrays are views. A ConfigurationError where it has no
    examples to tell apart, or a part that cannot be cut."""
    count = num_examples(batch)
    has_rows = any(map(is_rows, leaves(batch)))

    def cut(leaf: Any) -> Any:
        if has_to(leaf) or (isinstance(leaf, torch.Tensor) and (leaf.layout != torch.strided or leaf.is_nested)):
            raise ConfigurationError(
                f"a batch with {_kind(leaf)} cannot be cut into the replicas' parts; let "
                "distribute_datasets_from_function make a batch for each replica, or use a map-style dataset"
            )
        is_cut = is_rows(leaf) or (_may_have_examples(leaf, has_rows) and len(leaf) == count)
        return leaf[start:stop] if is_cut else leaf

    return map_leaves(batch, cut)


def empty_like(batch: Any) -> Any:
    """``batch`` with no examples left in any of its tensors, arrays and lists of values."""
    counts = {len(leaf) for leaf in leaves(batch) if is_rows(leaf)}

    def emptied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            return _none_of(leaf)
        is_cut = is_rows(leaf) or (_may_have_examples(leaf, bool(counts)) and (not counts or len(leaf) in counts))
        return leaf[:0] if is_cut else leaf

    return map_leaves(batch, emptied)


def warn_of_left_examples(batch: Any) -> None:
    """Warns, once for each kind, of an object that :func:`empty_like` left as it is, in the batch of a replica without
    examples."""
    for kind in {type(leaf).__name__ for leaf in leaves(batch) if has_to(leaf)}:
        warn_once(
            logger,
            "A replica without examples gets a %s with examples of others, because only those of tensors and arrays "
            "can be left out. The mean of a loss does not count them, but a sum, a metric or BatchNorm does: let the "
            "collate_fn put tensors into a dict, or choose batches with an example for each replica (drop_last=True)",
            kind,
        )


def _none_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like one that torch does not slice, of no examples."""
    if tensor.layout is torch.jagged:
        return _no_bags(tensor.shape[2:], tensor.dtype).to(tensor.device)
    if tensor.layout is torch.sparse_coo:
        return tensor.index_select(0, torch.empty(0, dtype=torch.int64, device=tensor.device))
    return torch.zeros(0, *tensor.shape[1:], dtype=tensor.dtype, layout=tensor.layout, device=tensor.device)


def _no_bags(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A nested tensor (``torch.jagged``) of no components; ``shape``: of an element of one."""
    no_offsets = torch.zeros(1, dtype=torch.int64)
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(torch.empty(0, *shape, dtype=dtype), no_offsets)
    return nested


def _may_have_examples(leaf: Any, has_rows: bool) -> bool:
    """Whether a leaf holds one plain value for each example, if it has as many. A tuple of numbers beside tensors is
    rather a size of the batch as a whole."""
    if isinstance(leaf, tuple) and not has_to(leaf):
        kinds = {type(item) for item in leaf}
        return not has_rows or (kinds <= {str, bytes, type(None)} and kinds != {type(None)})
    return isinstance(leaf, list)


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return f"a {type(leaf).__name__}"
    return "a nested tensor" if leaf.is_nested else f"a tensor of layout {leaf.layout}"


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with every tensor in it, and every object that can move itself, on ``device``."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if has_to(leaf) else leaf

    return map_leaves(batch, moved)


def form_of(batch: Any) -> Any:
    """What :func:`empty_of` needs to build a batch like ``batch`` with no examples, fit for JSON: for a worker that has
    none of its own to cut down to size 0."""
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
    if isinstance(batch, torch.Tensor) and batch.layout is torch.jagged:
        return {"jagged": str(batch.dtype).removeprefix("torch."), "shape": list(batch.shape[2:])}
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
    if "jagged" in form:
        return _no_bags(form["shape"], getattr(torch, form["jagged"]))
    if "array" in form:
        return np.empty((0, *form["shape"]), np.dtype(form["array"]))
    return form["value"]


def fingerprint(batch: Any) -> int:
    """32 bits over the form and all values of ``batch``."""
    crc = zlib.crc32(json.dumps(form_of(batch)).encode())
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            whole = leaf.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)  # and of stride 1
            data = whole.view(torch.uint8).numpy().tobytes()
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
