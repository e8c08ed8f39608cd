"""``state_dict()`` and ``load_state_dict()`` of an optimizer that changes tables on parameter servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stratagem.errors import ConfigurationError
from stratagem.worker.push.remote_table import RemoteTable


class TableState:
    """Keeps the state of tables out of this process: it may be larger than its memory.

    Args:
        optimizer: the optimizer.
        tables: those that it changes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, tables: list[RemoteTable]) -> None:
        self._optimizer = optimizer
        self._tables = tables
        self._loading: dict[int, Mapping[str, Any]] = {}
        for table in tables:
            optimizer.state.pop(table.handle, None)  # what the constructor made for it
        optimizer.register_state_dict_pre_hook(lambda _: self._refuse())
        optimizer.register_load_state_dict_pre_hook(lambda _, state: self._take_out(state))
        optimizer.register_load_state_dict_post_hook(lambda _: self._send())

    def _refuse(self) -> None:
        raise ConfigurationError(
            f"the state of {type(self._optimizer).__name__} is as large as table {self._tables[0].link.name} and lives "
            "with it on the parameter servers: save it with sg.Checkpoint(model=..., optimizer=...)"
        )

    def _take_out(self, state: dict[str, Any]) -> dict[str, Any]:
        """torch would convert the tables' state to the kind of their parameters, which have no memory."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        kept = dict(state["state"])
        if len(numbers) == len(parameters):  # else torch refuses it
            for at, table in enumerate(self._tables):
                self._loading[at] = kept.pop(numbers[indices[id(table.handle)]], {})
        return {**state, "state": kept}

    def _send(self) -> None:
        loading, self._loading = self._loading, {}
        for at, state in loading.items():
            num_updates = int(state.get("step", 1))
            for name, value in state.items():
                if name != "step" and isinstance(value, torch.Tensor):
                    self._tables[at].assign(value, name, num_updates)
