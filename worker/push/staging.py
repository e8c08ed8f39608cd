"""Gradient frames leave while backward still runs. Nothing staged counts before its commit (docs/protocol.md 3)."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from stratagem.errors import ConfigurationError, PeerUnavailableError
from stratagem.rpc.codec import FrameKind
from stratagem.worker.push.host_tensors import GradientSource
from stratagem.worker.push.layout import Chunk
from stratagem.worker.push.remote_tables import RemoteTables, by_group
from stratagem.worker.push.table_handle import RowGradient
from stratagem.worker.push.variables import EXACT_EVERY, NUM_EXACT, RemoteVariables
from stratagem.worker.push.wire import Transfer
from stratagem.worker.reduction.backward import current_backward
from stratagem.worker.reduction.same_bits import sum_of_bits

logger = logging.getLogger(__name__)

MIN_EARLY_BYTES = 64 << 10
"""Smaller frames leave with the commit, in one write: alone each would only wake the ps."""
MAX_RESTAGED_COMMITS = 3  # after so many commits that had to send again, eager staging does not pay


GRADIENT = int(FrameKind.GRADIENT)
_Signature = tuple[int, int, int] | None
"""Where a gradient is, how often it was changed, and the sum of its bits, where those are looked at."""


class GradientStaging:
    """Cuts the gradients of one optimizer's parameters into frames and sends each as soon as it is complete.

    A frame whose gradient changed after it was sent (other storage, version counter or bits) is sent again at
    :meth:`complete`; the ps keeps the newest. ``variables``: where the rows live; parameter i is variable i;
    ``on_backward``: called in each backward that reaches a parameter; ``tables``: those that the optimizer changes;
    their rows leave at :meth:`complete`.
    """

    def __init__(
        self,
        variables: RemoteVariables,
        parameters: Sequence[torch.nn.Parameter],
        on_backward: Callable[[], None],
        tables: Sequence[RemoteTables],
        turn: threading.RLock,
    ) -> None:
        self._clients = variables.clients
        self._tables = tables
        self._turn = turn
        self._rows: tuple[RowGradient | None, ...] = ()
        self._rows_sent: dict[int, tuple[RowGradient | None, ...]] = {}
        self._parameters = list(parameters)
        self._source = GradientSource(parameters)
        self._on_backward = on_backward
        self._eager = True
        self._paused = 0
        self._num_restaged_commits = 0
        self._num_steps = 0
        self._brought: dict[int, _Signature] | None = {}
        """Gradients as the newest backward has brought them, by parameter; None: nobody asks any more."""
        self._share: float | None = None
        self._shares: dict[int, float] = {}
        """Of the batches whose gradients each parameter was given; NaN: of batches that differ."""
        self._keeps: dict[int, bool] | None = None
        """Whether the newest backward found a gradient of another share there; None: there is no other so far."""
        self._layout = variables.layout
        self._any_fired = False
        self._backward = -1
        """The newest that has reached a parameter, by torch's number of it."""
        self._staged: dict[int, list[_Signature]] = {}
        self._transfers: dict[int, int] = {}
        self._num_frames: dict[int, int] = {}
        self._restaged = False
        self.rerouted()
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._hook(index))

    def rerouted(self) -> None:
        """The layout has changed: nothing is staged where it belongs."""
        layout = self._layout
        self._chunks = [chunk for chunk in layout.chunks if chunk.num_elements]
        self._members = {chunk.index: sorted({span.variable for span in chunk.spans}) for chunk in self._chunks}
        self._chunks_of: list[list[Chunk]] = [[] for _ in self._parameters]
        for chunk in self._chunks:
            for variable in self._members[chunk.index]:
                self._chunks_of[variable].append(chunk)
        self._early_of = [
            [chunk for chunk in chunks if chunk.num_elements * variable.dtype.itemsize >= MIN_EARLY_BYTES]
            for variable, chunks in zip(layout.variables, self._chunks_of, strict=True)
        ]
        self._fired: dict[int, set[int]] = {chunk.index: set() for chunk in self._chunks}
        self.reset()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, backward sends nothing: for accumulation."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def complete(self, servers: Sequence[int], rows: tuple[RowGradient | None, ...], is_part: bool = False) -> None:
        """Sends what is missing or has changed, for the given ps; what a commit must name is :meth:`reference`.
        ``rows``: gradient of each table; ``is_part``: whether the update has parts of other workers too."""
        self._rows = rows
        if self._stage_missing(servers) or self._restaged:
            self._count_restaged()
        if is_part and self._brought is not None and self._has_changed(self._brought):
            self._brought = None
            logger.warning(
                "gradients were changed between backward() and optimizer.step(), where they are this worker's part of "
                "the batch's: a mask or a factor has the same effect there, but clipping the parts does not clip the "
                "whole; prepare(clip_norm=...) does"
            )

    def _stage_missing(self, servers: Sequence[int]) -> bool:
        """Sends some ps what they do not have as it is now; whether they have had it otherwise."""
        restaged, known = False, dict[int, _Signature]()
        for chunk in self._chunks:
            if chunk.ps not in servers:
                continue
            signatures, staged = self._signatures(chunk, known), self._staged.get(chunk.index)
            if staged != signatures and any(signatures):
                restaged = restaged or staged is not None
                self._stage(chunk, signatures)
        for ps in servers:
            self._stage_rows(ps)
        return restaged

    def reference(self, ps: int) -> Transfer:
        """What has been sent to one ps for this step."""
        return Transfer(self._transfer(ps), self._num_frames.get(ps, 0))

    def lost(self, ps: int) -> None:
        """One ps has forgotten what it was sent: the connection to it is new."""
        self._transfers.pop(ps, None)
        self._num_frames.pop(ps, None)
        self._rows_sent.pop(ps, None)
        for chunk in self._chunks:
            if chunk.ps == ps:
                self._staged.pop(chunk.index, None)

    def restage(self, ps: int) -> Transfer:
        """Sends everything for one ps again, after its connection was lost."""
        self.lost(ps)
        self._stage_missing([ps])
        return self.reference(ps)

    def reset(self) -> None:
        """The step is over: the next frames belong to the next one."""
        self._num_steps += 1
        self._transfers.clear()
        self._num_frames.clear()
        self._staged.clear()
        self._rows_sent.clear()
        self._restaged = False
        if self._any_fired:
            for fired in self._fired.values():
                fired.clear()
            self._any_fired = False
        if self._brought is not None:  # who clips does it from the beginning
            self._brought = {} if self._num_steps <= NUM_EXACT else None

    def weigh(self, share: float) -> None:
        """See :meth:`GradientPush.weigh`."""
        if self._share not in (None, share) and self._keeps is None:
            self._keeps = {}
            for index, parameter in enumerate(self._parameters):
                if parameter.requires_grad:
                    parameter.register_hook(functools.partial(self._before_gradient, index))
        self._share = share

    def _before_gradient(self, index: int, _: torch.Tensor) -> None:
        assert self._keeps is not None and self._share is not None
        self._keeps[index] = self._shares.get(index, self._share) != self._share and self._has_values(index)

    def _has_values(self, index: int) -> bool:
        gradient = self._parameters[index].grad
        return gradient is not None and bool(gradient.any())

    def mixes_shares(self) -> bool:
        """See :meth:`GradientPush.mixes_shares`."""
        return any(share != self._share and self._has_values(index) for index, share in self._shares.items())

    def _has_changed(self, brought: Mapping[int, _Signature]) -> bool:
        return any(
            (gradient := self._parameters[index].grad) is not None and self._signature(gradient) != signature
            for index, signature in brought.items()
        )

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(parameter: torch.Tensor) -> None:
            if self._brought is not None:
                self._brought[index] = self._signature(parameter.grad)
            if self._share is not None:
                self._shares[index] = math.nan if self._keeps and self._keeps.pop(index, False) else self._share
            backward = current_backward()
            if backward != self._backward:
                self._backward = backward
                self._on_backward()
            if self._staged:
                for chunk in self._chunks_of[index]:
                    if self._staged.pop(chunk.index, None) is not None:
                        self._restaged = True
            early = self._early_of[index]
            if not early or not self._eager or self._paused:
                return
            self._any_fired = True
            known: dict[int, _Signature] = {}
            for chunk in early:
                fired = self._fired[chunk.index]
                fired.add(index)
                if len(fired) == len(self._members[chunk.index]):
                    fired.clear()
                    with contextlib.suppress(PeerUnavailableError):  # the commit will find it missing
                        self._stage(chunk, self._signatures(chunk, known))

        return on_gradient

    def _stage(self, chunk: Chunk, signatures: list[_Signature]) -> None:
        client = self._clients[chunk.ps]
        transfer = self._transfer(chunk.ps)
        pieces = self._source.pieces(chunk)
        with self._turn:
            client.lane.send(GRADIENT, transfer, chunk.group, chunk.offset, pieces, chunk.num_elements)
        self._num_frames[chunk.ps] = self._num_frames.get(chunk.ps, 0) + 1
        self._staged[chunk.index] = signatures

    def _stage_rows(self, ps: int) -> None:
        if not self._tables or self._rows_sent.get(ps) == self._rows:
            return
        for each, gradients in by_group(self._tables, self._rows):
            num_frames = each.send_gradients(gradients, self._clients[ps], self._transfer(ps))
            self._num_frames[ps] = self._num_frames.get(ps, 0) + num_frames
        self._rows_sent[ps] = self._rows

    def _transfer(self, ps: int) -> int:
        if ps not in self._transfers:
            self._transfers[ps] = self._clients[ps].new_transfer()
        return self._transfers[ps]

    def _signatures(self, chunk: Chunk, known: dict[int, _Signature]) -> list[_Signature]:
        """``known``: of other frames, in which the same gradients have parts; these are added."""
        variables = self._members[chunk.index]
        known.update({one: self._signature(self._parameters[one].grad) for one in variables if one not in known})
        return [known[variable] for variable in variables]

    def _signature(self, gradient: torch.Tensor | None) -> _Signature:
        if gradient is None:
            return None
        if gradient.layout is not torch.strided:
            raise ConfigurationError(
                f"a gradient of layout {gradient.layout} cannot be sent to parameter servers: leave sparse=True out of "
                "functional.embedding, or use sg.nn.Embedding, whose rows live there"
            )
        # Who hides changes does so in every step, and then nothing is sent early any more.
        is_exact = self._num_steps <= NUM_EXACT or not self._num_steps % EXACT_EVERY
        return gradient.data_ptr(), gradient._version, sum_of_bits(gradient.reshape(-1)) if is_exact else 0

    def _count_restaged(self) -> None:
        self._num_restaged_commits += 1
        if self._num_restaged_commits == MAX_RESTAGED_COMMITS and self._eager:
            self._eager = False
            logger.info(
                "gradients change between backward() and step(), so sending them early was wasted %d times and is off "
                "now. For clipping use prepare(clip_norm=...); for accumulation use strategy.no_sync().",
                MAX_RESTAGED_COMMITS,
            )
