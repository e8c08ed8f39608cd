"""A callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.errors import ConfigurationError
from stratagem.training.callbacks.base import Callback


class LambdaCallback(Callback):
    """Hooks given as functions: ``LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs["loss"]))``.

    Args:
        hooks: by name any hook of :class:`Callback`; each is called with the arguments of that hook.

    Raises:
        ConfigurationError: a name that is no hook, or what cannot be called.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        known = [name for name in vars(Callback) if name.startswith("on_")]
        for name, hook in hooks.items():
            if name not in known:
                raise ConfigurationError(f"expected hooks of {', '.join(known)}, got {name!r}")
            if hook is not None:
                if not callable(hook):
                    raise ConfigurationError(f"expected a function for {name}, got {type(hook).__name__}")
                setattr(self, name, hook)
