"""The settings of an optimizer, as a ps gets them with each update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stratagem.errors import ConfigurationError
from stratagem.worker.push.wire import to_struct

_NOT_SENT = {"params", "foreach", "fused", "capturable", "differentiable"}


class HyperParameters:
    """Those of one optimizer, which a script may change at any time."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._names = [name for name in optimizer.defaults if name not in _NOT_SENT]
        self._came: list[list[Any]] = []
        """As they stood in the last step."""
        self._is_plain = False
        """Whether none of them is a tensor or a list, which may change and be the same object."""
        self._values: list[dict[str, Any]] = []
        self._messages: Sequence[Any] = ()

    def messages(self) -> Sequence[Any]:
        """One a param_group; made again only when a value has changed, because that takes a while. ConfigurationError:
        a value is no number, text or list."""
        groups = self._optimizer.param_groups
        came = [[group[name] for name in self._names] for group in groups]
        if came != self._came or not self._is_plain:
            self._came = came
            self._is_plain = all(value is None or isinstance(value, int | float | str) for of in came for value in of)
            values = [self._values_of(group) for group in groups]
            if values != self._values:
                self._values, self._messages = values, [to_struct(each) for each in values]
        return self._messages

    def _values_of(self, group: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the optimizer as they stand in one param_group."""
        values: dict[str, Any] = {}
        for name in self._names:
            of_all = name == "initial_accumulator_value"  # torch reads it there, whatever a group says
            value = self._optimizer.defaults[name] if of_all else group[name]
            if isinstance(value, torch.Tensor):
                value = value.item()
            elif isinstance(value, tuple | list):
                value = [item.item() if isinstance(item, torch.Tensor) else item for item in value]
            if not isinstance(value, float | int | str | list | type(None)):
                raise ConfigurationError(
                    f"expected a number, text or list for the hyper-parameter {name} of "
                    f"{type(self._optimizer).__name__}, got {type(value).__name__}"
                )
            values[name] = value
        return values
