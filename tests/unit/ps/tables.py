"""What tests of tables build: specs, gradients as frames carry them, a worker that talks to a store about a table."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from stratagem.cluster.initial_rows import InitialRows
from stratagem.cluster.units import Unit
from stratagem.ps.requests import CommitResult, FrameKind, TransferRef
from stratagem.ps.specs import GroupSpec, ShardSpec
from stratagem.rpc.codec import Frame
from stratagem.rpc.generated import frame_pb2
from tests.unit.ps.driver import CALL, DirectWorker


def table_spec(
    rows: int, width: int, optimizer: str = "SGD", *, group: int = 1, dtype: torch.dtype = torch.float32
) -> GroupSpec:
    """A table "t" that lies whole on one ps."""
    shard = ShardSpec("t", (rows, width), 0, rows, 0, rows=InitialRows("normal", 0.0, 1.0, seed=5))
    return GroupSpec(group, optimizer, dtype, (shard,))


def beginning_with(spec: GroupSpec, *initial: InitialRows) -> GroupSpec:
    """The same tables, whose rows begin otherwise."""
    shards = [dataclasses.replace(shard, rows=rows) for shard, rows in zip(spec.shards, initial, strict=True)]
    return dataclasses.replace(spec, shards=tuple(shards))


def packed(numbers: torch.Tensor, values: torch.Tensor, before: int = 0) -> tuple[int, torch.Tensor]:
    """Rows of a gradient as one frame carries them, and how many came before."""
    return before, torch.cat([numbers.view(torch.uint8), values.contiguous().view(-1).view(torch.uint8)])


class TableWorker(DirectWorker):
    """One process life of a worker with a table."""

    def create_table(self, is_lead: bool = True) -> tuple[list[int], list[int]]:
        """Creates or attaches; returns what must be assigned, and what has values."""
        return self.store.variables.create_variables(self.numbered(), [self.spec], is_lead, CALL)

    def stage_rows(self, numbers: list[int], values: torch.Tensor) -> TransferRef:
        """Stages a gradient, one row a frame."""
        self.transfer += 1
        for before, number in enumerate(numbers):
            _, piece = packed(torch.tensor([number]), values[before : before + 1])
            frame = Frame(int(frame_pb2.ROW_GRADIENT), self.transfer, self.spec.group, before, piece)
            self.store.variables.stage(self.sender, FrameKind.GRADIENT, frame)
        return TransferRef(self.transfer, len(numbers))

    def commit_rows(self, numbers: list[int], values: torch.Tensor, *units: Unit, **fields: Any) -> CommitResult:
        """Stages and commits."""
        return self.send(self.request(self.stage_rows(numbers, values), units, **fields))

    def ask(self, *numbers: int) -> torch.Tensor:
        """Asks for rows."""
        self.transfer += 1
        frame = Frame(int(frame_pb2.WANTED_ROWS), self.transfer, self.spec.group, 3, torch.tensor(numbers))
        self.store.variables.stage(self.sender, FrameKind.WANTED_ROWS, frame)
        answer = self.lane.frames[-1]
        assert (answer.group, answer.offset) == (self.spec.group, 3)
        return answer.tensor.view(len(numbers), -1)
