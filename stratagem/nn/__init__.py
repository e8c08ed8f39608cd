"""``sg.nn``: layers whose weights may live elsewhere than in this process."""

from stratagem.nn.embedding import Embedding
from stratagem.nn.embedding_bag import EmbeddingBag
from stratagem.nn.initial import Constant, Normal, Uniform

__all__ = ["Constant", "Embedding", "EmbeddingBag", "Normal", "Uniform"]
