"""How an Estimator runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from stratagem.arguments import above_zero, checked, whole_numbers
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.tensorflow_names import WithWaysOut

CHECKPOINT_NAME = "model.ckpt"
"""Beginning of the names in the folder of a model; a chief may keep checkpoints of its own in there."""
DEFAULT_SAVE_S = 600.0

StrategyOrFactory = Strategy | Callable[[], Strategy]


@checked
@dataclasses.dataclass(frozen=True)
class RunConfig(WithWaysOut):
    """Choices for an Estimator.

    Raises:
        ConfigurationError: a value is out of its range, or two contradict each other.
    """

    model_dir: str | os.PathLike[str] | None = None
    """Where checkpoints, summaries and exports go; in a cluster every task has to see it."""
    seed: int | None = None
    """Seeds torch before the model is created; None: torch is left as it is."""
    save_summary_steps: int = 100
    """Steps between two lines in the log and two points in TensorBoard."""
    save_checkpoints_steps: int | None = None
    """Steps between two checkpoints. There is one at the end of a training in any case."""
    save_checkpoints_secs: float | None = None
    """Seconds between two checkpoints, instead of steps; with neither 600. ``math.inf``: only at the end."""
    keep_checkpoint_max: int | None = 5
    """Checkpoints to keep, the newest ones; None or 0: all."""
    train_distribute: StrategyOrFactory | None = None
    """The strategy of ``train``, or what makes it: a class, a function. None: what ``stratagem run`` and
    TF_CONFIG say (``sg.strategy_from_environment``)."""
    eval_distribute: StrategyOrFactory | None = None
    """The strategy of ``evaluate`` and ``predict``; None: one device."""

    def __post_init__(self) -> None:
        if self.save_checkpoints_steps is not None and self.save_checkpoints_secs is not None:
            raise ConfigurationError("expected save_checkpoints_steps or save_checkpoints_secs, got both")
        whole_numbers(save_summary_steps=self.save_summary_steps, save_checkpoints_steps=self.save_checkpoints_steps)
        above_zero(save_checkpoints_secs=self.save_checkpoints_secs)
        whole_numbers(0, keep_checkpoint_max=self.keep_checkpoint_max)

    @property
    def save_every_s(self) -> float | None:
        """Seconds between two checkpoints; None where steps count."""
        if self.save_checkpoints_steps is not None:
            return None
        return DEFAULT_SAVE_S if self.save_checkpoints_secs is None else self.save_checkpoints_secs
