"""What can be trained on parameter servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stratagem.errors import ConfigurationError
from stratagem.strategy.model_parts import sparse_embeddings
from stratagem.strategy.preparation import Preparation
from stratagem.worker.push.remote_table import RemoteTable


def check_prepared(objects: Sequence[Any], preparation: Preparation) -> None:
    """Looks at what ``prepare`` was given.

    Raises:
        ConfigurationError: it cannot be trained on parameter servers; says what can.
    """
    if any(isinstance(item, torch.amp.GradScaler) for item in objects):
        raise ConfigurationError(
            "a GradScaler cannot be used with parameter servers: gradients leave during backward, still scaled. Use "
            "bfloat16 autocast, which needs no scaling"
        )
    if preparation.sync_batchnorm:
        raise ConfigurationError(
            "sync_batchnorm=True needs workers that run in step and talk to each other: use "
            "MultiWorkerMirroredStrategy (--strategy ring)"
        )
    for name, layer in sparse_embeddings(item for item in objects if isinstance(item, torch.nn.Module)):
        if not isinstance(getattr(layer, "remote_table", None), RemoteTable):
            raise ConfigurationError(
                f"gradients of an nn.Embedding travel dense to parameter servers: give {name} sparse=False, or make "
                "it an sg.nn.Embedding (or EmbeddingBag) inside `with strategy.scope():`, whose rows live on the "
                "parameter servers"
            )
