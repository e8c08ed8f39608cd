"""The reductions of ``torch.distributed.ReduceOp`` in terms of our groups: scale, reduce, scale."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from stratagem.cluster.communication import ReduceOp
from stratagem.distributed.tensors import movable, words
from stratagem.errors import ConfigurationError
from stratagem.rpc.codec import can_travel
from stratagem.worker.ring.communicator import name_of
from stratagem.worker.ring.group import Group, Tag

_SUMS = dict.fromkeys(("SUM", "AVG", "PREMUL_SUM"), ReduceOp.SUM)
_OPS = {**_SUMS, "MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX, "PRODUCT": ReduceOp.PRODUCT}
_NAMES = {member.value: name for name, member in dist.ReduceOp.RedOpType.__members__.items()}
_BITWISE: Mapping[str, Callable[..., torch.Tensor]] = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
"""Those that no group knows: every rank gets all values and combines them."""
_WIDE = dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32), torch.int64) | {torch.float16: torch.float32}
"""In what a mean is formed of values whose sum may be too large for their dtype."""


Run = Callable[[Group, Tag], None]
"""One operation of a group."""


@dataclasses.dataclass(frozen=True)
class RankReduction:
    """One reduction over the ranks of a group, of flat tensors."""

    name: str
    """As torch calls it."""
    op: ReduceOp | None
    """Of the group; None: bitwise."""
    factor: Any = None
    """PREMUL_SUM: what this rank's values are multiplied with, a number or a tensor of one element."""
    is_of_pairs: bool = False
    """Of complex numbers: the group gets them as pairs."""

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor) -> Run:
        """``out`` = the reduction of every rank's ``source``; it may be the same memory."""

        return functools.partial(self._run, source, out, False)

    def reduce_scatter(self, source: torch.Tensor, out: torch.Tensor) -> Run:
        """``out`` = this rank's one of as many equal parts of the reduction as there are ranks."""

        return functools.partial(self._run, source, out, True)

    def _run(self, source: torch.Tensor, out: torch.Tensor, scatters: bool, group: Group, tag: Tag) -> None:
        if self.op is None:
            combined = self._combined(source, group, tag)
            out.copy_(combined.view(group.size, -1)[group.rank] if scatters else combined)
            return
        scaled = self.wide(source) if self.factor is None else source * self.factor
        result = self.wide(out)
        reduce = group.reduce_scatter if scatters else group.all_reduce
        reduce(self._real(scaled), self._real(result), self.op, tag)
        self.finish(result, group.size)
        out.copy_(result)

    def _real(self, values: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(values).view(-1) if self.is_of_pairs else values

    def _combined(self, source: torch.Tensor, group: Group, tag: Tag) -> torch.Tensor:
        every = [torch.empty_like(source) for _ in range(group.size)]
        group.all_gather(movable(source), [movable(values) for values in every], tag)
        return functools.reduce(_BITWISE[self.name], every)

    def wide(self, values: torch.Tensor) -> torch.Tensor:
        """In the dtype in which they are reduced."""
        return values.to(_WIDE.get(values.dtype, values.dtype)) if self.name == "AVG" else values

    def finish(self, out: torch.Tensor, size: int) -> None:
        """Makes what a group has reduced over ``size`` ranks what was asked for, in place."""
        if self.name == "AVG":
            out.div_(size) if out.is_floating_point() or out.is_complex() else out.div_(size, rounding_mode="trunc")


def reducing(op: Any, dtype: torch.dtype) -> RankReduction:
    """Reads an operation: a ``torch.distributed.ReduceOp`` or one of its members. Raises ConfigurationError: there is
    no such reduction for the dtype."""
    reduction = _reduction(_number(op), dtype)
    if reduction.name != "PREMUL_SUM":
        return reduction
    _, factor = op.__getstate__()
    return dataclasses.replace(reduction, factor=factor)


class AllReducePlan(NamedTuple):
    """What is the same whenever tensors of one dtype and shape are reduced."""

    what: str
    op: ReduceOp
    reduction: RankReduction


def op_of(opts: Any) -> Any:
    """The reduction that options name, or are."""
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def all_reduce_plan(op: Any, dtype: torch.dtype, shape: torch.Size) -> AllReducePlan | None:
    """None: the reduction takes more than a group's own."""
    return _plan(_number(op), dtype, shape)


def _number(op: Any) -> int:
    """Of the kind of reduction: torch makes an object of each whenever it is asked, and is slow to compare them."""
    # Not isinstance: torch says of its enum's members, too, that they are ReduceOps.
    number: int = (op.op if type(op) is dist.ReduceOp else op).value  # type: ignore[attr-defined]
    return number


@functools.lru_cache(4096)
def _plan(number: int, dtype: torch.dtype, shape: torch.Size) -> AllReducePlan | None:
    reduction = _reduction(number, dtype)
    is_wider = reduction.name == "AVG" and dtype in _WIDE
    if reduction.op is None or reduction.is_of_pairs or reduction.name == "PREMUL_SUM" or is_wider:
        return None
    return AllReducePlan(words(dtype, shape, f"all_reduce {reduction.name} of "), reduction.op, reduction)


@functools.cache
def _reduction(number: int, dtype: torch.dtype) -> RankReduction:
    name = _NAMES[number]
    if name in _BITWISE and not (dtype.is_floating_point or dtype.is_complex):
        return RankReduction(name, None)
    is_known = name in _OPS and (name in _SUMS if dtype.is_complex else can_travel(dtype))
    if is_known and not (name == "AVG" and dtype is torch.bool):
        return RankReduction(name, _OPS[name], is_of_pairs=dtype.is_complex)
    raise ConfigurationError(
        f"there is no {name} of {name_of(dtype)}: convert the tensor to float32, or gather it and reduce it yourself"
    )
