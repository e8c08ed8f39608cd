"""The interface of callbacks, and what they receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar

from stratagem.errors import ConfigurationError
from stratagem.training.model_state import ModelState

LogsArgument = MutableMapping[str, float] | None
_PER_BATCH = tuple(f"on_{kind}_batch_{end}" for kind in ("train", "test", "predict") for end in ("begin", "end"))
_OLDER_NAMES = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}


class Callback:
    """Observes ``fit``, ``evaluate`` and ``predict``; the hooks are those of Keras.

    Every worker calls its own callbacks. Logs of epochs and tests cover all workers if they run in step;
    logs of batches cover the local replicas since the epoch began, and are computed only when a callback reads them,
    because that waits for the device; a metric that cannot be computed of so few examples is NaN there. Callbacks see
    what earlier callbacks' hooks wrote into the logs.

    ``self.model.stop_training = True`` ends training: at once with one worker, else at the end of the epoch on all
    workers.
    """

    model: ModelState
    """The model being trained."""
    runs_last: ClassVar[bool] = False
    """Whether its hooks are called after those of all others."""
    in_step: bool = False
    """Whether workers that run in step do its work together, so that ``fit`` refuses it on only some of them."""
    params: Mapping[str, Any]
    """"epochs", "steps" (of an epoch, or None) and "verbose"."""

    def set_model(self, model: ModelState) -> None:
        """Called before all hooks."""
        self.model = model

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Called before all hooks."""
        self.params = params

    def state_dict(self) -> dict[str, Any]:
        """The state needed to resume after an interruption, in a form that a checkpoint can hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes where ``state`` was saved."""

    def on_train_begin(self, logs: LogsArgument = None) -> None:
        """Training is about to begin."""

    def on_train_end(self, logs: LogsArgument = None) -> None:
        """Training is over; ``logs`` are those of the last epoch."""

    def on_train_interrupted(self) -> None:
        """An error or a signal ends training, and propagates after this hook. Not a hook of Keras."""

    def on_epoch_begin(self, epoch: int, logs: LogsArgument = None) -> None:
        """An epoch, from 0, is about to begin."""

    def on_epoch_end(self, epoch: int, logs: LogsArgument = None) -> None:
        """An epoch is over; its logs include those of the validation ("val_loss")."""

    def on_epoch_missed(self, epoch: int, logs: LogsArgument = None) -> None:
        """Other workers on parameter servers have done a whole epoch; its logs are theirs. Not a hook of Keras."""

    def on_train_batch_begin(self, batch: int, logs: LogsArgument = None) -> None:
        """A step, from 0 in each epoch, is about to begin."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: LogsArgument = None) -> None:
        """A step is done."""
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: LogsArgument = None) -> None:
        """An older name of ``on_train_batch_begin``."""

    def on_batch_end(self, batch: int, logs: LogsArgument = None) -> None:
        """An older name of ``on_train_batch_end``."""

    def on_test_begin(self, logs: LogsArgument = None) -> None:
        """An evaluation is about to begin."""

    def on_test_end(self, logs: LogsArgument = None) -> None:
        """An evaluation is over; its logs."""

    def on_test_batch_begin(self, batch: int, logs: LogsArgument = None) -> None:
        """A batch is about to be evaluated."""

    def on_test_batch_end(self, batch: int, logs: LogsArgument = None) -> None:
        """A batch was evaluated."""

    def on_predict_begin(self, logs: LogsArgument = None) -> None:
        """A prediction is about to begin."""

    def on_predict_end(self, logs: LogsArgument = None) -> None:
        """A prediction is over."""

    def on_predict_batch_begin(self, batch: int, logs: LogsArgument = None) -> None:
        """A batch is about to be predicted."""

    def on_predict_batch_end(self, batch: int, logs: LogsArgument = None) -> None:
        """A batch was predicted; its outputs are ``logs["outputs"]``."""


class LambdaCallback(Callback):
    """Hooks given as functions: ``LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs["loss"]))``.

    Args:
        hooks: by name, any hook of :class:`Callback`; each is called with the arguments of that hook.

    Raises:
        ConfigurationError: a name is not a hook, or a value is not callable.
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
        for callback in self.callbacks:
            getattr(callback, hook)(*args)

    def call_batch(self, hook: str, batch: int, logs: Any = None) -> None:
        """Calls a hook of batches of those callbacks that have it."""
        for method in self._per_batch[hook]:
            method(batch, {} if logs is None else logs)


def _has(callback: Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(Callback, hook) or hook in vars(callback)
