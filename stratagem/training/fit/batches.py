"""The parts of a batch, and how a module is called with its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from stratagem.data.nested import map_leaves, num_examples


class Batch(NamedTuple):
    """What a step works on."""

    inputs: Any
    targets: Any = None
    weights: torch.Tensor | None = None
    """One for each example."""

    @property
    def size(self) -> int:
        """Examples."""
        if isinstance(self.targets, torch.Tensor) and self.targets.ndim:
            return len(self.targets)
        return num_examples(self.inputs)


def unpack(batch: Any) -> Batch:
    """``(inputs,)``, ``(inputs, targets)`` and ``(inputs, targets, weights)`` by their parts; all else is inputs."""
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields") and 1 <= len(batch) <= 3:
        return Batch(*batch)
    return Batch(batch)


def call(module: Any, inputs: Any) -> Any:
    """``module(*inputs)``, ``module(**inputs)`` or ``module(inputs)``: a list or tuple, a dict, or anything else."""
    if isinstance(inputs, list | tuple):
        return module(*inputs)
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(inputs)


def sample_of(inputs: Any) -> Any:
    """One or two examples of ``inputs``, on the CPU and of their own memory."""
    return map_leaves(
        inputs, lambda leaf: leaf[:2].detach().cpu().clone() if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf
    )
