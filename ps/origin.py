"""A checkpoint made by another number of ps: a ps takes from it the rows that it is to hold."""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import threading
from collections.abc import Mapping
from typing import Any

import torch

from stratagem.checkpoint.durable import read_file
from stratagem.checkpoint.tensor_file import open_tensors
from stratagem.errors import VariableError
from stratagem.ps.shard_group import ShardGroup
from stratagem.ps.snapshot import checked, reading, spec_from_json
from stratagem.ps.specs import GroupSpec, ShardSpec, of_another_model
from stratagem.ps.table_group import new_group
from stratagem.ps.units import UnitLedger

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of a variable as one ps had them."""

    shard: ShardSpec
    path: pathlib.Path
    """Its ``ps-<i>.json``."""
    position: int
    """Of the shard in its group."""
    group: Mapping[str, Any]
    """As it stands in there."""
    weights: Any
    slots: Any
    """Open files."""


class Origin:
    """Where all rows are, until each is on some ps. The files stay open: a newer checkpoint may replace them.
    ``directory``: a committed checkpoint, whose files have been checked. CheckpointError: a file is missing or
    damaged."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, list[_Rows]] = {}
        self._num_ps = 0
        """That made it."""
        self.num_elements = 0
        """Of the weights of all variables."""
        self.num_taken = 0
        """Of them on this ps."""
        self.step = 0
        """Largest number of updates applied to any group."""
        self.num_updates = 0
        """Of all groups together, as its ps told it."""
        self.store_epoch = 0
        """The largest of those that made it."""
        ledgers = []
        with reading(directory, VariableError):
            for path in sorted(directory.glob("ps-*.json")):
                data = checked(json.loads(read_file(path)))
                self.store_epoch = max(self.store_epoch, data["store_epoch"])
                ledgers.append(UnitLedger.from_json(data["units"]))
                self.num_updates += int(data.get("num_moved", 0))
                self._add(path, data["groups"])
                self._num_ps += 1
        self.units, num_torn = UnitLedger.joined(ledgers)
        """What was applied before."""
        if num_torn:
            logger.warning(
                "%s was made while its workers were dying: it contains %d updates in part, which count as applied",
                *(directory, num_torn),
            )

    def close(self) -> None:
        """All rows are on some ps, says the chief: those of this one are here."""
        with self._lock:
            self._rows.clear()

    def take(self, spec: GroupSpec) -> ShardGroup | None:
        """A group with its rows, optimizer state and counts; None where the checkpoint has none of its variables, or
        not all, from not all ps, and those were not trained: a worker was about to give their values, and gives all of
        them again. VariableError: it has some of what was trained or complete, or under another optimizer or shape.
        CheckpointError: it cannot be read any more."""
        if not any(shard.variable in self._rows for shard in spec.shards):
            return None
        group, num_taken, lacking, holders = new_group(spec), 0, "", set[pathlib.Path]()
        with self._lock, reading(f"group {spec.group} of the checkpoint that this ps begins from", VariableError):
            for index, shard in enumerate(spec.shards):
                num_rows = 0
                for rows in self._rows.get(shard.variable, ()):
                    holders.add(rows.path)
                    num_rows += self._copy(rows, group, index, shard)
                if num_rows != shard.num_rows:
                    stop = shard.first_row + shard.num_rows
                    lacking = (
                        f"variable {shard.variable}: expected rows {shard.first_row} to {stop} in the checkpoint that "
                        f"this ps begins from, found {num_rows}"
                    )
                num_taken += num_rows * shard.num_elements // max(1, shard.num_rows)
            if lacking and (group.num_updates or len(holders) == self._num_ps):  # a ps is given all of a group
                raise of_another_model(lacking)
            group.initialized = True
            self.num_taken += num_taken
        return None if lacking else group

    def _add(self, path: pathlib.Path, groups: list[dict[str, Any]]) -> None:
        names = [path.with_suffix(end) for end in (".safetensors", ".slots.safetensors")]
        weights, slots = (open_tensors(name) if name.exists() else None for name in names)
        for group in groups:
            self.step = max(self.step, group["num_updates"])
            self.num_updates += group["num_updates"]
            if not group["initialized"]:
                continue
            for position, shard in enumerate(spec_from_json(group).shards):
                self.num_elements += shard.num_elements
                found = _Rows(shard, path, position, group, weights, slots)
                self._rows.setdefault(shard.variable, []).append(found)

    def _copy(self, rows: _Rows, group: ShardGroup, index: int, shard: ShardSpec) -> int:
        """Copies what the two have in common; how many rows that is."""
        first = max(rows.shard.first_row, shard.first_row)
        stop = min(rows.shard.first_row + rows.shard.num_rows, shard.first_row + shard.num_rows)
        if first >= stop:
            return 0
        was = rows.group
        found = was["optimizer"], getattr(torch, was["dtype"]), rows.shard.shape
        expected = group.spec.optimizer, group.spec.dtype, shard.shape
        if found != expected:
            raise of_another_model(
                f"variable {shard.variable}: the checkpoint has it as {found}, but expected {expected}"
            )

        def copy(flat: torch.Tensor, file: Any, key: str) -> None:
            if shard.shape:
                values = file.get_slice(key)[first - rows.shard.first_row : stop - rows.shard.first_row]
            else:
                values = file.get_tensor(key)
            at = shard.offset + (first - shard.first_row) * (shard.num_elements // shard.num_rows)
            flat[at : at + values.numel()] = values.reshape(-1)

        copy(group.weights, rows.weights, rows.shard.key)
        for name in was["slots"]:
            copy(group.slot(name), rows.slots, f"slot/{name}/{rows.shard.key}")
        group.counts[index] = max(group.counts[index], was["counts"][rows.position])
        group.started[index] = group.started[index] or was["started"][rows.position]
        for name, values in was["scalars"].items():
            group.scalars.setdefault(name, [0.0] * len(group.counts))[index] = values[rows.position]
        group.counter = max(group.counter, was["counter"])
        group.num_updates = max(group.num_updates, was["num_updates"])
        group.num_skipped = max(group.num_skipped, was.get("num_skipped", 0))
        return stop - first
