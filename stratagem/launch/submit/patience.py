"""Who follows a job outlasts a target that does not answer for a moment: an engine or an API server starts again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from stratagem.errors import SubmitError

PATIENCE_S = 30.0
POLL_S = 1.0

T = TypeVar("T")


class TargetPatience:
    """With a target that has answered before."""

    def __init__(self) -> None:
        self._answered_at = -math.inf

    def ask(self, ask: Callable[[], T]) -> T:
        """What ``ask`` returns. While it raises a SubmitError it is asked again, until the last answer is
        ``PATIENCE_S`` old; then, or where there was none, that is raised."""
        while True:
            try:
                answer = ask()
            except SubmitError:
                if time.monotonic() > self._answered_at + PATIENCE_S:
                    raise
                time.sleep(POLL_S)
            else:
                self._answered_at = time.monotonic()
                return answer
