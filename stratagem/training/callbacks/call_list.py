"""Calls the callbacks of one ``fit``, ``evaluate`` or ``predict`` in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stratagem.errors import ConfigurationError
from stratagem.training.callbacks.base import Callback
from stratagem.training.model_state import ModelState

_PER_BATCH = tuple(f"on_{kind}_batch_{end}" for kind in ("train", "test", "predict") for end in ("begin", "end"))
_OLDER_NAMES = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}


def listed(callbacks: Callback | Sequence[Callback] | None) -> list[Callback]:
    """One callback, several or none, as a list."""
    return [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())


class CallbackList:
    """Callbacks in their order. A hook of batches costs nothing where no callback has it."""

    def __init__(self, callbacks: Iterable[Callback], model: ModelState, params: Mapping[str, Any]) -> None:
        self.callbacks = list(callbacks)
        self._model = model
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise ConfigurationError(f"expected callbacks of sg.callbacks.Callback, got {callback!r}")
            callback.set_params(params)
            callback.set_model(model)
        self._per_batch: dict[str, list[Callable[..., None]]] = {
            hook: [
                getattr(callback, hook)
                for callback in self.callbacks
                if _has(callback, hook) or _has(callback, _OLDER_NAMES.get(hook, hook))
            ]
            for hook in _PER_BATCH
        }

    def silenced(self) -> CallbackList:
        """A list of none."""
        return CallbackList((), self._model, {})

    def call(self, hook: str, *args: Any) -> None:
        """Calls a hook of every callback."""
        for callback in self.callbacks:
            getattr(callback, hook)(*args)

    def call_batch(self, hook: str, batch: int, logs: Any = None) -> None:
        """Calls a hook of batches of those callbacks that have it."""
        for method in self._per_batch[hook]:
            method(batch, {} if logs is None else logs)


def _has(callback: Callback, hook: str) -> bool:
    """Whether it has a hook of its own."""
    return getattr(type(callback), hook) is not getattr(Callback, hook) or hook in vars(callback)
