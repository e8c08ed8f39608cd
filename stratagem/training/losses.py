"""Losses by name or as callables, as a mean over a batch and what that mean was divided by."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from stratagem.arguments import whole_number
from stratagem.errors import ConfigurationError
from stratagem.training.named_losses import BINARY, DISTANCES, NAMED, OF_CLASSES, OF_SCORES, of_probabilities, snake

logger = logging.getLogger(__name__)

LossFunction = nn.Module | Callable[[Any, Any], torch.Tensor]

IGNORE_INDEX = -100
"""The class number of a target that losses over classes ignore, unless told otherwise."""
_TARGETS = frozenset({"y_true", "true", "label", "labels", "target", "targets"})
"""What the first parameter of a loss in Keras's order is called."""
_NEAR = 1e-2
"""What rounding in 16 bits may add to a sum of probabilities."""


_DISTANCE_MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


class LossValue(NamedTuple):
    """The loss of a batch."""

    mean: torch.Tensor
    """Scalar."""
    divisor: float | None
    """What the mean was divided by; None: the number of examples."""


class Loss:
    """A loss that knows what it divides by.

    Names are torch's, and mean what torch means by them: "cross_entropy" and "bce_with_logits" expect logits, "bce"
    probabilities, "nll" log-probabilities. Keras's expect probabilities, as Keras does: the outputs of a softmax for
    "sparse_categorical_crossentropy" (targets are class numbers) and "categorical_crossentropy" (one-hot rows), of a
    sigmoid for "binary_crossentropy"; classes are dimension 1. The first batch shows whether the outputs are that. The
    others are those of regression and the like, "mse" or "MeanSquaredError", all in Keras's definition.

    Weights of examples and classes make a weighted mean: divided by the sum of the weights, as torch does it.
    ``given``: a name, a loss module of torch, or ``f(outputs, targets)`` that returns a mean (a scalar) or one value an
    example; ``called``: what errors call it, None: ``loss="mse"``. ConfigurationError: an unknown name, or a loss that
    adds up where it should average.
    """

    def __init__(self, given: str | LossFunction, called: str | None = None) -> None:
        name = snake(given) if isinstance(given, str) else None
        if isinstance(given, str) and name not in NAMED:
            raise ConfigurationError(f"expected a loss of {', '.join(sorted(NAMED))} or a callable, got {given!r}")
        if not isinstance(given, str) and not callable(given):
            raise ConfigurationError(
                f"expected the name of a loss or a callable, got a {type(given).__name__}: for several outputs, give "
                "loss=f, where f(outputs, targets) adds up their losses"
            )
        check_order(given)
        if isinstance(given, type):
            raise ConfigurationError(f"expected a loss, got the class {given.__name__}: give {given.__name__}()")
        if getattr(given, "reduction", "mean") not in ("mean", "none"):
            raise ConfigurationError(
                f"{type(given).__name__} has reduction={given.reduction!r}; "  # type: ignore[union-attr]
                "use 'mean' or 'none': the gradients of the replicas are averaged by their examples"
            )
        self._given: Any = given if name is None else NAMED[name]
        self._is_named = isinstance(given, str)
        self._is_looked_at = False
        self._on: dict[torch.device, Any] = {}
        self._called = called or f'loss="{given}"'
        self.class_weight: dict[int, float] | None = None

    @property
    def takes_probabilities(self) -> bool | None:
        """Whether one output is near 1 for a positive answer, and near 0 else: no logit. None: nobody knows."""
        if self._given in OF_SCORES or isinstance(self._given, nn.BCEWithLogitsLoss):
            return False
        if self._given in (functional.cross_entropy, functional.nll_loss):
            return None
        is_known = self._is_named or self._is_distance or self._given in BINARY or isinstance(self._given, nn.BCELoss)
        return True if is_known else None

    @property
    def ignore_index(self) -> int:
        """The class number of targets that do not count."""
        return self._given.ignore_index if isinstance(self._given, nn.CrossEntropyLoss | nn.NLLLoss) else IGNORE_INDEX

    @property
    def _is_distance(self) -> bool:
        return self._given in DISTANCES or isinstance(self._given, _DISTANCE_MODULES)

    def weighted(self, class_weight: Mapping[int, float] | None) -> Loss:
        """The same loss with weights of classes."""
        if class_weight is None:
            return self
        given: Mapping[Any, Any] = class_weight
        for number, weight in given.items():
            whole_number("class numbers in class_weight", number, 0)
            if isinstance(weight, str | None) or not 0 <= float(weight) < math.inf:
                raise ConfigurationError(f"expected class_weight[{number}] of at least 0, got {weight!r}")
        twin = copy.copy(self)
        twin.class_weight = {int(number): float(weight) for number, weight in class_weight.items()} or None
        return twin

    def __call__(self, outputs: Any, targets: Any, weights: torch.Tensor | None = None) -> LossValue:
        """The loss of a batch, of which each example may have a weight. ConfigurationError: targets or weights that do
        not fit, or, at the first batch, outputs that are not what the name of the loss expects."""
        if targets is None:
            raise ConfigurationError("the loss needs targets: give y, or batches of (inputs, targets)")
        if self._is_named:
            instead = "give loss=f, where f(outputs, targets) says how their parts make the loss"
            check_tensors(self._called, outputs, targets, instead)
            self._look_at(outputs)
            targets = self._fitting(outputs, targets)
        elif self._is_distance and outputs.numel() == targets.numel():
            targets = formed(targets, outputs)
        for name, given in (("sample_weight", weights), ("class_weight", self.class_weight and targets)):
            if not isinstance(given, torch.Tensor | None):
                raise ConfigurationError(
                    f"{name} is one weight for each example, but with several outputs this is a "
                    f"{type(given).__name__}: put the weights into the targets, and give loss=f, where f(outputs, "
                    "targets) multiplies by them"
                )
        if self.class_weight is not None:
            by_class = _weights_by_class(self.class_weight, targets)
            weights = by_class if weights is None else weights * by_class
        function = self._of_device(outputs)
        if weights is not None:
            counted = _counted(function, targets)
            return _weighted(*self._each(function, outputs, targets, counted), weights)
        value = _tensor(function(outputs, targets))
        if value.dim():
            return LossValue(value.mean(), None)
        counted = _counted(function, targets)
        divisor = None if counted is None else float(counted.sum())
        return LossValue(outputs.sum() * 0.0 if divisor == 0.0 else value, divisor)  # torch's mean of nothing is NaN

    def values(self, outputs: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, Any]:
        """What a loss by name is the mean of, and which of it counts, None: all."""
        self._look_at(outputs)
        targets = self._fitting(outputs, targets)
        if self._given in OF_CLASSES and not targets.is_floating_point():
            targets = torch.where(targets == ignore_index, IGNORE_INDEX, targets)
        return self._given(outputs, targets, reduction="none"), _counted(self._given, targets)

    def _each(
        self, function: Any, outputs: Any, targets: Any, counted: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss of each example, shape [batch], and how much each counts: the sums of what its targets do."""
        if self._is_named:
            values = function(outputs, targets, reduction="none")
        else:
            if getattr(function, "reduction", "none") == "mean":
                function = copy.copy(function)
                function.reduction = "none"
            values = _tensor(function(outputs, targets))
        if values.dim() == 0:
            raise ConfigurationError(
                "weights of examples or classes need a loss that returns one value per example, but this one returns a "
                "scalar: use a name, a loss module of torch, or return the losses before their mean"
            )
        if values.dim() == 1:
            return values, counted
        if counted is None:
            return values.flatten(1).mean(1), None
        return values.flatten(1).sum(1), counted.flatten(1).sum(1)

    @torch.no_grad()
    def _look_at(self, outputs: torch.Tensor) -> None:
        """At the first outputs: probabilities where logits belong, and the other way round, train another loss."""
        if self._is_looked_at or not outputs.numel():
            return
        self._is_looked_at = True
        low, high = (float(value) for value in outputs.detach().float().aminmax())
        seen = f"the module's outputs range from {low:.3g} to {high:.3g}"
        if self._given is functional.nll_loss and high > _NEAR:
            raise ConfigurationError(
                f'{self._called} expects log-probabilities, and {seen}: use "cross_entropy" for logits'
            )
        if self._given in BINARY and (low < 0 or high > 1):
            raise ConfigurationError(
                f"{self._called} expects probabilities, and {seen}: end the module with a sigmoid, or use "
                '"bce_with_logits" for logits'
            )
        if self._given not in (functional.cross_entropy, of_probabilities) or outputs.dim() < 2:
            return
        if outputs.shape[1] == 1:
            raise ConfigurationError(
                f"{self._called} of a module with one output is 0, whatever the targets are: give the module an "
                'output for each class, or, for two classes, use "bce_with_logits" ("binary_crossentropy" after a '
                "sigmoid)"
            )
        are_probabilities = low >= 0 and high <= 1 and bool(((outputs.float().sum(1) - 1).abs() < _NEAR).all())
        if self._given is of_probabilities and not are_probabilities and math.isfinite(low + high):
            raise ConfigurationError(
                f"{self._called} is Keras's name and expects probabilities that add up to 1, and {seen}: end the "
                'module with a softmax, or use "cross_entropy" for logits'
            )
        if self._given is functional.cross_entropy and are_probabilities:
            logger.warning(
                "%s expects logits, and the module's outputs look like probabilities (a softmax at the end?): it "
                'applies another softmax to them. "sparse_categorical_crossentropy" takes probabilities',
                self._called,
            )

    def _fitting(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Targets of the form of the outputs, where the loss compares them element by element."""
        if self._given in OF_CLASSES:
            if targets.shape == outputs.shape and outputs.dim() > 1:  # one-hot rows, of whole numbers perhaps
                return targets.to(outputs.dtype)
            if targets.is_floating_point():
                raise ConfigurationError(
                    f"expected targets that are whole class numbers, or rows like the outputs {list(outputs.shape)}, "
                    f"got {targets.dtype} {list(targets.shape)}; y.astype('int64') or tensor.long() makes them whole"
                )
            targets = targets.long()
            return targets.squeeze(1) if targets.dim() == outputs.dim() == 2 and targets.shape[1] == 1 else targets
        targets = formed(targets, outputs)
        return targets if targets.is_floating_point() else targets.to(outputs.dtype)

    def _of_device(self, outputs: Any) -> Any:
        """The callable; a module with tensors of its own is copied to where the outputs are, if they are not there."""
        if not isinstance(self._given, nn.Module) or not isinstance(outputs, torch.Tensor):
            return self._given
        own = itertools.chain(self._given.parameters(), self._given.buffers())
        if all(tensor.device == outputs.device for tensor in own):
            return self._given
        if outputs.device not in self._on:
            self._on[outputs.device] = copy.deepcopy(self._given).to(outputs.device)
        return self._on[outputs.device]


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ConfigurationError(
            f"expected a loss that returns a tensor, the mean or one value an example, got a {type(value).__name__}"
        )
    return value


def check_order(function: Any) -> None:
    """Raises ``ConfigurationError`` where a function that gets (outputs, targets) calls the first one its targets."""
    try:
        names = [*inspect.signature(getattr(function, "forward", function)).parameters]
    except (TypeError, ValueError):  # nothing of Python's
        return
    if names and names[0] in _TARGETS:
        raise ConfigurationError(
            f"a loss or a metric is called with (outputs, targets), in torch's order, and this one takes "
            f"({', '.join(names[:2])}), in Keras's: write the outputs first"
        )


def check_tensors(who: str, outputs: Any, targets: Any, instead: str) -> None:
    """Raises ``ConfigurationError`` where a loss or a metric by name, ``who``, is given anything but two tensors."""
    for what, given in (("outputs", outputs), ("targets", targets)):
        if not isinstance(given, torch.Tensor):
            raise ConfigurationError(
                f"{who} compares one tensor with one, and the {what} are a {type(given).__name__}: {instead}"
            )


def formed(targets: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Targets in the shape of the outputs, from which theirs may differ by sizes of 1, or in that one of them is flat.
    ConfigurationError: they are of another shape, as where the channels come last in one of them."""
    here, there = ([size for size in each.shape if size != 1] for each in (targets, outputs))
    is_flat = targets.shape[:1] == outputs.shape[:1] and min(targets.dim(), outputs.dim()) <= 2
    if here != there and not (is_flat and targets.numel() == outputs.numel()):
        raise ConfigurationError(
            f"expected targets of the outputs' shape {list(outputs.shape)}, got {list(targets.shape)}: arrange them as "
            "the outputs are, with permute() for example"
        )
    return targets.reshape(outputs.shape)


def _weighted(values: torch.Tensor, counted: torch.Tensor | None, weights: torch.Tensor) -> LossValue:
    weights = weights.to(values.dtype).view(-1)
    if weights.shape != values.shape:
        raise ConfigurationError(
            f"expected one weight for each of {len(values)} examples, got {len(weights)}: those of parts of an example "
            "go into the targets, and loss=f, where f(outputs, targets) multiplies by them"
        )
    least = weights.amin() if len(weights) else weights.sum()
    if least < 0:
        raise ConfigurationError(
            f"expected weights of at least 0, by whose sum the loss is divided, got {float(least):g}: put signed "
            "factors into the targets, and give loss=f, where f(outputs, targets) multiplies by them"
        )
    total = (weights if counted is None else weights * counted).sum()
    return LossValue((values * weights).sum() / torch.where(total > 0, total, 1.0), float(total))


def _weights_by_class(class_weight: Mapping[int, float], targets: torch.Tensor) -> torch.Tensor:
    if targets.is_floating_point() and targets.dim() == 2 and targets.shape[1] > 1:
        if bool(((targets.sum(1) - 1).abs() > _NEAR).any()):
            raise ConfigurationError("class_weight needs one class for each example, got rows that do not add up to 1")
        targets = targets.argmax(1)
    elif targets.dim() == 2 and targets.shape[1] == 1:
        targets = targets.squeeze(1)
    if targets.dim() != 1:
        raise ConfigurationError(f"class_weight needs one class for each example, got targets {list(targets.shape)}")
    numbers = targets.long()
    if bool((numbers != targets).any()):
        raise ConfigurationError("class_weight needs targets that are class numbers, or one-hot rows of them")
    table = torch.ones(max(class_weight) + 1, device=targets.device)
    for number, weight in class_weight.items():
        table[number] = weight
    known = numbers.clamp(0, len(table) - 1)
    return torch.where(known == numbers, table[known], 1.0)


def _counted(function: Any, targets: Any) -> torch.Tensor | None:
    """How much a loss over classes counts each target; None: all alike."""
    if isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss):
        weight, ignored = function.weight, function.ignore_index
    elif function in OF_CLASSES:
        weight, ignored = None, IGNORE_INDEX
    else:
        return None
    if not isinstance(targets, torch.Tensor) or targets.is_floating_point():
        return None
    counted = targets != ignored
    return counted if weight is None else weight[torch.where(counted, targets, 0)] * counted
