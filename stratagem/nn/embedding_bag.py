"""``sg.nn.EmbeddingBag``: sums or means of rows of a table that lives where the strategy keeps tables."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from stratagem.arguments import checked
from stratagem.errors import ConfigurationError
from stratagem.nn.embedding import checked_sizes, own_weight, with_sparse
from stratagem.nn.initial import Init, Normal, initial_rows
from stratagem.nn.remote_rows import RemoteRows, TableLayer, has_sparse_gradient, pooled


class EmbeddingBag(TableLayer, nn.EmbeddingBag):
    """``torch.nn.EmbeddingBag`` with sparse gradients: as :class:`stratagem.nn.Embedding`, its rows pooled by bag.

    Args:
        num_embeddings: rows.
        embedding_dim: elements of a row.
        max_norm: as in torch; not on parameter servers.
        norm_type: of ``max_norm``.
        scale_grad_by_freq: as of :class:`stratagem.nn.Embedding`.
        mode: "sum" or "mean" of the rows of a bag.
        sparse: True: its gradients are.
        _weight: values of all rows, as ``from_pretrained`` gives them; parameter servers get them from the lead, a part
            at a time, in ``prepare``.
        include_last_offset: as in torch: the last offset is the number of ids.
        padding_idx: a row that is left out of every bag.
        device: of the table; on parameter servers rows come to the device of the ids.
        dtype: None: torch's default dtype.
        init: initial values: ``sg.nn.Normal``, ``Uniform`` or ``Constant``.
        seed: of the initial values; None: drawn from torch's generator. The lead's counts.

    Raises:
        ConfigurationError: a mode, size, padding or initial values that cannot be.
    """

    @checked
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Literal["sum", "mean"] = "mean",
        sparse: bool = True,
        _weight: torch.Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        init: Init = Normal(),  # noqa: B008 - immutable
        seed: int | None = None,
    ) -> None:
        num_embeddings, embedding_dim, padding_idx = sizes = checked_sizes(
            num_embeddings, embedding_dim, padding_idx, dtype, sparse
        )
        if mode not in ("sum", "mean"):
            raise ConfigurationError(
                f"expected mode 'sum' or 'mean' (torch has no sparse gradient of 'max'), got {mode!r}"
            )
        initial = initial_rows(init, seed, padding_idx) if _weight is None else _weight
        if isinstance(self, RemoteRows):
            self.build(sizes, initial, dtype, max_norm, norm_type, scale_grad_by_freq)
            self.mode, self.include_last_offset = mode, include_last_offset
            return
        super().__init__(
            num_embeddings,
            embedding_dim,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode=mode,
            sparse=not scale_grad_by_freq,
            _weight=own_weight(sizes, initial, device, dtype),
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
        )

    @classmethod
    @checked
    def from_pretrained(cls, embeddings: torch.Tensor, freeze: bool = True, *args: Any, **kwargs: Any) -> Any:
        """As ``torch.nn.EmbeddingBag.from_pretrained``; see :meth:`Embedding.from_pretrained`."""
        return super().from_pretrained(embeddings, freeze, *args, **with_sparse(args, kwargs))

    def export_form(self) -> nn.EmbeddingBag:
        """A plain ``nn.EmbeddingBag`` with a copy of all rows."""
        return nn.EmbeddingBag(
            self.num_embeddings,
            self.embedding_dim,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            mode=self.mode,
            sparse=not self.scale_grad_by_freq,
            _weight=self.whole_weight(),
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )


class RemoteEmbeddingBag(RemoteRows, EmbeddingBag):
    """An :class:`EmbeddingBag` whose rows live on parameter servers."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types for it
    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One row a bag, ``(bags, embedding_dim)``; arguments as of ``torch.nn.EmbeddingBag``."""
        rows, place, padding, found = self.batch_rows(input)
        sparse = has_sparse_gradient(place, self.scale_grad_by_freq)
        if not len(rows):  # no bag, or empty ones: torch wants a table of one row at least
            rows, sparse = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)]), False
        is_plain = offsets is None and per_sample_weights is None and padding is None and place.dim() == 2
        if is_plain and place.numel() and sparse:
            return pooled(rows, place, self.mode, found)
        return functional.embedding_bag(
            place,
            rows,
            offsets,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            sparse=sparse,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
