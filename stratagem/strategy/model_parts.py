"""What strategies look for in models and optimizers: layers with sparse gradients, parameters, buffers."""

from __future__ import annotations

import itertools
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


def all_parameters(models: Iterable[nn.Module], groups: Iterable[Iterable[nn.Parameter]]) -> list[nn.Parameter]:
    """Of the groups, then of the models, each once."""
    of_models = (model.parameters() for model in models)
    return [*dict.fromkeys(itertools.chain.from_iterable((*groups, *of_models)))]


def saved_buffers_of(model: nn.Module) -> list[torch.Tensor]:
    """Those in its ``state_dict()``."""
    saved = model.state_dict(keep_vars=True)
    return [buffer for name, buffer in model.named_buffers() if name in saved]


Kept = tuple[nn.Module, str, torch.Tensor | None, torch.Tensor | None]
"""A module, and of one of its own buffers the name, itself, and a copy."""


def copies_of_buffers(modules: Iterable[nn.Module]) -> list[Kept]:
    """The modules' own buffers (not those of their parts), each with a copy."""
    return [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
    ]


@torch.no_grad()
def restore_buffers(kept: Sequence[Kept]) -> None:
    """Puts back what :func:`copies_of_buffers` has copied, also where a module has another tensor since."""
    for module, name, buffer, old in kept:
        module._buffers[name] = buffer
        if buffer is not None and old is not None:
            buffer.copy_(old)
