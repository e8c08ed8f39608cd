"""The optimizers that a parameter server can run: the eleven elementwise ones of ``torch.optim``, by class name.

Elementwise means that a parameter cut anywhere gets the same values as the whole: so a ps can keep many variables, or
rows of them, in one flat tensor. The torch classes do the arithmetic; this module only knows which state each keeps.

In a table, an optimizer changes only the rows that have a gradient, as torch does with sparse gradients. A row that a
batch does not use keeps its weights and slots; the number of updates is the table's. Momentum and weight decay would
have to change every row in every update: they are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stratagem.errors import ConfigurationError, UnsupportedOptimizerError

HyperParameters = Mapping[str, Any]
"""Arguments of a torch.optim class by name: numbers, booleans, None and tuples of numbers."""
UpdateRows = Callable[[HyperParameters, int, torch.Tensor, Sequence[torch.Tensor], torch.Tensor], None]
"""Changes weights and slots in place: hyper-parameters, number of this update (from 1), weights, slots, gradient."""

_IMPLEMENTATION_CHOICES = ("foreach", "fused", "capturable")
"""Arguments that choose how torch computes, not what; here the ps chooses."""

# torch 2.13's fused CPU SGD silently leaves 16-bit weights unchanged, whole vectors of them.
_FUSED_DTYPES = (torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True)
class OptimizerRule:
    """What one torch.optim class keeps for each parameter."""

    cls: Callable[..., torch.optim.Optimizer]
    """Makes one from parameters and hyper-parameters."""
    slots: Callable[[HyperParameters], tuple[str, ...]]
    """Names of the tensors it keeps, each as large as the parameter."""
    fused: bool = False
    """Whether torch has a fused CPU kernel for it."""
    counts_steps: bool = True
    """Whether its state has a ``step``."""
    scalars: Mapping[str, Callable[[HyperParameters], float]] = dataclasses.field(default_factory=dict)
    """Numbers it keeps for each parameter, with their first values."""
    first_values: Mapping[str, Callable[[HyperParameters], float]] = dataclasses.field(default_factory=dict)
    """First values of slots that do not start at zero."""
    first_overrides: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Hyper-parameters of the first update that sees ``first_slot``, when its slot is still zero."""
    first_slot: str = ""
    """See ``first_overrides``."""
    update_rows: UpdateRows | None = None
    """How it changes rows of tables."""
    must_be_off: tuple[str, ...] = ()
    """Hyper-parameters that have to be 0 or False there, because they concern every row."""

    @property
    def name(self) -> str:
        """Name on the wire."""
        return self.cls.__name__

    @property
    def possible_slots(self) -> tuple[str, ...]:
        """Names of all slots that it may keep."""
        return self.slots({"amsgrad": True, "momentum": 0.9, "centered": True})


def _constant(*slots: str) -> Callable[[HyperParameters], tuple[str, ...]]:
    return lambda hyper: slots


def _adam_slots(hyper: HyperParameters) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if hyper["amsgrad"] else ()))


def _rmsprop_slots(hyper: HyperParameters) -> tuple[str, ...]:
    momentum = ("momentum_buffer",) if hyper["momentum"] > 0 else ()
    return ("square_avg", *momentum, *(("grad_avg",) if hyper["centered"] else ()))


_RULES: dict[str, OptimizerRule] = {
    rule.name: rule
    for rule in (
        # torch's first momentum buffer is the bare gradient: from a zero buffer, that is one update without dampening.
        OptimizerRule(
            torch.optim.SGD,
            lambda hyper: ("momentum_buffer",) if hyper["momentum"] != 0 else (),
            fused=True,
            counts_steps=False,
            first_overrides={"dampening": 0.0},
            first_slot="momentum_buffer",
        ),
        OptimizerRule(torch.optim.Adam, _adam_slots, fused=True),
        OptimizerRule(torch.optim.AdamW, _adam_slots, fused=True),
        OptimizerRule(torch.optim.Adamax, _constant("exp_avg", "exp_inf")),
        OptimizerRule(torch.optim.Adadelta, _constant("square_avg", "acc_delta")),
        OptimizerRule(
            torch.optim.Adagrad,
            _constant("sum"),
            fused=True,
            first_values={"sum": lambda hyper: float(hyper["initial_accumulator_value"])},
        ),
        OptimizerRule(torch.optim.NAdam, _constant("exp_avg", "exp_avg_sq"), scalars={"mu_product": lambda hyper: 1.0}),
        OptimizerRule(torch.optim.RAdam, _constant("exp_avg", "exp_avg_sq")),
        OptimizerRule(torch.optim.RMSprop, _rmsprop_slots),
        OptimizerRule(
            torch.optim.Rprop,
            _constant("prev", "step_size"),
            first_values={"step_size": lambda hyper: float(hyper["lr"])},
        ),
        OptimizerRule(
            torch.optim.ASGD,
            _constant("ax"),
            scalars={"eta": lambda hyper: float(hyper["lr"]), "mu": lambda hyper: 1.0},
        ),
    )
}


def _sgd_rows(
    hyper: HyperParameters, step: int, weights: torch.Tensor, slots: Sequence[torch.Tensor], gradient: torch.Tensor
) -> None:
    weights.add_(gradient, alpha=-_rate(hyper))


def _adagrad_rows(
    hyper: HyperParameters, step: int, weights: torch.Tensor, slots: Sequence[torch.Tensor], gradient: torch.Tensor
) -> None:
    (total,) = slots
    total.addcmul_(gradient, gradient)
    rate = _rate(hyper) / (1 + (step - 1) * hyper["lr_decay"])
    weights.addcdiv_(gradient, total.sqrt().add_(hyper["eps"]), value=-rate)


def _sparse_adam_rows(
    hyper: HyperParameters, step: int, weights: torch.Tensor, slots: Sequence[torch.Tensor], gradient: torch.Tensor
) -> None:
    mean, square = slots
    beta1, beta2 = hyper["betas"]
    mean.lerp_(gradient.neg() if hyper["maximize"] else gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    rate = float(hyper["lr"]) * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    weights.addcdiv_(mean, square.sqrt().add_(hyper["eps"]), value=-rate)


def _rate(hyper: HyperParameters) -> float:
    return -float(hyper["lr"]) if hyper["maximize"] else float(hyper["lr"])


_ROW_RULES: dict[str, OptimizerRule] = {
    "SGD": OptimizerRule(
        torch.optim.SGD,
        _constant(),
        counts_steps=False,
        update_rows=_sgd_rows,
        must_be_off=("momentum", "weight_decay", "nesterov"),
    ),
    "Adagrad": dataclasses.replace(_RULES["Adagrad"], update_rows=_adagrad_rows, must_be_off=("weight_decay",)),
    "SparseAdam": OptimizerRule(
        torch.optim.SparseAdam, _constant("exp_avg", "exp_avg_sq"), update_rows=_sparse_adam_rows
    ),
}
"""Of tables."""

_REFUSALS = {
    "Adafactor": "it scales by norms over whole rows, columns and tensors, and a ps holds pieces",
    "Muon": "it orthogonalises whole matrices, and a ps holds pieces",
    "LBFGS": "it needs a closure that evaluates the loss again, and a ps has no loss",
    "SparseAdam": "it works on rows of sg.nn.Embedding tables, and a variable of another kind was given to it",
}

SUPPORTED = tuple(_RULES)


def rule_for(name: str, by_rows: bool = False) -> OptimizerRule:
    """The rule of a torch.optim class; ``by_rows``: for a table. ``UnsupportedOptimizerError``: there is none."""
    if by_rows:
        return check_for_rows(name, {})
    rule = _RULES.get(name)
    if rule is None:
        reason = _REFUSALS.get(name, "it is not one of the elementwise optimizers that were tested here")
        raise UnsupportedOptimizerError(
            f"a parameter server cannot run {name}: {reason}. Use one of {', '.join(SUPPORTED)}"
        )
    return rule


def check_for_rows(name: str, hyper_parameters: HyperParameters) -> OptimizerRule:
    """The rule of a torch.optim class for tables; refuses what cannot be done for the rows of a batch alone.
    UnsupportedOptimizerError: another class, or momentum or weight decay."""
    rule = _ROW_RULES.get(name)
    if rule is None:
        raise UnsupportedOptimizerError(
            f"the rows of a table cannot be changed by {name}: it changes every row in every update, also those "
            f"that a batch does not use. Give the tables an optimizer of their own, of {', '.join(_ROW_RULES)}, or all "
            "parameters one of the first two"
        )
    on = [other for other in rule.must_be_off if hyper_parameters.get(other)]
    if on:
        raise UnsupportedOptimizerError(
            f"{name} with {on[0]}={hyper_parameters[on[0]]} changes every row of a table in every update, also "
            f"those that a batch does not use. Set {on[0]}=0, or give the tables an optimizer of their own"
        )
    return rule


def effective(rule: OptimizerRule, came: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that decide the update: every argument of the class, defaults included. ``came``: as in a
    ``param_group`` without ``params``; tuples may have become lists.

    Entries that are not arguments of the class (``initial_lr`` and other marks of schedulers) do not take part in
    torch's ``step()`` either; ``foreach``, ``fused`` and ``capturable`` choose an implementation, and the ps chooses
    its own. ConfigurationError: torch refuses the values. A rate of 0 or less, to which a schedule may come, is fine:
    torch refuses it of new optimizers alone. UnsupportedOptimizerError: ``differentiable=True``.
    """
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(rule.cls).parameters.items():
        if name == "params" or name in _IMPLEMENTATION_CHOICES:
            continue
        value = came.get(name, parameter.default)
        arguments[name] = tuple(value) if isinstance(value, list) else value
    if arguments.pop("differentiable", False):
        raise UnsupportedOptimizerError(
            f"a parameter server cannot run {rule.name} with differentiable=True: no graph crosses the wire"
        )
    try:
        rule.cls([torch.zeros(1)], **arguments | {"lr": abs(arguments["lr"]) or 1.0})
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        raise ConfigurationError(f"{rule.name} refuses its hyper-parameters {arguments}: {error}") from None
    return arguments


def warm_up() -> None:
    """Takes a first step: torch loads its compiler then, for seconds, and nobody should wait for that in training."""
    parameter = torch.zeros(1)
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], fused=True).step()


def build(
    rule: OptimizerRule,
    groups: Sequence[tuple[HyperParameters, Sequence[torch.Tensor]]],
    state: Mapping[torch.Tensor, dict[str, torch.Tensor]],
    dtype: torch.dtype,
) -> torch.optim.Optimizer:
    """A torch optimizer over existing parameters and existing state. ``state``: for each parameter, what the class
    keeps."""
    # Placeholders first: the constructors of some classes allocate state for what they are given.
    fused = rule.fused and dtype in _FUSED_DTYPES
    choices: dict[str, Any] = {"fused": True} if fused else {"foreach": False}
    optimizer = rule.cls([{"params": [torch.zeros(1)], **choices} for _ in groups])
    optimizer.state.clear()
    for target, (hyper, parameters) in zip(optimizer.param_groups, groups, strict=True):
        target.update(hyper, params=list(parameters))
    optimizer.state.update(state)
    return optimizer


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """One update of parameters that have no graph: torch's own step without what it does around it for hooks, profilers
    and the compiler, which costs more than the update of a small group."""
    step: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(type(optimizer).step)
    if type(optimizer) is torch.optim.SGD:
        return functools.partial(_sgd_step, optimizer, step)
    return functools.partial(step, optimizer)


def _sgd_step(optimizer: torch.optim.SGD, step: Callable[[torch.optim.Optimizer], object]) -> None:
    """Without momentum and decay an update is one addition, and what torch does around it costs several times that."""
    if any([group["momentum"] or group["weight_decay"] for group in optimizer.param_groups]):
        step(optimizer)
        return
    for group in optimizer.param_groups:
        rate = group["lr"] if group["maximize"] else -group["lr"]
        for parameter in group["params"]:
            parameter.add_(parameter.grad, alpha=rate)
