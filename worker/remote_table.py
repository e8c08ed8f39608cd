"""A table whose rows live on parameter servers: this worker asks for the rows of its batch, and holds no others."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from google.protobuf import struct_pb2

from stratagem.errors import ClusterTimeoutError, ConfigurationError, PeerUnavailableError
from stratagem.rpc.codec import to_wire_dtype
from stratagem.rpc.generated import frame_pb2, ps_pb2
from stratagem.rpc.lane import Pieces
from stratagem.worker.ps_client import PendingCall, PsClient
from stratagem.worker.row_gradients import PendingRows, RowGradient
from stratagem.worker.row_placement import Numbers, RowPlacement
from stratagem.worker.step_meter import StepMeter
from stratagem.worker.table_handle import LOAD, TableHandle
from stratagem.worker.variables import INITIAL_WAIT_S, Attached

PULL_BYTES = 32 << 20
"""Rows asked for at once; a larger pull takes turns."""
ASSIGN_BYTES = 32 << 20
"""Values on their way in one assignment."""
MAX_TRIES = 5
"""Pulls of the same rows before it is given up; between two the connection is made anew."""


@dataclasses.dataclass(frozen=True)
class TableLink:
    """What connects a table to its parameter servers."""

    name: str
    """Of the variable, in the job."""
    clients: Sequence[PsClient]
    """One per ps."""
    placement: RowPlacement
    group: int
    """Shard group of the table."""
    optimizer: str
    """Name of the torch.optim class; empty: no optimizer changes the table."""
    param_group: int
    frame_bytes: int
    meter: StepMeter
    is_lead: Callable[[], bool]
    may_assign: Callable[[], bool]
    """Whether values that this worker loads reach the ps."""
    on_backward: Callable[[], None]
    """Called whenever a gradient was accumulated."""
    recover: Callable[[PsClient], None]
    """Connects anew to a ps whose lane has broken."""
    timeout_s: float
    """Seconds to wait for a ps."""


class RemoteTable:
    """A table, from the moment that a module is built; ``prepare`` links it to the ps.

    Args:
        num_rows: rows.
        width: elements of a row.
        dtype: of the elements.
        initial: initial values of the rows: how the ps make them, or all rows, ``(num_rows, width)``, which may lie in
            a mapped file: they are read a part at a time.
    """

    def __init__(
        self, num_rows: int, width: int, dtype: torch.dtype, initial: ps_pb2.InitialRows | torch.Tensor
    ) -> None:
        self.num_rows = num_rows
        self.width = width
        self._values: torch.Tensor | None = None
        self.handle = TableHandle(torch.empty((num_rows, width), dtype=dtype, device="meta"))
        """What optimizers and ``parameters()`` get in the table's stead: shape and dtype, no memory."""
        self._pending = PendingRows(self.handle)
        self._link: TableLink | None = None
        self.begin_with(initial)

    def begin_with(self, initial: ps_pb2.InitialRows | torch.Tensor) -> None:
        """Chooses other initial values. Rows that are given are kept: a ps that lost all it had gets them again.

        Raises:
            ConfigurationError: the rows have their values.
        """
        if self._link is not None:
            raise ConfigurationError(
                "initial values of a table are chosen before strategy.prepare: by now its rows have theirs. To give it "
                f"others, on every worker:\n    {LOAD}"
            )
        if isinstance(initial, torch.Tensor):
            self._values = initial.detach()
            self._initial = ps_pb2.InitialRows(distribution=ps_pb2.InitialRows.ASSIGNED)
        else:
            self._values, self._initial = None, initial

    @property
    def is_linked(self) -> bool:
        """Whether the table is on the ps."""
        return self._link is not None

    @property
    def link(self) -> TableLink:
        """The connection.

        Raises:
            ConfigurationError: there is none yet.
        """
        if self._link is None:
            raise ConfigurationError(
                "this table has no rows yet: give its model to strategy.prepare(model, optimizer) first"
            )
        return self._link

    # -- creating ----------------------------------------------------------------------------------------------

    def create_or_attach(self, link: TableLink) -> None:
        """Creates the table on the ps if this worker is the lead; waits until it has values.

        Raises:
            VariableError: the job has it with another shape, dtype or optimizer.
            UnsupportedOptimizerError: the optimizer cannot change single rows.
            ClusterTimeoutError: no lead created it in time.
        """
        self._link = link
        waiting = [link.clients[ps] for ps in link.placement.servers]
        deadline = time.monotonic() + link.timeout_s
        for client in waiting:
            self.attach(client, link.is_lead())
        while waiting := [client for client in waiting if not self._has_values(client)]:
            if time.monotonic() > deadline:
                raise ClusterTimeoutError(
                    f"{waiting[0].task} got no initial values of table {link.name} within {link.timeout_s:.0f} s; "
                    "the lead (the lowest live worker) creates it in prepare(). Look at its log."
                )
            for client in waiting:
                self.attach(client, link.is_lead())

    def attach(self, client: PsClient, can_initialize: bool) -> Attached:
        """Tells one ps which rows it holds; where it has no values it makes them, or gets them from this worker."""
        link = self.link
        shards = [
            ps_pb2.ShardSpec(
                variable=link.name,
                shape=[self.num_rows, self.width],
                first_row=shard.first_row,
                num_rows=shard.num_rows,
                offset=shard.local_row * self.width,
                param_group=link.param_group,
            )
            for shard in link.placement.on(client.index)
        ]
        if not shards:
            return Attached(0, 0)
        spec = ps_pb2.GroupSpec(
            group=link.group,
            optimizer=link.optimizer,
            dtype=to_wire_dtype(self.handle.dtype),  # type: ignore[arg-type]  # an enum is an int on the wire
            shards=shards,
            rows=self._initial,
        )
        request = ps_pb2.CreateVariablesRequest(groups=[spec], can_initialize=can_initialize)
        reply: ps_pb2.CreateVariablesReply = client.call("CreateVariables", request)
        if reply.initialize:
            assert self._values is not None
            self._assign_all(self._values, [client.index])
        return Attached.from_reply(request, reply)

    # -- rows --------------------------------------------------------------------------------------------------

    def rows(self, numbers: Numbers) -> torch.Tensor:
        """Some rows as they are on the ps now, ``(len(numbers), width)``, on the CPU.

        Args:
            numbers: ascending, each once, below ``num_rows``.

        Raises:
            PeerUnavailableError: a ps did not come back in time.
        """
        link = self.link
        out = torch.empty(len(numbers), self.width, dtype=self.handle.dtype, device="cpu")
        at_once = max(1, PULL_BYTES // self._row_bytes)
        with link.meter.exposed(f"rows of {link.name}"):
            for start in range(0, len(numbers), at_once):
                self._pull(numbers[start : start + at_once], out[start : start + at_once])
        return out

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """All rows in turn: number of the first, and some."""
        at_once = max(1, PULL_BYTES // self._row_bytes)
        for start in range(0, self.num_rows, at_once):
            yield start, self.rows(np.arange(start, min(start + at_once, self.num_rows)))

    def accumulate(self, numbers: Numbers, values: torch.Tensor) -> None:
        """A backward has reached the table. Takes ``values`` over."""
        self.link.on_backward()
        self._pending.add(numbers, values)

    def gradient(self) -> RowGradient | None:
        """What backward has accumulated since ``zero_grad()``; None without any."""
        return self._pending.total()

    def clear_gradient(self) -> None:
        """Forgets it."""
        self._pending.clear()

    def send_gradient(self, client: PsClient, transfer: int) -> int:
        """Sends one ps its part of the gradient; returns the number of frames."""
        link, gradient, num_frames = self.link, self.gradient(), 0
        if gradient is not None:
            for before, pieces in gradient.pieces(link.placement, client.index, link.frame_bytes):
                num_bytes = sum(piece.numel() for piece in pieces)
                client.lane.send(frame_pb2.ROW_GRADIENT, transfer, link.group, before, _held(pieces), num_bytes)
                num_frames += 1
        return num_frames

    # -- values from outside -----------------------------------------------------------------------------------

    def assign(self, values: torch.Tensor, slot: str = "", num_updates: int = 0) -> None:
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
        elif self.link.may_assign():
            self._assign_all(values, self.link.placement.servers, slot, num_updates)

    def _assign_all(self, values: torch.Tensor, servers: Sequence[int], slot: str = "", num_updates: int = 0) -> None:
        link = self.link
        at_once = max(1, ASSIGN_BYTES // self._row_bytes)
        for shard in link.placement.shards:
            for start in range(0, shard.num_rows if shard.ps in servers else 0, at_once):
                stop = min(start + at_once, shard.num_rows)
                rows = values[shard.first_row + start : shard.first_row + stop]
                first = (shard.local_row + start) * self.width
                self._assign(link.clients[shard.ps], rows, first, slot, num_updates)

    def _assign(self, client: PsClient, rows: torch.Tensor, first: int, slot: str, num_updates: int) -> None:
        link = self.link
        flat = rows.detach().to("cpu", self.handle.dtype).reshape(-1)
        transfer, num_frames = client.new_transfer(), 0
        for piece in flat.split(max(1, link.frame_bytes // flat.itemsize)):
            client.lane.send(frame_pb2.VALUES, transfer, link.group, first, _held([piece]), piece.numel())
            first += piece.numel()
            num_frames += 1
        request = ps_pb2.AssignValuesRequest(
            values=ps_pb2.TransferRef(transfer=transfer, num_frames=num_frames),
            groups=[link.group],
            slot=slot,
            step_counts=[num_updates] * len(link.placement.on(client.index)) if slot else [],
            scalars=struct_pb2.Struct(),
        )
        client.call("AssignValues", request, sequenced=True)

    # -- asking ------------------------------------------------------------------------------------------------

    @property
    def _row_bytes(self) -> int:
        return self.width * self.handle.dtype.itemsize

    def _pull(self, numbers: Numbers, out: torch.Tensor) -> None:
        link = self.link
        for tries_left in reversed(range(MAX_TRIES)):
            client: PsClient | None = None
            transfers: dict[int, int] = {}
            asked: list[tuple[int, torch.Tensor]] = []
            try:
                for ps, start, stop, local in link.placement.cut(numbers, max(1, link.frame_bytes // self._row_bytes)):
                    client = link.clients[ps]
                    if ps not in transfers:
                        transfers[ps] = client.new_transfer()
                    self._ask(client, transfers[ps], start, local)
                    asked.append((ps, out[start:stop].view(-1)))
                deadline = time.monotonic() + link.timeout_s
                for ps, target in asked:
                    client = link.clients[ps]
                    frame = client.lane.receive(transfers[ps], deadline, into=target)
                    if frame.tensor.data_ptr() != target.data_ptr():
                        target.copy_(frame.tensor)
                for ps, transfer in transfers.items():
                    link.clients[ps].lane.forget(transfer)
                return
            except PeerUnavailableError:
                if client is None or not tries_left:
                    raise
                link.recover(client)

    def _ask(self, client: PsClient, transfer: int, offset: int, local: Numbers) -> None:
        kind = frame_pb2.WANTED_ROWS
        client.lane.send(kind, transfer, self.link.group, offset, _held([torch.from_numpy(local)]), len(local))

    def _has_values(self, client: PsClient) -> bool:
        want = ps_pb2.PullWeightsRequest.Want(group=self.link.group)
        request = ps_pb2.PullWeightsRequest(groups=[want], wait_s=INITIAL_WAIT_S, reply_transfer=client.new_transfer())
        call: PendingCall = client.start("PullWeights", request)
        return bool(call.result().versions)


def _held(pieces: Sequence[torch.Tensor]) -> Pieces:
    return lambda: pieces
