"""Between the objects of a script and states that can be written: taking them, putting them back."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from stratagem.arguments import is_metric, warn_once
from stratagem.checkpoint.reading import (
    CLASS,
    LEASED,
    MODEL,
    OBJECT,
    OPTIMIZER,
    SERVED_OPTIMIZER,
    VALUE,
    VARIABLE,
    SavedCheckpoint,
)
from stratagem.checkpoint.server_state import ServerState
from stratagem.checkpoint.tree import EncodedState, StateOnServers, encode
from stratagem.data.distributed import DistributedDataset
from stratagem.errors import CheckpointError, ConfigurationError, StratagemError
from stratagem.strategy.base import Strategy
from stratagem.strategy.ps.servers import Place, Servers, place_of
from stratagem.strategy.replicas.variable import Variable
from stratagem.worker.gradient_guard import parameters_of
from stratagem.worker.push.optimizer_state import HAS_MORE
from stratagem.worker.push.table_handle import TableHandle

logger = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """What a checkpoint can hold besides models, optimizers, variables and plain values."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, arrays, numbers, strings and structures of them."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Takes it back."""


def kind_of(name: str, item: Any) -> str:
    """What an object is to a checkpoint. ConfigurationError: nothing that could be saved."""
    if isinstance(item, Variable):
        return VARIABLE
    if item is None or isinstance(item, bool | int | float | str):
        return VALUE
    if isinstance(item, torch.nn.Module):
        return MODEL
    if isinstance(item, torch.optim.Optimizer):
        return OPTIMIZER
    if isinstance(item, Stateful):
        return OBJECT
    if isinstance(item, DistributedDataset):
        return LEASED
    raise ConfigurationError(
        f"a checkpoint holds models, optimizers, variables, anything with state_dict() and load_state_dict(), numbers "
        f"and strings; {name} is of type {type(item).__name__}"
    )


def take(
    objects: Mapping[str, Any], strategy: Strategy, servers: Servers | None, *, copy: bool, keep: bool
) -> tuple[dict[str, EncodedState], list[ConfigurationError]]:
    """The states of objects, and of those that cannot be written why. Under a synchronous strategy every worker has to
    call it. ``copy``: later changes must not show; ``keep``: this process is the one that writes, the others only do
    their part. ConfigurationError: weights here are not those of the parameter servers."""
    models = [item for item in objects.values() if isinstance(item, torch.nn.Module)]
    names: Mapping[Place, str] = {}
    if servers is not None:
        servers.check(models)
        names = servers.names()
    states: dict[str, EncodedState] = {}
    refused: list[ConfigurationError] = []  # here alone: what follows is still done together
    with strategy.averaged_buffers(*models) if models else contextlib.nullcontext():
        # Averaged buffers are there only now: they are copied in any case.
        copy = copy or strategy.num_replicas_in_sync > 1
        for name, item in objects.items():
            kind = kind_of(name, item)
            if kind == OPTIMIZER and servers is not None:
                kind, state = SERVED_OPTIMIZER, _served_optimizer(name, item, names)
            else:
                if kind == OPTIMIZER and keep and strategy.num_replicas_in_sync == 1:
                    _warn_of_accumulation(name, item)
                state = _state(kind, item, names)
            if kind in (OPTIMIZER, SERVED_OPTIMIZER):
                state = {**state, CLASS: type(item).__name__}
            if keep:
                try:
                    states[name] = encode(state, name, copy=copy).of_kind(kind)
                except ConfigurationError as error:
                    refused.append(error)
    return states, refused


def _warn_of_accumulation(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Says so if the next backward adds to the gradients that are there now, which the checkpoint does not have. Where
    several replicas reduce, the reducer has put them aside by then, or (central storage) they are not what the next
    backward adds to: nobody asks."""
    saved = next((each for each in parameters_of(optimizer) if each.requires_grad and each.grad is not None), None)
    if saved is None or saved.grad is None:
        return
    parameter, gradient, version = weakref.ref(saved), weakref.ref(saved.grad), saved.grad._version

    def look(_: torch.Tensor) -> None:
        handle.remove()
        now = None if (owner := parameter()) is None else owner.grad
        if now is not None and now is gradient() and now._version == version:  # zero_grad() lets go of it, or writes
            logger.warning(
                "The last checkpoint was saved between two backward passes whose gradients %s adds up, and does not "
                "have the gradients of the first: a job that resumes from it makes this update without them. Save "
                "after the optimizer's step and zero_grad()",
                name,
            )

    handle = saved.register_hook(look)


def _state(kind: str, item: Any, names: Mapping[Place, str]) -> Any:
    if kind == VARIABLE:
        return item.value()
    if kind in (VALUE, LEASED):
        return item if kind == VALUE else item.epoch
    state = item.state_dict()
    if kind == MODEL and not state and is_metric(item):
        warn_once(
            logger,
            "A checkpoint has no states of metrics of torchmetrics: one that is restored in the middle of an epoch "
            "counts the rest of that epoch alone. Leave metrics out, and compute them over epochs that no restart cut",
        )
    if kind == MODEL and names:
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and place_of(value) in names:
                state[key] = StateOnServers(names[place_of(value)])
    return state


def _served_optimizer(name: str, optimizer: torch.optim.Optimizer, names: Mapping[Place, str]) -> dict[str, Any]:
    variables = [names.get(place_of(parameter)) for parameter in parameters_of(optimizer)]
    if None in variables:
        none = "is not connected to the parameter servers: give it and its model to strategy.prepare first"
        raise ConfigurationError(f"{name} {HAS_MORE if any(variables) else none}")
    return {"param_groups": param_groups(optimizer), "variables": variables}


def param_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """As in ``state_dict()``: parameters by number."""
    groups, first = [], 0
    for group in optimizer.param_groups:
        count = len(group["params"])
        rest = {key: value for key, value in group.items() if key != "params"}
        groups.append({**rest, "params": list(range(first, first + count))})
        first += count
    return groups


def beyond_variables(objects: Mapping[str, Any]) -> str:
    """What a checkpoint lacks that holds variables alone, as the chief takes it by itself; empty: nothing."""
    num_models = sum(isinstance(item, torch.nn.Module) for item in objects.values())
    others = [n for n, item in objects.items() if not isinstance(item, torch.nn.Module | torch.optim.Optimizer)]
    if others:
        return f"no state of {', '.join(others)}"
    return "" if num_models == 1 else f"no names of {num_models} models"


def states_of_variables(objects: Mapping[str, Any], state: ServerState) -> dict[str, EncodedState]:
    """States out of a checkpoint that holds variables alone. CheckpointError: an object needs more than that."""
    if what := beyond_variables(objects):
        raise CheckpointError(
            f"it holds only the variables of the parameter servers, and {what}: the chief made it on its own, or the "
            "process that asked for it died while writing the rest. A Checkpoint of one model and its optimizers can "
            "restore it"
        )
    (model,) = (item for item in objects.values() if isinstance(item, torch.nn.Module))
    keys = {id(value): key for key, value in model.state_dict(keep_vars=True).items()}
    states = {}
    for name, item in objects.items():
        value: Any
        if item is model:
            value = {key: state.variable(key) for key in keys.values()}
        else:
            parameters = parameters_of(item)
            if any(id(parameter) not in keys for parameter in parameters):
                raise CheckpointError(f"{name} changes parameters that are not the model's")
            variables = [keys[id(parameter)] for parameter in parameters]
            groups = param_groups(item)
            value = {"state": state.optimizer_state(variables, groups), "param_groups": groups}
        states[name] = encode(value, name, copy=False).of_kind(kind_of(name, item))
    return states


def tables_of(objects: Mapping[str, Any], saved: SavedCheckpoint) -> set[str]:
    """Which variables in a checkpoint are tables in these modules, whether prepared or not."""
    found = set()
    for name, item in objects.items():
        if isinstance(item, torch.nn.Module):
            tree = saved.objects[name].tree if name in saved.objects else {}
            named = tree.get("$module", tree) if isinstance(tree, dict) else {}
            tables = [key for key, value in item.state_dict().items() if isinstance(value, TableHandle)]
            # A checkpoint of variables alone has them by the names in the model.
            found |= {named[key].get("$variable", key) if key in named else key for key in tables}
    return found


def put_back(objects: dict[str, Any], states: Mapping[str, tuple[str, Any]]) -> None:
    """Gives objects the states that were read, each with its kind; plain values are replaced in ``objects``.
    CheckpointError: an object is not what the checkpoint says it was."""
    kinds = {name: kind_of(name, item) for name, item in objects.items()}
    for name, kind in kinds.items():
        if states[name][0] != kind and {states[name][0], kind} != {LEASED, OBJECT}:
            raise CheckpointError(f"expected a {states[name][0]} for {name}, as in the checkpoint, got a {kind}")
        cls = type(objects[name]).__name__
        if kind == OPTIMIZER and (saved := states[name][1].pop(CLASS, cls)) != cls:
            raise CheckpointError(
                f"expected the state of {cls} for {name}, got that of {saved}: leave {name} out to start it afresh, or "
                f'give it what fits of sg.load_checkpoint(path, "{name}")'
            )
    for name in sorted(kinds, key=lambda name: kinds[name] != MODEL):  # models first
        _put_one(objects, name, kinds[name], *states[name])


def _put_one(objects: dict[str, Any], name: str, kind: str, saved: str, state: Any) -> None:
    if kind == VALUE:
        objects[name] = state
    elif kind == VARIABLE:
        objects[name].assign(state)
    elif kind == LEASED or saved == LEASED:
        epoch = state.get("epoch") if isinstance(state, Mapping) else state
        begin_at = getattr(objects[name], "begin_at", None)
        if begin_at is not None and epoch is not None:
            begin_at(epoch)
        if kind != saved or epoch is None:
            place = "from the beginning" if begin_at is None or not epoch else f"at the beginning of epoch {epoch}"
            logger.warning(
                "%s starts %s: the checkpoint is from a job whose data was distributed differently", name, place
            )
    else:
        try:
            settings = [set(group) for group in objects[name].param_groups] if kind == OPTIMIZER else []
            if kind == OPTIMIZER and objects[name].__class__.load_state_dict is torch.optim.Optimizer.load_state_dict:
                _number_by_range(state["param_groups"])
            objects[name].load_state_dict(state)
            # Torch takes the state of any optimizer, fills in settings newer than that, and fails in the next step.
            for before, group in zip(settings, objects[name].param_groups if settings else (), strict=True):
                if lacking := sorted(before - set(group)):
                    raise ValueError(f"it says nothing of {', '.join(lacking)}")
        except (RuntimeError, ValueError, KeyError) as error:  # as torch says that a state does not fit
            if isinstance(error, StratagemError):
                raise
            way_out = "load what fits with sg.load_checkpoint" if kind == MODEL else "leave it out to start it afresh"
            raise CheckpointError(
                f"the checkpoint is of a different {kind} than {name}, which may have loaded a part of it ({way_out}): "
                f"{error}"
            ) from error


def _number_by_range(groups: list[dict[str, Any]]) -> None:
    """Torch looks for the number of a parameter in its group once for each tensor of its state: with ten thousand
    parameters a list takes as long as everything else of a restore."""
    first = 0
    for group in groups:
        numbers = range(first, first + len(group["params"]))
        if group["params"] == [*numbers]:
            group["params"] = numbers
        first = numbers.stop
