"""Memory of a bucket: where local gradients are written, where reduced ones appear, and how they get to the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from stratagem.worker.ring.group import Arena


class Area:
    """Memory of one bucket. All tensors are flat, of the bucket's dtype and equal in length. Of CPU parameters
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
