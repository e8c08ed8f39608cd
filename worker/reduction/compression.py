"""Compressions of gradients by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from stratagem.cluster.spec import nearest
from stratagem.errors import ConfigurationError
from stratagem.worker.reduction.compress_cast import CastCompression
from stratagem.worker.reduction.compress_int8 import Int8Compression
from stratagem.worker.reduction.compress_interface import BucketPart, GradientCompression
from stratagem.worker.reduction.compress_powersgd import PowerSGDCompression
from stratagem.worker.reduction.compress_topk import TopKCompression

__all__ = ["BucketPart", "GradientCompression", "compression_named"]


_COMPRESSIONS: dict[str, Callable[..., GradientCompression]] = {
    "bf16": functools.partial(CastCompression, "bf16", torch.bfloat16),
    "fp16": functools.partial(CastCompression, "fp16", torch.float16),
    "int8": Int8Compression,
    "powersgd": PowerSGDCompression,
    "topk": TopKCompression,
}


def compression_named(name: str, **arguments: Any) -> GradientCompression:
    """A new compression.

    Args:
        name: bf16, fp16, int8, powersgd or topk.
        arguments: of its class: ``chunk_elements`` (int8), ``rank`` and ``seed`` (powersgd), ``ratio`` (topk).

    Raises:
        ConfigurationError: no such compression, or no such argument.
    """
    if name not in _COMPRESSIONS:
        raise ConfigurationError(f"unknown compression {name!r}; {nearest(name, _COMPRESSIONS)}")
    build = _COMPRESSIONS[name]
    known = inspect.signature(build).parameters
    for argument in arguments:
        if argument not in known:
            offer = nearest(argument, known) if known else "it has none"
            raise ConfigurationError(f"unknown argument {argument!r} of compression {name}; {offer}")
    return build(**arguments)
