"""Lets an object that has a tensor stand in wherever a tensor can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from stratagem.data.nested import map_values
from stratagem.errors import ConfigurationError


def _of_value(name: str) -> Callable[..., torch.Tensor]:
    def operator(self: TensorOperators, *others: Any) -> torch.Tensor:
        result: torch.Tensor = getattr(self.value(), name)(*map(_values, others))
        return result

    return operator


def _refused(name: str) -> Callable[[Any, Any], NoReturn]:
    def operator(self: TensorOperators, other: Any) -> NoReturn:
        raise ConfigurationError(
            f"{name} would replace the variable with a tensor; use assign, assign_add or assign_sub"
        )

    return operator


class TensorOperators:
    """Operators and torch's functions use :meth:`value`; ``==`` too, and such objects can be keys, as tensors can."""

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

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.value())

    __neg__, __abs__ = _of_value("__neg__"), _of_value("__abs__")
    __getitem__ = _of_value("__getitem__")
    __lt__, __le__, __gt__, __ge__ = _of_value("__lt__"), _of_value("__le__"), _of_value("__gt__"), _of_value("__ge__")
    __eq__, __ne__, __hash__ = _of_value("__eq__"), _of_value("__ne__"), object.__hash__  # type: ignore[assignment]
    __add__, __radd__, __iadd__ = _of_value("__add__"), _of_value("__radd__"), _refused("+=")
    __sub__, __rsub__, __isub__ = _of_value("__sub__"), _of_value("__rsub__"), _refused("-=")
    __mul__, __rmul__, __imul__ = _of_value("__mul__"), _of_value("__rmul__"), _refused("*=")
    __truediv__, __rtruediv__, __itruediv__ = _of_value("__truediv__"), _of_value("__rtruediv__"), _refused("/=")
    __floordiv__, __rfloordiv__, __ifloordiv__ = _of_value("__floordiv__"), _of_value("__rfloordiv__"), _refused("//=")
    __mod__, __rmod__, __imod__ = _of_value("__mod__"), _of_value("__rmod__"), _refused("%=")
    __pow__, __rpow__, __ipow__ = _of_value("__pow__"), _of_value("__rpow__"), _refused("**=")
    __matmul__, __rmatmul__, __imatmul__ = _of_value("__matmul__"), _of_value("__rmatmul__"), _refused("@=")


def _values(item: Any) -> Any:
    return map_values(item, lambda part: part.value() if isinstance(part, TensorOperators) else part)
