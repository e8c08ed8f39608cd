"""``sg.nn.EmbeddingBag``: sums or means of rows of a table that lives where the strategy keeps tables."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from stratagem.errors import ConfigurationError
from stratagem.nn.embedding import checked_padding
from stratagem.nn.initial import Init, Normal, fill, initial_rows
from stratagem.nn.remote_rows import RemoteRows
from stratagem.strategy.base import current_strategy

Mode = Literal["sum", "mean"]


class EmbeddingBag(nn.EmbeddingBag):
    """``torch.nn.EmbeddingBag`` with sparse gradients: as :class:`stratagem.nn.Embedding`, its rows pooled by bag.

    Args:
        num_embeddings: rows.
        embedding_dim: elements of a row.
        mode: "sum" or "mean" of the rows of a bag.
        padding_idx: a row that is left out of every bag.
        dtype: None: torch's default dtype.
        init: initial values: ``sg.nn.Normal``, ``Uniform`` or ``Constant``.
        seed: of the initial values; None: drawn from torch's generator. The lead's counts.

    Raises:
        ConfigurationError: a mode, size, padding or initial values that cannot be.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> EmbeddingBag:
        is_built = bool(args or kwargs)  # copy and pickle make an empty one
        remote = cls is EmbeddingBag and is_built and current_strategy().holds_tables
        return super().__new__(RemoteEmbeddingBag if remote else cls)

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: Mode = "mean",
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
            mode=_checked(mode),
            padding_idx=padding_idx,
            sparse=True,
            _weight=torch.empty(num_embeddings, embedding_dim, dtype=dtype),
        )
        fill(self.weight, initial)

    def export_form(self) -> nn.EmbeddingBag:
        """A plain ``nn.EmbeddingBag`` with a copy of all rows."""
        weight = self.whole_weight()
        return nn.EmbeddingBag(
            self.num_embeddings,
            self.embedding_dim,
            mode=self.mode,
            sparse=True,
            _weight=weight,
            padding_idx=self.padding_idx,
        )

    def whole_weight(self) -> torch.Tensor:
        """A copy of all rows, ``(num_embeddings, embedding_dim)``."""
        return self.weight.detach().clone()


class RemoteEmbeddingBag(RemoteRows, EmbeddingBag):
    """An :class:`EmbeddingBag` whose rows live on parameter servers."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: Mode = "mean",
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        init: Init = Normal(),  # noqa: B008 - immutable
        seed: int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, _checked(mode)
        self.padding_idx = checked_padding(num_embeddings, embedding_dim, padding_idx)
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, True
        self.include_last_offset = False
        self.build(dtype or torch.get_default_dtype(), initial_rows(init, seed, self.padding_idx))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types for it
    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One row a bag, ``(bags, embedding_dim)``; arguments as of ``torch.nn.EmbeddingBag``."""
        rows, place, padding = self.batch_rows(input)
        if not len(rows):  # no bag, or empty ones: torch wants a table of one row at least
            rows = rows.new_zeros(1, self.embedding_dim)
        return functional.embedding_bag(
            place, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights, padding_idx=padding
        )


def _checked(mode: Mode) -> Mode:
    if mode not in ("sum", "mean"):
        raise ConfigurationError(f"expected mode 'sum' or 'mean' (torch has no sparse gradient of 'max'), got {mode!r}")
    return mode
