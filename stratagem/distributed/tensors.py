"""Tensors of a script as the lanes move them: flat, contiguous, on the host, of a dtype that can travel."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from stratagem.rpc.codec import can_travel


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements; no copy of a contiguous tensor on the CPU. A copy is complete when this returns, whatever stream
    of a device was to write to the tensor."""
    return tensor.detach().cpu().contiguous().view(-1)


def room_for(tensor: torch.Tensor) -> torch.Tensor:
    """Where the flat elements of a result go: the tensor's own memory if that is possible; see :func:`put`."""
    return tensor.detach().view(-1) if _is_flat(tensor) else torch.empty(tensor.numel(), dtype=tensor.dtype)


def put(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Gives tensors the flat values that are not in their memory yet; what a device still copies is waited for."""
    for tensor, value in zip(tensors, values, strict=True):
        if not _is_flat(tensor) or value.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(value.view(tensor.shape))
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()


def movable(values: torch.Tensor) -> torch.Tensor:
    """Flat values that are only moved, never added: those of a dtype unknown to the wire travel as their bytes."""
    return values if can_travel(values.dtype) else values.view(torch.uint8)


def name_of(dtype: torch.dtype) -> str:
    """For example "float32"."""
    return str(dtype).removeprefix("torch.")


def told(tensor: torch.Tensor) -> str:
    """For errors: "float32 [16, 64]"."""
    return _words(tensor.dtype, tensor.shape)


@functools.lru_cache(4096)
def _words(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{name_of(dtype)} {list(shape)}"


def _is_flat(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()
