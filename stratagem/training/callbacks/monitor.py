"""Which of two logged values is better."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Literal

from stratagem.errors import ConfigurationError

logger = logging.getLogger(__name__)

Mode = Literal["auto", "min", "max"]

_GROWING = ("acc", "auc", "auroc", "precision", "recall", "f1", "fbeta", "dice", "jaccard", "iou", "r2", "correlation")
_SHRINKING = ("loss", "err", "mse", "mae", "mape", "msle", "distance", "divergence", "entropy", "perplexity", "hinge")


class Monitor:
    """Follows one value of the epochs' logs. ``mode``: whether less or more is better; "auto": more, where the name
    says accuracy, AUC, precision and the like, less, where it says loss, error and the like. ``min_delta``: what counts
    as better. ConfigurationError: no mode, or "auto" and a name that does not say it."""

    def __init__(self, name: str, mode: Mode = "auto", min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise ConfigurationError(f"expected mode 'auto', 'min' or 'max', got {mode!r}")
        self.name = name
        growing, shrinking = mode == "max", mode == "min"
        if mode == "auto":
            growing, shrinking = (any(word in name for word in words) for words in (_GROWING, _SHRINKING))
        if growing == shrinking:
            raise ConfigurationError(
                f"the name {name!r} does not say whether higher or lower is better: give mode='max' or mode='min'"
            )
        self._sign = 1.0 if growing else -1.0
        self._min_delta = abs(min_delta)
        self.best = math.nan
        """NaN before the first value."""
        self._has_warned = False

    def value(self, logs: Mapping[str, float] | None) -> float | None:
        """The value in ``logs``; None, with one warning, if it is not there."""
        if logs is not None and self.name in logs:
            return float(logs[self.name])
        if not self._has_warned:
            self._has_warned = True
            known = ", ".join(logs or ())
            logger.warning("%r is not in the logs of the epoch, which have: %s", self.name, known)
        return None

    def improves(self, value: float, best: float | None = None) -> bool:
        """Whether ``value`` is better than ``best``, which is this monitor's unless given. NaN never is."""
        best = self.best if best is None else best
        if math.isnan(value):
            return False
        return math.isnan(best) or self._sign * (value - best) > self._min_delta
