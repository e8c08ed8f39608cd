"""What layers over remote tables have in common: the weights of a batch, and being a module without weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from stratagem.arguments import checked
from stratagem.checkpoint.server_state import SavedRows
from stratagem.cluster.initial_rows import Distribution, InitialRows
from stratagem.errors import ConfigurationError
from stratagem.nn.initial import Constant, Normal, Uniform, initial_rows
from stratagem.ps.row_values import fill_rows
from stratagem.strategy.current import current_strategy
from stratagem.worker.push.remote_table import RemoteTable
from stratagem.worker.push.row_reads import Occurrences, Places, are_within, array_of, found_in

Sizes = tuple[int, int, int | None]
"""Of a table: rows, elements of a row, the row of the padding."""


class BatchRows(NamedTuple):
    """The rows that a batch uses, each once."""

    rows: torch.Tensor
    """On the device of the ids."""
    place: torch.Tensor
    """Where each id's row is among them, in the shape of the ids."""
    padding: int | None
    """Where the padding row is."""
    found: Occurrences
    """The same as ``place``, for backward."""


class TableLayer(nn.Module):
    """A layer beside a class of ``torch.nn``. Where the strategy holds tables, building one yields the subclass whose
    rows are on parameter servers."""

    weight: torch.Tensor
    scale_grad_by_freq: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        is_built = bool(args or kwargs)  # copy and pickle make an empty one
        remote = [kind for kind in cls.__subclasses__() if issubclass(kind, RemoteRows)]
        return super().__new__(remote[0] if remote and is_built and current_strategy().holds_tables else cls)

    @classmethod
    @checked
    def from_pretrained(cls, embeddings: torch.Tensor, freeze: bool = True, *args: Any, **kwargs: Any) -> Any:
        """Like torch's ``from_pretrained``: a table of these rows, not trained unless ``freeze=False``.

        On parameter servers the lead sends them in ``prepare``, 32 MiB at a time, if the job has no such table yet: a
        job that resumes keeps what it has trained. Pass the rows on every worker and do not change them: they are kept
        for a ps that restarts without a checkpoint. Rows of a mapped file (``torch.load(path, mmap=True)``,
        ``torch.from_numpy(numpy.memmap(...))``) are never copied as a whole.
        """
        make: Any = super().from_pretrained  # type: ignore[misc]  # of the class of torch.nn beside this one
        if len(args) < 5:  # of both layers sparse is the fifth argument after freeze
            kwargs.setdefault("sparse", True)
        return make(embeddings, freeze, *args, **kwargs)

    def export_form(self) -> Any:
        """A plain layer of ``torch.nn`` with a copy of all rows, frozen if this one is."""
        plain: Any = nn.EmbeddingBag if isinstance(self, nn.EmbeddingBag) else nn.Embedding
        settings = {name: getattr(self, name) for name in plain.__constants__}
        settings["sparse"] = not self.scale_grad_by_freq
        return plain(**settings, _weight=self.whole_weight()).requires_grad_(self.weight.requires_grad)

    def whole_weight(self) -> torch.Tensor:
        """A copy of all rows, ``(num_embeddings, embedding_dim)``."""
        return self.weight.detach().clone()


class RemoteRows(nn.Module):
    """A layer whose ``weight`` is a table on parameter servers; beside a class of ``torch.nn``.

    Its only parameter, ``weight``, has the table's shape and no memory: optimizers, counts of parameters and names of
    a ``state_dict`` are those of the layer with weights.
    """

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    max_norm: float | None
    remote_table: RemoteTable

    def build(
        self,
        sizes: Sizes,
        initial: InitialRows | torch.Tensor,
        dtype: torch.dtype | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        freeze: bool = False,
    ) -> None:
        """In the place of the constructor of the class in ``torch.nn``, whose arguments these are. ``initial``: how the
        rows begin, or all of them, which are read in ``prepare``; ``dtype``: None: that of the rows, or torch's default
        dtype."""
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim, self.padding_idx = sizes
        self.max_norm, self.norm_type = max_norm, norm_type  # prepare refuses it
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, True
        if isinstance(initial, torch.Tensor):
            check_rows(self.num_embeddings, self.embedding_dim, initial)
        dtype = dtype or (initial.dtype if isinstance(initial, torch.Tensor) else torch.get_default_dtype())
        if not dtype.is_floating_point:
            raise ConfigurationError(f"a table on parameter servers has a floating dtype: give another than {dtype}")
        self.remote_table = RemoteTable(self.num_embeddings, self.embedding_dim, dtype, initial)
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

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Called for ``layer.weight = …`` too, which would share another layer's table, or bring rows."""
        if name == "weight" and param is not self.remote_table.handle:
            self.remote_table.handle.refuse("replacing (to share a table, call one layer twice)")
        super().register_parameter(name, param)

    def _begin_with(
        self, distribution: Distribution, first: float, second: float, generator: torch.Generator | None
    ) -> None:
        """As torch fills a weight: the padding row too."""
        init = {"normal": Normal, "uniform": Uniform}.get(distribution, lambda value, _: Constant(value))(first, second)
        seed = 0 if isinstance(init, Constant) else None  # torch draws no number either for what is the same everywhere
        self.remote_table.begin_with(initial_rows(init, seed, None, generator))

    def _fill_padding_idx_with_zero(self) -> None:
        """What ``reset_parameters()`` does after it has filled the weight."""
        initial = self.remote_table.initial
        if self.padding_idx is not None:
            self.remote_table.begin_with(dataclasses.replace(initial, zero_row=self.padding_idx))

    def batch_rows(self, ids: torch.Tensor) -> BatchRows:
        """The rows that a batch uses, each once; ids are int32 or int64, of any shape, or nested (``torch.jagged``). In
        backward the table gets the rows' gradients. Raises IndexError: an id that the table does not have;
        ConfigurationError: ids of another dtype, or a weight put in the table's place (``functional_call``)."""
        table = self.remote_table
        if self._parameters["weight"] is not table.handle:
            table.handle.refuse("replacing")
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64):
            came = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise ConfigurationError(f"expected a tensor of ids, int32 or int64, got {came}")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise ConfigurationError(
                f"{table.title} under torch.vmap or another of torch.func's, where ids have no values to ask the "
                "parameter servers for: call the layer with all ids outside, and give the function the rows"
            )
        if torch._C._is_tracing():
            raise ConfigurationError(
                f"{table.title} under torch.jit.trace, which would keep the rows of these ids for all others: trace a "
                "model whose tables are layer.export_form(), or write a program with sg.Model.save"
            )
        flat = ids.values() if ids.is_nested else ids
        array = array_of(flat)
        if not are_within(array, self.num_embeddings):
            raise IndexError(
                f"{table.title}: expected ids from 0 to {self.num_embeddings - 1}, got {int(array.min())} to "
                f"{int(array.max())}"
            )
        first = None if torch.is_grad_enabled() else table.begins_with  # of a pass that trains nothing
        if first is None:
            _, numbers, found, rows = table.lookup(flat, array)
        else:
            numbers, found = found_in(array, self.num_embeddings)
            rows = _picked(first, numbers, table)
        rows = rows.to(ids.device)
        padding = None
        if self.padding_idx is not None:
            at = int(np.searchsorted(numbers, self.padding_idx))
            padding = at if at < len(numbers) and numbers[at] == self.padding_idx else None
        if torch.is_grad_enabled() and table.handle.requires_grad:
            rows.requires_grad_().register_post_accumulate_grad_hook(_gives_gradient(table, numbers, padding))
        place = torch.from_numpy(found.place).view(flat.shape).to(ids.device)
        if ids.is_nested:
            place = nested_as(ids, place)
        return BatchRows(rows, place, padding, found)

    def whole_weight(self) -> torch.Tensor:
        """A copy of all rows, ``(num_embeddings, embedding_dim)``, on the CPU."""
        dtype = self.remote_table.dtype
        weight = torch.empty(self.num_embeddings, self.embedding_dim, dtype=dtype, device="cpu")
        for first, rows in self.remote_table.chunks():
            weight[first : first + len(rows)] = rows
        return weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        wanted = fn(torch.empty(0, dtype=self.remote_table.dtype)).dtype
        if wanted is not self.remote_table.dtype:
            raise ConfigurationError(
                f"a table on parameter servers keeps the dtype it was created with: give it dtype={wanted}"
            )
        return self  # rows come to the device of the ids

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.remote_table.handle

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        key = prefix + "weight"
        if (value := state_dict.get(key)) is None:
            missing_keys.append(key)
        elif not isinstance(value, torch.Tensor | SavedRows):
            error_msgs.append(f"{key}: expected a tensor, got a {type(value).__name__}; torch.from_numpy(array) is one")
        elif value.device.type == "meta":
            error_msgs.append(
                f"{key} has no values: a state_dict does not hold tables of parameter servers. Save and restore "
                "them with sg.Checkpoint"
            )
        elif tuple(value.shape) != (self.num_embeddings, self.embedding_dim):
            shape = [self.num_embeddings, self.embedding_dim]
            error_msgs.append(f"size mismatch for {key}: expected {shape}, got {list(value.shape)}")
        elif value.layout is not torch.strided:
            error_msgs.append(f"{key}: expected rows that lie one after the other, got {value.layout}")
        else:
            self.remote_table.assign(value)


def check_rows(num_embeddings: int, embedding_dim: int, weight: torch.Tensor) -> None:
    if tuple(weight.shape) != (num_embeddings, embedding_dim):
        raise ConfigurationError(f"expected rows of shape {[num_embeddings, embedding_dim]}, got {list(weight.shape)}")
    if weight.device.type == "meta":
        raise ConfigurationError("expected rows with values, got a tensor of device meta")
    if weight.layout is not torch.strided:
        raise ConfigurationError(f"expected rows that lie one after the other, got {weight.layout}: give .to_dense()")


def _picked(initial: InitialRows | torch.Tensor | SavedRows, numbers: Places, table: RemoteTable) -> torch.Tensor:
    """Some of the rows that a table begins with, where the job has none yet."""
    picked = torch.empty(len(numbers), table.width, dtype=table.dtype, device="cpu")
    for out, number in zip(picked.split(1), numbers.tolist(), strict=False):  # of no rows torch makes one part
        if isinstance(initial, InitialRows):
            fill_rows(out, number, initial)
        else:
            out.copy_(initial[number : number + 1])
    return picked


def nested_as(ids: Any, values: torch.Tensor) -> torch.Tensor:
    """Values in the place of those of nested ids."""
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, ids.offsets(), ids.lengths())
    return nested


def has_sparse_gradient(place: torch.Tensor, scale_grad_by_freq: bool) -> bool:
    """Whether torch gives the gradient of a batch's rows by occurrence; it has none divided by frequency. On the CPU
    :func:`summed_by_row` is then more than twice as fast as its dense backward, which adds row by row."""
    return place.device.type == "cpu" and not scale_grad_by_freq


def summed_by_row(found: Occurrences, values: torch.Tensor, per_value: int = 1) -> torch.Tensor:
    """The gradients of rows by occurrence, one for each ``per_value`` of them in turn, as one of each row. Most batches
    have most rows once: those are copied, the others added."""
    one, others = found.one, found.others
    if not len(found.place):
        return values.new_zeros(len(one), values.shape[1])
    dense = values.index_select(0, torch.from_numpy(one // per_value if per_value > 1 else one))
    if len(others):
        rows = torch.from_numpy(found.place[others])
        dense.index_add_(0, rows, values.index_select(0, torch.from_numpy(others // per_value)))
    return dense


class _Pooled(torch.autograd.Function):
    """Bags of one size on the CPU. torch's own sparse backward writes the gradient of a bag once for each of its ids;
    what is wanted is one for each row, which comes from the bags at once."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, place: torch.Tensor, mode: str, found: Occurrences) -> torch.Tensor:
        ctx.found, ctx.per_bag, ctx.is_mean = found, place.shape[1], mode == "mean"
        return nn.functional.embedding_bag(place, rows.detach(), mode=mode)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.is_mean:
            gradient = gradient / ctx.per_bag
        return summed_by_row(ctx.found, gradient, ctx.per_bag), None, None, None


def pooled(rows: torch.Tensor, place: torch.Tensor, mode: str, found: Occurrences) -> torch.Tensor:
    """Sums or means of ``rows`` by bag, ``(bags, width)``; ``place``: ``(bags, ids of each)``, on the CPU; ``found``
    is the same."""
    result: torch.Tensor = _Pooled.apply(rows, place, mode, found)  # type: ignore[no-untyped-call]
    return result


def _gives_gradient(table: RemoteTable, numbers: Any, padding: int | None) -> Callable[[torch.Tensor], None]:
    def on_gradient(rows: torch.Tensor) -> None:
        gradient, rows.grad = rows.grad, None
        assert gradient is not None
        if not table.handle.requires_grad:  # as of the weight of a layer that is frozen between forward and backward
            return
        if gradient.is_sparse:
            found = Occurrences.of(gradient._indices()[0].numpy(), len(gradient))
            gradient = summed_by_row(found, gradient._values())
        if padding is None:
            table.accumulate(numbers, gradient)
        else:
            kept = np.arange(len(numbers)) != padding
            table.accumulate(numbers[kept], gradient[torch.from_numpy(kept).to(gradient.device)])

    return on_gradient
