"""Gradients are reduced while backward runs; when ``backward()`` returns, ``p.grad`` is the global gradient.

The recipe is docs/protocol.md 15. A hook on a parameter stashes ``p.grad`` before autograd adds to it, so the
post-accumulate hook sees the gradient of this backward alone; weighted, it goes into its bucket. A bucket leaves when
it is complete and all earlier ones have left. At the end of backward a callback of the engine sends the rest and one
small vector that says which gradients this rank has, waits, and merges.
"""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from stratagem.errors import ConfigurationError
from stratagem.worker.interrupts import PreemptionRequest, preemption
from stratagem.worker.reduction.backward import Backward, BackwardReducer
from stratagem.worker.reduction.backward_status import BackwardStatus, MergedStatus
from stratagem.worker.reduction.compression import FullBucket, GradientCompression
from stratagem.worker.reduction.gradient_layout import (
    BUCKET_BYTES,
    FIRST_BYTES,
    GradientLayout,
    PlacedBucket,
    check_parameter,
)
from stratagem.worker.reduction.gradient_slot import DenseSlot, ParameterGradient, SparseSlot, packed, unpacked
from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.reduction.same_bits import SameBits
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.healing import Kept
from stratagem.worker.step_meter import StepMeter


class GradientReducer(BackwardReducer["_Backward"]):
    """Reduces the gradients of parameters over all ranks, whenever ``backward()`` reaches one of them.

    All ranks need the same parameters and have to make the same ``backward()`` calls. What a backward leaves in
    ``p.grad`` is a view of memory that the next one writes to: clone a gradient to keep it longer. It carries no graph,
    also with ``create_graph=True``. ``torch.autograd.grad`` is not touched.

    Args:
        parameters: in registration order; one that comes twice is taken once. Those that need no gradient stay
            out until they do.
        communicator: who reduces; its calls have to be in the same order on every rank.
        meter: takes the time that backward waits.
        weight: how much this rank counts. Asked once at the start of each backward, in a thread of autograd.
        bucket_bytes: limit of a bucket.
        first_bytes: limit of the first one.
        compression: of float32 buckets; a copy is taken, so its state is this reducer's own.
        keep_sources: leave this rank's own gradients as they are until the next backward, for as much memory again as
            the gradients take. With ``compression`` they always are.
        sparse: those of ``parameters`` whose gradients are sparse (embeddings with ``sparse=True``).
        groups: parameters that get gradients together, a collection for each model or optimizer; what is in none is a
            group too. A group that no rank's backward reaches costs nothing.
        early: whether buckets leave during backward. False where a collective inside backward (SyncBatchNorm) may meet
            parameters that some ranks do not use: buckets would leave before it on one rank and after it on another.
        same_bits: looks whether this rank has what the others have, in every backward; None: nobody looks.
        request: whether this rank has been asked to end; told when any rank has, in the same backward on all.

    Raises:
        ConfigurationError: a dtype that cannot be reduced, or parameters that differ between ranks; also out of
            ``backward()``: the ranks have other weights or other settings of their optimizers.
        CollectiveError: also out of ``backward()``: no gradient of it is left anywhere.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        communicator: Communicator,
        *,
        meter: StepMeter,
        weight: Callable[[], Weight],
        bucket_bytes: int = BUCKET_BYTES,
        first_bytes: int = FIRST_BYTES,
        compression: GradientCompression | None = None,
        keep_sources: bool = False,
        sparse: Collection[torch.nn.Parameter] = (),
        groups: Sequence[Collection[torch.nn.Parameter]] = (),
        early: bool = True,
        same_bits: SameBits | None = None,
        request: PreemptionRequest = preemption,
    ) -> None:
        super().__init__(weight, meter, _Backward)
        self._communicator = communicator
        self._request = request
        self._same_bits = same_bits
        self._bucket_bytes, self._first_bytes = bucket_bytes, first_bytes
        self._compression = copy.deepcopy(compression)
        self._in_place = compression is None and not keep_sources
        self._early = early
        self._futures: list[concurrent.futures.Future[Any]] = []
        self.buckets: list[PlacedBucket] = []
        """In the order in which they leave."""
        self.num_early = 0
        """Buckets of the newest reduced backward that left before its end: they overlapped with it."""

        unique = list(dict.fromkeys(parameters))
        sparse_ids = {id(parameter) for parameter in sparse}
        group_of = {id(parameter): index for index, group in reversed(list(enumerate(groups))) for parameter in group}
        self._num_groups = len(groups) + 1
        self._restarts = communicator.restarts
        self._follow: list[set[int]] = [set() for _ in range(self._num_groups)]
        """By group: which had gradients in the newest backward that began with it. The same on every rank."""
        self._groups = [group_of.get(id(parameter), len(groups)) for parameter in unique]
        self._slots: list[DenseSlot | SparseSlot] = [
            (SparseSlot if id(parameter) in sparse_ids else DenseSlot)(parameter, index)
            for index, parameter in enumerate(unique)
        ]
        self._layout: GradientLayout | None = None
        self._lay_out()

    # -- what a strategy calls --------------------------------------------------------------------------------

    def committed(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """A step was made with the gradients of ``parameters``: what compression left out is owed, but not where an
        update was skipped, which has no gradients: it may be NaN."""
        if self._compression is not None:
            stepped = {id(parameter) for parameter in parameters if parameter.grad is not None}
            self._compression.commit(
                bucket.index for bucket in self.buckets if any(id(slot.parameter) in stepped for slot in bucket.slots)
            )

    def refresh(self) -> None:
        """Cuts the buckets again if parameters have changed dtype or device, or need gradients that did not.

        A backward does that too, but not one that reaches none of the parameters known so far. Collective if there is
        a change.
        """
        if self._restarts != self._communicator.restarts:  # in that step perhaps not every rank came to a backward
            self._forget()
        if self._is_for_others():  # a newcomer has no past
            self._forget()
            self._lay_out()
        elif any(
            slot.parameter.requires_grad if not slot.handles else isinstance(slot, DenseSlot) and not slot.fits
            for slot in self._slots
        ):
            self._lay_out()

    def _forget(self) -> None:
        self._restarts = self._communicator.restarts
        self._num_reduced = 0
        self._follow = [set() for _ in self._follow]
        if self._same_bits is not None:
            self._same_bits.begin_anew()

    # -- memory ------------------------------------------------------------------------------------------------

    def _is_for_others(self) -> bool:
        """Whether a group was formed anew, whose memory this is not. All ranks find it in the same step, whenever each
        has come to that group: by the first step that the group has shared out."""
        healing, step = self._communicator.healing, self._communicator.step
        return healing is not None and healing.placement(step).first_step > self._laid_out_at

    def _lay_out(self) -> None:
        """Gives every parameter that needs gradients its hooks and its place. Collective."""
        self._drain()
        self._laid_out_at = self._communicator.step
        if self._layout is not None:
            self._layout.close()
        if self._compression is not None:
            self._compression.reset()
        for slot in self._slots:
            parameter = slot.parameter
            if slot.handles or not parameter.requires_grad:
                continue
            check_parameter(parameter)
            if self._backward is not None and parameter.grad is not None:
                raise ConfigurationError(
                    f"a parameter of shape {list(parameter.shape)} was unfrozen and has a gradient that may not be "
                    "reduced: set its gradient to None when it is unfrozen, or prepare the model after that"
                )
            self._hook(slot)
        attached = [slot for slot in self._slots if slot.handles]
        groups = [self._groups[slot.index] for slot in attached]
        self._layout = GradientLayout(
            attached,
            groups,
            self._communicator,
            self._first_bytes,
            self._bucket_bytes,
            in_place=self._in_place,
            on_host=self._compression is not None,
        )
        self.buckets = self._layout.buckets

    # -- one backward ------------------------------------------------------------------------------------------

    def _on_leaf(self, slot: ParameterGradient, gradient: torch.Tensor) -> None:
        self._communicator.check_caller()  # before the lock, which its own rank holds while it waits for the caller's
        super()._on_leaf(slot, gradient)

    def _begin(self, backward: _Backward, first: ParameterGradient) -> None:
        self._drain()
        self.refresh()
        super()._begin(backward, first)
        backward.generation = self._communicator.generation
        backward.group = self._groups[first.index]
        backward.num_missing = [len(bucket.slots) for bucket in self.buckets]
        if self._early:
            others = self._follow[backward.group] - {backward.group}
            backward.waiting = [bucket for bucket in self.buckets if bucket.group == backward.group]
            backward.waiting += [bucket for bucket in self.buckets if bucket.group in others]

    def _added(self, slot: DenseSlot | SparseSlot, backward: _Backward) -> None:
        assert self._layout is not None
        bucket = self._layout.bucket_of.get(slot.index)
        if bucket is None or backward.local:
            return
        bucket.area.wrote()
        backward.num_missing[bucket.index] -= 1
        # Behind the last one nothing is left to compute: it leaves where its sum is waited for.
        while len(backward.waiting) > 1 and backward.num_missing[backward.waiting[0].index] == 0:
            self._launch(backward, backward.waiting.pop(0))

    def _launch(self, backward: _Backward, bucket: PlacedBucket, is_awaited: bool = False) -> None:
        for slot in bucket.slots:
            slot.fill()
        bucket.area.seal()
        backward.launched.append(bucket)
        if backward.generation == self._communicator.generation:  # else all are reduced once more, at the end
            self._submit(bucket, is_awaited)

    def _submit(self, bucket: PlacedBucket, is_awaited: bool = False) -> None:
        again = self._compression is not None and any(
            slot.stash is not None and bool(slot.stash.any())  # zeroed: nothing is added to
            for slot in bucket.slots
        )
        self._futures.append(self._communicator.submit(functools.partial(self._reduce, bucket, again), is_awaited))

    def _reduce(self, bucket: PlacedBucket, again: bool) -> None:
        """Runs in the communicator's thread."""
        with bucket.area.reducing() as source:
            if self._compression is not None and source.dtype == torch.float32:
                full = FullBucket(bucket.index, bucket.parts, source, bucket.area.reduced, again)
                self._compression.reduce(full, self._communicator)
            else:
                self._communicator.all_reduce(source, out=bucket.area.reduced)

    def _keep(self, backward: _Backward) -> None:
        super()._keep(backward)
        if (healing := self._communicator.healing) is not None:
            healing.pending_steps.append(self._communicator.step)

    def _synchronise(self, backward: _Backward) -> None:
        self.num_early = len(backward.launched)
        with self._meter.exposed("the gradients of the other ranks"):
            for bucket in backward.waiting:
                self._launch(backward, bucket, is_awaited=bucket is backward.waiting[-1])
            backward.num_before_status = len(backward.launched)
            try:
                merged, sparse = self._communicator.atomic(
                    functools.partial(self._exchange, backward),
                    functools.partial(self._pack, backward),
                    functools.partial(self._take_over, backward),
                    is_training=True,
                )
            finally:
                self._num_reduced += 1
        if merged.wants_end:
            self._request.agreed = True
        if merged.sees_newcomer and self._communicator.healing is not None:
            self._communicator.healing.is_due = True
        self._futures.clear()
        reached = {bucket.group for bucket in self.buckets if any(merged.present[s.index] for s in bucket.slots)}
        self._follow[backward.group] = reached
        for bucket in backward.launched:
            bucket.area.show()
            if merged.divisor:
                bucket.area.result.div_(merged.divisor)
        for slot in self._slots:
            if not slot.taken:
                continue
            if isinstance(slot, SparseSlot):
                slot.merge(sparse.get(slot.index))
            else:
                slot.merge(slot.result if merged.present[slot.index] else None)

    def _exchange(self, backward: _Backward) -> _Exchanged:
        """The collectives that need all ranks, after a loss from the sources once more."""
        if backward.generation != self._communicator.generation:
            self._drain()
            backward.generation = self._communicator.generation
            del backward.launched[backward.num_before_status :]  # who missed the status has none of them
            for bucket in backward.launched:
                self._submit(bucket)
        backward.status, backward.total = self._submit_status(backward)
        self._futures[-1].result()
        merged = backward.status.decode(backward.total, self._communicator.size)
        if not merged.is_alike and self._same_bits is not None:
            self._same_bits.raise_difference(self._communicator)
        backward.is_short = True
        for bucket in self.buckets:
            if bucket not in backward.launched and any(merged.present[slot.index] for slot in bucket.slots):
                backward.is_short = False
                self._launch(backward, bucket)
        while self._futures:
            self._futures.pop(0).result()  # in no variable: see _failed in worker/ring/communicator.py
        of_rows = [slot for slot in self._slots if isinstance(slot, SparseSlot)]
        backward.is_short = backward.is_short and not of_rows
        return merged, self._gather([slot for slot in of_rows if merged.present[slot.index]], merged.divisor)

    def _pack(self, backward: _Backward, _: _Exchanged) -> Kept | None:
        """What a rank lacks that has done all but the last collective: the status, if that came last."""
        assert backward.total is not None
        return Kept([self._communicator.size], backward.total.view(torch.uint8)) if backward.is_short else None

    def _take_over(self, backward: _Backward, kept: Kept) -> _Exchanged:
        assert backward.status is not None
        return backward.status.decode(kept.data.clone().view(torch.float64), kept.lengths[0]), {}

    def _tell_failure(self, backward: _Backward) -> None:
        for bucket in backward.waiting:  # the other ranks wait for the rest of it
            self._launch(backward, bucket)
        self._submit_status(backward, failed=True)
        self._num_reduced += 1

    def _submit_status(self, backward: _Backward, failed: bool = False) -> tuple[BackwardStatus, torch.Tensor]:
        group = backward.group if self._early else 0
        asked = self._request.requested
        if self._same_bits is not None and backward.looked is None:
            backward.looked = self._same_bits.look()
        healing = self._communicator.healing
        told = (failed, asked, healing is not None and healing.sees_newcomer, *(backward.looked or (0, 0)))
        status = BackwardStatus(self._present(), backward.weights, group, self._num_groups, self._num_reduced, *told)
        mine = status.encode(self._communicator.rank, self._communicator.size)
        total = torch.empty_like(mine)
        all_reduce = functools.partial(self._communicator.all_reduce, mine, out=total)
        # Who has failed raises at once; whoever else waits is told meanwhile.
        self._futures.append(self._communicator.submit(all_reduce, is_awaited=not failed))
        return status, total

    def _gather(self, slots: Sequence[SparseSlot], divisor: float | None) -> dict[int, torch.Tensor]:
        """Those of all slots together: a collective is a round trip, and a model may have dozens of tables."""
        if not slots:
            return {}
        every = [unpacked(data, slots) for data in self._communicator.all_gather(packed(slots))]
        return {slot.index: slot.assemble([rows[at] for rows in every], divisor) for at, slot in enumerate(slots)}

    def _drain(self) -> None:
        """Waits for collectives of a backward that failed: they read and write the buckets."""
        concurrent.futures.wait(self._futures)
        self._futures.clear()


@dataclasses.dataclass(eq=False)
class _Backward(Backward):
    group: int = 0
    num_missing: list[int] = dataclasses.field(default_factory=list)
    """By bucket: parameters whose gradient has not come."""
    waiting: list[PlacedBucket] = dataclasses.field(default_factory=list)
    """Buckets that leave before the status, and have not yet."""
    launched: list[PlacedBucket] = dataclasses.field(default_factory=list)
    num_before_status: int = 0
    """How many of them left before it."""
    generation: int = 0
    """Of the communicator, when the buckets were reduced."""
    looked: tuple[int, int] | None = None
    """What :meth:`SameBits.look` said in it: once, however often ranks make it again."""
    status: BackwardStatus | None = None
    total: torch.Tensor | None = None
    """Of all ranks' tails."""
    is_short: bool = False
    """Whether the status was its last collective."""


_Exchanged = tuple[MergedStatus, dict[int, torch.Tensor]]
"""What all ranks know, and the gathered gradients of sparse parameters by index."""
