"""``sg.nn.Embedding`` and ``EmbeddingBag``: tables that live where the strategy keeps tables."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from stratagem.arguments import checked
from stratagem.cluster.initial_rows import InitialRows
from stratagem.errors import ConfigurationError
from stratagem.nn.initial import Init, Normal, initial_rows
from stratagem.nn.remote_rows import RemoteRows, Sizes, TableLayer, check_rows, has_sparse_gradient, nested_as, pooled
from stratagem.ps.row_values import fill_rows


class Embedding(TableLayer, nn.Embedding):
    """``torch.nn.Embedding`` with sparse gradients, for tables of any size.

    Built in the scope of a ``ParameterServerStrategy``, it keeps its rows on the parameter servers, which generate
    their initial values: a step fetches the rows of its batch and pushes their gradients, and no worker holds the
    table. Everywhere else it is an ``nn.Embedding(sparse=True)`` with the same initial values. Its optimizer is
    ``torch.optim.SGD`` (without momentum and weight decay), ``Adagrad`` (without weight decay) or ``SparseAdam``, which
    change only the rows of the batch. ``export_form()`` returns a plain layer of ``torch.nn`` with a copy of all rows.

    Args:
        num_embeddings: number of rows.
        embedding_dim: elements of a row.
        padding_idx: a row that is initially zero and gets no gradient.
        max_norm: as in torch; not available on parameter servers.
        norm_type: the norm of ``max_norm``.
        scale_grad_by_freq: as in torch: divides a row's gradient by how often the replica's part of a batch has it.
            Without parameter servers, gradients are then dense, which SparseAdam does not accept.
        sparse: True: its gradients are sparse.
        _weight: values of all rows, as ``from_pretrained`` passes them; parameter servers get them from the lead in
            ``prepare``, a part at a time.
        _freeze: whether the table is not trained.
        device: device of the table; on parameter servers, rows are delivered to the device of the ids.
        dtype: None: torch's default dtype.
        init: initial values: ``sg.nn.Normal``, ``Uniform`` or ``Constant``.
        seed: seed of the initial values; None: drawn from torch's generator. The lead's seed is used.

    Raises:
        ConfigurationError: an invalid size, padding or initial value.
    """

    @checked
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        _weight: torch.Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        init: Init = Normal(),  # noqa: B008 - immutable
        seed: int | None = None,
    ) -> None:
        num_embeddings, embedding_dim, padding_idx = sizes = _checked_sizes(
            num_embeddings, embedding_dim, padding_idx, dtype, sparse
        )
        initial = initial_rows(init, seed, padding_idx) if _weight is None else _weight
        if isinstance(self, RemoteRows):
            self.build(sizes, initial, dtype, max_norm, norm_type, scale_grad_by_freq, _freeze)
            return
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse=not scale_grad_by_freq,  # which torch has no sparse gradient for
            _weight=_own_weight(sizes, initial, device, dtype),
            _freeze=_freeze,
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of ids of any shape: ``(*input.shape, embedding_dim)``; nested (``torch.jagged``) ones of nested ids."""
        if isinstance(input, torch.Tensor) and input.is_nested:  # torch has no sparse gradient of nested ids
            return nested_as(input, self.forward(input.values()))
        if isinstance(input, torch.Tensor) and not input.dim():  # torch fails on its sparse gradient beside a padding
            return self.forward(input.view(1)).squeeze(0)
        return super().forward(input)  # also of what torch.fx traces with


class RemoteEmbedding(RemoteRows, Embedding):
    """An :class:`Embedding` whose rows live on parameter servers."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types for it
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As :meth:`Embedding.forward`."""
        if isinstance(input, torch.Tensor) and (input.is_nested or not input.dim()):
            return super().forward(input)
        rows, place, padding, _ = self.batch_rows(input)
        by_frequency = self.scale_grad_by_freq
        sparse = has_sparse_gradient(place, by_frequency)
        return functional.embedding(place, rows, padding, scale_grad_by_freq=by_frequency, sparse=sparse)


class EmbeddingBag(TableLayer, nn.EmbeddingBag):
    """``torch.nn.EmbeddingBag`` with sparse gradients: like :class:`stratagem.nn.Embedding`, with its rows pooled by
    bag. Arguments that both have mean the same.

    Args:
        mode: "sum" or "mean" of the rows of a bag.
        include_last_offset: as in torch: the last offset is the number of ids.
        padding_idx: a row that is left out of every bag.

    Raises:
        ConfigurationError: an invalid mode, size, padding or initial value.
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
        num_embeddings, embedding_dim, padding_idx = sizes = _checked_sizes(
            num_embeddings, embedding_dim, padding_idx, dtype, sparse
        )
        if mode not in ("sum", "mean"):
            raise ConfigurationError(
                f"expected mode 'sum' or 'mean', got {mode!r}; torch has no sparse gradient of 'max': take "
                "sg.nn.Embedding and the maximum of what it returns, embedding(ids).amax(1)"
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
            _weight=_own_weight(sizes, initial, device, dtype),
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
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
        # Of others torch computes with memory that is not its own.
        if offsets is not None and len(falls := (offsets.diff() < 0).nonzero()):
            at = int(falls[0, -1])
            raise ConfigurationError(
                f"expected offsets in ascending order, where each bag begins, got {offsets[..., at : at + 2].tolist()}"
            )
        if self.include_last_offset and offsets is not None and int(offsets[-1:].sum()) != input.numel():
            raise ConfigurationError(
                f"expected offsets whose last one is the number of ids, {input.numel()} (include_last_offset=True), "
                f"got {offsets.tolist()[-1:]} at their end"
            )
        rows, place, padding, found = self.batch_rows(input)
        sparse = has_sparse_gradient(place, self.scale_grad_by_freq)
        if not len(rows):  # no bag, or empty ones: torch wants a table of one row at least
            rows, sparse = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)]), False
        is_plain = offsets is None and per_sample_weights is None and padding is None and place.dim() == 2
        if is_plain and place.numel() and sparse and not place.is_nested:
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


def _checked_sizes(
    num_embeddings: int, embedding_dim: int, padding_idx: int | None, dtype: torch.dtype | None, sparse: bool
) -> Sizes:
    """The sizes, and ``padding_idx`` counted from the beginning, as numbers of Python, which have no largest one; a
    ConfigurationError for sizes below 1, more than torch can describe, a padding that is no row, or dense gradients."""
    if not sparse:
        raise ConfigurationError(
            "the gradients of sg.nn.Embedding and EmbeddingBag are sparse: leave sparse= out, or use torch.nn's layer, "
            "whose dense gradient is sent"
        )
    if num_embeddings < 1 or embedding_dim < 1:
        raise ConfigurationError(
            f"expected a table of at least one row and element, got {num_embeddings} x {embedding_dim}"
        )
    num_embeddings, embedding_dim = int(num_embeddings), int(embedding_dim)
    row_bytes = embedding_dim * (dtype or torch.get_default_dtype()).itemsize
    if num_embeddings * row_bytes >= 1 << 63:
        raise ConfigurationError(
            f"expected a table of less than 2**63 bytes, got {num_embeddings} rows of {row_bytes} bytes: at most "
            f"{((1 << 63) - 1) // row_bytes} of this width, and no more than memory holds; hash ids to fewer rows"
        )
    if padding_idx is None:
        return num_embeddings, embedding_dim, None
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ConfigurationError(f"expected a padding_idx within {num_embeddings} rows, got {padding_idx}")
    return num_embeddings, embedding_dim, int(padding_idx) % num_embeddings


def _own_weight(
    sizes: Sizes,
    initial: InitialRows | torch.Tensor,
    device: torch.device | str | int | None,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """The weight of a table of this process, with its values."""
    num_embeddings, embedding_dim, _ = sizes
    if isinstance(initial, torch.Tensor):
        check_rows(num_embeddings, embedding_dim, initial)
        return initial.to(device=device, dtype=dtype)
    weight = torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
    if weight.device.type == "cpu":
        fill_rows(weight, 0, initial)
    elif not weight.is_meta:  # which has no values
        values = torch.empty_like(weight, device="cpu")
        fill_rows(values, 0, initial)
        weight.copy_(values)
    return weight
