"""States that a script loads under parameter servers reach them once in the life of a job."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from stratagem.errors import ClusterTimeoutError
from stratagem.strategy.ps_counts import SharedCounts
from stratagem.strategy.ps_variables import VariableGroups
from stratagem.worker.runtime import WorkerRuntime

RETRY_S = 0.05
"""Until the next look at who is the lead, when the last one died."""


def load_once(runtime: WorkerRuntime, counts: SharedCounts, groups: VariableGroups, load: Callable[[], None]) -> None:
    """Calls ``load`` on every worker; on the lead what it loads goes to the ps. Every worker has to call this.

    Nobody comes back before the ps have it, so that no update is overwritten. A worker that starts again later finds
    that it is done: its own copy follows what the job has by now.

    Workers leave by what they agreed on, never by what one of them sees: that may be new to one and old to another.

    Args:
        runtime: of this worker.
        counts: where the workers agree.
        groups: of the variables.
        load: gives objects the states that were read.

    Raises:
        ClusterTimeoutError: the lead does not load, and nobody takes its place.
    """
    group = counts.new_group("load")
    has_loaded = False
    counts.agree(group, 0, 0)  # all are here: none of them has an update under way
    deadline = time.monotonic() + runtime.config.start_timeout_s
    for attempt in itertools.count(1):
        is_done = counts.logs(group, 0) is not None
        if not is_done and runtime.is_lead():
            with runtime.assigning(True):
                load()
            counts.settle(group, 0, {})
            is_done = has_loaded = True
        if counts.agree(group, attempt, int(is_done)):
            break
        if time.monotonic() > deadline:
            raise ClusterTimeoutError(
                f"{runtime.session.membership.lead} has not loaded what this worker loads: let every worker restore, "
                "at the same place of the script"
            )
        time.sleep(RETRY_S)
    if not has_loaded:
        with runtime.assigning(False):
            load()
        groups.pull_anew()
