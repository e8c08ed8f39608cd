"""``optimizer.state_dict()`` and ``load_state_dict()`` while state lives on parameter servers (docs/protocol.md 7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stratagem.rpc.codec import Frame
from stratagem.worker.push.host_tensors import WeightTargets
from stratagem.worker.push.layout import Layout
from stratagem.worker.push.ps_client import PsClient
from stratagem.worker.push.variables import send_values
from stratagem.worker.push.wire import assign_values, pull_weights, scalars_of

SCALARS = frozenset({"mu_product", "eta", "mu"})
"""State of NAdam and ASGD that is one number a parameter; all other state but "step" has the parameter's shape."""


class OptimizerState:
    """The slots of one optimizer, on the ps.

    Args:
        clients: one per ps.
        layout: where the rows of its parameters live; variable i is parameter i.
        optimizer: the optimizer.
        parameters: its parameters, in the order of the layout.
        may_assign: whether this worker's ``load_state_dict`` reaches the ps; others load the same file.
    """

    def __init__(
        self,
        clients: Sequence[PsClient],
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        may_assign: Callable[[], bool],
    ) -> None:
        self._clients = clients
        self._layout = layout
        self._optimizer = optimizer
        self._parameters = parameters
        self._may_assign = may_assign
        optimizer.register_state_dict_pre_hook(lambda _: self._fill())
        optimizer.register_state_dict_post_hook(lambda _, state: self._empty())
        optimizer.register_load_state_dict_post_hook(lambda _: self._load())

    def _fill(self) -> None:
        """Puts the state of the ps into ``optimizer.state``, where ``state_dict()`` looks for it."""
        for (group, ps), shards in sorted(self._layout.shards.items()):
            client = self._clients[ps]
            facts = self._pull(client, group, "", None)
            scalars = scalars_of(facts)
            tensors = {name: [torch.zeros(p.shape, dtype=p.dtype) for p in self._parameters] for name in facts.slots}
            for name in facts.slots:
                targets = WeightTargets(self._layout, tensors[name])
                self._pull(client, group, name, targets)
            for position, shard in enumerate(shards):
                if not facts.step_counts[position]:
                    continue
                state: dict[str, Any] = self._optimizer.state[self._parameters[shard.variable]]
                for name, values in scalars.items():
                    state[name] = torch.tensor(values[position])
                for name in facts.slots:
                    whole = state.setdefault(name, torch.zeros_like(tensors[name][shard.variable]))
                    rows = slice(shard.start, shard.start + shard.num_elements)
                    whole.view(-1)[rows] = tensors[name][shard.variable].view(-1)[rows]

    def _pull(self, client: PsClient, group: int, slot: str, targets: WeightTargets | None) -> Any:
        def write(frame: Frame) -> None:
            if targets is not None:
                targets.write(client.index, frame)

        return pull_weights(client, {group: None}, slot=slot).result(write)

    def _empty(self) -> None:
        for parameter in self._parameters:
            self._optimizer.state.pop(parameter, None)

    def _load(self) -> None:
        """Sends a loaded state to the ps, and forgets it here."""
        if not self._may_assign():
            self._empty()
            return
        for (group, ps), shards in sorted(self._layout.shards.items()):
            states = [dict(self._optimizer.state.get(self._parameters[shard.variable], {})) for shard in shards]
            counts = [int(state.get("step", 1 if state else 0)) for state in states]
            names = {name for state in states for name, value in state.items() if value is not None}
            scalars = {name: [float(state.get(name, 0.0)) for state in states] for name in sorted(names & SCALARS)}
            slots = sorted(names - SCALARS - {"step"})
            for slot in slots:
                self._assign(self._clients[ps], group, slot, counts, scalars)
        self._empty()

    def _assign(
        self, client: PsClient, group: int, slot: str, counts: list[int], scalars: dict[str, list[float]]
    ) -> None:
        tensors = [
            self._optimizer.state.get(parameter, {}).get(slot, torch.zeros_like(parameter, device="cpu"))
            for parameter in self._parameters
        ]
        source = WeightTargets(self._layout, tensors)
        values = send_values(client, self._layout, source, [group])
        assign_values(client, values, [group], slot, counts, scalars)
