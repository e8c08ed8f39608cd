"""The same model everywhere: what is checked and copied before the first step, and what can be checked after any."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

import torch

from stratagem.errors import ConfigurationError
from stratagem.rpc.codec import byte_view
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.state_broadcast import gather_json


def agree(
    communicator: Communicator,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    asked: str = "",
) -> None:
    """Gives every rank the parameters and buffers of rank 0.

    Args:
        asked: what the script asked of ``prepare``.

    Raises:
        ConfigurationError: a rank has other parameters, other hyper-parameters of an optimizer, or asked otherwise.
    """
    mine = [asked, *_describe(models, optimizers)]
    different = _others(communicator, hashlib.sha256("\n".join(mine).encode()).digest())
    if different:
        texts = gather_json(communicator, mine)
        first, other = texts[0], texts[rank := different[0]]
        unlike = ((one, another) for one, another in zip(first, other, strict=False) if one != another)
        here, there = next(unlike, (f"{len(first) - 1} tensors and groups", f"{len(other) - 1}"))
        raise ConfigurationError(
            f"every worker must prepare the same model and optimizers: rank 0 has {here}, rank {rank} has {there}"
        )
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    tensors += [tensor for optimizer in optimizers for group in optimizer.param_groups for tensor in group["params"]]
    for tensor in dict.fromkeys(tensors):
        communicator.broadcast(tensor)


def same_everywhere(communicator: Communicator, models: Iterable[torch.nn.Module]) -> bool:
    """Whether every rank has the same bits in every parameter."""
    digest = hashlib.sha256()
    for model in models:
        for parameter in model.parameters():
            digest.update(byte_view(parameter))
    return not _others(communicator, digest.digest())


def without_addresses(settings: str) -> str:
    """Settings in words, without where functions and objects lie: each process has its own."""
    return re.sub(r" at 0x[0-9a-f]+", "", settings)


def _others(communicator: Communicator, digest: bytes) -> list[int]:
    """Ranks that have another digest than rank 0."""
    digests = communicator.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    return [rank for rank, other in enumerate(digests) if not torch.equal(other, digests[0])]


def _describe(models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    lines = [
        f"{name} {list(tensor.shape)} {tensor.dtype}" + ("" if tensor.requires_grad else " (frozen or a buffer)")
        for model in models
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            settings = {name: value for name, value in group.items() if name != "params"}
            lines.append(without_addresses(f"{type(optimizer).__name__} of {len(group['params'])} tensors, {settings}"))
    return lines
