"""How regularly a task is heard of, and what its silence says: phi accrual. Pure, no I/O.

After Hayashibara, Defago, Yared, Katayama: The phi accrual failure detector (SRDS 2004): the times between heartbeats
are taken as normal, and phi is minus the decimal logarithm of the chance that one as late as the present comes yet.
"""

from __future__ import annotations

import math

LOST_DEVIATIONS = 5.6
"""Standard deviations at phi 8, one silence in a hundred million."""
LONGEST = 3.0
"""Session timeouts that a silence may last, however irregular the heartbeats were."""
_MEMORY = 0.05
"""Weight of the newest interval in the mean: the last twenty count most."""
_LEAST_DEVIATION = 0.25
"""Of the mean: heartbeats never come more regularly than their timer and the machine let them."""
_MOST_PHI = 99.0


class Heartbeats:
    """The intervals between the heartbeats of one process, which are sent every ``interval_s`` seconds."""

    def __init__(self, interval_s: float) -> None:
        self._mean_s = interval_s
        self._variance = 0.0

    def add(self, interval_s: float) -> None:
        """A heartbeat came, so many seconds after the one before."""
        away_s = interval_s - self._mean_s
        self._mean_s += _MEMORY * away_s
        self._variance = (1 - _MEMORY) * (self._variance + _MEMORY * away_s * away_s)

    @property
    def _deviation_s(self) -> float:
        return max(math.sqrt(self._variance), _LEAST_DEVIATION * self._mean_s)

    def phi(self, silent_s: float) -> float:
        """How suspicious a silence is: 1 for one in ten, 3 for one in a thousand; at most 99."""
        chance = 0.5 * math.erfc((silent_s - self._mean_s) / self._deviation_s / math.sqrt(2))
        return min(-math.log10(chance), _MOST_PHI) if chance > 0 else _MOST_PHI

    def patience_s(self, timeout_s: float) -> float:
        """Seconds of silence after which the process is lost: ``timeout_s``, more for one that was often late."""
        return min(max(timeout_s, self._mean_s + LOST_DEVIATIONS * self._deviation_s), LONGEST * timeout_s)
