"""How the values of one process's devices become one value on each of them, by the names of ``tf.distribute``.

Everything here is arithmetic and copies: the caller has brought the tensors of all replicas together. Replica i is the
one that brought tensor i, whatever device the tensor names: torch has one CPU, so it cannot tell logical CPUs apart.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from stratagem.arguments import checked, whole_number
from stratagem.cluster.communication import ReduceOp
from stratagem.errors import ConfigurationError
from stratagem.strategy.devices import parse_device
from stratagem.worker.ring.group import REDUCE, check_reducible

logger = logging.getLogger(__name__)

Device = str | torch.device

_HALVES = (torch.float16, torch.bfloat16)
_NCCL_DTYPES = (*_HALVES, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
_COMBINE: Mapping[ReduceOp, Callable[..., torch.Tensor]] = {**REDUCE, ReduceOp.MEAN: torch.add}
# The numbers of ncclRedOp_t.
_NCCL_OPS = {ReduceOp.SUM: 0, ReduceOp.MEAN: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}


class CrossDeviceOps(abc.ABC):
    """Reduces values over the replicas of one process.

    Sums are formed in a fixed order whatever the timing, and all replicas get the same bits. float16 and bfloat16 are
    summed in float32. Results carry no graph and share no memory with the arguments or with another replica's result.
    Work on GPUs is queued on the caller's current streams.

    Raises (every method):
        ConfigurationError: the replicas' tensors differ in shape or dtype, or ``op`` does not fit them.
    """

    def all_reduce(self, op: ReduceOp | str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The reduction of one tensor per replica, on the device of each."""
        return self.all_reduce_many(op, [tensors])[0]

    def all_reduce_many(
        self, op: ReduceOp | str, per_tensor: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[torch.Tensor]]:
        """Like :meth:`all_reduce` for several tensors at once, which may be packed; the first index is the tensor, the
        second the replica."""
        op = ReduceOp(op)
        for tensors in per_tensor:
            _check(op, tensors)
        return self._all_reduce_many(op, per_tensor)

    def reduce(
        self, op: ReduceOp | str, tensors: Sequence[torch.Tensor], destinations: Device | Sequence[Device]
    ) -> list[torch.Tensor]:
        """The reduction of one tensor per replica, on each of the destinations, in their order."""
        op = ReduceOp(op)
        _check(op, tensors)
        names = _as_list(destinations)
        if not names:
            raise ConfigurationError("expected at least one device to reduce to, got none")
        return self._reduce(op, tensors, names)

    def broadcast(self, tensor: torch.Tensor, destinations: Device | Sequence[Device]) -> list[torch.Tensor]:
        """A copy of ``tensor`` on each of the destinations, in their order."""
        return _copies(tensor.detach().clone(), [_place(device) for device in _as_list(destinations)])

    @abc.abstractmethod
    def _all_reduce_many(self, op: ReduceOp, per_tensor: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """:meth:`all_reduce_many` of tensors that have been checked."""

    @abc.abstractmethod
    def _reduce(
        self, op: ReduceOp, tensors: Sequence[torch.Tensor], destinations: Sequence[Device]
    ) -> list[torch.Tensor]:
        """:meth:`reduce` of tensors that have been checked."""


@checked
class ReductionToOneDevice(CrossDeviceOps):
    """Brings all values to one device, reduces them there in replica order, and copies the result to all.

    Args:
        reduce_to_device: that device; None: the first destination.
        accumulation_fn: adds tensors that are all on that device, for SUM and MEAN; None: adds in replica order.
    """

    def __init__(
        self,
        reduce_to_device: Device | None = None,
        accumulation_fn: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None,
    ) -> None:
        if reduce_to_device is not None:
            _place(reduce_to_device)
        self._reduce_to_device = reduce_to_device
        self._accumulation_fn = accumulation_fn
        self._has_logged = False

    def _all_reduce_many(self, op: ReduceOp, per_tensor: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        return [self._reduce(op, tensors, names_of([tensor.device for tensor in tensors])) for tensors in per_tensor]

    @torch.no_grad()
    def _reduce(
        self, op: ReduceOp, tensors: Sequence[torch.Tensor], destinations: Sequence[Device]
    ) -> list[torch.Tensor]:
        root = destinations[0] if self._reduce_to_device is None else self._reduce_to_device
        if not self._has_logged:
            self._has_logged = True
            logger.info("Reduce to %s then broadcast to %s", root, tuple(map(str, destinations)))
        if any(tensor.is_sparse for tensor in tensors):
            total = _accumulate_sparse(op, tensors, _place(root))
        elif self._accumulation_fn is not None and op in (ReduceOp.SUM, ReduceOp.MEAN):
            total = self._accumulation_fn([tensor.detach().to(_place(root), copy=True) for tensor in tensors])
        else:
            total = _accumulate(op, tensors, _place(root))
        return _copies(_finished(op, total, tensors), [_place(device) for device in destinations])


class _AllReduce(CrossDeviceOps):
    """The common part of HierarchicalCopyAllReduce and NcclAllReduce: packing, and what they reduce on one device."""

    def __init__(self, num_packs: int = 1) -> None:
        self._num_packs = whole_number("num_packs", num_packs, 0)
        self._one_device = ReductionToOneDevice()

    def _reduce(
        self, op: ReduceOp, tensors: Sequence[torch.Tensor], destinations: Sequence[Device]
    ) -> list[torch.Tensor]:
        if [_place(device) for device in destinations] == [tensor.device for tensor in tensors]:
            return self._all_reduce_many(op, [tensors])[0]
        return self._one_device._reduce(op, tensors, destinations)

    @torch.no_grad()
    def _all_reduce_many(self, op: ReduceOp, per_tensor: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        packable = [index for index, tensors in enumerate(per_tensor) if self._takes(tensors)]
        packed = pack([per_tensor[index] for index in packable], self._num_packs)
        reduced = packed.unpack([self._all_reduce_pack(op, one, index) for index, one in enumerate(packed.packs)])
        results = dict(zip(packable, reduced, strict=True))
        others = [index for index in range(len(per_tensor)) if index not in results]
        results.update(zip(others, self._one_device._all_reduce_many(op, [per_tensor[i] for i in others]), strict=True))
        return [results[index] for index in range(len(per_tensor))]

    def _takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are reduced here; the rest goes to one device, unpacked."""
        return not any(tensor.is_sparse for tensor in tensors)

    @abc.abstractmethod
    def _all_reduce_pack(self, op: ReduceOp, tensors: Sequence[torch.Tensor], index: int) -> list[torch.Tensor]:
        """Reduces one flat tensor a replica; ``index`` counts the packs of this call."""


class HierarchicalCopyAllReduce(_AllReduce):
    """Reduces inside two groups of replicas, then between their roots, and copies back along the same path.

    Fewer copies cross the slow link between the two halves of a host. Pack i has its root at replica i mod n, so that
    many packs keep all devices busy. With an odd number of replicas the second group has one more. Sums of floats are
    those of :class:`ReductionToOneDevice` up to rounding, because the order of addition differs.

    Args:
        num_packs: number of flat tensors into which the tensors of a call are packed, separately for each dtype; 0: no
            packing. Sparse tensors are reduced on one device.
    """

    def _all_reduce_pack(self, op: ReduceOp, tensors: Sequence[torch.Tensor], index: int) -> list[torch.Tensor]:
        devices = [tensor.device for tensor in tensors]
        route = hierarchy(len(tensors), index % len(tensors))
        # At most two sums: the bits do not depend on which comes first, and so not on the root.
        sums = [_accumulate(op, [tensors[i] for i in group], devices[root]) for root, group in route]
        total = _accumulate(op, sums, devices[route[0][0]])
        on_roots = _copies(_finished(op, total, tensors), [devices[root] for root, _ in route])
        results: dict[int, torch.Tensor] = {}
        for (_, group), value in zip(route, on_roots, strict=True):
            results.update(zip(group, _copies(value, [devices[i] for i in group]), strict=True))
        return [results[i] for i in range(len(tensors))]


class NcclAllReduce(_AllReduce):
    """All-reduce by NCCL among the GPUs of this process.

    Tensors that NCCL cannot take (not each on a GPU of its own, sparse, of an unsupported dtype) are reduced on one
    device. float16 and bfloat16 are summed as NCCL does it.

    Args:
        num_packs: as for :class:`HierarchicalCopyAllReduce`.

    Raises:
        ConfigurationError: there is no CUDA device, or this torch was built without NCCL.
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)
        if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
            raise ConfigurationError(
                "NcclAllReduce needs CUDA devices and a torch built with NCCL, which are not available here; use "
                "ReductionToOneDevice() or HierarchicalCopyAllReduce(), or leave cross_device_ops out"
            )

    def _takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        devices = {tensor.device for tensor in tensors}
        return (
            super()._takes(tensors)
            and len(devices) == len(tensors)
            and all(device.type == "cuda" for device in devices)
            and tensors[0].dtype in _NCCL_DTYPES
        )

    def _all_reduce_pack(self, op: ReduceOp, tensors: Sequence[torch.Tensor], index: int) -> list[torch.Tensor]:
        sources = [tensor.detach().contiguous() for tensor in tensors]
        results = [torch.empty_like(source) for source in sources]
        torch.cuda.nccl.all_reduce(sources, results, _NCCL_OPS[op])
        if op is ReduceOp.MEAN:
            for result in results:
                result.div_(len(tensors))
        return results


def pack_sizes(num_elements: int, num_packs: int) -> list[int]:
    """Elements of each pack: equal ones, the last takes the remainder too (the rule of ``tf.distribute``)."""
    size = num_elements // num_packs
    return [size] * (num_packs - 1) + [num_elements - size * (num_packs - 1)]


@dataclasses.dataclass(frozen=True)
class Packed:
    """Flat tensors to be reduced, and what is needed to take them apart again."""

    packs: list[list[torch.Tensor]]
    """By pack, then by replica: flat tensors of one length and dtype. No pack is empty unless all tensors are."""
    _groups: list[tuple[list[int], int]]
    """The tensors that lie in a row of packs, and how many packs that is."""
    _shapes: list[torch.Size]

    def unpack(self, reduced: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """By tensor, then by replica: what the packs have become. Results of one replica may share a storage."""
        results: dict[int, list[torch.Tensor]] = {}
        first = 0
        for members, num_packs in self._groups:
            rows = reduced[first : first + num_packs]
            first += num_packs
            flats = [parts[0] if num_packs == 1 else torch.cat(parts) for parts in zip(*rows, strict=True)]
            counts = [self._shapes[index].numel() for index in members]
            pieces = [flat.split(counts) for flat in flats]
            for place, index in enumerate(members):
                results[index] = [piece[place].view(self._shapes[index]) for piece in pieces]
        return [results[index] for index in range(len(self._shapes))]


def pack(per_tensor: Sequence[Sequence[torch.Tensor]], num_packs: int) -> Packed:
    """Flattens and concatenates each replica's dense tensors (by tensor, then by replica), dtype by dtype, and splits
    the whole into ``num_packs``; 0: every tensor is a pack of its own."""
    groups: dict[object, list[int]] = {}
    for index, tensors in enumerate(per_tensor):
        groups.setdefault(tensors[0].dtype if num_packs else index, []).append(index)
    packs: list[list[torch.Tensor]] = []
    sizes_of: list[tuple[list[int], int]] = []
    for members in groups.values():
        rows = list(zip(*([tensor.detach().reshape(-1) for tensor in per_tensor[i]] for i in members), strict=True))
        flats = [row[0] if len(row) == 1 else torch.cat(row) for row in rows]
        sizes = [size for size in pack_sizes(flats[0].numel(), num_packs or 1) if size] or [0]
        packs += [list(parts) for parts in zip(*(flat.split(sizes) for flat in flats), strict=True)]
        sizes_of.append((members, len(sizes)))
    return Packed(packs, sizes_of, [tensors[0].shape for tensors in per_tensor])


def cross_device_ops_of(
    given: CrossDeviceOps | type[CrossDeviceOps] | None, devices: Sequence[torch.device]
) -> CrossDeviceOps:
    """What a strategy was given, a class with its defaults (a ConfigurationError where it is something else); None:
    NCCL where each replica has a GPU of its own, else one device."""
    if given is None:
        distinct = len(set(devices)) == len(devices)
        with_nccl = distinct and all(each.type == "cuda" for each in devices) and torch.distributed.is_nccl_available()
        return NcclAllReduce() if with_nccl else ReductionToOneDevice()
    if isinstance(given, CrossDeviceOps):
        return given
    if isinstance(given, type) and issubclass(given, CrossDeviceOps):
        return given()
    raise ConfigurationError(
        "expected cross_device_ops like sg.ReductionToOneDevice(), sg.HierarchicalCopyAllReduce() or "
        f"sg.NcclAllReduce(), got {given!r}"
    )


def hierarchy(num_replicas: int, root: int) -> list[tuple[int, range]]:
    """The two groups, each with its root; the group of ``root`` comes first. One replica is one group."""
    half = num_replicas // 2
    first, second = range(half), range(half, num_replicas)
    if not first:
        return [(root, second)]
    if root in first:
        return [(root, first), (second[root % len(second)], second)]
    return [(root, second), (first[(root - half) % half], first)]


def _check(op: ReduceOp, tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise ConfigurationError("expected a tensor for each replica, got none")
    for replica, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape or tensor.dtype != tensors[0].dtype:
            raise ConfigurationError(
                f"replicas reduce tensors of one shape and dtype, but replica 0 has {_describe(tensors[0])} and "
                f"replica {replica} has {_describe(tensor)}"
            )
        if tensor.layout not in (torch.strided, torch.sparse_coo):
            raise ConfigurationError(f"expected dense or sparse_coo tensors, got {tensor.layout} of replica {replica}")
    check_reducible(tensors[0].dtype, op)


def is_inexact(tensor: torch.Tensor) -> bool:
    """Whether it can hold a mean, or have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _accumulate(op: ReduceOp, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A new tensor on ``device``: the reduction in the order given; MEAN is not divided yet, halves are float32 yet."""
    wide = _wide(tensors[0].dtype)
    total = tensors[0].detach().to(device, wide, copy=True, memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        _COMBINE[op](total, tensor.detach().to(device), out=total)
    return total


def _accumulate_sparse(op: ReduceOp, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """As :func:`_accumulate`; dense if any of the tensors is."""
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ConfigurationError(f"sparse tensors reduce with SUM and MEAN, not with {op.name}: use to_dense() first")
    if not all(tensor.is_sparse for tensor in tensors):
        return _accumulate(op, [tensor.to_dense() for tensor in tensors], device)
    wide = _wide(tensors[0].dtype)
    total = tensors[0].detach().to(device, wide, copy=True)
    for tensor in tensors[1:]:
        total = total + tensor.detach().to(device, wide)
    return total.coalesce()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALVES else dtype


def _finished(op: ReduceOp, total: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if op is ReduceOp.MEAN:
        total = total.div_(len(tensors))
    return total.to(tensors[0].dtype)


def _copies(value: torch.Tensor, devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """``value`` on each device; the first that is its own gets it uncopied."""
    own = next((index for index, device in enumerate(devices) if device == value.device), None)
    return [value if index == own else value.to(device, copy=True) for index, device in enumerate(devices)]


def _as_list(destinations: Device | Sequence[Device]) -> list[Device]:
    return [destinations] if isinstance(destinations, str | torch.device) else list(destinations)


def _place(device: Device) -> torch.device:
    """Where memory for a device is, as tensors there say it."""
    parsed = parse_device(device)
    if parsed.type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if parsed == torch.device("cuda") else parsed


def names_of(devices: Sequence[torch.device]) -> list[Device]:
    """The devices of the replicas; those on the CPU are numbered as logical ones."""
    numbers = itertools.count()
    return [f"cpu:{next(numbers)}" if device.type == "cpu" else str(device) for device in devices]
