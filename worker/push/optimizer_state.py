"""``optimizer.state_dict()`` and ``load_state_dict()`` while state lives on parameter servers (docs/protocol.md 7)."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stratagem.checkpoint.server_state import SavedRows, add_first_sums
from stratagem.errors import ConfigurationError
from stratagem.worker.gradient_guard import parameters_of
from stratagem.worker.push.host_tensors import WeightTargets
from stratagem.worker.push.ps_client import insist
from stratagem.worker.push.remote_table import RemoteTable
from stratagem.worker.push.variables import RemoteVariables, send_values
from stratagem.worker.push.wire import assign_values, pull_weights, scalars_of

SCALARS = frozenset({"mu_product", "eta", "mu"})
"""State of NAdam and ASGD that is one number a parameter; all other state but "step" has the parameter's shape."""

_TABLE_SLOTS = {torch.optim.Adagrad: ("sum",), torch.optim.SparseAdam: ("exp_avg", "exp_avg_sq")}


class _OnServers(dict[str, Any]):
    """What ``optimizer.state`` returns for a parameter."""

    def __missing__(self, name: str) -> Any:
        raise ConfigurationError(
            f"optimizer.state[parameter][{name!r}] is on the parameter servers: optimizer.state_dict() fetches the "
            "state of all parameters, and sg.Checkpoint(model=..., optimizer=...) saves it there"
        )


_NOT_HERE = (
    "the state of a prepared optimizer is on the parameter servers, and optimizer.state has none of it: to reset it, "
    "give optimizer.load_state_dict() that of an optimizer that has made no step; optimizer.state_dict() fetches it"
)

HAS_MORE = (
    "has got parameters since strategy.prepare, which the parameter servers do not train: call add_param_group before "
    "prepare, and requires_grad_(False) on what should not train yet"
)
"""Of an optimizer."""


class _Elsewhere(collections.defaultdict[Any, Any]):
    """The local stand-in for an optimizer's state."""

    def clear(self) -> None:
        raise ConfigurationError(_NOT_HERE)


@dataclasses.dataclass(eq=False, repr=False)
class OptimizerState:
    """The slots of one optimizer, on the ps."""

    variables: dataclasses.InitVar[RemoteVariables]
    """Where the rows of its parameters live; variable i is parameter i."""
    _optimizer: torch.optim.Optimizer
    _parameters: Sequence[torch.nn.Parameter]
    _may_assign: Callable[[], bool]
    """Whether this worker's ``load_state_dict`` reaches the ps; others load the same file."""
    _reconnect: Callable[[], None]
    """To the ps, of which one was lost."""

    def __post_init__(self, variables: RemoteVariables) -> None:
        self._clients = variables.clients
        self._layout = variables.layout
        self._elsewhere = _Elsewhere()
        self._num_parameters = self._count()
        self._optimizer.register_state_dict_pre_hook(lambda _: insist(self._fetch, self._reconnect))
        self._optimizer.register_state_dict_post_hook(lambda _, state: self._finish(state))
        self._optimizer.register_load_state_dict_post_hook(lambda _: self._load())
        self._optimizer.register_step_pre_hook(lambda *_: self._check())

    def _fetch(self) -> None:
        """Puts the state of the ps into ``optimizer.state``, where ``state_dict()`` looks for it."""
        self._empty()
        for (group, ps), shards in sorted(self._layout.shards.items()):
            client = self._clients[ps]
            facts = pull_weights(client, {group: None}).result(lambda _: None)
            scalars = scalars_of(facts)
            tensors = {name: [torch.zeros(p.shape, dtype=p.dtype) for p in self._parameters] for name in facts.slots}
            for name in facts.slots:
                targets = WeightTargets(self._layout, tensors[name])
                write = functools.partial(targets.write, client.index)
                pull_weights(client, {group: None}, slot=name).result(write)
            for position, shard in enumerate(shards):
                if not facts.step_counts[position]:
                    continue
                state = self._optimizer.state.setdefault(self._parameters[shard.variable], {})
                for name, values in scalars.items():
                    state[name] = torch.tensor(values[position])
                for name in facts.slots:
                    whole = state.setdefault(name, torch.zeros_like(tensors[name][shard.variable]))
                    rows = slice(shard.start, shard.start + shard.num_elements)
                    whole.view(-1)[rows] = tensors[name][shard.variable].view(-1)[rows]

    def _finish(self, state: dict[str, Any]) -> None:
        self._empty()
        add_first_sums(state["state"], state["param_groups"], parameters_of(self._optimizer).__getitem__)

    def _empty(self) -> None:
        for parameter in self._parameters:
            self._optimizer.state.pop(parameter, None)
        self._optimizer.state = self._elsewhere = _Elsewhere(_OnServers, self._optimizer.state)

    def _check(self) -> None:
        if self._optimizer.state is not self._elsewhere:
            raise ConfigurationError(_NOT_HERE)
        if self._count() != self._num_parameters:
            raise ConfigurationError(f"{type(self._optimizer).__name__} {HAS_MORE}")

    def _count(self) -> int:
        return sum([len(group["params"]) for group in self._optimizer.param_groups])

    def begin(self, is_given: bool) -> None:
        """What the optimizer had before it was prepared goes to the ps with the weights that this process gave them, if
        it did, and is forgotten here. What its constructor made (of Adagrad, say) a ps makes itself."""
        if is_given and any(_num_steps(self._optimizer.state.get(parameter, {})) for parameter in self._parameters):
            insist(self._assign, self._reconnect)
        self._empty()

    def _load(self) -> None:
        """Sends a loaded state to the ps, and forgets it here."""
        if self._may_assign():
            insist(self._assign, self._reconnect)
        self._empty()

    def _assign(self) -> None:
        for (group, ps), shards in sorted(self._layout.shards.items()):
            states = [dict(self._optimizer.state.get(self._parameters[shard.variable], {})) for shard in shards]
            counts = [*map(_num_steps, states)]
            names = {name for state in states for name, value in state.items() if value is not None}
            scalars = {name: [float(state.get(name, 0.0)) for state in states] for name in sorted(names & SCALARS)}
            slots = sorted(names - SCALARS - {"step"})
            if not names:  # a state that begins anew
                slots = list(pull_weights(self._clients[ps], {group: None}).result(lambda _: None).slots)
            for slot in slots:
                tensors = [
                    self._optimizer.state.get(parameter, {}).get(slot, torch.zeros_like(parameter, device="cpu"))
                    for parameter in self._parameters
                ]
                source = WeightTargets(self._layout, tensors)
                values = send_values(self._clients[ps], self._layout, source, [group])
                assign_values(self._clients[ps], values, [group], slot, counts, scalars)


def _num_steps(state: Mapping[str, Any]) -> int:
    return int(state.get("step", 1 if state else 0))


def check_loaded(optimizer: torch.optim.Optimizer, handle: torch.nn.Parameter, name: str) -> None:
    """Raises ConfigurationError: the optimizer has state of the table ``name`` without values, because it was loaded
    as tensors before prepare, and torch gave it the device of the parameter, which has no memory."""
    state = optimizer.state.get(handle, {})
    if _num_steps(state) and any(isinstance(value, torch.Tensor) and value.is_meta for value in state.values()):
        raise ConfigurationError(
            f"the state that {type(optimizer).__name__} has of table {name} was loaded before strategy.prepare, when "
            "there was no parameter server to take it. Load it after prepare: restore the sg.Checkpoint there, or on "
            "every worker:\n    strategy.load_once(lambda: optimizer.load_state_dict(state))"
        )


class TableState:
    """Keeps the state of tables out of this process: it may be larger than its memory."""

    def __init__(self, optimizer: torch.optim.Optimizer, tables: list[RemoteTable]) -> None:
        self._optimizer = optimizer
        self._tables = tables
        self._loading: dict[int, Mapping[str, Any]] = {}
        for at, table in enumerate(tables):
            state = optimizer.state.pop(table.handle, {})  # what the constructor made for it, or a checkpoint has
            if table.is_given and _num_steps(state):
                self._loading[at] = state
        optimizer.register_state_dict_pre_hook(lambda _: self._refuse())
        optimizer.register_load_state_dict_pre_hook(lambda _, state: self._take_out(state))
        optimizer.register_load_state_dict_post_hook(lambda _: self.send())

    def _refuse(self) -> None:
        raise ConfigurationError(
            f"the state of {type(self._optimizer).__name__} is as large as table {self._tables[0].link.name} and lives "
            "with it on the parameter servers: save it with sg.Checkpoint(model=..., optimizer=...)"
        )

    def _take_out(self, state: dict[str, Any]) -> dict[str, Any]:
        """torch would convert the tables' state to the kind of their parameters, which have no memory."""
        parameters = parameters_of(self._optimizer)
        indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        kept = dict(state["state"])
        if len(numbers) == len(parameters):  # else torch refuses it
            for at, table in enumerate(self._tables):
                self._loading[at] = kept.pop(numbers[indices[id(table.handle)]], {})
        return {**state, "state": kept}

    def send(self) -> None:
        """Gives the ps what was loaded, also before this optimizer was prepared with rows of this process's. It can be
        called again where that fails."""
        for at, state in self._loading.items():
            table = self._tables[at]
            num_updates = _num_steps(state)
            if not state:  # it begins anew
                nothing = torch.zeros((), dtype=table.handle.dtype).expand(table.num_rows, table.width)
                state = dict.fromkeys(_TABLE_SLOTS.get(type(self._optimizer), ()), nothing)
            for name, value in state.items():
                if name != "step" and isinstance(value, torch.Tensor | SavedRows):
                    table.assign(value, name, num_updates)
        self._loading = {}
