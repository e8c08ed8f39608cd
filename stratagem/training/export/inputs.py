"""What a model is called with, and batches of any size made of it.

Inputs are nested like batches are (:mod:`stratagem.data.nested`). A leaf is a tensor, a :class:`TensorSpec`, or a value
that stays as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from stratagem.arguments import checked
from stratagem.data.nested import is_rows, leaves, map_leaves
from stratagem.errors import ConfigurationError


@checked
@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """An input tensor without its elements."""

    shape: tuple[int | None, ...]
    """Sizes; None in the first place means as many rows as the batch has."""
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if None in self.shape[1:]:
            raise ConfigurationError(
                "expected a shape in which only the first size may be None (the rows of the batch), got "
                f"{list(self.shape)}"
            )

    def to(self, device: torch.device) -> TensorSpec:
        """Itself: a spec has no device. (Whatever can be moved is a leaf to :mod:`stratagem.data.nested`.)"""
        return self

    @property
    def is_batched(self) -> bool:
        """Whether the first dimension is the batch."""
        return self.shape[:1] == (None,)


def as_arguments(inputs: Any) -> tuple[Any, ...]:
    """The positional arguments that ``inputs`` stand for: a tuple is all of them, anything else the only one.
    ConfigurationError: no tensor has rows, or tensors have different numbers of them."""
    arguments = tuple(inputs) if type(inputs) is tuple else (inputs,)
    found = leaves(arguments)
    counts = {len(leaf) for leaf in found if is_rows(leaf)}
    if len(counts) > 1:
        raise ConfigurationError(
            f"expected example_inputs whose tensors share their first dimension, the rows of the batch, got {counts}; "
            "give a TensorSpec with a fixed shape for a tensor that does not grow with the batch"
        )
    if not counts and not any(isinstance(leaf, TensorSpec) and leaf.is_batched for leaf in found):
        raise ConfigurationError(
            "expected example_inputs with a tensor whose first dimension is the batch, or a TensorSpec((None, …)), "
            f"got {inputs!r}"
        )
    return arguments


def batch_of(arguments: tuple[Any, ...], num_rows: int) -> tuple[Any, ...]:
    """Arguments of ``num_rows`` rows, on the CPU.

    Rows of example tensors are repeated in turn. Those of specs, and of tensors without any, are made up: floats are
    normal random numbers (the same each time), integers 0, which is a valid index of any table, booleans False.
    """
    generator = torch.Generator().manual_seed(0)

    def make(leaf: Any) -> Any:
        if is_rows(leaf) and len(leaf):
            rows = torch.as_tensor(leaf).detach().cpu()
            return rows[torch.arange(num_rows) % len(rows)].clone()
        if is_rows(leaf):
            leaf = TensorSpec((None, *leaf.shape[1:]), torch.as_tensor(leaf).dtype)
        if isinstance(leaf, TensorSpec):
            return _made_up(leaf, num_rows, generator)
        return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf

    made: tuple[Any, ...] = map_leaves(arguments, make) if leaves(arguments) else arguments
    return made


def growing(arguments: tuple[Any, ...], batch: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors of ``batch``, made of ``arguments``, that have as many rows as it."""
    pairs = zip(leaves(arguments), leaves(batch), strict=True)
    return [made for leaf, made in pairs if is_rows(leaf) or (isinstance(leaf, TensorSpec) and leaf.is_batched)]


def _made_up(spec: TensorSpec, num_rows: int, generator: torch.Generator) -> torch.Tensor:
    shape = [num_rows if size is None else size for size in spec.shape]
    if spec.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(spec.dtype)
    if spec.dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=spec.dtype)
    return torch.zeros(shape, dtype=spec.dtype)
