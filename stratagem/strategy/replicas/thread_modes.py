"""The modes that torch keeps for each thread, carried from one thread to another."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch


@dataclasses.dataclass(frozen=True)
class ThreadModes:
    """The modes and choices in which a thread computes (docs/protocol.md 17)."""

    grad: bool
    inference: bool
    autocast: Mapping[str, torch.dtype]
    """By device type, where it is on."""
    autocast_cache: bool
    default_device: torch.device
    num_threads: int
    streams: Mapping[torch.device, torch.cuda.Stream]

    @classmethod
    def here(cls, devices: Sequence[torch.device]) -> ThreadModes:
        """Those of the calling thread, as far as computing on ``devices`` is concerned."""
        kinds = {"cpu", *(device.type for device in devices)}
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            {kind: torch.get_autocast_dtype(kind) for kind in sorted(kinds) if torch.is_autocast_enabled(kind)},
            torch.is_autocast_cache_enabled(),
            torch.get_default_device(),
            torch.get_num_threads(),
            {device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"},
        )

    @contextlib.contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Makes them those of the calling thread, which computes on ``device``."""
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        with contextlib.ExitStack() as stack:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(self.streams[device]))
            # Backward runs where it is called. Else replicas that share a GPU would share its thread of autograd,
            # where the first would wait for the others' gradients, and they for that thread.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
            if self.default_device.type == device.type != "cpu":
                stack.enter_context(device)  # "the GPU" is each replica's own
            elif self.default_device.type != "cpu":
                stack.enter_context(self.default_device)
            yield
