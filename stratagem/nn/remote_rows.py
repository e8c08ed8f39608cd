"""What layers over remote tables have in common: the weights of a batch, and being a module without weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from stratagem.errors import ConfigurationError
from stratagem.nn.initial import Constant, Normal, Uniform, initial_rows, to_wire
from stratagem.ps.row_values import Distribution, InitialRows
from stratagem.worker.remote_table import RemoteTable


class RemoteRows(nn.Module):
    """A layer whose ``weight`` is a table on parameter servers; beside a class of ``torch.nn``.

    Its only parameter, ``weight``, has the table's shape and no memory: optimizers, counts of parameters and names of
    a ``state_dict`` are those of the layer with weights.
    """

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    remote_table: RemoteTable

    def build(
        self,
        initial: InitialRows | torch.Tensor,
        dtype: torch.dtype | None,
        max_norm: float | None,
        freeze: bool = False,
    ) -> None:
        """In the place of the constructor of the class in ``torch.nn``.

        Args:
            initial: how the rows begin, or all of them, which are read in ``prepare``.
            dtype: None: that of the rows, or torch's default dtype.
            max_norm: refused.
            freeze: whether the table is not trained.
        """
        if max_norm is not None:
            raise ConfigurationError(
                "max_norm= writes rows in forward(), and those of parameter servers change in optimizer.step() alone: "
                "leave it out, and use torch.nn.functional.normalize(layer(ids), dim=-1) or clip_norm= of prepare"
            )
        if isinstance(initial, torch.Tensor):
            check_rows(self.num_embeddings, self.embedding_dim, initial)
        dtype = dtype or (initial.dtype if isinstance(initial, torch.Tensor) else torch.get_default_dtype())
        begin = initial if isinstance(initial, torch.Tensor) else to_wire(initial)
        self.remote_table = RemoteTable(self.num_embeddings, self.embedding_dim, dtype, begin)
        self._parameters["weight"] = self.remote_table.handle
        self.remote_table.handle.requires_grad_(not freeze)
        self.remote_table.handle.begin_with = self._begin_with

    @property
    def weight(self) -> Any:
        """What stands for the table: its form, and no values."""
        return self.remote_table.handle

    @weight.setter
    def weight(self, value: Any) -> None:
        self.remote_table.handle.refuse("replacing")

    def _begin_with(
        self, distribution: Distribution, first: float, second: float, generator: torch.Generator | None
    ) -> None:
        """As torch fills a weight: the padding row too."""
        init = {"normal": Normal, "uniform": Uniform}.get(distribution, lambda value, _: Constant(value))(first, second)
        self.remote_table.begin_with(to_wire(initial_rows(init, None, None, generator)))

    def batch_rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """The rows that a batch uses, each once.

        Args:
            ids: of any shape; int32 or int64.

        Returns:
            the rows, on the device of ``ids``; where each id's row is among them, in the shape of ``ids``; and where
            the padding row is. In backward the table gets the rows' gradients.

        Raises:
            IndexError: an id that the table does not have.
        """
        table = self.remote_table
        if ids.dtype not in (torch.int32, torch.int64):
            raise ConfigurationError(f"expected ids of int32 or int64, got {ids.dtype}")
        array = ids.detach().cpu().reshape(-1).numpy().astype(np.int64, copy=False)
        numbers, place = np.unique(array, return_inverse=True)
        if len(numbers) and not (numbers[0] >= 0 and numbers[-1] < self.num_embeddings):
            raise IndexError(
                f"expected ids from 0 to {self.num_embeddings - 1}, got {int(numbers[0])} to {int(numbers[-1])}"
            )
        rows = table.rows(numbers).to(ids.device)
        padding = None
        if self.padding_idx is not None:
            at = int(np.searchsorted(numbers, self.padding_idx))
            padding = at if at < len(numbers) and numbers[at] == self.padding_idx else None
        if torch.is_grad_enabled() and table.handle.requires_grad:
            rows.requires_grad_().register_post_accumulate_grad_hook(_gives_gradient(table, numbers, padding))
        return rows, torch.from_numpy(place).view(ids.shape).to(ids.device), padding

    def whole_weight(self) -> torch.Tensor:
        """A copy of all rows, ``(num_embeddings, embedding_dim)``, on the CPU."""
        dtype = self.remote_table.handle.dtype
        weight = torch.empty(self.num_embeddings, self.embedding_dim, dtype=dtype, device="cpu")
        for first, rows in self.remote_table.chunks():
            weight[first : first + len(rows)] = rows
        return weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        wanted = fn(torch.empty(0, dtype=self.remote_table.handle.dtype)).dtype
        if wanted is not self.remote_table.handle.dtype:
            raise ConfigurationError(
                f"a table on parameter servers keeps the dtype it was made with: give it dtype={wanted}"
            )
        return self  # rows come to the device of the ids

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.remote_table.handle

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        key = prefix + "weight"
        value = state_dict.get(key)
        if value is None:
            missing_keys.append(key)
        elif value.device.type == "meta":
            error_msgs.append(
                f"{key} has no values: a state_dict does not hold tables of parameter servers. Save and restore "
                "them with sg.Checkpoint"
            )
        elif tuple(value.shape) != (self.num_embeddings, self.embedding_dim):
            shape = [self.num_embeddings, self.embedding_dim]
            error_msgs.append(f"size mismatch for {key}: expected {shape}, got {list(value.shape)}")
        else:
            self.remote_table.assign(value)


def check_rows(num_embeddings: int, embedding_dim: int, weight: torch.Tensor) -> None:
    """Refuses rows that are not those of the table."""
    if tuple(weight.shape) != (num_embeddings, embedding_dim):
        raise ConfigurationError(f"expected rows of shape {[num_embeddings, embedding_dim]}, got {list(weight.shape)}")
    if weight.device.type == "meta":
        raise ConfigurationError("expected rows with values, got a tensor of device meta")


def _gives_gradient(table: RemoteTable, numbers: Any, padding: int | None) -> Callable[[torch.Tensor], None]:
    def on_gradient(rows: torch.Tensor) -> None:
        gradient, rows.grad = rows.grad, None
        assert gradient is not None
        if padding is None:
            table.accumulate(numbers, gradient)
        else:
            kept = np.arange(len(numbers)) != padding
            table.accumulate(numbers[kept], gradient[torch.from_numpy(kept).to(gradient.device)])

    return on_gradient
