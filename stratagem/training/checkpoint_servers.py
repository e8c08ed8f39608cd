"""The part of a checkpoint that parameter servers hold: writing it through the chief."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable

import torch

from stratagem.checkpoint.catalog import is_complete
from stratagem.strategy.base import Strategy
from stratagem.strategy.parameter_server import ParameterServerStrategy

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
