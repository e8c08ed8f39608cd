"""Metrics by name and those of torchmetrics, counted on each replica and merged when they are read."""

from __future__ import annotations

import logging
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torchmetrics
from torchmetrics import classification

from stratagem.errors import ConfigurationError
from stratagem.strategy.metric_states import States
from stratagem.strategy.prepared_metric import check_counts_all, empty_copy, merged, num_updates, states_of
from stratagem.training.losses import IGNORE_INDEX, Loss, check_order, check_tensors, formed
from stratagem.training.named_losses import NAMED, snake

logger = logging.getLogger(__name__)

MetricFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Counted = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]
"""Values, perhaps with a mask of those that count."""
_Function = Callable[[torch.Tensor, torch.Tensor], _Counted]
_Form = Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]]
OneMetric = str | torchmetrics.Metric | torchmetrics.MetricCollection | MetricFunction
Metrics = OneMetric | Sequence[OneMetric] | Mapping[str, str | torchmetrics.Metric | MetricFunction]


class Metric(Protocol):
    """A metric on one replica."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Counts a batch."""

    def reset(self) -> None:
        """Forgets what was counted."""

    def states(self) -> States:
        """What was counted, as the metric's own tensors."""

    def compute(self, parts: Sequence[States]) -> dict[str, float]:
        """Values by name suffix ("" for the only one), of the states of several replicas together."""


class Mean:
    """Implements :class:`Metric`: the mean of a function of a batch's outputs and targets, of any shape, over all that
    it gives a value for; ``finish`` makes the result of it."""

    def __init__(self, function: _Function, finish: Callable[[float], float] = float) -> None:
        self._function = function
        self._finish = finish
        self._total: torch.Tensor | None = None
        self._count: int | torch.Tensor = 0

    def update(self, outputs: Any, targets: Any) -> None:
        found = self._function(outputs, targets)
        values, counted = found if isinstance(found, tuple) else (found, None)
        total = (values if counted is None else values * counted).sum(dtype=torch.float64)
        self._total = total if self._total is None else self._total.add_(total)
        self._count = self._count + (values.numel() if counted is None else counted.sum())

    def reset(self) -> None:
        self._total, self._count = None, 0

    def states(self) -> States:
        total = torch.zeros((), dtype=torch.float64) if self._total is None else self._total
        return {"total": total, "count": torch.as_tensor(self._count)}

    def compute(self, parts: Sequence[States]) -> dict[str, float]:
        count = sum(int(cast(torch.Tensor, part["count"])) for part in parts)
        total = sum(float(cast(torch.Tensor, part["total"])) for part in parts)
        return {"": self._finish(total / count) if count else float("nan")}


class OfTorchmetrics:
    """Implements :class:`Metric` by a copy of one of torchmetrics, merged by its own reductions, wherever its states
    are. ConfigurationError: it does not count all."""

    def __init__(self, metric: torchmetrics.Metric, device: torch.device, form: _Form | None = None) -> None:
        check_counts_all(metric)
        self._metric, self._form = empty_copy(metric, device), form
        self.reset = self._metric.reset

    def update(self, outputs: Any, targets: Any) -> None:
        self._metric.update(*((outputs, targets) if self._form is None else self._form(outputs, targets)))

    def states(self) -> States:
        return states_of(self._metric)

    def compute(self, parts: Sequence[States]) -> dict[str, float]:
        twin = merged(self._metric, parts)
        if not num_updates(twin):
            return {"": float("nan")}
        value: Any = twin.compute()
        values = {f"_{key}": item for key, item in value.items()} if isinstance(value, Mapping) else {"": value}
        for item in values.values():
            if torch.as_tensor(item).numel() != 1:
                raise ConfigurationError(
                    f"{type(twin).__name__} computes {list(torch.as_tensor(item).shape)} values, and a log has one "
                    "number for each name: ask for an average, or compute it in a callback"
                )
        return {key: float(item) for key, item in values.items()}


def metrics_of(
    given: Metrics | None,
    device: torch.device,
    *,
    takes_probabilities: bool | None = False,
    ignore_index: int = IGNORE_INDEX,
) -> dict[str, Metric]:
    """The metrics of one replica, by the names they have in logs.

    Args:
        given: names, Keras's among them ("accuracy", "top_5_accuracy", "AUC", and each name of a loss),
            metrics of torchmetrics, functions of outputs and targets that return one value an example, or a dict that
            names them.
        takes_probabilities: for "accuracy" of one output: positive answers are above 0.5, not above 0. None: above 0,
            with a warning where the first outputs look like probabilities.
        ignore_index: the class number of targets that the loss ignores; those of classes leave them out, too.

    Raises:
        ConfigurationError: an unknown name, two metrics of one name, or what is no metric.
    """
    pairs = given.items() if isinstance(given, Mapping) else [(None, item) for item in _listed(given)]
    found: dict[str, Metric] = {}
    for key, item in pairs:
        for name, metric in _made(key, item, device, _Positive(takes_probabilities), ignore_index):
            if name in found or name == "loss":
                raise ConfigurationError(
                    f"two metrics are called {name!r}; name them: metrics={{'first': …, 'second': …}}"
                )
            if name.startswith("val_"):
                raise ConfigurationError(
                    f"a metric is called {name!r}, which is the name of a validation value in the logs: give it a "
                    "different name, metrics={'name': …}"
                )
            found[name] = metric
    return found


def _listed(given: Metrics | None) -> Iterable[Any]:
    if given is None:
        return ()
    is_one = isinstance(given, str) or callable(given) or not isinstance(given, Iterable)
    return [given] if is_one else cast(Iterable[Any], given)


def _made(
    key: str | None, item: Any, device: torch.device, positive: _Positive, ignore_index: int
) -> Iterator[tuple[str, Metric]]:
    if isinstance(item, str) and snake(item) in _RATES:
        yield key or item, OfTorchmetrics(_RATES[snake(item)](), device, lambda *both: positive.rated(item, *both))
    elif isinstance(item, str):
        values = _of_tensors(item, _function(item, positive, ignore_index))
        yield key or item, Mean(values, _FINISHES.get(snake(item), float))
    elif isinstance(item, torchmetrics.MetricCollection):
        for name, metric in item.items(keep_base=False):
            yield f"{key}_{name}" if key else name, OfTorchmetrics(metric, device)
    elif isinstance(item, torchmetrics.Metric):
        yield key or snake(type(item).__name__), OfTorchmetrics(item, device)
    elif callable(item) and not isinstance(item, type):
        check_order(item)
        called = key or str(getattr(item, "__name__", snake(type(item).__name__)))
        yield called, Mean(_of_examples(called, item))
    else:
        raise ConfigurationError(
            "expected the name of a metric, one of torchmetrics or a function of outputs and targets, got "
            f"{f'the class {item.__name__}' if isinstance(item, type) else type(item).__name__}"
        )


def _of_examples(name: str, function: MetricFunction) -> MetricFunction:
    """A function that is held to what a mean over all examples needs."""

    def values(outputs: Any, targets: Any) -> torch.Tensor:
        found: Any = function(outputs, targets)
        if not isinstance(found, torch.Tensor) or not found.dim():
            raise ConfigurationError(
                f"a function given as a metric returns a tensor with one value per example, which are averaged; {name} "
                f"returned {'a scalar' if isinstance(found, torch.Tensor) else type(found).__name__}"
            )
        if found.is_complex():
            raise ConfigurationError(f"the mean of a metric is one real number; {name} returned complex ones: .abs()?")
        return found

    return values


def _of_tensors(name: str, function: _Function) -> _Function:
    def values(outputs: Any, targets: Any) -> _Counted:
        instead = "give a function of outputs and targets that returns one value per example"
        check_tensors(f"the metric {name!r}", outputs, targets, instead)
        return function(outputs, targets)

    return values


# -- by name -------------------------------------------------------------------------------------------------------


class _Positive:
    """Which outputs say yes: of probabilities those above 0.5, of logits those above 0."""

    def __init__(self, takes_probabilities: bool | None) -> None:
        self._takes_probabilities = takes_probabilities
        self._threshold = 0.5 if takes_probabilities else 0.0
        self._is_known = takes_probabilities is not None

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        if not self._is_known and outputs.numel():
            self._is_known = True
            low, high = (float(value) for value in outputs.detach().aminmax())
            if low >= 0 and high <= 1:
                logger.warning(
                    "accuracy takes a single output as a logit, positive above 0, unless a loss says otherwise, but "
                    "the outputs range from %.3g to %.3g, as probabilities do: if they are, give the function (outputs "
                    "> 0.5) == (targets > 0.5) as the metric",
                    *(low, high),
                )
        return outputs > self._threshold

    def rated(self, name: str, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities of yes, and whether it is yes, flat."""
        check_tensors(f"the metric {name!r}", outputs, targets, "give one of torchmetrics")
        rates = outputs.float().sigmoid() if self._takes_probabilities is False else outputs.float()
        if bool(((rates < 0) | (rates > 1)).any()):
            raise ConfigurationError(
                f"the metric {name!r} takes probabilities, and the outputs range from {float(rates.amin()):.3g} to "
                f"{float(rates.amax()):.3g}: end the module with a sigmoid, or give one of torchmetrics"
            )
        return rates.flatten(), (formed(targets, outputs) > 0.5).long().flatten()


_THRESHOLDS = torch.tensor([-1e-7, *(number / 199 for number in range(1, 199)), 1 + 1e-7])
"""The thresholds of Keras's AUC: beyond 0 and 1, so that the curve has both ends."""
_RATES: Mapping[str, Callable[[], torchmetrics.Metric]] = {
    "auc": lambda: classification.BinaryAUROC(thresholds=_THRESHOLDS),
    "precision": classification.BinaryPrecision,
    "recall": classification.BinaryRecall,
}
_OF_LOSSES = {"root_mean_squared_error": "mse", "log_cosh_error": "log_cosh"}
"""Metrics that are means of losses of another name; those of their own name are too."""
_FINISHES: Mapping[str, Callable[[float], float]] = {
    "root_mean_squared_error": math.sqrt,
    "cosine_similarity": operator.neg,
}


def _function(given: str, positive: _Positive, ignore_index: int) -> _Function:
    name = snake(given)
    if name in ("accuracy", "acc"):
        return lambda outputs, targets: _correct(outputs, targets, positive, ignore_index)
    if name in ("sparse_categorical_accuracy", "categorical_accuracy"):
        return lambda outputs, targets: _among_top(outputs, targets, 1, ignore_index)
    if name == "binary_accuracy":
        return lambda outputs, targets: _binary(outputs, targets, positive)
    top = re.fullmatch(r"top_(\d+)_accuracy|(?:sparse_)?top_k_categorical_accuracy", name)
    if top:
        return lambda outputs, targets: _among_top(outputs, targets, int(top[1] or 5), ignore_index)
    called = f"the metric {given!r}"
    binary, of_classes = (Loss(each, called) for each in ("binary_crossentropy", "categorical_crossentropy"))
    if name in ("crossentropy", "ce"):
        return lambda outputs, targets: (binary if outputs[:1].numel() <= 1 else of_classes).values(
            outputs.float(), targets, ignore_index
        )
    name = _OF_LOSSES.get(name, name)
    if name in NAMED:
        loss = Loss(name, called)
        return lambda outputs, targets: loss.values(outputs.float(), targets, ignore_index)
    known = ["accuracy", "binary_accuracy", "categorical_accuracy", "sparse_categorical_accuracy", "top_5_accuracy"]
    known += ["top_k_categorical_accuracy", "sparse_top_k_categorical_accuracy", "crossentropy", *_RATES]
    raise ConfigurationError(
        f"expected a metric of {', '.join([*known, *_OF_LOSSES, *sorted(NAMED)])} or one of torchmetrics, got {given!r}"
    )


def _correct(outputs: torch.Tensor, targets: torch.Tensor, positive: _Positive, ignore_index: int) -> _Counted:
    if outputs.numel() == targets.numel() and (outputs.dim() == 1 or outputs.shape[1] == 1):
        return _binary(outputs, targets, positive)
    targets, counted = _class_numbers(outputs, targets, ignore_index)
    return outputs.argmax(1) == targets, counted


def _class_numbers(
    outputs: torch.Tensor, targets: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """And which of them count."""
    if targets.shape == outputs.shape:  # one-hot
        numbers = targets.argmax(1)
        return numbers, torch.ones_like(numbers, dtype=torch.bool)
    numbers = targets.squeeze(1) if targets.dim() == outputs.dim() == 2 and targets.shape[1] == 1 else targets
    return numbers, numbers != ignore_index


def _binary(outputs: torch.Tensor, targets: torch.Tensor, positive: _Positive) -> torch.Tensor:
    return positive(outputs) == (formed(targets, outputs) > 0.5)


def _among_top(outputs: torch.Tensor, targets: torch.Tensor, number: int, ignore_index: int) -> _Counted:
    targets, counted = _class_numbers(outputs, targets, ignore_index)
    number = min(number, outputs.shape[1])  # of fewer classes each is among them, as in Keras
    return (outputs.topk(number, dim=1).indices == targets.unsqueeze(1)).any(1), counted
