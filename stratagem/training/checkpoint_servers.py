"""The part of a checkpoint that parameter servers hold: writing it through the chief, reading it as plain states."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from stratagem.errors import CheckpointError
from stratagem.ps.consolidate import consolidate
from stratagem.strategy.base import Strategy
from stratagem.strategy.parameter_server import ParameterServerStrategy
from stratagem.training.checkpoint_catalog import is_complete

logger = logging.getLogger(__name__)

Place = tuple[int, torch.Size]
"""Address and shape of a tensor; of one without memory, which stands for a table, the object instead."""


class Servers:
    """The parameter servers of a job, as a checkpoint sees them.

    Args:
        strategy: of the job.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self._strategy = strategy

    def save(self, directory: pathlib.Path) -> pathlib.Path:
        """Takes a consistent checkpoint of all ps in a directory that all of them see; returns its path."""
        return pathlib.Path(self._strategy.save_checkpoint(directory.absolute()))

    def claim(self, target: pathlib.Path) -> bool:
        """Says that this worker saves there. False when another worker, or an earlier job, has done so."""
        if not is_complete(target):  # looked at first: whoever writes it says so before
            self.announce(target)
            return True
        if not self.is_announced(target):
            logger.warning(
                "%s is of an earlier job and stays as it is: nothing is saved. Go on from it (restore_or_initialize), "
                "or save into another directory",
                target,
            )
        return False

    def announce(self, target: pathlib.Path) -> None:
        """Tells the job that a worker of it is about to save there."""
        self._strategy.counts.settle(f"checkpoint {target}", 0, {})

    def is_announced(self, target: pathlib.Path) -> bool:
        """Whether a worker of this job has said that."""
        return self._strategy.counts.logs(f"checkpoint {target}", 0) is not None

    def names(self) -> dict[Place, str]:
        """Names of tables and of the variables that optimizers change on the ps, by :func:`place_of` the copy in this
        process, or of what stands for a table.

        Of what no optimizer changes (buffers) the ps have the initial values only.
        """
        named = self._strategy.named_variables()
        return {place_of(tensor): name for name, tensor in named if tensor.numel()}

    def push_weights(self) -> None:
        """Gives the ps the values that the lead has now; the others take them from there."""
        self._strategy.push_weights()

    def load_once(self, load: Callable[[], None]) -> None:
        """Calls ``load`` on every worker; what the lead loads reaches the ps, once in the life of the job."""
        self._strategy.load_once(load)


def place_of(tensor: torch.Tensor) -> Place:
    """What tells tensors of a script apart, also by a ``detach()`` of them."""
    return id(tensor) if tensor.device.type == "meta" else tensor.data_ptr(), tensor.shape


def servers_of(strategy: Strategy) -> Servers | None:
    """The ps that hold the variables; None when this process has them."""
    return Servers(strategy) if isinstance(strategy, ParameterServerStrategy) else None


class ServerState:
    """What parameter servers wrote into a checkpoint; weights and slots are read when first asked for.

    Args:
        path: of the checkpoint.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._slots: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def variables(self) -> Mapping[str, torch.Tensor]:
        """Every variable whole, by name.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        return self._slot("")

    def variable(self, name: str) -> torch.Tensor:
        """One of them.

        Raises:
            CheckpointError: there is none of that name.
        """
        if name not in self.variables:
            raise CheckpointError(f"the checkpoint {self._path} has no variable {name}: it is of another model")
        return self.variables[name]

    def optimizer_state(self, names: Iterable[str]) -> dict[int, dict[str, Any]]:
        """The part ``state`` of an optimizer's ``state_dict()``.

        Args:
            names: of its parameters on the ps, in the optimizer's order.
        """
        facts = self._facts()
        state: dict[int, dict[str, Any]] = {}
        for index, name in enumerate(names):
            group, position = facts.get(name, ({}, 0))
            if not group or not group["counts"][position]:
                continue  # no update has touched it
            entry: dict[str, Any] = {}
            if group["optimizer"] != "SGD":  # the only one that counts no steps
                entry["step"] = torch.tensor(float(group["counts"][position]))
            entry |= {scalar: torch.tensor(values[position]) for scalar, values in group["scalars"].items()}
            entry |= {slot: self._slot(slot)[name] for slot in group["slots"]}
            if entry:
                state[index] = entry
        return state

    def _slot(self, slot: str) -> dict[str, torch.Tensor]:
        if slot not in self._slots:
            self._slots[slot] = consolidate(self._path, slot)
        return self._slots[slot]

    def _facts(self) -> dict[str, tuple[dict[str, Any], int]]:
        """The group of each variable that an optimizer changes, and its place in there; of a cut one its first."""
        facts: dict[str, tuple[dict[str, Any], int]] = {}
        for part in sorted(self._path.glob("ps-*.json")):
            try:
                for group in json.loads(part.read_text())["groups"]:
                    for position, shard in enumerate(group["shards"]):
                        if group["optimizer"]:
                            facts.setdefault(shard["variable"], (group, position))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{part} cannot be read: {error!r}") from None
        return facts


def has_server_state(path: pathlib.Path) -> bool:
    """Whether parameter servers wrote (a part of) the checkpoint."""
    return any(path.glob("ps-*.json"))
