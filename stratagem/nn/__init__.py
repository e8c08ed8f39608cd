"""``sg.nn``: layers whose weights may be outside this process."""

from typing import Any

from stratagem.nn.embedding import Embedding, EmbeddingBag
from stratagem.nn.initial import Constant, Normal, Uniform
from stratagem.strategy.loss_scaling import compute_average_loss as compute_average_loss  # tf.nn has them
from stratagem.strategy.loss_scaling import scale_regularization_loss as scale_regularization_loss
from stratagem.tensorflow_names import no_attribute

__all__ = ["Constant", "Embedding", "EmbeddingBag", "Normal", "Uniform"]


def __getattr__(name: str) -> Any:
    raise no_attribute(f"module {__name__!r}", name, __name__)
