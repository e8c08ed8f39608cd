"""A model, its training and its weights, as callbacks see them."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stratagem.arguments import checked, known_arguments
from stratagem.checkpoint.catalog import next_number
from stratagem.data.nested import num_examples
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.strategy.current import current_strategy
from stratagem.strategy.prepared import strategy_of_scope
from stratagem.tensorflow_names import WithWaysOut
from stratagem.training.export.export import export_model
from stratagem.training.fit.position import FitPosition
from stratagem.training.fit.running_metrics import RunningMetrics
from stratagem.training.fit.sources import Arrays
from stratagem.training.saving.checkpoint import Checkpoint
from stratagem.worker.runtime import active_runtime

logger = logging.getLogger(__name__)

_OF_OPTIMIZERS = {
    **dict.fromkeys(("lr", "learning_rate"), "set model.learning_rate"),
    **dict.fromkeys(("clipnorm", "global_clipnorm", "clipvalue"), "give compile(clip_norm=)"),
}
_NEVER_CALLED = frozenset(
    {
        *("train_step", "test_step", "predict_step", "make_train_function", "make_test_function", "call"),
        *("compute_loss", "compute_metrics", "metrics"),
    }
)
_NOT_CALLED = (
    "which is never called: a step computes the module's forward and compile's loss; for a step of your own, write the "
    "loop, with strategy.run(step, args=(batch,))"
)
_OF_A_FIT = ("is_fitting", "stop_training", "history", "_position", "_running")
"""What a ``fit`` that a callback of another calls gives back to that one."""


class ModelState(WithWaysOut):
    """A model, the progress of its training, and the methods for single batches."""

    fit: Callable[..., Any]
    evaluate: Callable[..., Any]
    predict: Callable[..., Any]

    def __init__(self, strategy: Strategy, module: nn.Module) -> None:
        self.strategy = strategy
        """Whose replicas train it."""
        self.module = module
        """What was given, or, once prepared, what stands for it on all replicas."""
        self.optimizer: torch.optim.Optimizer | None = None
        """Prepared."""
        self.stop_training = False
        """Callbacks set it; see :class:`~stratagem.training.callbacks.base.Callback`."""
        self._original = module
        self._known: list[nn.Parameter] = []
        """The parameters that ``compile`` found."""
        self._example: Any = None
        self._position: FitPosition | None = None
        self._running: RunningMetrics | None = None
        self._num_steps = self._num_fits = self._num_done = 0
        self.is_fitting = False
        """Whether ``fit`` runs."""
        for name in {"train_step", "compute_loss"}.intersection(dir(type(module))):  # others have other frameworks too
            logger.warning("%s defines %s, %s", type(module).__name__, name, _NOT_CALLED)

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuses what Keras would call, and nothing here does. ConfigurationError: the class defines one of them."""
        super().__init_subclass__(**options)
        for name in _NEVER_CALLED.intersection(dir(cls)):
            raise ConfigurationError(f"{cls.__name__} defines {name}, {_NOT_CALLED}")

    @property
    def learning_rate(self) -> float:
        """Learning rate of the optimizer's first group; setting it sets that of all groups."""
        return float(self._compiled_optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        given: Any = value
        if isinstance(given, str | None) or not 0 <= float(given) < math.inf:
            raise ConfigurationError(f"expected a learning rate of at least 0, got {given!r}")
        self._set_rates(lambda _: value)

    def lower_learning_rates(self, factor: float, least: float) -> bool:
        """Multiplies the learning rate of each group of the optimizer by ``factor``, down to ``least``.

        Returns:
            whether any was lowered.
        """
        is_lower = any(group["lr"] > least for group in self._compiled_optimizer.param_groups)
        self._set_rates(lambda rate: min(rate, max(rate * factor, least)))
        return is_lower

    def _set_rates(self, new: Callable[[float], float]) -> None:
        for group in self._compiled_optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(new(float(group["lr"])))
            else:
                group["lr"] = new(group["lr"])

    def check_attributes(self) -> None:
        """Refuses attributes that Keras understands, and that torch would silently accept as new attributes.
        ConfigurationError: one of them was set, or every parameter is frozen. Warns once of a layer that was put in
        after ``compile``."""
        for name in _NEVER_CALLED.intersection(vars(self)):
            raise ConfigurationError(f"model.{name} was set, {_NOT_CALLED}")
        is_of_torch = type(self.optimizer).__module__.startswith("torch.")  # one of the script's own may read them
        for name in _OF_OPTIMIZERS.keys() & vars(self.optimizer).keys() if is_of_torch else ():
            raise ConfigurationError(
                f"optimizer.{name} was set, which torch's optimizers ignore: {_OF_OPTIMIZERS[name]}"
            )
        frozen = (layer for layer in self._original.modules() if vars(layer).get("trainable") is False)
        trained = any(parameter.requires_grad for layer in frozen for parameter in layer.parameters())
        if trained or "trainable" in vars(self) or "trainable" in vars(self._original):
            raise ConfigurationError(
                "trainable was set, which has no effect: call requires_grad_(False) on the module before compile"
            )
        if not any(parameter.requires_grad for parameter in self._original.parameters()):
            raise ConfigurationError(
                "fit has nothing to train: requires_grad is False for every parameter of the module; call "
                "requires_grad_(True) on what is to be trained"
            )
        known = {*map(id, self._known)}
        for name, parameter in self._original.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                logger.warning("%s was put into the module after compile, so it is not trained: compile again", name)
                self._known = [*self._original.parameters()]  # said once
                break

    @property
    def position(self) -> FitPosition:
        """The progress of ``fit``; a checkpoint can save and restore it. ConfigurationError: there was no ``fit``."""
        if self._position is None:
            raise ConfigurationError("the position is that of fit, which has not been called")
        return self._position

    @property
    def num_steps(self) -> int:
        """Steps of all ``fit`` calls, including those before an interruption."""
        return self._num_steps + (self._position.num_steps if self._position is not None else 0)

    @property
    def step_in_epoch(self) -> int:
        """Steps of the epoch so far."""
        return 0 if self._running is None else self._running.num_steps

    @property
    def examples_in_epoch(self) -> int:
        """Examples of the epoch so far; with several workers that run in step, as if each had as many."""
        workers = self.strategy.communicator
        return 0 if self._running is None else self._running.num_examples * (1 if workers is None else workers.size)

    def logs_of_all(self, own: Mapping[str, float]) -> Mapping[str, float]:
        """Loss and metrics of the epoch so far: of all workers if they run in step, in which case every worker must
        call it; else ``own``."""
        if self.strategy.communicator is None or self._running is None:
            return own
        return self._running.result()

    @property
    def is_mid_update(self) -> bool:
        """Whether gradients of some steps of ``fit`` wait for those of further steps, to make one update with them."""
        return self._position is not None and self._position.num_waiting != 0

    @property
    def is_resumed(self) -> bool:
        """Whether ``fit`` resumes where an earlier one was interrupted."""
        return self._position is not None and self._position.is_resumed

    @property
    def has_servers(self) -> bool:
        """Whether parameter servers hold the weights, and their chief the position in the data."""
        return self.strategy.servers is not None

    @property
    def _compiled_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ConfigurationError("there is no optimizer: give compile(optimizer=...)")
        return self.optimizer

    @contextlib.contextmanager
    def _fitting(self) -> Iterator[None]:
        outer = {name: vars(self)[name] for name in _OF_A_FIT}
        self._num_steps, self._position = self.num_steps, None
        self.stop_training = False
        self._num_fits += 1
        self.is_fitting = True
        try:
            yield
            self._num_done += not outer["is_fitting"]
        finally:
            done = self.num_steps
            vars(self).update(outer if outer["is_fitting"] else {"is_fitting": False})
            self._num_steps += done - self.num_steps

    def _scope(self) -> contextlib.AbstractContextManager[Any]:
        current = current_strategy()
        if current.places_models and not self.strategy.places_models:
            raise ConfigurationError(
                f"this sg.Model was built outside of the scope of {type(current).__name__}, which does not train it: "
                "build the sg.Model inside `with strategy.scope():`"
            )
        return contextlib.nullcontext() if current is self.strategy else self.strategy.scope()

    def _check_is_for_all(self) -> None:
        """Raises ConfigurationError: it would train on less than its script has asked for."""
        if self.strategy.places_models:
            return
        if active_runtime() is not None:
            raise ConfigurationError(
                "this worker belongs to a cluster: build the sg.Model inside `with strategy.scope():`, otherwise it "
                "would be trained on this worker only"
            )
        strategy = strategy_of_scope(self._original)
        if strategy is not None and strategy.num_replicas_in_sync > 1:
            raise ConfigurationError(
                f"the module was built inside the scope of {type(strategy).__name__}, but this sg.Model outside, where "
                "one device would train it: build the sg.Model inside `with strategy.scope():` too, or for one device "
                "of copy.deepcopy(module)"
            )

    # -- weights -----------------------------------------------------------------------------------------------

    @checked
    def save(
        self, path: str | os.PathLike[str], example_inputs: Any = None, metadata: Mapping[str, Any] | None = None
    ) -> Path:
        """Exports the model as a program that plain PyTorch runs; ``sg.load_model`` reads it. The lead writes.

        If workers run in step, it exists when any of them returns.

        Args:
            path: path of the folder.
            example_inputs: the module's arguments: its only argument, or a tuple of them; None: those of its last call
                by ``fit``, ``evaluate`` or ``predict``.
            metadata: stored with it; anything JSON can hold.

        Raises:
            ConfigurationError: the module's arguments are unknown.
            ExportError: the program cannot be made; the weights are written all the same.
        """
        example = self._as_arguments(self._example) if example_inputs is None else example_inputs
        try:
            with self._scope(), self.strategy.averaged_buffers(self.module):
                return export_model(self.module, path, example, metadata)
        finally:
            if self.strategy.communicator is not None:
                self.strategy.communicator.barrier()

    @checked
    def save_weights(self, path: str | os.PathLike[str]) -> str:
        """Saves the weights as the only checkpoint in the folder ``path``, and returns its path.

        On parameter servers one worker is enough.
        """
        return Checkpoint(strategy=self.strategy, model=self.module).write(path, step=next_number(path, self.num_steps))

    @checked
    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Loads the weights of a checkpoint of any strategy, or of the newest one in a folder. CheckpointError: it is
        damaged, or belongs to another model."""
        Checkpoint(strategy=self.strategy, model=self.module).restore(path, random=False)

    def state_dict(self) -> dict[str, Any]:
        """The module's ``state_dict()``."""
        return self.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the module's state; every worker calls it, see :meth:`Strategy.load_once`."""
        self.strategy.load_once(lambda: self.module.load_state_dict(state))

    def _as_arguments(self, inputs: Any) -> Any:
        """As ``export_model`` takes them."""
        if isinstance(inputs, Mapping):
            return inspect.signature(self._original.forward).bind(**inputs).args
        return tuple(inputs) if isinstance(inputs, list) else inputs

    # -- single batches ----------------------------------------------------------------------------------------

    @known_arguments
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """One step of training on one GLOBAL batch, the same on every worker: a :meth:`fit` of that batch.

        Args:
            x: inputs, as arrays.
            y: targets.
            sample_weight: a weight for each example.
            class_weight: weight of each class; unnamed classes have 1.
            return_dict: as in :meth:`evaluate`; the result has the same form, for the weights before the step.

        Raises:
            ConfigurationError: as in :meth:`fit`; or on parameter servers, whose chief leases batches of a dataset.
        """
        if self.has_servers:
            raise ConfigurationError(
                "train_on_batch is one step of all workers on one batch, and under parameter servers the chief leases "
                "batches of a dataset: use fit, or MultiWorkerMirroredStrategy"
            )
        batch = Arrays.of(x, y, sample_weight).parts
        history = self.fit([batch], verbose=0, class_weight=class_weight).history
        return as_asked({name: values[-1] for name, values in history.items()}, return_dict)

    @known_arguments
    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """:meth:`evaluate` for one batch."""
        size = num_examples(x)
        return self.evaluate(x, y, batch_size=size, sample_weight=sample_weight, verbose=0, return_dict=return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """:meth:`predict` for one batch."""
        return self.predict(x, batch_size=num_examples(x))


def as_asked(logs: dict[str, float], as_dict: bool) -> Any:
    """A dict by name; else the loss, or a list of the loss and the metrics, as in Keras."""
    values = list(logs.values())
    return logs if as_dict else values[0] if len(values) == 1 else values


def layer_table(module: nn.Module) -> list[str]:
    """A line for each layer with parameters of its own, or no layers inside; a shared parameter counts once."""
    rows = [("Layer", "Type", "Parameters")]
    counted: set[int] = set()
    for name, layer in module.named_modules():
        parameters = list(layer.parameters(recurse=False))
        if not parameters and next(layer.children(), None) is not None:
            continue
        own = [parameter for parameter in parameters if id(parameter) not in counted]
        counted.update(map(id, own))
        rows.append((name or "(the module)", type(layer).__name__, f"{sum(p.numel() for p in own):,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}" for row in rows]
    rule = "-" * len(lines[0])
    total = sum(parameter.numel() for parameter in module.parameters())
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    sums = f"Parameters: {total:,} ({num_bytes / 2**20:.2f} MiB), {trained:,} of them trained"
    return [lines[0], rule, *lines[1:], rule, sums]
