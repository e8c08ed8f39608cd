"""What any number of parameter servers wrote into a checkpoint, as plain states: torch and safetensors alone."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import safetensors
import torch

from stratagem.checkpoint.catalog import was_removed
from stratagem.checkpoint.durable import check_disk, patiently, read_file
from stratagem.checkpoint.manifest import UNREADABLE
from stratagem.checkpoint.tensor_file import open_tensors
from stratagem.checkpoint.tree import StateOnServers
from stratagem.errors import CheckpointError


@contextlib.contextmanager
def _reading(what: object) -> Iterator[None]:
    """Inside, what parameter servers wrote is read: what cannot be is a ``CheckpointError``."""
    try:
        yield
    except CheckpointError:
        raise
    except (*UNREADABLE, IndexError, RuntimeError, safetensors.SafetensorError) as error:
        check_disk(error, f"{what} cannot be read")
        raise CheckpointError(f"{what} cannot be read: {error!r}") from None


def consolidate(
    directory: str | pathlib.Path, slot: str = "", without: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Every variable of a checkpoint under its own name, whole. ``slot``: name of an optimizer slot ("exp_avg") to read
    instead of weights; variables without it are left out. Of one that was never updated (frozen, say) some ps may have
    it, for what they hold beside it: zeros. ``without``: variables that are not read. Raises CheckpointError: the
    checkpoint is incomplete or damaged; names the variable or file. UnreadableError: nobody can tell now."""
    path = pathlib.Path(directory)
    parts = _parts(path)
    if not parts or was_removed(path):
        raise CheckpointError(f"expected a committed checkpoint (manifest.json and ps-*.json) in {path}")
    state: dict[str, torch.Tensor] = {}
    rows: dict[str, int] = {}
    for part in parts:
        source = _file_of(part, slot)
        with _reading(source):
            groups = json.loads(read_file(part))["groups"]
            for shard in [shard for group in groups for shard in group["shards"]]:
                rows[shard["variable"]] = rows.get(shard["variable"], 0) + shard["num_rows"]
            chosen = [shard for group in groups if not slot or slot in group["slots"] for shard in group["shards"]]
            wanted = [shard for shard in chosen if shard["variable"] not in without]
            if not wanted:
                continue
            with open_tensors(source) as tensors:
                for shard in wanted:
                    name, shape = shard["variable"], tuple(shard["shape"])
                    tensor = tensors.get_tensor(_key_of(shard, slot))
                    if name not in state:  # once, not for every part: tables fill the memory
                        state[name] = torch.zeros(shape, dtype=tensor.dtype)
                    whole = state[name]
                    target = whole.narrow(0, shard["first_row"], shard["num_rows"]) if shape else whole
                    target.copy_(tensor)
    for name, tensor in state.items():
        expected = tensor.shape[0] if tensor.dim() else 1
        if rows[name] != expected:
            raise CheckpointError(f"checkpoint {path}: expected {expected} rows of variable {name}, found {rows[name]}")
    return state


class ServerState:
    """What parameter servers wrote into a checkpoint; weights and slots are read when first asked for. For ``tables``,
    names of variables, is given what stands for a :class:`SavedRows`."""

    def __init__(self, path: pathlib.Path, tables: Collection[str] = ()) -> None:
        self._path = path
        self._slots: dict[str, dict[str, torch.Tensor]] = {}
        self._tables = {name: form for name, form in self.forms().items() if name in tables} if tables else {}

    @property
    def variables(self) -> Mapping[str, torch.Tensor]:
        """Every variable whole, by name, but for the tables. Raises CheckpointError: a file is missing or damaged."""
        return self._slot("")

    def variable(self, name: str) -> torch.Tensor | StateOnServers:
        """One of them. Raises CheckpointError: there is none of that name."""
        if name not in self._tables and name not in self.variables:
            raise CheckpointError(f"the checkpoint {self._path} has no variable {name}: it is from a different model")
        return self._value(name)

    def optimizer_state(
        self, names: Sequence[str], param_groups: Iterable[Mapping[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        """The part ``state`` of the ``state_dict()`` of an optimizer whose parameters have these names on the ps, in
        its order, beside the ``param_groups`` of it."""
        facts: dict[str, tuple[dict[str, Any], int]] = {}
        for _, group, position, shard in _shards(self._path):
            if group["optimizer"]:  # of a variable that was cut its first part
                facts.setdefault(shard["variable"], (group, position))
        state: dict[int, dict[str, Any]] = {}
        for index, name in enumerate(names):
            group, position = facts.get(name, ({}, 0))
            if not group or not group["counts"][position]:
                continue  # no update has touched it
            entry: dict[str, Any] = {}
            if group["counts_steps"]:
                entry["step"] = torch.tensor(float(group["counts"][position]))
            entry |= {scalar: torch.tensor(values[position]) for scalar, values in group["scalars"].items()}
            entry |= {slot: self._value(name, slot) for slot in group["slots"]}
            if entry:
                state[index] = entry
        add_first_sums(state, param_groups, lambda index: self.variables.get(names[index]))  # of tables: the worker
        return state

    def num_updates(self, names: Collection[str]) -> int:
        """The updates that the job has made to variables of these names; of several the most. Raises CheckpointError: a
        file is missing or damaged."""
        with _reading(self._path):
            numbers = [one["num_updates"] for _, one, _, shard in _shards(self._path) if shard["variable"] in names]
        return max(numbers, default=0)

    def _value(self, name: str, slot: str = "") -> torch.Tensor | StateOnServers:
        if name in self._tables:
            return StateOnServers(f"slot/{slot}/{name}" if slot else name)
        return self._slot(slot)[name]

    def _slot(self, slot: str) -> dict[str, torch.Tensor]:
        if slot not in self._slots:
            self._slots[slot] = consolidate(self._path, slot, self._tables)
        return self._slots[slot]

    def forms(self) -> dict[str, torch.Tensor]:
        """Every variable by name, without values: a tensor of device "meta". Nothing but descriptions is read. Raises
        CheckpointError: one is missing or damaged."""
        with _reading(self._path):
            return {
                shard["variable"]: torch.empty(shard["shape"], dtype=getattr(torch, group["dtype"]), device="meta")
                for _, group, _, shard in _shards(self._path)
            }


class SavedRows:
    """A table that parameter servers wrote, or a slot of it: ``rows[first:stop]`` reads these, and no others. ``path``:
    the checkpoint; ``name``: of the variable; of a slot of it ``slot/<slot>/<name>``, which is zero where a ps has
    none. Raises CheckpointError: a row is on no ps, or a file cannot be read; so does reading rows.
    UnreadableError: the disk did not answer for ten seconds."""

    device, layout = torch.device("cpu"), torch.strided

    def __init__(self, path: pathlib.Path, name: str) -> None:
        *_, slot, variable = ["", *name.split("/", 2)[1:]] if name.startswith("slot/") else ["", name]
        self._parts: list[tuple[int, int, pathlib.Path, str]] = []
        self.shape, num_rows = torch.Size((1,)), 0
        with _reading(path):
            for part, group, _, shard in patiently(lambda: list(_shards(path))):
                if shard["variable"] != variable:
                    continue
                self.shape, self.dtype = torch.Size(shard["shape"]), getattr(torch, group["dtype"])
                num_rows += shard["num_rows"]
                if not slot or slot in group["slots"]:
                    stop = shard["first_row"] + shard["num_rows"]
                    self._parts.append((shard["first_row"], stop, _file_of(part, slot), _key_of(shard, slot)))
        if num_rows != self.shape[0]:
            raise CheckpointError(f"checkpoint {path}: expected {self.shape[0]} rows of {variable}, found {num_rows}")

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return patiently(lambda: self._read(rows))

    def _read(self, rows: slice) -> torch.Tensor:
        first, stop, _ = rows.indices(self.shape[0])
        found = torch.zeros((stop - first, *self.shape[1:]), dtype=self.dtype)
        for begin, end, file, key in self._parts:
            if (low := max(first, begin)) < (high := min(stop, end)):
                with _reading(file), open_tensors(file) as tensors:  # open, it would keep what was read
                    found[low - first : high - first] = tensors.get_slice(key)[low - begin : high - begin]
        return found


def _file_of(part: pathlib.Path, slot: str) -> pathlib.Path:
    """Where a ps wrote its weights, or slots; ``part``: its description."""
    return part.with_suffix(".slots.safetensors" if slot else ".safetensors")


def _key_of(shard: Mapping[str, Any], slot: str) -> str:
    return f"slot/{slot}/{shard['key']}" if slot else str(shard["key"])


def _shards(path: pathlib.Path) -> Iterator[tuple[pathlib.Path, dict[str, Any], int, dict[str, Any]]]:
    """Of every ps: each shard, after its file, its group and its place in there."""
    for part in _parts(path):
        with _reading(part):
            groups = json.loads(read_file(part))["groups"]
            shards = [(part, group, *each) for group in groups for each in enumerate(group["shards"])]
        yield from shards


def add_first_sums(
    state: dict[int, dict[str, Any]],
    param_groups: Iterable[Mapping[str, Any]],
    value: Callable[[int], torch.Tensor | None],
) -> None:
    """Adagrad has sums from the beginning, also of parameters that no update has touched: ``state`` gets what it lacks
    of these, as torch's constructor makes it; without it ``step()`` of a single process ends in a KeyError. ``state``:
    of a ``state_dict()``, by number of the parameter; ``param_groups`` as there; ``value``: of the parameter with a
    number; None: it is not known."""
    for group in param_groups:
        if "initial_accumulator_value" in group:
            for index in group["params"]:
                if index not in state and (like := value(index)) is not None:
                    first = torch.full_like(like, group["initial_accumulator_value"])
                    state[index] = {"step": torch.tensor(0.0), "sum": first}


def has_server_state(path: pathlib.Path) -> bool:
    """Whether parameter servers wrote (a part of) the checkpoint. Raises UnreadableError: nobody can tell now."""
    return bool(_parts(path))


def _parts(path: pathlib.Path) -> list[pathlib.Path]:
    """The descriptions of what each ps wrote; a glob takes a folder that it may not read for an empty one."""
    with _reading(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(part for part in path.iterdir() if part.match("ps-*.json"))
    return []
