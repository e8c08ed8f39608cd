"""The local stand-in for a table on parameter servers: a parameter without memory, and a gradient of rows by number.

The ``grad`` of the parameter that an optimizer holds is a mark of the same kind: setting it to None or to zero
(``zero_grad()``) drops the rows with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
import torch

from stratagem.errors import ConfigurationError
from stratagem.worker.push.layout import Numbers

Distribution = Literal["normal", "uniform", "constant"]

_ABOUT = frozenset(
    (
        *("__len__", "__hash__", "__repr__", "__eq__", "__ne__", "dim", "ndimension", "numel", "nelement", "size"),
        *("stride", "element_size", "is_floating_point", "is_complex", "is_contiguous", "get_device", "requires_grad_"),
        *("empty_like", "zeros_like", "full_like", "is_same_size"),
    )
)
"""Functions that ask about a tensor, or make another of its form."""
_VALUES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})
"""Attributes that are values."""

_FILLS: dict[str, tuple[Distribution, tuple[str, str], tuple[float, float]]] = {
    "normal_": ("normal", ("mean", "std"), (0.0, 1.0)),
    "uniform_": ("uniform", ("from|a", "to|b"), (0.0, 1.0)),
    "fill_": ("constant", ("value", ""), (0.0, 0.0)),
    "constant_": ("constant", ("val", ""), (0.0, 0.0)),
    "zero_": ("constant", ("", ""), (0.0, 0.0)),
}
"""What fills a tensor: the distribution, names of its two numbers, and their defaults in torch."""


LOAD = 'strategy.load_once(lambda: layer.load_state_dict({"weight": rows}))'
"""How a script gives a table values; every worker calls it."""


def _direct(name: str) -> Any:
    """An attribute that every step asks for or sets, four times: through ``__torch_function__`` that takes 4 µs."""
    own = getattr(torch.Tensor, name)

    def read(tensor: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return own.__get__(tensor)

    def write(tensor: torch.Tensor, value: Any) -> None:
        try:
            with torch._C.DisableTorchFunctionSubclass():
                own.__set__(tensor, value)
        except RuntimeError as error:  # what is set has values
            raise ConfigurationError(
                f"the {name} of a table on parameter servers cannot be set like this ({error}): backward() gives it "
                "the rows of the batch. Change the loss, or register_hook on what the layer returns; None drops it"
            ) from None

    return property(read, write)


class WithoutValues(torch.Tensor):
    """A tensor of device "meta" that refuses, with advice, whatever would need or copy its values."""

    harmless: ClassVar[frozenset[str]] = _ABOUT
    grad, requires_grad = _direct("grad"), _direct("requires_grad")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
        if attribute == "is_meta":
            return False  # torch.nn.init leaves tensors of that device alone, without a word
        if name in cls.harmless or (attribute and attribute not in _VALUES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return cls.instead(attribute or name, args, kwargs)

    @classmethod
    def instead(cls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What is done for ``func`` when it is none of the harmless ones."""
        cls.refuse(name)

    @classmethod
    def refuse(cls, what: str) -> NoReturn:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse("pickle (torch.save)")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.refuse("copy.deepcopy")


class TableHandle(WithoutValues, torch.nn.Parameter):
    """Shape, dtype, name and identity of a table. Functions of ``torch.nn.init`` choose its initial values."""

    begin_with: Callable[[Distribution, float, float, torch.Generator | None], None]
    """Takes a distribution and its two numbers; set by whoever makes the table's initial values known to the ps."""

    @classmethod
    def instead(cls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        named = dict(kwargs)
        handle = named.pop("tensor") if "tensor" in named else args[0]
        if name == "data" and len(args) == 1:
            return handle
        if name in ("register_hook", "register_post_accumulate_grad_hook"):
            raise ConfigurationError(
                f"{name} of the weight of a table on parameter servers: its gradient consists of rows, and no hook "
                "would be called. Register it on what the layer returns, whose gradient is computed here"
            )
        if not isinstance(handle, TableHandle) or name not in _FILLS:
            cls.refuse(name)
        distribution, keys, numbers = _FILLS[name]
        given = dict(zip((key.split("|")[0] for key in keys), args[1:], strict=False)) | named
        first, second = (
            float(next((given[key] for key in names.split("|") if key in given), default))
            for names, default in zip(keys, numbers, strict=True)
        )
        handle.begin_with(distribution, first, second, given.get("generator"))
        return handle

    @classmethod
    def refuse(cls, what: str) -> NoReturn:
        raise ConfigurationError(
            f"{what} of the weight of a table on parameter servers, which is not in this process: call the layer to "
            "get rows, layer.export_form() to get all as a plain layer, sg.Checkpoint to save and restore it. Before "
            "prepare, nn.init.normal_, uniform_, constant_, zeros_, ones_, xavier_*_ and init=sg.nn.Normal(std=0.02) "
            f"choose initial values, from_pretrained or layer.load_state_dict({{'weight': rows}}) gives them; after "
            f"it, on every worker:\n    {LOAD}"
        )


class TableGradient(WithoutValues):
    """Marks that a table has a gradient."""

    harmless = _ABOUT | {"zero_", "detach_", "_foreach_zero_"}

    @classmethod
    def refuse(cls, what: str) -> NoReturn:
        raise ConfigurationError(
            f"{what} of the gradient of a table on parameter servers, of which this process has only the rows of its "
            "batch, elsewhere: clip with strategy.prepare(..., clip_norm=), which counts tables and all ps, or clip "
            "the other parameters alone"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class RowGradient:
    """Some rows of a gradient; the others are zero."""

    numbers: Numbers
    values: torch.Tensor
    """``(len(numbers), width)``, on the CPU, contiguous."""


class PendingRows:
    """The rows that backward has given a table so far."""

    def __init__(self, handle: torch.nn.Parameter) -> None:
        self._handle = handle
        self._dtype = handle.dtype
        self._parts: list[RowGradient] = []
        self._mark = torch.empty_like(handle).as_subclass(TableGradient)
        """What the handle has for a gradient while there is one."""
        self._version = -1
        self.share = 1.0
        """Staleness 0: the part of its global batch that the batch in hand is."""
        self._shares: set[float] = set()
        """Of the batches whose rows are here."""

    def add(self, numbers: Numbers, values: torch.Tensor) -> None:
        """A backward has reached the table. Takes ``values`` over."""
        if not self._is_current():
            self._parts.clear()
            self._shares.clear()
            self._handle.grad = self._mark
            self._version = self._mark._version
        self._parts.append(RowGradient(numbers, values.to("cpu", self._dtype).contiguous()))
        self._shares.add(self.share)

    def mixes_shares(self) -> bool:
        """Whether there are rows of a batch with another share."""
        return self._is_current() and bool(self._shares - {self.share})

    def total(self) -> RowGradient | None:
        """The sum of what came; None without any. What was set to zero has no rows, and torch counts its updates."""
        if not self._is_current():
            self._parts.clear()
            if self._handle.grad is not self._mark:
                return None
            return RowGradient(np.empty(0, np.int64), torch.empty(0, self._handle.shape[1], dtype=self._dtype))
        if len(self._parts) > 1:
            numbers, place = np.unique(np.concatenate([part.numbers for part in self._parts]), return_inverse=True)
            values = torch.cat([part.values for part in self._parts])
            summed = values.new_zeros(len(numbers), values.shape[1]).index_add_(0, torch.from_numpy(place), values)
            self._parts = [RowGradient(numbers, summed)]
        return self._parts[0]

    def clear(self) -> None:
        self._parts.clear()
        self._handle.grad = None

    def _is_current(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self._handle.grad is self._mark and self._mark._version == self._version
