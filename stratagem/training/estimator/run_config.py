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
    """Options of an Estimator.

    Raises:
        ConfigurationError: a value is out of range, or two contradict each other.
    """

    model_dir: str | os.PathLike[str] | None = None
    """Folder for checkpoints, summaries and exports; in a cluster it must be visible to every task."""
    seed: int | None = None
    """Seeds torch before the model is created; None: torch is not seeded."""
    save_summary_steps: int = 100
    """Steps between two lines in the log and two points in TensorBoard."""
    save_checkpoints_steps: int | None = None
    """Steps between two checkpoints. The end of a training always saves one."""
    save_checkpoints_secs: float | None = None
    """Seconds between two checkpoints, instead of steps; 600 if neither is set. ``math.inf``: only at the end."""
    keep_checkpoint_max: int | None = 5
    """Number of checkpoints to keep, newest first; None or 0: all."""
    train_distribute: StrategyOrFactory | None = None
    """The strategy of ``train``, or a class or function that makes it. None: the strategy of ``stratagem run`` and
    TF_CONFIG (``sg.strategy_from_environment``)."""
    eval_distribute: StrategyOrFactory | None = None
    """The strategy of ``evaluate`` and ``predict``; None: one device."""

    def __post_init__(self) -> None:
        if self.save_checkpoints_steps is not None and self.save_checkpoints_secs is not None:
            raise ConfigurationError("expected save_checkpoints_steps or save_checkpoints_secs, got both")
        whole_numbers(save_summary_steps=self.save_summary_steps, save_checkpoints_steps=self.save_checkpoints_steps)
        above_zero(save_checkpoints_secs=self.save_checkpoints_secs)
        whole_numbers(0, keep_checkpoint_max=self.keep_checkpoint_max)
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 64:
            raise ConfigurationError(f"expected a seed that torch takes, from -2**63 to 2**64 - 1, got {self.seed}")
