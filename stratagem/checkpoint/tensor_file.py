"""Writes a safetensors file from views, hashing on the way.

The library's own writer takes every tensor as bytes at once, which would double the memory of a ps while it saves. The
format is small: length of the header (8 bytes, little endian), JSON header, the elements. Reading uses the library.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import safetensors
import torch

from stratagem.checkpoint.draft import CheckpointDraft
from stratagem.checkpoint.durable import open_file, write_durably

_WRITE_BYTES = 1 << 22
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What a file knows, by its names there."""


def write_tensors(path: pathlib.Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Writes contiguous CPU tensors durably (fsync). In the order given, to a file that does not exist yet. Gives size
    in bytes, and SHA-256 in hex. Raises OSError: the file exists or cannot be written."""
    return write_durably(path, _header(tensors), *_pieces(tensors))


def open_tensors(path: pathlib.Path) -> Any:
    """Opens such a file to read, by the library, which would wait for a pipe's other end. Raises OSError: it cannot be
    read, or is no file. safetensors.SafetensorError: what it holds is not of this format."""
    open_file(path).close()
    try:
        return safetensors.safe_open(path, "pt")
    except RuntimeError as error:  # torch opens it once more; whoever prunes the folder may have removed it meanwhile
        raise OSError(str(error)) from None


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    for tensor in tensors.values():
        view: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
        data = memoryview(view)
        for start in range(0, data.nbytes, _WRITE_BYTES):
            yield data[start : start + _WRITE_BYTES]


def add_tensors(
    draft: CheckpointDraft, stem: str, tensors: Mapping[str, torch.Tensor], max_file_bytes: int
) -> list[str]:
    """Writes tensors into a file of a draft, or several of at most that size (or of one tensor). Returns their names.
    Raises CheckpointError: the disk is full, for example."""
    parts: list[dict[str, torch.Tensor]] = []
    room = 0
    for key, tensor in tensors.items():
        if not parts or tensor.nbytes > room:
            parts.append({})
            room = max_file_bytes
        parts[-1][key] = tensor
        room -= tensor.nbytes
    names = [f"{stem}.safetensors" if len(parts) == 1 else f"{stem}-{i:05d}.safetensors" for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        draft.add(name, partial(write_tensors, tensors=part))
    return names


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        stop = offset + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
