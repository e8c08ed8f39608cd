"""Merges the slices of a synchronous step into one gradient, and computes facts about it. Pure tensor arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from stratagem.ps.requests import Facts, Merge
from stratagem.ps.rows import unpack
from stratagem.ps.runs import cut_runs
from stratagem.ps.shard_group import Parts
from stratagem.ps.specs import GroupSpec

_CHUNK = 1 << 18
_MAX_NAMES = 3


@dataclasses.dataclass(frozen=True)
class SliceGradient:
    coefficient: float
    parts: Parts
    present: Sequence[bool]


def coefficients(merge: Merge, weights: Sequence[float]) -> list[float]:
    """Factors of the slices that are included, in slice order.

    MEAN gives weight_i / sum of the included weights, so the others make up for a slice that was left out. SUM adds
    slices as they are: what was left out comes in a later step, and each example counts once. A slice of weight 0 has
    factor 0 in a mean: its gradient is left out, never multiplied (0 · NaN is NaN).
    """
    if merge is Merge.SUM:
        return [1.0] * len(weights)
    total = math.fsum(weights)
    return [weight / total if total else 0.0 for weight in weights]


def merge_slices(spec: GroupSpec, slices: Sequence[SliceGradient], out: torch.Tensor) -> tuple[bool, ...]:
    """Sums slices into ``out``, the flat tensor of the group, in slice order; those with coefficient 0 are left out,
    and are zeros where all are. Returns for each shard whether any slice has a gradient for it: elements of the others
    are undefined afterwards."""
    used = [piece for piece in slices if piece.coefficient]
    union = any_present(used or slices) or (False,) * len(spec.shards)
    fresh = bool(used) and tuple(used[0].present) == union
    if not fresh:
        out.zero_()
    alike = [0] * len(spec.shards)
    for index, piece in enumerate(used):
        extents = [(offset, tensor.numel()) for offset, tensor in piece.parts]
        for run in cut_runs(extents, spec.shards, piece.present, alike):
            offset, tensor = piece.parts[run.piece]
            source = tensor[run.start - offset : run.stop - offset]
            target = out[run.start : run.stop]
            if fresh and index == 0:
                torch.mul(source, piece.coefficient, out=target)
            else:
                target.add_(source, alpha=piece.coefficient)
    return union


def any_present(slices: Sequence[SliceGradient]) -> tuple[bool, ...]:
    """For each shard, whether any slice has a gradient for it."""
    return tuple(any(shard) for shard in zip(*(one.present for one in slices), strict=True))


def facts_of(spec: GroupSpec, parts: Parts, present: Sequence[bool]) -> Facts:
    """Sum of squares and finiteness of a gradient; elements of shards without a gradient do not count."""
    squared, not_finite = 0.0, list[str]()
    if spec.is_table:
        return join_facts([_facts_of_rows(spec, numbers, rows) for numbers, rows in unpack(spec, parts)])
    alike = list(range(len(spec.shards)))
    extents = [(offset, tensor.numel()) for offset, tensor in parts]
    for run in cut_runs(extents, spec.shards, present, alike):
        offset, tensor = parts[run.piece]
        piece = tensor[run.start - offset : run.stop - offset]
        here, is_finite = _squared_norm(piece)
        name = spec.shards[run.shard].variable
        if not is_finite and name not in not_finite:
            not_finite.append(name)
        squared += here
    return Facts(squared, not not_finite, tuple(not_finite[:_MAX_NAMES]))


def _facts_of_rows(spec: GroupSpec, numbers: torch.Tensor, rows: torch.Tensor) -> Facts:
    squared, is_finite = _squared_norm(rows.reshape(-1))
    if is_finite:
        return Facts(squared, True, ())
    shards = spec.holders(numbers[~torch.isfinite(rows).all(1)].numpy())
    names = dict.fromkeys(spec.shards[index].variable for index in shards.tolist())
    return Facts(squared, False, tuple(names)[:_MAX_NAMES])


def join_facts(facts: Sequence[Facts]) -> Facts:
    names = list(dict.fromkeys(name for fact in facts for name in fact.not_finite))
    squared = math.fsum(fact.squared_norm for fact in facts if fact.finite)
    finite = all(fact.finite for fact in facts)
    return Facts(squared if finite else math.nan, finite, tuple(names[:_MAX_NAMES]))


def _squared_norm(piece: torch.Tensor) -> tuple[float, bool]:
    """And whether every element is finite: the squares of large ones need not be."""
    wide = torch.float64 if piece.dtype is torch.float64 else torch.float32
    norms = (float(torch.linalg.vector_norm(chunk, dtype=wide)) for chunk in piece.split(_CHUNK))
    squared = math.fsum(norm * norm for norm in norms) if piece.numel() else 0.0
    if math.isfinite(squared):
        return squared, True
    is_finite = bool(torch.isfinite(piece).all())
    return float(piece.double().square().sum()) if is_finite else squared, is_finite
