"""The position of ``fit``: what a checkpoint needs to resume there."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem.checkpoint.tree import encode
from stratagem.data.split_dataset import SplitDataset
from stratagem.errors import ConfigurationError
from stratagem.strategy.metric_states import pack, unpack
from stratagem.training.fit.running_metrics import RunningMetrics
from stratagem.training.saving.object_states import Stateful

_OWN = ("epoch", "step", "num_steps", "is_trained", "is_over", "logs", "example")
"""Attributes of a position that are its state."""


class FitPosition:
    """The epoch and the step that come next, the place in the data, what was counted, and the callbacks' own state.

    A checkpoint takes it by ``state_dict`` and ``load_state_dict``. Where workers run in step, every worker has to ask
    for the state.
    """

    def __init__(
        self, dataset: Any, running: RunningMetrics, callbacks: Sequence[Stateful], epoch: int, num_before: int = 0
    ) -> None:
        self._dataset = dataset
        if self._is_placed:
            dataset.is_own_loop = False
        self._running = running
        self._callbacks = callbacks
        self.validation: SplitDataset | None = None
        """Data that workers who run in step evaluate after epochs."""
        self._num_before = num_before
        """Calls of ``fit`` that were done before this one, of this model in its process."""
        self.epoch = epoch
        self.step = 0
        """Within the epoch: steps that are done."""
        self.num_steps = 0
        """Steps that are done in all epochs."""
        self.is_trained = False
        """Whether the epoch has had all its steps, and is being validated."""
        self.num_waiting = 0
        """Steps whose gradients wait for those of further ones, to make one update. No checkpoint has them."""
        self.is_resumed = False
        self.is_over = False
        """Whether a callback had said stop when this was saved: no other epoch begins."""
        self.logs: dict[str, float] = {}
        """Of the last epoch that is done."""
        self.example: Any = None
        """Of what the module is called with: ``Model.save`` needs it, also where nothing was left to train."""

    def keep(self, example: Any) -> None:
        """Saves it with the rest, if it can be."""
        with contextlib.suppress(ConfigurationError):
            encode(example, "example", copy=False)
            self.example = example

    def end_epoch(self) -> None:
        """The epoch is over, its callbacks have been called."""
        self.epoch, self.step, self.is_trained = self.epoch + 1, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors of bytes."""
        counted = self._running.states() if self.step else []
        return {
            **self._place(),
            "counted": [pack(states) for states in counted],
            "data": self._dataset.state_dict() if self._is_placed else {},
            "validation_epoch": 0 if self.validation is None else self.validation.next_epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where ``state`` was saved. The first callback of a class gets the state of the first, and so on.
        ConfigurationError: it is of a later ``fit`` of the script."""
        if (number := state["num_before"]) > self._num_before:
            raise ConfigurationError(
                f"this backup was saved in fit call {number + 1} of this model, but this is call "
                f"{self._num_before + 1}: give each fit call a BackupAndRestore with its own folder, and all but the "
                "last delete_checkpoint=False, so that finished calls are not trained again"
            )
        self._put(state)
        self._running.add_states([unpack(part) for part in state["counted"]])
        if self._is_placed and state["data"]:
            self._dataset.load_state_dict(state["data"])
        if self.validation is not None:  # its order may be another in each epoch
            self.validation.begin_at(state.get("validation_epoch", 0))

    def hand_over(self) -> dict[str, Any]:
        """What a newcomer to a ring needs besides model, optimizer and data; what was counted, the others have."""
        validation = {} if self.validation is None else self.validation.hand_over(is_open=False)
        return {**self._place(), "validation": validation}

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Goes on where the others are, whose :meth:`hand_over` it is."""
        self._put(state)
        if self.validation is not None and state["validation"]:
            self.validation.take_over(state["validation"])

    def _place(self) -> dict[str, Any]:
        return {
            "num_before": self._num_before,
            **{name: getattr(self, name) for name in _OWN},
            "callbacks": [
                {"kind": type(callback).__name__, "state": callback.state_dict()} for callback in self._callbacks
            ],
        }

    def _put(self, state: Mapping[str, Any]) -> None:
        for name in _OWN:
            setattr(self, name, state.get(name, getattr(self, name)))  # an older backup lacks some
        self.is_resumed = True
        self._running.reset()
        self._running.num_steps = self.step
        saved = list(state["callbacks"])
        for callback in self._callbacks:
            own = next((one for one in saved if one["kind"] == type(callback).__name__), None)
            if own is not None:
                saved.remove(own)
                callback.load_state_dict(own["state"])

    @property
    def _is_placed(self) -> bool:
        """Whether the dataset knows its position; parameter servers' chief keeps theirs."""
        return hasattr(self._dataset, "load_state_dict")
