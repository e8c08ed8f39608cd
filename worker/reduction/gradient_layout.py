"""The layout of a reducer's gradients: buckets, their memory, and the check that all ranks have the same."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Sequence

import torch

from stratagem.errors import ConfigurationError
from stratagem.worker.reduction.compression import BucketPart
from stratagem.worker.reduction.gradient_slot import DenseSlot, ParameterGradient, SparseSlot
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.group import Arena


class Area:
    """Memory of one bucket. All tensors are flat, of the bucket's dtype and equal in length. For CPU parameters
    everything happens in the arena, which belongs to the group: there is nothing to do."""

    source: torch.Tensor
    """Where local gradients are written, on the parameters' device."""
    result: torch.Tensor
    """Where ``p.grad`` looks at, on the parameters' device."""
    reduced: torch.Tensor
    """Where reduced values go in the arena."""

    def __init__(self, arena: Arena, start: int, num_bytes: int, dtype: torch.dtype) -> None:
        self.source = arena.source[start : start + num_bytes].view(dtype)
        self.result = self.reduced = arena.result[start : start + num_bytes].view(dtype)

    def wrote(self) -> None:
        """A gradient was written into the source. Called in the thread of backward."""

    def seal(self) -> None:
        """The source is complete. Called in the thread of backward."""

    @contextlib.contextmanager
    def reducing(self) -> Iterator[torch.Tensor]:
        """Around what reduces, in the communicator's thread: gives the complete source in the arena; at the end
        ``reduced`` is complete."""
        yield self.source

    def show(self) -> None:
        """Makes the result visible to the caller's stream. Called in the thread of backward."""

    def close(self) -> None:
        """Gives back what the area holds of the device."""


class DeviceArea(Area):
    """A bucket in an arena on the parameters' CUDA device. The group works in a side stream, which events order."""

    def __init__(self, arena: Arena, start: int, num_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(arena, start, num_bytes, dtype)
        self._side = torch.cuda.Stream(device)
        self._writers: set[torch.cuda.Stream] = set()
        self._is_reduced = torch.cuda.Event()

    def wrote(self) -> None:
        self._writers.add(torch.cuda.current_stream(self.source.device))

    def seal(self) -> None:
        self.wrote()
        # Also orders what changes the result behind whatever still reads the last one, such as the optimizer.
        for stream in self._writers:
            self._side.wait_stream(stream)
        self._writers.clear()

    @contextlib.contextmanager
    def reducing(self) -> Iterator[torch.Tensor]:
        with torch.cuda.stream(self._side):
            yield self.source
            self._is_reduced.record(self._side)

    def show(self) -> None:
        torch.cuda.current_stream(self.result.device).wait_event(self._is_reduced)

    def close(self) -> None:
        self._side.synchronize()


class StagedArea(DeviceArea):
    """A bucket of CUDA parameters whose arena is page-locked host memory: the side stream copies there and back."""

    def __init__(self, arena: Arena, start: int, num_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(arena, start, num_bytes, dtype, device)
        self._staged = self.source
        self.source = torch.zeros_like(self._staged, device=device)
        self.result = torch.zeros_like(self.reduced, device=device)
        self._is_staged = torch.cuda.Event()

    def seal(self) -> None:
        super().seal()
        with torch.cuda.stream(self._side):
            self._staged.copy_(self.source, non_blocking=True)
            self._is_staged.record(self._side)

    @contextlib.contextmanager
    def reducing(self) -> Iterator[torch.Tensor]:
        self._is_staged.synchronize()
        yield self._staged
        with torch.cuda.stream(self._side):
            self.result.copy_(self.reduced, non_blocking=True)
            self._is_reduced.record(self._side)


def page_locked(arena: Arena, device: torch.device) -> tuple[Arena, Callable[[], None]]:
    """The arena for a CUDA device, and what undoes it: the arena itself, registered with CUDA.

    Where CUDA refuses to register it, other memory that is page-locked; the group then copies from and to that.
    """
    registered: list[int] = []

    def release() -> None:
        while registered:
            torch.cuda.cudart().cudaHostUnregister(registered.pop())

    for memory in (arena.source, arena.result):
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) != 0:
            release()
            with contextlib.suppress(RuntimeError):  # the refusal would show up as the error of some later kernel
                torch.zeros(1, device=device).add_(1)
            return Arena.of(lambda: torch.zeros_like(arena.source, pin_memory=True), False), release
        registered.append(memory.data_ptr())
    return arena, release


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
AS_REAL = (
    "make the parameter nn.Parameter(torch.view_as_real(it)), and take torch.view_as_complex(self.parameter) in forward"
)
"""What to do with a complex parameter."""


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedBucket:
    """A bucket with its memory and its parameters."""

    index: int
    group: int
    slots: Sequence[DenseSlot]
    parts: Sequence[BucketPart]
    area: Area


class GradientLayout:
    """Buckets in one arena. Collective.

    Args:
        slots: those whose parameters need gradients, the same on every rank.
        groups: the group of each; a bucket holds parameters of one group.
        communicator: gives the arena.
        first_bytes: limit of the first bucket of each group.
        bucket_bytes: limit of the others.
        in_place: reduce where the gradients lie, which takes half the memory. Where any rank's are copied from a device
            to be reduced, all keep two regions.
        on_host: whether what is reduced has to be in host memory.

    Raises:
        ConfigurationError: a dtype that cannot be reduced, or parameters that differ between ranks.
    """

    def __init__(
        self,
        slots: Sequence[DenseSlot | SparseSlot],
        groups: Sequence[int],
        communicator: Communicator,
        first_bytes: int,
        bucket_bytes: int,
        in_place: bool = False,
        on_host: bool = False,
    ) -> None:
        any_cuda = _check_same(slots, groups, communicator)
        self.buckets: list[PlacedBucket] = []
        """In the order in which they leave."""
        self._release: Callable[[], None] | None = None
        plan = []
        for group in sorted(set(groups)):
            members = [s for s, its in zip(slots, groups, strict=True) if its == group and isinstance(s, DenseSlot)]
            for bucket in cut_buckets([member.parameter for member in members], first_bytes, bucket_bytes):
                plan.append((group, [members[index] for index in bucket.parameters], bucket))
        cuda = next((bucket.device for _, _, bucket in plan if bucket.device.type == "cuda"), None)
        num_bytes = max(ALIGNMENT, sum(bucket.num_bytes for _, _, bucket in plan))
        in_place = in_place and (communicator.device.type == "cuda" or not any_cuda)
        self._arena = arena = communicator.arena(num_bytes, in_place)
        if arena.source.is_cuda and (on_host or any(bucket.device != communicator.device for _, _, bucket in plan)):
            arena = Arena.of(lambda: torch.zeros(num_bytes, dtype=torch.uint8), False)
        if cuda is not None and arena.source.is_cpu:
            arena, self._release = page_locked(arena, cuda)
        arena.source.zero_()
        start = 0
        for group, members, bucket in plan:
            place = arena, start, bucket.num_bytes, bucket.dtype
            kind = DeviceArea if arena.source.is_cuda else StagedArea
            area = kind(*place, bucket.device) if bucket.device.type == "cuda" else Area(*place)
            start += bucket.num_bytes
            parts = []
            for slot, offset in zip(members, bucket.offsets, strict=True):
                begin, size = offset // bucket.dtype.itemsize, slot.parameter.numel()
                slot.place(area.source[begin : begin + size], area.result[begin : begin + size])
                parts.append(BucketPart(begin, tuple(slot.parameter.shape)))
            self.buckets.append(PlacedBucket(len(self.buckets), group, members, parts, area))
        self.bucket_of = {slot.index: bucket for bucket in self.buckets for slot in bucket.slots}
        """By index of the slot; sparse ones have none."""

    def close(self) -> None:
        """Gives back what the device holds, and the arena. Every rank calls it."""
        for bucket in self.buckets:
            bucket.area.close()
        if self._release is not None:
            self._release()
            self._release = None
        self._arena.free()


def check_parameter(parameter: torch.nn.Parameter) -> None:
    """Raises ``ConfigurationError`` for a dtype or device whose gradients cannot be reduced."""
    if parameter.is_complex():
        raise ConfigurationError(f"gradients of {parameter.dtype} cannot be reduced, those of its parts can: {AS_REAL}")
    if parameter.dtype not in DTYPES or parameter.device.type not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"gradients of {parameter.dtype} on {parameter.device} cannot be reduced; expected one of "
            f"{', '.join(map(str, DTYPES))} on the CPU or a CUDA device"
        )


def _check_same(slots: Sequence[ParameterGradient], groups: Sequence[int], communicator: Communicator) -> bool:
    """Makes sure that all ranks have the same parameters, and says which one differs. Returns whether any rank has
    some on a CUDA device."""
    cuda = any(slot.parameter.is_cuda for slot in slots)
    mine = [_describe(slot, group) for slot, group in zip(slots, groups, strict=True)]
    sums = torch.tensor([zlib.crc32(text.encode()) for text in mine], dtype=torch.int64)
    gathered = communicator.all_gather(torch.cat([sums, torch.tensor([int(cuda)])]))
    for rank, theirs in enumerate(each[:-1] for each in gathered):
        if torch.equal(sums, theirs):
            continue
        same = min(len(sums), len(theirs))
        at = next((i for i in range(same) if sums[i] != theirs[i]), same)
        here = mine[at] if at < len(mine) else "missing"
        raise ConfigurationError(
            f"expected the same trainable parameters on every rank, but rank {communicator.rank} has {len(sums)} and "
            f"rank {rank} has {len(theirs)}; number {at} differs, on rank {communicator.rank} it is {here}"
        )
    return any(int(each[-1]) for each in gathered)


def _describe(slot: ParameterGradient, group: int) -> str:
    parameter = slot.parameter
    kind = "sparse" if isinstance(slot, SparseSlot) else "dense"
    strides = list(torch.empty_like(parameter, device="meta").stride())  # of its gradient, wherever it lies itself
    return f"{kind} {parameter.dtype} {list(parameter.shape)} with strides {strides} in group {group}"


ALIGNMENT = 64
"""Bytes; every gradient begins at a multiple of it, for vector instructions and cache lines."""
FIRST_BYTES = 1024**2
"""A small first bucket leaves early, so that the lanes begin to work while backward has just begun."""
BUCKET_BYTES = 25 * 1024**2
"""Large enough for full bandwidth, small enough to leave while backward goes on."""


@dataclasses.dataclass
class Bucket:
    """Gradients of one dtype and device that are reduced by one collective."""

    dtype: torch.dtype
    device: torch.device
    parameters: list[int] = dataclasses.field(default_factory=list)
    """Indices of the parameters, the last registered first."""
    offsets: list[int] = dataclasses.field(default_factory=list)
    """Where each of them begins, in bytes from the begin of the bucket."""
    num_bytes: int = 0
    """Size with the gaps between the gradients; a multiple of :data:`ALIGNMENT`."""


def cut_buckets(
    parameters: Sequence[torch.Tensor], first_bytes: int = FIRST_BYTES, bucket_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Cuts parameters into buckets, in the order in which backward is expected to complete them.

    Backward reaches the parameters that were registered last first, so the buckets go through them in reverse.
    ``parameters``: in registration order. ``first_bytes``: limit of the first bucket of each dtype and device, at most
    ``bucket_bytes``. ``bucket_bytes``: limit of the others. A parameter above the limit has a bucket of its own.
    """
    opened: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    buckets: list[Bucket] = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        key = (parameter.dtype, parameter.device)
        num_bytes = aligned(parameter.numel() * parameter.dtype.itemsize)
        bucket = opened.get(key)
        if bucket is None or bucket.num_bytes + num_bytes > limits[key]:
            limits[key] = min(first_bytes, bucket_bytes) if bucket is None else bucket_bytes
            bucket = opened[key] = Bucket(*key)
            buckets.append(bucket)
        bucket.parameters.append(index)
        bucket.offsets.append(bucket.num_bytes)
        bucket.num_bytes += num_bytes
    return sorted(buckets, key=lambda bucket: -bucket.parameters[-1])


def aligned(num_bytes: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
