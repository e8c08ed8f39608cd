"""The gradient of one parameter during a backward: stashed, written, merged or restored."""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stratagem.arguments import warn_once
from stratagem.errors import ConfigurationError
from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.ring.communicator import bytes_of

logger = logging.getLogger(__name__)

Rows = tuple[torch.Tensor, torch.Tensor]
"""Of a sparse gradient: indices of rows, and their values ``(rows, dense dims)``."""


class ParameterGradient:
    """What ``p.grad`` was before a backward, and what it goes back to if that backward fails.

    Gradients that ``no_sync`` has left are *pending*: this rank's own, not reduced, and what ``p.grad`` shows until the
    next backward that reduces. Setting ``p.grad`` to None drops them; changing them in place changes what is reduced.
    """

    def __init__(self, parameter: torch.nn.Parameter, index: int) -> None:
        self.parameter = parameter
        self.index = index
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        self.pending = False
        self.counted = False
        """Whether what this rank has for the parameter makes its gradient exist; an empty share does not."""
        self.taken = False
        """Whether ``p.grad`` is put aside; the rest of the attributes below has a meaning only then."""
        self.fired = False
        """Whether this backward has brought a gradient."""
        self.spent = False
        """Whether this backward has written where pending gradients lie."""
        self.stash: torch.Tensor | None = None
        """What the reduced gradient is added to."""
        self.shown: tuple[torch.Tensor, int] | None = None
        """What hooks of before ``prepare`` have found as ``p.grad``, and its number of writes then."""
        self._before: torch.Tensor | None = None
        self._held: torch.Tensor | None = None  # what was there before the pending gradients, reduced already

    def take(self) -> None:
        """Puts ``p.grad`` aside, so that this backward's own gradient can be told apart."""
        if not self.taken:
            self.taken = True
            self.stash = self._before = self.parameter.grad
            self.parameter.grad = None

    def begin(self) -> None:
        """Finds out what has become of pending gradients since the last backward."""
        self.take()
        if self._before is None:
            self.pending = self.counted = False
            self._held = None
        elif self._adopt(self._before):
            self._held = None
        self.stash = self._held

    def check_hooks(self, delta: torch.Tensor) -> None:
        """A ConfigurationError where earlier hooks have made ``delta`` of this backward's gradient, and one process
        would have had them change the sum with what was there before."""
        if self.shown is None or (delta is self.shown[0] and delta._version == self.shown[1]):
            return
        if self._before is not None and bool(self._before.to_dense().any()):
            raise ConfigurationError(
                "a hook of register_post_accumulate_grad_hook changed a gradient that is added to others (several "
                "backward() before a step): in one process it changes their sum, here it sees only the newest. Change "
                "that one in register_hook, and the sum when the last backward() has returned"
            )

    def keep(self) -> None:
        """Ends a backward inside ``no_sync``: what it brought stays pending."""
        self._held = self.stash
        self.pending = True
        self.parameter.grad = self._local()
        self._reset()

    def merge(self, reduced: torch.Tensor | None) -> None:
        """Ends a backward: ``p.grad`` is the reduced gradient (None: no rank has one) plus what was there before."""
        self.parameter.grad = self.stash if reduced is None else self._joined(reduced)
        self.pending = self.counted = False
        self._held = None
        self._reset()

    def restore(self) -> None:
        """Ends a backward that failed, or that was a ``torch.autograd.grad`` and none of ours.

        Pending gradients that it has added to or reduced are gone: ``p.grad`` is what there was before them.
        """
        if self.taken:
            self.parameter.grad = self._before
            if self.spent:
                self.parameter.grad, self.pending, self._held = self._held, False, None
            self._reset()

    def _reset(self) -> None:
        self.taken = self.fired = self.spent = False
        self.stash = self._before = self.shown = None

    def _count(self, weight: Weight) -> None:
        self.counted = weight.counts or ((self.pending or self.fired) and self.counted)
        self.spent = self.pending
        self.fired = True

    def _adopt(self, grad: torch.Tensor) -> bool:
        """Makes ``grad`` the pending gradient, if it is not; returns whether the user has zeroed it."""
        raise NotImplementedError

    def _local(self) -> torch.Tensor:
        """The pending gradient, for ``p.grad``."""
        raise NotImplementedError

    def _joined(self, reduced: torch.Tensor) -> torch.Tensor:
        """The reduced gradient plus the stash."""
        raise NotImplementedError


class DenseSlot(ParameterGradient):
    """The gradient is a region of a bucket. :meth:`place` says which."""

    source: torch.Tensor
    result: torch.Tensor
    """May be the source."""
    _is_placed = False

    def place(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Gives the slot its flat regions of the bucket's source and result.

        They get the strides of the parameter where it fills its memory (channels_last, for example), as autograd does.
        """
        shape, strides = self.parameter.shape, torch.empty_like(self.parameter, device="meta").stride()
        self.source = source.as_strided(shape, strides, source.storage_offset())
        in_place = result.data_ptr() == source.data_ptr()
        self.result = self.source if in_place else result.as_strided(shape, strides, result.storage_offset())
        self._is_placed = True

    @property
    def fits(self) -> bool:
        """Whether the slot has its regions, and the parameter still is what they were made for."""
        if not self._is_placed:
            return False  # the ranks did not agree on the regions
        parameter, source = self.parameter, self.source
        return parameter.dtype == source.dtype and parameter.shape == source.shape and parameter.device == source.device

    def add(self, delta: torch.Tensor, weight: Weight) -> None:
        """Writes ``weight`` times this backward's own gradient, in one pass over memory."""
        if delta.layout is not torch.strided:
            raise ConfigurationError(
                f"a parameter of shape {list(self.parameter.shape)} got a gradient of layout {delta.layout}, but was "
                "declared dense: only parameters of nn.Embedding and nn.EmbeddingBag with sparse=True may be sparse"
            )
        delta = delta.detach()
        self._protect()
        if self.pending or self.fired:
            if weight.scale:
                self.source.add_(delta, alpha=weight.scale)
        elif weight.scale:
            torch.mul(delta, weight.scale, out=self.source)
        else:
            self.source.zero_()
        self._count(weight)

    def fill(self) -> None:
        """Makes the region ready to be reduced: zeros where this rank has no gradient."""
        self.take()
        self._protect()
        self.spent = self.spent or (self.pending and self.source is self.result)
        if not (self.fired or self.pending):
            self.source.zero_()
            self.counted = False

    def _protect(self) -> None:
        """Copies the stash if it lies in the arena, which is about to be written."""
        stash = self.stash
        if stash is None or stash.layout is not torch.strided:
            return
        arena = {memory.untyped_storage().data_ptr() for memory in (self.source, self.result)}
        if stash.untyped_storage().data_ptr() in arena:
            self.stash = stash.detach().clone()
            if self._before is stash:
                self._before = self.stash

    def _adopt(self, grad: torch.Tensor) -> bool:
        replaced = grad.data_ptr() != self.source.data_ptr()
        if replaced:
            self.source.copy_(grad.detach())
        changed = replaced or grad._version != 0  # _local() starts at 0, and what add() does is not seen there
        return changed and _is_zeroed(grad)

    def _local(self) -> torch.Tensor:
        return self.source.data

    def _joined(self, reduced: torch.Tensor) -> torch.Tensor:
        grad = reduced.data  # its own version counter: what happens to other gradients is not a change of this one
        return grad if self.stash is None else grad.add_(self.stash.detach())


class OwnSlot(ParameterGradient):
    """The gradient is a tensor of its own, in no bucket."""

    _own: torch.Tensor | None = None
    _version = 0  # of _own, when it was last shown as p.grad

    @torch.no_grad()
    def add(self, delta: torch.Tensor, weight: Weight) -> None:
        """Takes in ``weight`` times this backward's own gradient."""
        own = delta.detach() * weight.scale if weight.scale else torch.zeros_like(delta)
        self._own = self._own + own if self._own is not None and (self.pending or self.fired) else own
        self._count(weight)

    def _adopt(self, grad: torch.Tensor) -> bool:
        changed = grad is not self._own or grad._version != self._version
        self._own = grad.detach()
        values = self._own.coalesce().values() if grad.layout is torch.sparse_coo else self._own
        return changed and _is_zeroed(values)

    def _local(self) -> torch.Tensor:
        assert self._own is not None
        self._version = self._own._version
        return self._own

    def _joined(self, reduced: torch.Tensor) -> torch.Tensor:
        self._own = None
        return reduced if self.stash is None else self.stash.detach() + reduced


class SparseSlot(OwnSlot):
    """The gradient is a sparse tensor of rows: those of all ranks are gathered."""

    def add(self, delta: torch.Tensor, weight: Weight) -> None:
        if delta.layout is not torch.sparse_coo:
            raise ConfigurationError(
                f"a parameter of shape {list(self.parameter.shape)} was declared sparse but got a dense gradient: "
                "it is used outside of its embedding too (tied weights?); make it a torch.nn layer with sparse=False"
            )
        super().add(delta.detach().coalesce(), weight)

    def rows(self) -> Rows:
        """What this rank contributes; maybe of no rows."""
        self.take()
        if not (self.fired or self.pending) or self._own is None:
            self.counted = False
            weight = self.parameter
            empty = torch.empty(0, dtype=torch.int64, device=weight.device)
            return empty, torch.empty((0, *weight.shape[1:]), dtype=weight.dtype, device=weight.device)
        own = self._own.coalesce()
        return own.indices()[0], own.values()

    def assemble(self, every: Sequence[Rows], divisor: float | None) -> torch.Tensor:
        """One gradient of all ranks' rows, the same on every rank."""
        indices, values = map(torch.cat, zip(*every, strict=True))
        joined = values.to(self.parameter.device)
        if divisor is not None:
            joined.div_(divisor)
        with torch.sparse.check_sparse_tensor_invariants(False):
            return torch.sparse_coo_tensor(indices[None].to(joined.device), joined, self.parameter.shape).coalesce()


def packed(slots: Sequence[SparseSlot]) -> torch.Tensor:
    """What this rank contributes to several gradients, as bytes: how many rows each has, then their indices and values,
    slot by slot."""
    every = [slot.rows() for slot in slots]
    counts = torch.tensor([len(indices) for indices, _ in every], device=every[0][0].device)
    parts = (part.resolve_conj().resolve_neg().contiguous() for part in (counts, *itertools.chain(*every)))
    return torch.cat([bytes_of(part).to(counts.device) for part in parts])


def unpacked(data: torch.Tensor, slots: Sequence[SparseSlot]) -> list[Rows]:
    """By slot, what the rank contributes that has packed this."""
    head = len(slots) * torch.int64.itemsize
    counts = data[:head].view(torch.int64).tolist()
    forms = [
        ((count, *slot.parameter.shape[1:]), slot.parameter.dtype) for count, slot in zip(counts, slots, strict=True)
    ]
    sizes = [(shape[0] * torch.int64.itemsize, math.prod(shape) * dtype.itemsize) for shape, dtype in forms]
    parts = iter(data[head:].split([*itertools.chain(*sizes)]))
    return [
        # Copied, for a view of another dtype begins at a multiple of its size.
        (next(parts).clone().view(torch.int64), next(parts).clone().view(dtype).view(shape))
        for shape, dtype in forms
    ]


def _is_zeroed(values: torch.Tensor) -> bool:
    """Of a pending gradient that the script has changed; a warning of any other change than zeroing."""
    if is_other := bool(values.any()):
        warn_once(
            logger,
            "a gradient was changed after backward() inside no_sync(), where it is this replica's part: a mask or a "
            "factor has the same effect there, but clipping the parts does not clip the whole. Clip after a backward() "
            "outside of no_sync(), or accumulate without no_sync(), where each backward() leaves the gradient of all "
            "replicas",
        )
    return not is_other


class WeakHook:
    """A post-accumulate hook that keeps nothing alive: torch never frees a cycle through one that does. ``method`` of a
    reducer is called with ``slot`` and its parameter as long as both live."""

    def __init__(self, method: Callable[[Any, torch.Tensor], None], slot: ParameterGradient) -> None:
        self._method = weakref.WeakMethod(method)
        self._slot = weakref.ref(slot)

    @property
    def reducer(self) -> Any:
        """Whose method it is; None: it is gone."""
        return getattr(self._method(), "__self__", None)

    def __call__(self, parameter: torch.Tensor) -> None:
        method, slot = self._method(), self._slot()
        if method is not None and slot is not None:
            method(slot, parameter)
