"""Successive calls of ``backward()``: when one begins, what it yields, how it ends, whatever reduces the gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.nn.parameter import is_lazy

from stratagem.arguments import warn_once
from stratagem.errors import ConfigurationError
from stratagem.measuring.measures import BACKWARD, FORWARD
from stratagem.worker.gradient_guard import parameters_of
from stratagem.worker.reduction.gradient_slot import ParameterGradient, WeakHook
from stratagem.worker.reduction.gradient_weight import Weight, WeightSum
from stratagem.worker.step_meter import StepMeter

logger = logging.getLogger(__name__)

current_backward = torch._C._current_graph_task_id
"""Torch's number of the backward that runs in this thread."""
NO_BACKWARD = -1
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


@dataclasses.dataclass(eq=False, repr=False)
class BackwardWatch:
    """Tells a meter when each ``backward()`` begins and ends. The hooks of gradients call it with each."""

    _meter: StepMeter
    _newest: int = -1

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Those that it does not watch yet, and no reducer, whose hook is the last."""
        for parameter in parameters:
            hooks = (parameter._post_accumulate_grad_hooks or {}).values()
            is_watched = any(hook is self or isinstance(hook, WeakHook) for hook in hooks)
            if parameter.requires_grad and not is_watched and not is_lazy(parameter):
                parameter.register_post_accumulate_grad_hook(self)

    def __call__(self, *_: Any) -> None:
        backward = current_backward()
        if backward != self._newest:
            self._newest = backward
            self._meter.computes(BACKWARD)
            _queue_callback(self._end)

    def _end(self) -> None:
        self._meter.computes(FORWARD, after=BACKWARD)


@dataclasses.dataclass(eq=False)
class Backward:
    task: int
    """Of the engine; nested runs have their own."""
    begun: bool = False
    """Whether a gradient has come; all that follows has a meaning only then."""
    local: bool = False
    """Inside ``no_sync``."""
    weight: Weight = dataclasses.field(default_factory=lambda: Weight(1.0))
    weights: WeightSum = dataclasses.field(default_factory=WeightSum)
    """With those of the pending gradients that are reduced along."""


B = TypeVar("B", bound=Backward)


class BackwardReducer(Generic[B]):
    """Receives the gradients of parameters, and has those of each ``backward()`` reduced at its end.

    A hook on a parameter stashes ``p.grad`` before autograd adds to it, so the post-accumulate hook sees the gradient
    of this backward alone. ``weight`` says how much this rank counts; it is asked once at the start of each backward,
    in a thread of autograd. ``new_backward`` makes the record of one, from the engine's number of it.
    """

    _slots: Sequence[ParameterGradient]

    def __init__(self, weight: Callable[[], Weight], meter: StepMeter, new_backward: Callable[[int], B]) -> None:
        self._weight = weight
        self._meter = meter
        self._new_backward = new_backward
        self._lock = threading.RLock()  # each device has its own thread in a backward
        self._paused = 0
        self._pending_weights = WeightSum()
        self._num_reduced = 0
        self._backward: B | None = None
        self._stepped: set[int] = set()
        """Optimizers that have stepped, or are new, since the last backward that reduced."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards that begin inside add to this rank's pending gradients; the next one outside reduces the whole.

        With ``set_weight`` the whole is divided by the sum of all their weights: it is one mean over all of them.
        """
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @property
    def has_pending(self) -> bool:
        """Whether ``no_sync`` has left gradients that are this rank's own: a step with them would part the ranks."""
        return any(slot.pending and slot.parameter.grad is not None for slot in self._slots)

    def is_pending(self, parameter: torch.nn.Parameter) -> bool:
        """Whether ``no_sync`` has left a gradient of ``parameter``, whatever has become of it since then."""
        return any(slot.pending for slot in self._slots if slot.parameter is parameter)

    def refresh(self) -> None:
        """Looks for parameters that have changed. Collective if there are."""

    def committed(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """A step was made with the gradients of ``parameters``."""

    def reduces(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether some of ``parameters`` are its own."""
        return not {id(slot.parameter) for slot in self._slots}.isdisjoint(map(id, parameters))

    def _hook(self, slot: ParameterGradient) -> None:
        parameter = slot.parameter
        slot.handles.append(parameter.register_hook(functools.partial(self._on_leaf, slot)))
        if earlier := dict(parameter._post_accumulate_grad_hooks or {}):
            parameter._post_accumulate_grad_hooks.clear()  # this one comes before them, the last one after
            slot.handles.append(parameter.register_post_accumulate_grad_hook(WeakHook(self._on_own, slot)))
            parameter._post_accumulate_grad_hooks.update(earlier)
        slot.handles.append(parameter.register_post_accumulate_grad_hook(WeakHook(self._on_gradient, slot)))

    def _on_leaf(self, slot: ParameterGradient, _: torch.Tensor) -> None:
        """Runs before autograd adds to ``p.grad``; also for ``torch.autograd.grad`` of the parameter."""
        task = current_backward()
        with self._lock:
            if self._backward is not None and self._backward.task != task:
                self._end(self._backward)  # a backward inside a backward (reentrant checkpointing): one after the other
            if self._backward is None:
                self._backward = self._new_backward(task)
                end = _EndOfBackward(self, self._backward)
                _queue_callback(end)
            slot.take()

    def _on_own(self, slot: Any, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            slot.shown = parameter.grad, parameter.grad._version

    def _on_gradient(self, slot: Any, parameter: torch.Tensor) -> None:
        """Runs after autograd added to ``p.grad``, which holds this backward's own gradient alone."""
        with self._lock:
            backward, delta = self._backward, parameter.grad
            if backward is None or delta is None:
                return
            if not backward.begun:
                self._meter.computes(BACKWARD)
                self._begin(backward, slot)
                backward.begun = True
                if delta.requires_grad:
                    warn_once(
                        logger,
                        "backward(create_graph=True): reduced gradients have no graph, so a penalty that is computed "
                        "from .grad trains nothing. Compute it from torch.autograd.grad(loss, parameters, "
                        "create_graph=True)",
                    )
            slot.check_hooks(delta)
            parameter.grad = None
            slot.add(delta, backward.weight)
            self._added(slot, backward)

    def _begin(self, backward: B, first: ParameterGradient) -> None:
        """The first gradient has come: this is a backward, not a ``torch.autograd.grad``."""
        for slot in self._slots:
            if slot.handles and next(reversed(slot.parameter._post_accumulate_grad_hooks)) != slot.handles[-1].id:
                if not _reducers_of(slot.parameter) <= {self}:
                    raise ConfigurationError(f"another strategy has prepared this model since. {_COPY}")
                raise ConfigurationError(
                    "a hook registered with register_post_accumulate_grad_hook after strategy.prepare would find no "
                    ".grad: the gradients of all replicas are there when backward() has returned. Do its work then, or "
                    "on this replica's own gradient, with register_hook or a hook registered before strategy.prepare"
                )
        pending = [slot for slot in self._slots if slot.pending]
        for slot in pending:
            slot.begin()
        if any(slot.pending for slot in pending):
            backward.weights = dataclasses.replace(self._pending_weights)
        backward.weight = self._weight()
        backward.weights.add(backward.weight)
        backward.local = self._paused > 0

    def _added(self, slot: Any, backward: B) -> None:
        """A slot has taken in its gradient."""

    def _end(self, backward: B) -> None:
        """All gradients of the backward have come."""
        with self._lock:
            if backward is not self._backward:
                return
            try:
                if backward.begun and not backward.local:
                    self._synchronise(backward)
                    self._stepped.clear()
                elif backward.begun:
                    self._keep(backward)
            finally:
                self._backward = None
                for slot in self._slots:
                    slot.restore()
                self._meter.computes(FORWARD, after=BACKWARD)

    def _keep(self, backward: B) -> None:
        """Inside ``no_sync``: what the backward has brought waits for a later one."""
        for slot in self._slots:
            if slot.fired or (slot.taken and slot.pending):
                slot.keep()
        self._pending_weights = backward.weights

    def _abandon(self, backward: B) -> None:
        """The backward raised; the other ranks wait for the rest of it, or for the word that it failed."""
        if backward is not self._backward:
            return  # without the lock: the garbage collector may run in a thread that the lock's holder waits for
        with self._lock:
            if backward is not self._backward:
                return
            self._backward = None
            try:
                if backward.begun and not backward.local:
                    self._tell_failure(backward)
            finally:
                for slot in self._slots:
                    slot.restore()
                self._meter.computes(FORWARD, after=BACKWARD)

    def _present(self) -> list[bool]:
        """By slot: whether this rank has a gradient for it."""
        return [slot.counted and (slot.fired or slot.pending) for slot in self._slots]

    def _synchronise(self, backward: B) -> None:
        """Reduces what the backward has brought, and merges it into ``p.grad``."""
        raise NotImplementedError

    def _tell_failure(self, backward: B) -> None:
        """Tells the other ranks that the backward has failed here."""
        raise NotImplementedError


_COPY = (
    "A model is trained by one strategy: prepare a copy in the other (copy.deepcopy of the model, with an optimizer of "
    "its own to train it there)"
)


def _reducers_of(parameter: torch.Tensor) -> set[Any]:
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return {hook.reducer for hook in hooks if isinstance(hook, WeakHook)} - {None}


def check_own(optimizers: Iterable[torch.optim.Optimizer], own: Iterable[BackwardReducer[Any]]) -> None:
    """Refuses (ConfigurationError) optimizers of parameters whose gradients go to other reducers than its ``own``."""
    for optimizer in optimizers:
        if set[Any]().union(*map(_reducers_of, parameters_of(optimizer))) - {*own}:
            raise ConfigurationError(
                f"another strategy trains the model of this {type(optimizer).__name__}: the gradients go to that one. "
                f"{_COPY}"
            )


def follow(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    reducers: Sequence[BackwardReducer[Any]],
    are_same: Callable[[], bool],
) -> None:
    """Tells the ``reducers`` of its ``parameters`` of an optimizer's steps, and refuses one with gradients of this rank
    alone.

    ``are_same`` finds out whether all ranks have the same gradients. It is asked where no backward has reduced any
    since the last step: the script has set them.
    """

    def before(*_: Any) -> None:
        if current_backward() != NO_BACKWARD:
            raise ConfigurationError(
                "optimizer.step() within backward(), by a hook: all replicas' gradients are there when backward() has "
                "returned. Step then"
            )
        if any(reducer.has_pending for reducer in reducers):
            raise ConfigurationError(
                "optimizer.step() after backward() inside no_sync(): those gradients are of this replica only, and the "
                "replicas would diverge. Make the last backward() before a step outside of no_sync()"
            )
        if all(id(optimizer) in reducer._stepped for reducer in reducers) and not are_same():
            raise ConfigurationError(
                "optimizer.step() with gradients that do not come from backward() (torch.autograd.grad, torch.func) "
                "and that differ between the replicas, which would diverge. Let backward() compute them, or reduce "
                'each, n being the examples here, as a tensor, and sum_of = partial(context.all_reduce, "sum") of '
                "context = sg.get_replica_context(): p.grad = sum_of(gradient * n) / sum_of(n)"
            )

    def after(*_: Any) -> None:
        for reducer in reducers:
            reducer._stepped.add(id(optimizer))
            reducer.committed(parameters)

    for reducer in reducers:
        reducer._stepped.add(id(optimizer))
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


@dataclasses.dataclass(eq=False, repr=False)
class _EndOfBackward:
    """The engine calls it when a backward is done; if the backward fails, the engine drops it uncalled."""

    _reducer: BackwardReducer[Any]
    _backward: Backward

    def __call__(self) -> None:
        self._reducer._end(self._backward)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the error of the backward is on its way; this one would hide it
            self._reducer._abandon(self._backward)
