"""Names of devices."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from stratagem.errors import ConfigurationError


def parse_device(device: str | torch.device) -> torch.device:
    """The torch device of a name in torch's or TensorFlow's spelling; a ConfigurationError where there is none."""
    if isinstance(device, torch.device):
        return device
    try:
        parsed = torch.device(_spelled(device))
    except (RuntimeError, AttributeError, TypeError):  # it is no text, or no device
        raise ConfigurationError(f"expected a device like 'cpu', 'cuda:0' or '/gpu:0', got {device!r}") from None
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"{device!r} was asked for, but torch sees no CUDA device here; use 'cpu'")
    if parsed.type == "cuda" and (parsed.index or 0) >= (num_devices := torch.cuda.device_count()):
        raise ConfigurationError(
            f"{device!r} was asked for, but torch sees {num_devices} CUDA device{'s' if num_devices > 1 else ''} here: "
            f"expected cuda:0 to cuda:{num_devices - 1}"
        )
    if parsed.type not in ("cpu", "cuda"):
        try:
            torch.empty(0, device=parsed).cpu()
        except (RuntimeError, NotImplementedError, AssertionError):  # meta has no values; others are not in this torch
            raise ConfigurationError(f"{device!r} was asked for, but torch cannot compute on it; use 'cpu'") from None
    # torch has one CPU; "cpu:1" is a logical one.
    return torch.device("cpu") if parsed.type == "cpu" else parsed


def parse_devices(devices: str | torch.device | Sequence[str | torch.device] | None) -> tuple[torch.device, ...]:
    """The devices of the replicas of this process. None: its part of the GPUs that torch sees, else one CPU.

    Workers of one host (LOCAL_WORLD_SIZE, LOCAL_RANK) share out the GPUs. Raises ConfigurationError: no such device,
    none at all, or one that comes twice.
    """
    if devices is None:
        return _own_part_of_gpus()
    try:
        names = [devices] if isinstance(devices, str | torch.device) else list(devices)
    except TypeError:
        raise ConfigurationError(f"expected devices like ['cuda:0', 'cuda:1'], got {devices!r}") from None
    if not names:
        raise ConfigurationError("expected a device for each replica, got none; leave devices out for all GPUs")
    spelled = [_spelled(str(name)) for name in names]
    if len({name if ":" in name else f"{name}:0" for name in spelled}) != len(spelled):
        raise ConfigurationError(
            f"expected each device once, got {', '.join(map(str, names))} ('cpu' is 'cpu:0'); for trying "
            "things out there are logical CPUs: 'cpu:0', 'cpu:1'"
        )
    return tuple(map(parse_device, names))


def _spelled(name: str) -> str:
    return name.lower().removeprefix("/").removeprefix("device:").replace("gpu", "cuda")


def _own_part_of_gpus() -> tuple[torch.device, ...]:
    each = torch.cuda.device_count() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not torch.cuda.is_available() or not each:
        return (default_device(),)
    first = int(os.environ.get("LOCAL_RANK", "0")) * each
    return tuple(torch.device("cuda", first + index) for index in range(each))


def default_device() -> torch.device:
    """Where a worker computes when nobody says: ``cuda:LOCAL_RANK`` if there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def named_devices(names: str) -> list[str] | None:
    """The devices of a list with commas; None where it is empty."""
    return [name.strip() for name in names.split(",")] if names else None
