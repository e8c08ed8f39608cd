"""Names of devices."""

from __future__ import annotations

import os

import torch

from stratagem.errors import ConfigurationError


def parse_device(device: str | torch.device) -> torch.device:
    """The torch device of a name in torch's or TensorFlow's spelling.

    Raises:
        ConfigurationError: no such device.
    """
    if isinstance(device, torch.device):
        return device
    name = device.lower().removeprefix("/").removeprefix("device:").replace("gpu", "cuda")
    try:
        parsed = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(f"expected a device like 'cpu', 'cuda:0' or '/gpu:0', got {device!r}") from None
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"{device!r} was asked for, but torch sees no CUDA device here; use 'cpu'")
    # torch has one CPU; "cpu:1" is a logical one.
    return torch.device("cpu") if parsed.type == "cpu" else parsed


def default_device() -> torch.device:
    """Where a worker computes when nobody says: ``cuda:LOCAL_RANK`` if there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
