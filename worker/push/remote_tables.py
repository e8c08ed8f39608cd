"""Tables of one shard group: on each ps their rows lie in one flat tensor, and one frame carries rows of all of them.

A job of 26 tables of one width sends one frame where it would send 26, and a ps updates their rows in one turn.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from stratagem.errors import ClusterTimeoutError
from stratagem.rpc.codec import FrameKind
from stratagem.worker.push.ps_client import SILENCE_S, PsClient
from stratagem.worker.push.remote_table import RemoteTable
from stratagem.worker.push.row_frames import RowsThere, frames_of, numbers_of, rows_in
from stratagem.worker.push.row_reads import held
from stratagem.worker.push.table_handle import RowGradient
from stratagem.worker.push.variables import INITIAL_WAIT_S, RemoteVariables
from stratagem.worker.push.wire import GroupSpec, create_variables, group_spec, pull_weights, shard_spec

logger = logging.getLogger(__name__)

_ROW_GRADIENT = int(FrameKind.ROW_GRADIENT)


@dataclasses.dataclass(eq=False, frozen=True)
class RemoteTables:
    """Tables of one width, dtype, optimizer and param_group."""

    group: int
    optimizer: str
    """Name of the torch.optim class; empty: no optimizer changes them."""
    param_group: int
    tables: Sequence[RemoteTable]
    """In the order of the flat tensor."""

    @property
    def title(self) -> str:
        """What it is, for messages."""
        return self.tables[0].title + (f" and {len(self.tables) - 1} more" if len(self.tables) > 1 else "")

    @property
    def servers(self) -> tuple[int, ...]:
        """The ps that hold rows."""
        return tuple(sorted({ps for table in self.tables for ps in table.link.placement.servers}))

    def specs(self, ps: int) -> list[GroupSpec]:
        """The rows on one ps, and how it makes them unless this worker gives them."""
        shards = [
            shard_spec(
                table.link.name,
                (table.num_rows, table.width),
                shard,
                shard.local_row * table.width,
                self.param_group,
                table.initial,
            )
            for table in self.tables
            for shard in table.link.placement.on(ps)
        ]
        return [group_spec(self.group, self.optimizer, self.tables[0].dtype, shards)] if shards else []

    def give(self, client: PsClient, groups: Sequence[int]) -> None:
        """Sends one ps the rows that this worker was built with."""
        for table in self.tables:
            table.give(client)

    def has_values(self, client: PsClient) -> bool:
        """Whether one ps has all of its rows; waits a moment."""
        if client.index not in self.servers:
            return True
        return bool(pull_weights(client, {self.group: None}, INITIAL_WAIT_S).result().versions)

    def present(self, ps: int, gradients: Sequence[RowGradient | None]) -> list[bool]:
        """Of each shard on one ps, whether its table has a gradient."""
        given = zip(self.tables, gradients, strict=True)
        return [gradient is not None for table, gradient in given for _ in table.link.placement.on(ps)]

    def send_gradients(self, gradients: Sequence[RowGradient | None], client: PsClient, transfer: int) -> int:
        """Sends one ps its part of the gradient of each table; returns the number of frames."""
        num_frames = num_rows = 0
        max_rows = rows_in(self.tables[0].link.runtime.config.frame_bytes, self.tables[0].handle)
        for frame in frames_of(self._parts(gradients, client.index, max_rows), max_rows):
            pieces = [numbers_of(frame), *(part.rows.view(-1) for part in frame)]
            piece_bytes = [piece.view(torch.uint8) for piece in pieces]
            num_bytes = sum([piece.numel() for piece in piece_bytes])
            client.lane.send(_ROW_GRADIENT, transfer, self.group, num_rows, held(piece_bytes), num_bytes)
            num_frames += 1
            num_rows += len(pieces[0])
        return num_frames

    def _parts(self, gradients: Sequence[RowGradient | None], ps: int, max_rows: int) -> Iterator[RowsThere]:
        for table, gradient in zip(self.tables, gradients, strict=True):
            if gradient is not None:
                for holder, start, stop, local in table.link.placement.cut(gradient.numbers, max_rows):
                    if holder == ps:
                        yield RowsThere(local, gradient.values[start:stop])


def by_group(
    groups: Iterable[RemoteTables], gradients: Iterable[RowGradient | None]
) -> Iterator[tuple[RemoteTables, list[RowGradient | None]]]:
    """Each group with the gradients of its tables; ``gradients``: in the order of :func:`every_table`."""
    following = iter(gradients)
    return ((each, list(itertools.islice(following, len(each.tables)))) for each in groups)


def every_table(groups: Iterable[RemoteTables]) -> Iterator[RemoteTable]:
    """The tables of some groups, in their order."""
    return (table for each in groups for table in each.tables)


Placed = RemoteVariables | RemoteTables
"""What parameter servers hold for the job, and workers attach to."""


def attach(every: Sequence[Placed], client: PsClient, can_initialize: bool) -> tuple[int, int]:
    """Tells one ps what it holds, and then gives it the values that it asks this process for.

    It is told of everything at once: a checkpoint is taken when a ps has values of all that it was told of. Gives how
    many variables got their values from this process, and how many groups have none yet: another worker's to give.
    """
    return start_attach(every, client, can_initialize)()


def start_attach(every: Sequence[Placed], client: PsClient, can_initialize: bool) -> Callable[[], tuple[int, int]]:
    """Tells one ps what it holds; what it returns does the rest of :func:`attach`."""
    specs = {one: one.specs(client.index) for one in every}
    told = [spec for own in specs.values() for spec in own]
    reply_of = create_variables(client, told, can_initialize)

    def give() -> tuple[int, int]:
        reply = reply_of()
        asked = {*reply.initialize}
        for one, own in specs.items():
            if groups := [spec.group for spec in own if spec.group in asked]:
                one.give(client, groups)
        num_given = sum([len(spec.shards) for spec in told if spec.group in asked])
        return num_given, len(told) - len(asked.union(reply.initialized))

    return give


def create_or_attach(
    every: Sequence[Placed], clients: Sequence[PsClient], is_lead: Callable[[], bool], timeout_s: float
) -> None:
    """Creates it all with this process's values if this worker is the lead, else waits until it has the job's. Raises
    VariableError: the job has it with another shape, dtype or optimizer; UnsupportedOptimizerError: a ps cannot run the
    optimizer, or not on single rows; ClusterTimeoutError: no lead supplied initial values within ``timeout_s``
    seconds."""
    deadline, silent_until = time.monotonic() + timeout_s, time.monotonic() + SILENCE_S
    waiting = [(client, one) for client in clients for one in every]
    while waiting:
        asked = {client.index: client for client, _ in waiting}.values()
        for give in [start_attach(every, client, is_lead()) for client in asked]:  # all make the rows of tables at once
            give()
        while waiting and waiting[-1][1].has_values(waiting[-1][0]):
            waiting.pop()
        if not waiting:
            break
        client, one = waiting[-1]
        if time.monotonic() > silent_until:
            silent_until = math.inf
            logger.warning(
                "prepare waits, %.0f s more, until %s gives %s its values of %s: every worker has to prepare the same, "
                "in the same order",
                *(deadline - time.monotonic(), client.session.membership.lead, client.task, one.title),
            )
        if time.monotonic() > deadline:
            raise ClusterTimeoutError(
                f"{client.task} got no initial values of {one.title} within {timeout_s:.0f} s; the lead (the lowest "
                "live worker) supplies them in prepare(). Look at its log."
            )
