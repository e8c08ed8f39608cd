"""Tensors from one rank to others, in chunks: what a restored checkpoint gives every rank, and a ring its newcomer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stratagem.worker.ring.communicator import Communicator, name_of

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
    """The tensors of ``root`` on every rank that wants them; every rank has to call it.

    Args:
        communicator: of the ranks.
        tensors: of ``root``: contiguous, on the CPU; of others nothing is read.
        root: whose they are.
        wants: whether this rank is to have them; else the result is empty.
    """
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
