"""``sg.nn.Embedding``: a table that lives where the strategy keeps tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from stratagem.errors import ConfigurationError
from stratagem.nn.initial import Init, Normal, fill, initial_rows
from stratagem.nn.remote_rows import RemoteRows
from stratagem.strategy.base import current_strategy


class Embedding(nn.Embedding):
    """``torch.nn.Embedding`` with sparse gradients, for tables of any size.

    Built in the scope of a ``ParameterServerStrategy`` its rows live on the parameter servers, which make their initial
    values: a step gets the rows of its batch and pushes their gradients, and no worker holds the table. Everywhere else
    it is an ``nn.Embedding(sparse=True)`` with the same initial values. Its optimizer is ``torch.optim.SGD`` (without
    momentum and weight decay), ``Adagrad`` (without weight decay) or ``SparseAdam``: they change the rows of the batch
    and no other.

    Args:
        num_embeddings: rows.
        embedding_dim: elements of a row.
        padding_idx: a row that is zero at first and gets no gradient.
        dtype: None: torch's default dtype.
        init: initial values: ``sg.nn.Normal``, ``Uniform`` or ``Constant``.
        seed: of the initial values; None: drawn from torch's generator. The lead's counts.

    Raises:
        ConfigurationError: a size, padding or initial values that cannot be.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Embedding:
        is_built = bool(args or kwargs)  # copy and pickle make an empty one
        remote = cls is Embedding and is_built and current_strategy().holds_tables
        return super().__new__(RemoteEmbedding if remote else cls)

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        init: Init = Normal(),  # noqa: B008 - immutable
        seed: int | None = None,
    ) -> None:
        padding_idx = checked_padding(num_embeddings, embedding_dim, padding_idx)
        initial = initial_rows(init, seed, padding_idx)
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            sparse=True,
            _weight=torch.empty(num_embeddings, embedding_dim, dtype=dtype),
        )
        fill(self.weight, initial)

    def export_form(self) -> nn.Embedding:
        """A plain ``nn.Embedding`` with a copy of all rows."""
        weight = self.whole_weight()
        return nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, sparse=True, _weight=weight)

    def whole_weight(self) -> torch.Tensor:
        """A copy of all rows, ``(num_embeddings, embedding_dim)``."""
        return self.weight.detach().clone()


class RemoteEmbedding(RemoteRows, Embedding):
    """An :class:`Embedding` whose rows live on parameter servers."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        init: Init = Normal(),  # noqa: B008 - immutable
        seed: int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = checked_padding(num_embeddings, embedding_dim, padding_idx)
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, True
        self.build(dtype or torch.get_default_dtype(), initial_rows(init, seed, self.padding_idx))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types for it
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of ids of any shape: ``(*input.shape, embedding_dim)``."""
        rows, place, padding = self.batch_rows(input)
        return functional.embedding(place, rows, padding)


def checked_padding(num_embeddings: int, embedding_dim: int, padding_idx: int | None) -> int | None:
    """``padding_idx`` counted from the beginning.

    Raises:
        ConfigurationError: sizes below 1, or a padding that is no row.
    """
    if num_embeddings < 1 or embedding_dim < 1:
        raise ConfigurationError(
            f"expected a table of at least one row and element, got {num_embeddings} x {embedding_dim}"
        )
    if padding_idx is None:
        return None
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ConfigurationError(f"expected a padding_idx within {num_embeddings} rows, got {padding_idx}")
    return padding_idx % num_embeddings
