"""What strategies look for in models and optimizers: layers with sparse gradients, parameters, buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn


def sparse_embeddings(models: Iterable[nn.Module]) -> list[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    """Embeddings whose gradients are sparse, with the names that messages give them."""
    layers = (named for model in models for named in model.named_modules())
    return [
        (name or "the embedding", layer)
        for name, layer in layers
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    ]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Those of all its groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def copies_of_buffers(modules: Iterable[nn.Module]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The modules' own buffers (not those of their parts), each with a copy."""
    return [(buffer, buffer.clone()) for module in modules for buffer in module.buffers(recurse=False)]


@torch.no_grad()
def restore_buffers(kept: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Puts back what :func:`copies_of_buffers` has copied."""
    for buffer, old in kept:
        buffer.copy_(old)
