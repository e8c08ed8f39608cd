"""A table whose rows are on parameter servers: this worker requests the rows of its batch, and holds no others."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from stratagem.checkpoint.server_state import SavedRows
from stratagem.cluster.initial_rows import InitialRows
from stratagem.errors import ClusterTimeoutError, ConfigurationError
from stratagem.rpc.codec import FrameKind
from stratagem.worker.push.layout import Numbers
from stratagem.worker.push.ps_client import SILENCE_S, PsClient
from stratagem.worker.push.row_reads import MAX_BYTES, Lookup, Places, TableLink, held
from stratagem.worker.push.table_handle import LOAD, PendingRows, RowGradient, TableHandle
from stratagem.worker.push.variables import INITIAL_WAIT_S, RemoteVariables
from stratagem.worker.push.wire import (
    GroupSpec,
    Transfer,
    assign_values,
    create_variables,
    group_spec,
    pull_weights,
    shard_spec,
)

logger = logging.getLogger(__name__)

_ROW_GRADIENT, _VALUES = int(FrameKind.ROW_GRADIENT), int(FrameKind.VALUES)


class RemoteTable:
    """A table, from the moment that a module is built; ``prepare`` links it to the ps. ``initial``: how the ps make the
    rows, or all rows, ``(num_rows, width)``, perhaps in a mapped file: they are read in parts."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, initial: InitialRows | torch.Tensor) -> None:
        self.num_rows = num_rows
        self.width = width
        self.dtype = dtype
        self.rows_at_once = max(1, MAX_BYTES // (width * dtype.itemsize))
        """That are read or assigned; more take turns."""
        self._values: torch.Tensor | SavedRows | None = None
        self.handle = TableHandle(torch.empty((num_rows, width), dtype=dtype, device="meta"))
        """What optimizers and ``parameters()`` get in the table's stead: shape and dtype, no memory."""
        self.pending = PendingRows(self.handle)
        """What backward has accumulated since ``zero_grad()``."""
        self._link: TableLink | None = None
        self.begin_with(initial)

    def begin_with(self, initial: InitialRows | torch.Tensor | SavedRows) -> None:
        """Chooses other initial values. Rows that are given are kept: a ps that lost all it had gets them again. Raises
        ConfigurationError: the rows have their values."""
        if self._link is not None:
            raise ConfigurationError(
                "initial values of a table are chosen before strategy.prepare: by now its rows have values. To "
                f"replace them, on every worker:\n    {LOAD}"
            )
        if isinstance(initial, InitialRows):
            self._values, self._initial = None, initial
        else:
            self._values = initial.detach() if isinstance(initial, torch.Tensor) else initial
            self._initial = InitialRows("assigned")

    @property
    def begins_with(self) -> InitialRows | torch.Tensor | SavedRows | None:
        """What the rows are to be; None: they are on the ps."""
        if self._link is not None:
            return None
        return self._initial if self._values is None else self._values

    @property
    def link(self) -> TableLink:
        """The connection. Raises ConfigurationError: there is none yet."""
        if self._link is None:
            raise ConfigurationError(
                "this table has no rows yet: give its model to strategy.prepare(model, optimizer) first"
            )
        return self._link

    # -- creating ----------------------------------------------------------------------------------------------

    def link_to(self, link: TableLink) -> None:
        """From now on the table is on the ps."""
        self._link = link

    @property
    def title(self) -> str:
        """What it is, for messages."""
        return f"table {self._link.name}" if self._link is not None else "a table"

    def specs(self, ps: int) -> list[GroupSpec]:
        """The rows on one ps, and how it makes them unless this worker gives them."""
        link = self.link
        shards = [
            shard_spec(link.name, (self.num_rows, self.width), shard, shard.local_row * self.width, link.param_group)
            for shard in link.placement.on(ps)
        ]
        return [group_spec(link.group, link.optimizer, self.dtype, shards, self._initial)] if shards else []

    def give(self, client: PsClient, groups: Sequence[int]) -> None:
        """Sends one ps the rows that this worker was built with."""
        assert self._values is not None
        self._assign_all(self._values, [client.index])

    # -- rows --------------------------------------------------------------------------------------------------

    def lookup(self, ids: torch.Tensor, array: Places) -> Lookup:
        """The rows of some ids as they are on the ps now; see :meth:`RowReads.lookup`."""
        return self.link.reads.lookup(self, ids, array)

    def rows(self, numbers: Numbers) -> torch.Tensor:
        """Some rows, as :meth:`RowReads.read` has them."""
        out = torch.empty(len(numbers), self.width, dtype=self.dtype, device="cpu")
        self.link.reads.read(self, numbers, out)
        return out

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """All rows in turn: number of the first, and some."""
        for start in range(0, self.num_rows, self.rows_at_once):
            yield start, self.rows(np.arange(start, min(start + self.rows_at_once, self.num_rows)))

    def accumulate(self, numbers: Numbers, values: torch.Tensor) -> None:
        """A backward has reached the table. Takes ``values`` over."""
        self.link.on_backward()
        self.pending.add(numbers, values)

    def send_gradient(self, gradient: RowGradient, client: PsClient, transfer: int) -> int:
        """Sends one ps its part of a gradient; returns the number of frames."""
        link, num_frames = self.link, 0
        for before, pieces in gradient.pieces(link.placement, client.index, link.runtime.config.frame_bytes):
            num_bytes = sum([piece.numel() for piece in pieces])
            client.lane.send(_ROW_GRADIENT, transfer, link.group, before, held(pieces), num_bytes)
            num_frames += 1
        return num_frames

    # -- values from outside -----------------------------------------------------------------------------------

    def assign(self, values: torch.Tensor | SavedRows, slot: str = "", num_updates: int = 0) -> None:
        """Gives the ps values of the whole table, a part at a time; only the lead's reach them.

        Before ``prepare`` they are kept, and the table begins with them.

        Args:
            values: ``(num_rows, width)``.
            slot: of the optimizer; empty: weights.
            num_updates: with a slot: updates that the table has seen.

        Raises:
            ConfigurationError: another shape.
        """
        if tuple(values.shape) != (self.num_rows, self.width):
            raise ConfigurationError(
                f"expected values of a table of shape {[self.num_rows, self.width]}, got {list(values.shape)}"
            )
        if self._link is None and not slot:
            self.begin_with(values)
        elif self.link.runtime.may_assign():
            self._assign_all(values, self.link.placement.servers, slot, num_updates)

    def _assign_all(
        self, values: torch.Tensor | SavedRows, servers: Sequence[int], slot: str = "", num_updates: int = 0
    ) -> None:
        link = self.link
        at_once = self.rows_at_once
        for shard in link.placement.shards:
            for start in range(0, shard.num_rows if shard.ps in servers else 0, at_once):
                stop = min(start + at_once, shard.num_rows)
                rows = values[shard.first_row + start : shard.first_row + stop]
                first = (shard.local_row + start) * self.width
                with link.reads.turn:
                    link.reads.clear()
                    self._assign(link.runtime.clients[shard.ps], rows, first, slot, num_updates)

    def _assign(self, client: PsClient, rows: torch.Tensor, first: int, slot: str, num_updates: int) -> None:
        link = self.link
        flat = rows.detach().to("cpu", self.dtype).reshape(-1)
        transfer, num_frames = client.new_transfer(), 0
        for piece in flat.split(max(1, link.runtime.config.frame_bytes // flat.itemsize)):
            client.lane.send(_VALUES, transfer, link.group, first, held([piece]), piece.numel())
            first += piece.numel()
            num_frames += 1
        counts = [num_updates] * len(link.placement.on(client.index)) if slot else []
        assign_values(client, Transfer(transfer, num_frames), [link.group], slot, counts)

    def has_values(self, client: PsClient) -> bool:
        """Whether one ps has all of its rows; waits a moment."""
        if client.index not in self.link.placement.servers:
            return True
        return bool(pull_weights(client, {self.link.group: None}, INITIAL_WAIT_S).result().versions)


Placed = RemoteVariables | RemoteTable
"""What parameter servers hold for the job, and workers attach to."""


def attach(every: Sequence[Placed], client: PsClient, can_initialize: bool) -> tuple[int, int]:
    """Tells one ps what it holds, and then gives it the values that it asks this process for.

    It is told of everything at once: a checkpoint is taken when a ps has values of all that it was told of. Gives how
    many variables got their values from this process, and how many groups have none yet: another worker's to give.
    """
    specs = {one: one.specs(client.index) for one in every}
    told = [spec for own in specs.values() for spec in own]
    reply = create_variables(client, told, can_initialize)
    asked = {*reply.initialize}
    for one, own in specs.items():
        if groups := [spec.group for spec in own if spec.group in asked]:
            one.give(client, groups)
    num_given = sum([len(spec.shards) for spec in told if spec.group in asked])
    return num_given, len(told) - len(asked.union(reply.initialized))


def create_or_attach(
    every: Sequence[Placed], clients: Sequence[PsClient], is_lead: Callable[[], bool], timeout_s: float
) -> None:
    """Creates it all with this process's values if this worker is the lead, else waits until it has the job's.

    Raises:
        VariableError: the job has it with another shape, dtype or optimizer.
        UnsupportedOptimizerError: a ps cannot run the optimizer, or not on single rows.
        ClusterTimeoutError: no lead supplied initial values within ``timeout_s`` seconds.
    """
    deadline, silent_until = time.monotonic() + timeout_s, time.monotonic() + SILENCE_S
    waiting = [(client, one) for client in clients for one in every]
    while waiting:
        for client in {client.index: client for client, _ in waiting}.values():
            attach(every, client, is_lead())
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
