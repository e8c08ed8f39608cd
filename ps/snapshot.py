"""A ps's part of a checkpoint on disk.

Up to three files: ``ps-<i>.safetensors`` (weights; to PyTorch alone a plain state dict: a whole variable under its own
name, a row shard under ``name@first_row``), ``ps-<i>.slots.safetensors`` (optimizer slots under ``slot/<slot>/<name>``,
if there are any), ``ps-<i>.json`` (specs, step counts, scalars, units).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors
import torch

from stratagem.checkpoint.durable import GIVE_ANOTHER, check_disk, hash_file, read_file, way_out, write_durably
from stratagem.checkpoint.manifest import UNREADABLE, SavedFile, read_content
from stratagem.checkpoint.tensor_file import open_tensors, write_tensors
from stratagem.cluster.initial_rows import InitialRows
from stratagem.errors import CheckpointError, StratagemError
from stratagem.ps.shard_group import ShardGroup
from stratagem.ps.specs import GroupSpec, ShardSpec
from stratagem.ps.table_group import new_group
from stratagem.ps.units import UnitLedger

FORMAT = 2
CANNOT_BE_READ = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,  # an absurd size; RecursionError is one too
    MemoryError,
    safetensors.SafetensorError,
    StratagemError,
)
"""What comes of reading files that are not what :func:`save` wrote."""


@contextlib.contextmanager
def reading(what: object, passes: type[StratagemError] | tuple[()] = ()) -> Iterator[None]:
    """Inside, ``what`` is read: what goes wrong is a ``CheckpointError``, unless it is of the kind ``passes``, about
    something else; an ``UnreadableError`` where ``what`` may be whole."""
    try:
        yield
    except passes:
        raise
    except CANNOT_BE_READ as error:
        check_disk(error, f"{what} cannot be read")
        raise CheckpointError(f"{what} cannot be read: {error!r}") from None


@dataclasses.dataclass(frozen=True)
class Content:
    groups: list[ShardGroup]
    units: UnitLedger
    store_epoch: int
    num_moved: int = 0
    """See :attr:`StoreState.num_moved`."""


def check_nonce(directory: pathlib.Path, nonce: str, index: int) -> None:
    """Makes sure that the chief and the ps of this index mean the same directory. CheckpointError: the file ``nonce``
    is missing or says something else."""
    try:
        found = read_file(directory / "nonce").decode(errors="replace").strip()
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be read by ps:{index} ({error.strerror}); the checkpoint directory must be on a file "
            "system that the chief and every parameter server share"
        ) from None
    if found != nonce:
        raise CheckpointError(
            f"{directory} exists at ps:{index}, and it is not the chief's: expected nonce {nonce!r}, found {found!r}. "
            "The checkpoint directory must be on a file system that the chief and every parameter server share"
        )


def save(directory: pathlib.Path, index: int, content: Content) -> list[SavedFile]:
    """Writes the files of one ps, durably. Nobody may change the groups meanwhile. CheckpointError: they cannot be
    written."""
    weights = {shard.key: _rows(group.weights, shard) for group in content.groups for shard in group.spec.shards}
    slots = {
        f"slot/{name}/{shard.key}": _rows(flat, shard)
        for group in content.groups
        for name, flat in sorted(group.slots.items())
        for shard in group.spec.shards
    }
    stem = f"ps-{index}"
    try:
        saved = [SavedFile(f"{stem}.safetensors", *write_tensors(directory / f"{stem}.safetensors", weights))]
        if slots:
            name = f"{stem}.slots.safetensors"
            saved.append(SavedFile(name, *write_tensors(directory / name, slots)))
        data = json.dumps(describe(index, content), separators=(",", ":")).encode()
        saved.append(SavedFile(f"{stem}.json", *write_durably(directory / f"{stem}.json", data)))
    except OSError as error:
        advice = way_out(error, GIVE_ANOTHER)
        raise CheckpointError(
            f"ps:{index} cannot write its shards into {directory.parent}: {error.strerror or error}; {advice}"
        ) from None
    return saved


def load(directory: pathlib.Path, index: int) -> Content:
    """Reads what :func:`save` wrote for one ps. CheckpointError: a file is missing or damaged."""
    stem = f"ps-{index}"
    with reading(f"the part of ps:{index} in checkpoint {directory}"):
        data = checked(json.loads(read_file(directory / f"{stem}.json")))
        told = sum(spec.num_bytes for spec in map(spec_from_json, data["groups"]) if not spec.is_table)
        if told > (directory / f"{stem}.safetensors").stat().st_size:
            raise ValueError(f"its variables should take {told:,} bytes, and their file is shorter")
        content = without_values(data)
        groups = content.groups
        with open_tensors(directory / f"{stem}.safetensors") as weights:
            for group in groups:
                _read_rows(weights, group.spec, "", group.weights)
        if any(group.slots for group in groups):
            with open_tensors(directory / f"{stem}.slots.safetensors") as slots:
                for group in groups:
                    for name, flat in group.slots.items():
                        _read_rows(slots, group.spec, f"slot/{name}/", flat)
        return content


def held_elsewhere(directory: pathlib.Path, index: int) -> list[GroupSpec]:
    """What the other ps hold that made a checkpoint, of what has values. CheckpointError: a description cannot be
    read."""
    with reading(f"the other parts of checkpoint {directory}"):
        parts = [path for path in directory.glob("ps-*.json") if path.name != f"ps-{index}.json"]
        groups = [entry for path in parts for entry in checked(json.loads(read_file(path)))["groups"]]
        return [spec_from_json(entry) for entry in groups if entry["initialized"]]


def without_values(data: Mapping[str, Any]) -> Content:
    """What :func:`describe` told of; the tensors are there, and their elements have to be read. KeyError, TypeError,
    ValueError, StratagemError: it tells of something else."""
    groups = [_group(entry) for entry in checked(data)["groups"]]
    return Content(groups, UnitLedger.from_json(data["units"]), data["store_epoch"], int(data.get("num_moved", 0)))


def checked(data: Any) -> Any:
    """The content of ``ps-<i>.json``; ``ValueError`` where it is not of this format."""
    if data["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT}, got {data['format']!r}")
    return data


def check(directory: pathlib.Path, index: int, num_ps: int = 0, is_fresh: bool = False) -> bool:
    """Makes sure that the files that one of ``num_ps`` needs (0: of as many as made the checkpoint) are those that its
    manifest tells of; where it ``is_fresh``, made a moment ago, that they are there is enough. Returns whether these
    are the ps's own: if another number of ps made the checkpoint, it needs those of all. CheckpointError: the
    checkpoint is not complete, was made without this ps, or a file is missing or was altered. UnreadableError: nobody
    can tell now."""
    try:
        files = read_content(directory)["files"]
        is_own = num_ps in (0, len({file["ps"] for file in files}))
        mine = [file for file in files if not is_own or file["ps"] == f"ps:{index}"]
        if not mine:
            raise CheckpointError(f"{directory} was made without ps:{index}")
        for file in mine:
            path = directory / file["name"]
            if not path.is_file():
                raise CheckpointError(f"{path.name} is missing")
            size = path.stat().st_size
            if not is_fresh and (size != file.get("bytes", size) or hash_file(path) != file["sha256"]):
                raise CheckpointError(f"{path.name} was altered: its SHA-256 is not the one in the manifest")
        return is_own
    except UNREADABLE as error:
        check_disk(error, f"{directory} cannot be read by ps:{index}")
        raise CheckpointError(f"{directory} cannot be read by ps:{index}: {error}") from None


def _rows(flat: torch.Tensor, shard: ShardSpec) -> torch.Tensor:
    return flat[shard.offset : shard.stop].view(shard.local_shape)


def _read_rows(source: Any, spec: GroupSpec, prefix: str, flat: torch.Tensor) -> None:
    for shard in spec.shards:
        tensor = source.get_tensor(prefix + shard.key)
        if tuple(tensor.shape) != shard.local_shape or tensor.dtype != spec.dtype:
            raise ValueError(
                f"{shard.key}: expected {spec.dtype} of shape {list(shard.local_shape)}, "
                f"got {tensor.dtype} of {list(tensor.shape)}"
            )
        flat[shard.offset : shard.stop] = tensor.reshape(-1)


def describe(index: int, content: Content) -> dict[str, Any]:
    """All of it but the elements of the tensors, as JSON."""
    return {
        "format": FORMAT,
        "ps": index,
        "store_epoch": content.store_epoch,
        "num_moved": content.num_moved,
        "units": content.units.to_json(),
        "groups": [
            {
                "group": group.spec.group,
                "optimizer": group.spec.optimizer,
                "dtype": str(group.spec.dtype).removeprefix("torch."),
                "shards": [dataclasses.asdict(shard) | {"key": shard.key} for shard in group.spec.shards],
                "slots": sorted(group.slots),
                "counts": group.counts,
                "counts_steps": group.counts_steps,
                "scalars": group.scalars,
                "started": group.started,
                "counter": group.counter,
                "num_updates": group.num_updates,
                "num_skipped": group.num_skipped,
                "initialized": group.initialized,
            }
            for group in content.groups
        ],
    }


def spec_from_json(entry: Mapping[str, Any]) -> GroupSpec:
    """The spec of one group in ``ps-<i>.json``."""
    shards = tuple(map(_shard_from_json, entry["shards"]))
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a torch dtype, got {entry['dtype']!r}")
    return GroupSpec(entry["group"], entry["optimizer"], dtype, shards)


def _shard_from_json(entry: Mapping[str, Any]) -> ShardSpec:
    fields = {field.name: entry[field.name] for field in dataclasses.fields(ShardSpec)}
    rows = None if fields["rows"] is None else InitialRows(**fields["rows"])
    return ShardSpec(**fields | {"shape": tuple(fields["shape"]), "rows": rows})


def _group(entry: Mapping[str, Any]) -> ShardGroup:
    group = new_group(spec_from_json(entry))
    for name in entry["slots"]:
        group.slot(name)
    group.set_progress(entry["counts"], entry["scalars"])
    group.started = list(entry["started"])
    group.counter, group.num_updates = entry["counter"], entry["num_updates"]
    group.num_skipped = entry.get("num_skipped", 0)  # an earlier version did not count them
    group.initialized = entry["initialized"]
    return group
