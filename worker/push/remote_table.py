"""A table whose rows are on parameter servers: this worker requests the rows of its batch, and holds no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from stratagem.checkpoint.server_state import SavedRows
from stratagem.cluster.initial_rows import InitialRows
from stratagem.errors import ConfigurationError
from stratagem.rpc.codec import FrameKind
from stratagem.worker.push.layout import Numbers
from stratagem.worker.push.ps_client import PsClient
from stratagem.worker.push.row_reads import MAX_BYTES, Lookup, Places, TableLink, held
from stratagem.worker.push.table_handle import LOAD, PendingRows, TableHandle
from stratagem.worker.push.wire import Transfer, assign_values

_VALUES = int(FrameKind.VALUES)


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
        self.is_given = False
        """A ps has asked this process for its rows."""
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
            self._values, self.initial = None, initial
        else:
            self._values = initial.detach() if isinstance(initial, torch.Tensor) else initial
            self.initial = InitialRows("assigned")

    @property
    def begins_with(self) -> InitialRows | torch.Tensor | SavedRows | None:
        """What the rows are to be; None: they are on the ps."""
        if self._link is not None:
            return None
        return self.initial if self._values is None else self._values

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

    def give(self, client: PsClient) -> None:
        """Sends one ps the rows that this worker was built with, if it was."""
        if self._values is not None:
            self.is_given = True
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

    # -- values from outside -----------------------------------------------------------------------------------

    def assign(self, values: torch.Tensor | SavedRows, slot: str = "", num_updates: int = 0) -> None:
        """Gives the ps values of the whole table, a part at a time; only the lead's reach them.

        Before ``prepare`` they are kept, and the table begins with them. After it, weights only where all workers load:
        what others have trained would be overwritten, by a lead that starts again too.

        Args:
            values: ``(num_rows, width)``.
            slot: of the optimizer; empty: weights.
            num_updates: with a slot: updates that the table has seen.

        Raises:
            ConfigurationError: another shape, or weights of a prepared table outside of ``load_once``.
        """
        if tuple(values.shape) != (self.num_rows, self.width):
            raise ConfigurationError(
                f"expected values of a table of shape {[self.num_rows, self.width]}, got {list(values.shape)}"
            )
        if not slot and (self._link is None or not self._link.runtime.is_loading()):
            self.begin_with(values)  # which refuses it after prepare
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
        counts = [num_updates] if slot else []
        assign_values(client, Transfer(transfer, num_frames), [link.group], slot, counts)
