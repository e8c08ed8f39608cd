"""What callbacks see of a model and of its training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.training.callbacks.history import History
from stratagem.training.fit_position import FitPosition
from stratagem.training.tally import Tally


class ModelState:
    """A model and how far its training has come.

    Args:
        strategy: whose replicas train it.
        module: not prepared.
    """

    def __init__(self, strategy: Strategy, module: nn.Module) -> None:
        self.strategy = strategy
        """Whose replicas train it."""
        self.module = module
        """What was given, or, once prepared, what stands for it on all replicas."""
        self.optimizer: torch.optim.Optimizer | None = None
        """Prepared."""
        self.stop_training = False
        """Callbacks set it; see :class:`~stratagem.training.callbacks.base.Callback`."""
        self.history: History | None = None
        """Of the newest ``fit``."""
        self._position: FitPosition | None = None
        self._tally: Tally | None = None
        self._num_steps = 0
        self._is_fitting = False

    @property
    def learning_rate(self) -> float:
        """Of the optimizer's first group; setting it sets that of all groups."""
        return float(self._compiled_optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for group in self._compiled_optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    @property
    def position(self) -> FitPosition:
        """How far ``fit`` has come; a checkpoint can save and restore it.

        Raises:
            ConfigurationError: there was no ``fit``.
        """
        if self._position is None:
            raise ConfigurationError("the position is that of fit, which has not been called")
        return self._position

    @property
    def num_steps(self) -> int:
        """Steps that all ``fit`` calls have made, those before an interruption included."""
        return self._num_steps + (self._position.num_steps if self._position is not None else 0)

    @property
    def step_in_epoch(self) -> int:
        """Steps that the epoch has had."""
        return 0 if self._tally is None else self._tally.num_steps

    @property
    def examples_in_epoch(self) -> int:
        """Examples that the epoch has had; of several workers that run in step, as if each had as many."""
        workers = self.strategy.communicator
        return 0 if self._tally is None else self._tally.num_examples * (1 if workers is None else workers.size)

    @property
    def is_fitting(self) -> bool:
        """Whether ``fit`` runs."""
        return self._is_fitting

    @property
    def is_mid_update(self) -> bool:
        """Whether gradients of some steps of ``fit`` wait for those of further ones, to make one update with them."""
        return self._position is not None and self._position.num_waiting != 0

    @property
    def is_resumed(self) -> bool:
        """Whether ``fit`` goes on where an earlier one was interrupted."""
        return self._position is not None and self._position.is_resumed

    @property
    def has_servers(self) -> bool:
        """Whether parameter servers hold the weights, and their chief the place in the data."""
        return self.strategy.servers is not None

    @property
    def _compiled_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ConfigurationError("there is no optimizer: give compile(optimizer=...)")
        return self.optimizer

    @contextlib.contextmanager
    def _fitting(self) -> Iterator[None]:
        self._num_steps, self._position = self.num_steps, None
        self.stop_training = False
        self._is_fitting = True
        try:
            yield
        finally:
            self._is_fitting = False
