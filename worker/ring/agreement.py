"""Agreement among ranks: what is checked and copied before the first step, what can be checked after any, and JSON and
tensors sent from one rank to others, such as a restored checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from stratagem.errors import ConfigurationError
from stratagem.rpc.codec import byte_view
from stratagem.worker.ring.communicator import Communicator, name_of


def agree(
    communicator: Communicator,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    asked: str = "",
) -> None:
    """Gives every rank the parameters and buffers of rank 0. ``asked``: what the script asked of ``prepare``. Raises
    ConfigurationError: a rank has other parameters, other hyper-parameters of an optimizer, or asked otherwise."""
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


CHUNK_BYTES = 4 << 20
"""Bytes that one collective moves. A rank that does not want them needs no more memory than this."""


def broadcast_json(communicator: Communicator, value: Any, root: int = 0) -> Any:
    """The value that ``root`` gives, on every rank; anything JSON can hold."""
    is_root = communicator.rank == root
    data = bytearray(json.dumps(value if is_root else None).encode())
    length = int(communicator.broadcast(torch.tensor([len(data)]), root))
    text = torch.frombuffer(data, dtype=torch.uint8) if is_root else torch.empty(length, dtype=torch.uint8)
    return json.loads(bytes(communicator.broadcast(text, root).tolist()))


def gather_json(communicator: Communicator, value: Any) -> list[Any]:
    """The values that the ranks give, on every rank; anything JSON can hold."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(bytes(each.tolist())) for each in communicator.all_gather(data)]


def broadcast_tensors(
    communicator: Communicator, tensors: Mapping[str, torch.Tensor], root: int = 0, wants: bool = True
) -> dict[str, torch.Tensor]:
    """The tensors of ``root`` (contiguous, on the CPU; of other ranks nothing is read) on every rank that ``wants``
    them; on others the result is empty. Every rank has to call it."""
    is_root = communicator.rank == root
    shapes = [[key, name_of(each.dtype), list(each.shape)] for key, each in tensors.items()]
    entries = broadcast_json(communicator, shapes if is_root else None, root)
    if is_root:
        held = dict(tensors)
    else:
        held = {key: torch.empty(shape if wants else 0, dtype=getattr(torch, dtype)) for key, dtype, shape in entries}
    sizes = [torch.Size(shape).numel() * held[key].element_size() for key, _, shape in entries]
    views = [held[key].view(-1).view(torch.uint8) for key, _, _ in entries] if is_root or wants else []
    scratch = torch.empty(min(CHUNK_BYTES, sum(sizes)), dtype=torch.uint8)
    for pieces in _chunks(sizes):
        chunk = scratch[: sum(stop - start for _, start, stop in pieces)]
        if is_root:
            torch.cat([views[index][start:stop] for index, start, stop in pieces], out=chunk)
        communicator.broadcast(chunk, root)
        if not is_root and wants:
            lengths = [stop - start for _, start, stop in pieces]
            for (index, start, stop), part in zip(pieces, chunk.split(lengths), strict=True):
                views[index][start:stop] = part
    return held if is_root or wants else {}


def _chunks(sizes: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Pieces (which, from byte, to byte) of flat memories, chunk by chunk."""
    chunks: list[list[tuple[int, int, int]]] = []
    room = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if not room:
                chunks.append([])
                room = CHUNK_BYTES
            stop = min(size, start + room)
            chunks[-1].append((index, start, stop))
            room -= stop - start
            start = stop
    return chunks
