"""What a script asked of ``prepare``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from stratagem.errors import ConfigurationError
from stratagem.worker.gradient_guard import GradientPolicy

_NUM_DIMENSIONS = {torch.channels_last: 4, torch.channels_last_3d: 5}


@dataclasses.dataclass(frozen=True)
class Preparation(GradientPolicy):
    """What a script asked of ``prepare``; ``Strategy.prepare`` explains each."""

    sync_batchnorm: bool = False
    torch_compile: bool | str | Mapping[str, Any] | None = None
    memory_format: torch.memory_format | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_format is not None and self.memory_format not in _NUM_DIMENSIONS:
            known = " or ".join(map(str, _NUM_DIMENSIONS))
            raise ConfigurationError(f"expected memory_format={known}, or None, got {self.memory_format!r}")

    @property
    def alike(self) -> str:
        """What has to be the same on every worker."""
        return (
            f"prepare(gradients={self.gradients!r}, clip_norm={self.clip_norm}, nan={self.nan!r}, "
            f"sync_batchnorm={self.sync_batchnorm})"
        )

    def lay_out(self, model: torch.nn.Module) -> None:
        """Gives what convolutions compute with the memory format that was asked for, in place."""
        if self.memory_format is None:
            return
        for tensor in (*model.parameters(), *model.buffers()):
            lazy = isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer)
            if not lazy and tensor.dim() == _NUM_DIMENSIONS[self.memory_format]:
                tensor.data = tensor.data.contiguous(memory_format=self.memory_format)

    def compile(self, models: Iterable[torch.nn.Module]) -> None:
        """Has torch compile models, in place, if that was asked for."""
        if self.torch_compile is None or self.torch_compile is False:
            return
        chosen = self.torch_compile
        options = {"mode": chosen} if isinstance(chosen, str) else {} if chosen is True else dict(chosen)
        for model in models:
            # As nn.Module.compile does it, but from a frame that is not torch's own: dynamo leaves those alone, so that
            # an nn.Sequential would not be compiled at all.
            model._compiled_call_impl = torch.compile(_frame_around(model._call_impl), **options)


def _frame_around(call: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return forward
