"""The order of the examples in an epoch: the same on every worker, whoever asks."""

from __future__ import annotations

import hashlib

import torch


def epoch_order(num_examples: int, shuffle: bool, seed: int, dataset: int, epoch: int) -> torch.Tensor:
    """Indices of the examples in the order of one epoch, shape [num_examples], int64.

    Args:
        shuffle: a permutation seeded by (seed, dataset, epoch); else 0, 1, 2, …
        dataset: ordinal of the dataset.
        epoch: pass over it, starting at 0.
    """
    if not shuffle:
        return torch.arange(num_examples)
    digest = hashlib.sha256(f"{seed}/{dataset}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randperm(num_examples, generator=generator)
