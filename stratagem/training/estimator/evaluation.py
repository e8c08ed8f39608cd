"""Evaluating and predicting with a checkpoint: objects of their own, apart from those that are trained."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stratagem.checkpoint.catalog import check
from stratagem.checkpoint.durable import patiently
from stratagem.checkpoint.reading import SavedCheckpoint, describe, kind_and_state, read_states
from stratagem.checkpoint.tree import EncodedState
from stratagem.data.nested import map_leaves, num_examples, on_cpu
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.training.estimator.inputs import Input, sample, split
from stratagem.training.estimator.model_function import EstimatorSpec, ModeKeys, ModelFunction, ModelObjects, giving
from stratagem.training.fit.loop import first_batches
from stratagem.training.fit.running_metrics import RunningMetrics, StepResult
from stratagem.training.fit.sources import devices_of, for_evaluation, for_prediction
from stratagem.training.fit.steps import sample_of
from stratagem.training.metrics import Mean, Metric, metrics_of
from stratagem.training.saving.object_states import put_back

logger = logging.getLogger(__name__)


class RestoredObjects:
    """The objects of mode EVAL or PREDICT, with the weights of a checkpoint. The device counts if the strategy is the
    pass-through."""

    def __init__(self, function: ModelFunction, mode: ModeKeys, strategy: Strategy, device: torch.device) -> None:
        self.strategy = strategy
        self.device = device
        self.example: Any = None
        """Features of an example or two."""
        self.objects = ModelObjects()
        self._function = function
        self._mode = mode
        self._first: EstimatorSpec | None = None
        self._loaded: Path | None = None

    def build(self, batch: Any) -> EstimatorSpec:
        """Creates the objects with a small batch, if that has not been done; the answer to the first one."""
        self.example = sample_of(split(batch)[0])
        if self._first is None:
            plain = not self.strategy.places_models
            with contextlib.nullcontext() if plain else self.strategy.scope(), self.objects.building():
                first = self.call(batch)
            self.objects.prepare(self.strategy, False, {})
            if plain:
                for module in self.objects.modules.values():
                    module.to(self.device)
            self._first = first
        return self._first

    def load(self, path: Path | None) -> int:
        """Takes the weights of a checkpoint; returns its step. None: those that the objects were created with.
        CheckpointError: it is damaged, gone, lacks an object, or is of another model."""
        step = 0
        if path is None:
            logger.warning("There is no checkpoint: the model is as it was created")
        else:
            saved, states = patiently(lambda: _read(path, list(self.objects.modules)))
            found = {name: kind_and_state(state) for name, state in states.items()}
            self._loaded = Path()  # of none, if what follows is interrupted
            put_back({name: self.objects.in_use[name] for name in found}, found)
            step = saved.step
        self.objects.global_step, self._loaded = step, path
        return step

    def call(self, batch: Any) -> EstimatorSpec:
        features, labels = split(batch)
        return self._function(features, None if self._mode is ModeKeys.PREDICT else labels, self._mode)

    def results(
        self, step: Any, dataset: Iterable[Any], num_batches: int | None, path: Path | None
    ) -> Iterator[tuple[Any, ...]]:
        """What ``step(batch)`` returns on each local replica, batch by batch, with the weights of the checkpoint."""
        self.objects.train(False)
        with contextlib.closing(first_batches(dataset, num_batches)) as batches:
            for _, batch in batches:
                if self._loaded != path:  # of another prediction that is gone through meanwhile
                    self.load(path)
                with giving(self.objects), torch.no_grad():
                    result = self.strategy.run(step, args=(batch,))
                yield self.strategy.local_results(result)


def evaluate(restored: RestoredObjects, given: Input, path: Path | None, num_batches: int | None) -> dict[str, float]:
    """Loss, metrics and "global_step" of a checkpoint, over at most ``num_batches`` batches. CheckpointError: see
    :meth:`RestoredObjects.load`. ConfigurationError: there is no example."""
    batch, source = sample(given.open())
    first = restored.build(batch)
    step = restored.load(path)
    strategy, device = restored.strategy, restored.device
    running = RunningMetrics(strategy, [_metrics(first, one) for one in devices_of(strategy, device)])

    def count(batch: Any) -> StepResult:
        size = num_examples(split(batch)[0])
        if not size:
            return StepResult(0)
        spec = restored.call(batch)
        if spec.metrics.keys() != first.metrics.keys():
            raise ConfigurationError(
                f"model_fn gives the metrics {', '.join(spec.metrics)}, but gave {', '.join(first.metrics)} at first"
            )
        weight = float(size) if spec.weight is None else spec.weight
        return StepResult(size, dict(spec.metrics), None, spec.loss, weight)

    logs = None
    while logs is None:  # a ring has lost a worker meanwhile
        running.reset()
        for results in restored.results(count, for_evaluation(strategy, source, device), num_batches, path):
            running.add(results)
        logs = running.whole_result()
    return {**logs, "global_step": step}


def predict(restored: RestoredObjects, given: Input, path: Path | None) -> Iterator[Any]:
    """The predictions, example by example, on the CPU, in the order of the input."""
    batch, source = sample(given.open())
    restored.build(batch)
    restored.load(path)

    def answer(batch: Any) -> tuple[int, Any]:
        size = num_examples(split(batch)[0])
        return size, map_leaves(restored.call(batch).predictions, on_cpu) if size else None

    dataset = for_prediction(restored.strategy, source, restored.device)
    for results in restored.results(answer, dataset, None, path):
        for size, predictions in results:
            for row in range(size):
                yield map_leaves(predictions, functools.partial(_row, row))


def _row(row: int, leaf: Any) -> Any:
    return leaf[row] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf


def _read(path: Path, names: list[str]) -> tuple[SavedCheckpoint, dict[str, EncodedState]]:
    check(path)
    saved = describe(path)
    return saved, read_states(saved, names)


def _metrics(spec: EstimatorSpec, device: torch.device) -> dict[str, Metric]:
    """One metric of a replica for each that ``model_fn`` reports, by the same names."""
    found: dict[str, Metric] = {}
    for name, value in spec.metrics.items():
        if name in ("loss", "global_step"):
            raise ConfigurationError(f"a metric cannot be called {name!r}: every result already has that name")
        if isinstance(value, torch.Tensor):
            found[name] = _Reported(name, Mean(lambda outputs, _: outputs))
        elif isinstance(value, tuple) and len(value) == 3:
            kind: Any = value[0]
            is_maker = callable(kind) and not isinstance(kind, nn.Module)
            made = {name: kind(device)} if is_maker else metrics_of({name: kind}, device, takes_probabilities=None)
            found.update((full, _Reported(name, metric)) for full, metric in made.items())
        else:
            raise ConfigurationError(
                f"expected a tensor or (metric, outputs, targets) for the metric {name!r}, got {type(value).__name__}"
            )
    return found


class Predictor(nn.Module):
    """The answers of a ``model_fn`` in mode PREDICT as a plain module, which can be exported; its parts have the names
    of its modules."""

    def __init__(self, function: ModelFunction, objects: ModelObjects, global_step: int) -> None:
        super().__init__()
        self.global_step = global_step
        self._function = function
        self._optimizers = objects.optimizers  # a model_fn may make them whatever the mode, as TensorFlow's do
        for name, module in objects.modules.items():
            self.add_module(name, module)
        self.eval()

    def forward(self, features: Any) -> Any:
        """The predictions that ``model_fn`` gives for these features in mode ``PREDICT``."""
        with giving(self):
            return self._function(features, None, ModeKeys.PREDICT).predictions

    def get_or_create(self, name: str, factory: Callable[[], Any]) -> Any:
        made = {**self._modules, **self._optimizers}
        if name not in made:
            raise ConfigurationError(f"model_fn did not create {name!r} in its first call in mode PREDICT")
        return made[name]


class _Reported:
    """A metric that takes what ``model_fn`` reports under a name."""

    def __init__(self, name: str, metric: Metric) -> None:
        self._name = name
        self._metric = metric
        self.reset, self.states, self.compute = metric.reset, metric.states, metric.compute

    def update(self, outputs: Any, targets: Any) -> None:
        """Counts the reported value; ``outputs`` are all that was reported."""
        value = outputs[self._name]
        if isinstance(value, torch.Tensor):
            self._metric.update(value.detach(), None)
        else:
            self._metric.update(*value[1:])
