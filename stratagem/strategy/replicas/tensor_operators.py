"""What lets an object that has a tensor stand where a tensor can."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from stratagem.errors import ConfigurationError


def _one(name: str) -> Callable[[Any], torch.Tensor]:
    def operator(self: TensorOperators) -> torch.Tensor:
        result: torch.Tensor = getattr(self.value(), name)()
        return result

    return operator


def _two(name: str) -> Callable[[Any, Any], torch.Tensor]:
    def operator(self: TensorOperators, other: Any) -> torch.Tensor:
        result: torch.Tensor = getattr(self.value(), name)(_values(other))
        return result

    return operator


def _refused(name: str) -> Callable[[Any, Any], NoReturn]:
    def operator(self: TensorOperators, other: Any) -> NoReturn:
        raise ConfigurationError(
            f"{name} would put a tensor in the place of the variable; use assign, assign_add or assign_sub"
        )

    return operator


class TensorOperators:
    """Operators and torch's functions see :meth:`value`. ``==`` compares identity: such objects can be keys."""

    def value(self) -> torch.Tensor:
        """The tensor to compute with."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return func(*_values(args), **_values(kwargs or {}))

    def __float__(self) -> float:
        return float(self.value().detach())

    def __int__(self) -> int:
        return int(self.value().detach())

    def __index__(self) -> int:
        return self.value().__index__()

    def __bool__(self) -> bool:
        return bool(self.value().detach())

    def __len__(self) -> int:
        return len(self.value())

    __neg__, __abs__ = _one("__neg__"), _one("__abs__")
    __getitem__ = _two("__getitem__")
    __lt__, __le__, __gt__, __ge__ = _two("__lt__"), _two("__le__"), _two("__gt__"), _two("__ge__")
    __add__, __radd__, __iadd__ = _two("__add__"), _two("__radd__"), _refused("+=")
    __sub__, __rsub__, __isub__ = _two("__sub__"), _two("__rsub__"), _refused("-=")
    __mul__, __rmul__, __imul__ = _two("__mul__"), _two("__rmul__"), _refused("*=")
    __truediv__, __rtruediv__, __itruediv__ = _two("__truediv__"), _two("__rtruediv__"), _refused("/=")
    __floordiv__, __rfloordiv__, __ifloordiv__ = _two("__floordiv__"), _two("__rfloordiv__"), _refused("//=")
    __mod__, __rmod__, __imod__ = _two("__mod__"), _two("__rmod__"), _refused("%=")
    __pow__, __rpow__, __ipow__ = _two("__pow__"), _two("__rpow__"), _refused("**=")
    __matmul__, __rmatmul__, __imatmul__ = _two("__matmul__"), _two("__rmatmul__"), _refused("@=")


def _values(item: Any) -> Any:
    if isinstance(item, TensorOperators):
        return item.value()
    if isinstance(item, Mapping):
        return {key: _values(part) for key, part in item.items()}
    return type(item)(map(_values, item)) if type(item) in (list, tuple) else item
