"""Gradient frames leave while backward still runs. Nothing staged counts before its commit (docs/protocol.md 3)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from stratagem.errors import PeerUnavailableError
from stratagem.rpc.generated import frame_pb2, ps_pb2
from stratagem.worker.host_tensors import GradientSource
from stratagem.worker.layout import Chunk, Layout
from stratagem.worker.ps_client import PsClient
from stratagem.worker.remote_table import RemoteTable
from stratagem.worker.row_gradients import RowGradient

logger = logging.getLogger(__name__)

MIN_EARLY_BYTES = 64 << 10
"""Smaller frames leave with the commit, in one write: alone each would only wake the ps."""
MAX_RESTAGED_COMMITS = 3  # after so many commits that had to send again, eager staging does not pay

_Signature = tuple[int, int] | None


class GradientStaging:
    """Cuts the gradients of one optimizer's parameters into frames and sends each as soon as it is complete.

    A frame whose gradient changed after it was sent (other storage or version counter) is sent again at
    :meth:`complete`; the ps keeps the newest.

    Args:
        clients: one per ps.
        layout: where the rows live; parameter i is variable i.
        parameters: the parameters.
        on_backward: called whenever a gradient was accumulated.
        tables: those that the optimizer changes; their rows leave at :meth:`complete`.
    """

    def __init__(
        self,
        clients: Sequence[PsClient],
        layout: Layout,
        parameters: Sequence[torch.nn.Parameter],
        on_backward: Callable[[], None],
        tables: Sequence[RemoteTable] = (),
    ) -> None:
        self._clients = clients
        self._tables = tables
        self._rows_sent: dict[int, tuple[RowGradient | None, ...]] = {}
        self._parameters = list(parameters)
        self._source = GradientSource(parameters)
        self._on_backward = on_backward
        self._eager = True
        self._paused = 0
        self._num_restaged_commits = 0
        self._chunks = [chunk for chunk in layout.chunks if chunk.num_elements]
        self._members = {chunk.index: sorted({span.variable for span in chunk.spans}) for chunk in self._chunks}
        self._chunks_of: list[list[Chunk]] = [[] for _ in parameters]
        for chunk in self._chunks:
            for variable in self._members[chunk.index]:
                self._chunks_of[variable].append(chunk)
        self._early_of = [
            [
                chunk
                for chunk in chunks
                if chunk.num_elements * layout.variables[index].dtype.itemsize >= MIN_EARLY_BYTES
            ]
            for index, chunks in enumerate(self._chunks_of)
        ]
        self._fired: dict[int, set[int]] = {chunk.index: set() for chunk in self._chunks}
        self._staged: dict[int, tuple[_Signature, ...]] = {}
        self._transfers: dict[int, int] = {}
        self._num_frames: dict[int, int] = {}
        self._restaged = False
        self._handles: list[RemovableHandle] = []
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(index)))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, backward sends nothing: for accumulation."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def complete(self, servers: Sequence[int]) -> dict[int, ps_pb2.TransferRef]:
        """Sends what is missing or has changed, for the given ps. Returns what the commit must name, by ps."""
        restaged = self._restaged
        for chunk in self._chunks:
            if chunk.ps not in servers:
                continue
            signatures = self._signatures(chunk)
            if all(signature is None for signature in signatures):
                continue
            staged = self._staged.get(chunk.index)
            if staged != signatures:
                restaged = restaged or staged is not None
                self._stage(chunk, signatures)
        if restaged:
            self._count_restaged()
        for ps in servers:
            self._stage_rows(ps)
        return {ps: self.reference(ps) for ps in servers}

    def reference(self, ps: int) -> ps_pb2.TransferRef:
        """What has been sent to one ps for this step."""
        return ps_pb2.TransferRef(transfer=self._transfer(ps), num_frames=self._num_frames.get(ps, 0))

    def lost(self, ps: int) -> None:
        """One ps has forgotten what it was sent: the connection to it is new."""
        self._transfers.pop(ps, None)
        self._num_frames.pop(ps, None)
        self._rows_sent.pop(ps, None)
        for chunk in self._chunks:
            if chunk.ps == ps:
                self._staged.pop(chunk.index, None)

    def restage(self, ps: int) -> ps_pb2.TransferRef:
        """Sends everything for one ps again, after its connection was lost."""
        self.lost(ps)
        for chunk in self._chunks:
            if chunk.ps == ps:
                signatures = self._signatures(chunk)
                if any(signature is not None for signature in signatures):
                    self._stage(chunk, signatures)
        self._stage_rows(ps)
        return self.reference(ps)

    def reset(self) -> None:
        """The step is over: the next frames belong to the next one."""
        self._transfers.clear()
        self._num_frames.clear()
        self._staged.clear()
        self._rows_sent.clear()
        self._restaged = False
        for fired in self._fired.values():
            fired.clear()

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(_: torch.Tensor) -> None:
            self._on_backward()
            for chunk in self._chunks_of[index]:
                if self._staged.pop(chunk.index, None) is not None:
                    self._restaged = True
            if not self._eager or self._paused:
                return
            for chunk in self._early_of[index]:
                fired = self._fired[chunk.index]
                fired.add(index)
                if len(fired) == len(self._members[chunk.index]):
                    fired.clear()
                    with contextlib.suppress(PeerUnavailableError):  # the commit will find it missing
                        self._stage(chunk, self._signatures(chunk))

        return on_gradient

    def _stage(self, chunk: Chunk, signatures: tuple[_Signature, ...]) -> None:
        client = self._clients[chunk.ps]
        transfer = self._transfer(chunk.ps)
        pieces = self._source.pieces(chunk)
        client.lane.send(frame_pb2.GRADIENT, transfer, chunk.group, chunk.offset, pieces, chunk.num_elements)
        self._num_frames[chunk.ps] = self._num_frames.get(chunk.ps, 0) + 1
        self._staged[chunk.index] = signatures

    def _stage_rows(self, ps: int) -> None:
        gradients = tuple(table.gradient() for table in self._tables)
        if self._rows_sent.get(ps, ()) == gradients:
            return
        for table in self._tables:
            num_frames = table.send_gradient(self._clients[ps], self._transfer(ps))
            self._num_frames[ps] = self._num_frames.get(ps, 0) + num_frames
        self._rows_sent[ps] = gradients

    def _transfer(self, ps: int) -> int:
        if ps not in self._transfers:
            self._transfers[ps] = self._clients[ps].new_transfer()
        return self._transfers[ps]

    def _signatures(self, chunk: Chunk) -> tuple[_Signature, ...]:
        signatures: list[_Signature] = []
        for variable in self._members[chunk.index]:
            gradient = self._parameters[variable].grad
            signatures.append(None if gradient is None else (gradient.data_ptr(), gradient._version))
        return tuple(signatures)

    def _count_restaged(self) -> None:
        self._num_restaged_commits += 1
        if self._num_restaged_commits == MAX_RESTAGED_COMMITS and self._eager:
            self._eager = False
            logger.info(
                "gradients change between backward() and step(), so sending them early was wasted %d times and is off "
                "now. For clipping use prepare(clip_norm=...); for accumulation use strategy.no_sync().",
                MAX_RESTAGED_COMMITS,
            )
