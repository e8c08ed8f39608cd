"""Many schedules, in one process or in several."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests.simulation.install import installed
from tests.simulation.mutations import mutated
from tests.simulation.plans import plan
from tests.simulation.schedule import run

SHARE = 20
"""Schedules that a process runs before it tells what came of them."""
SHARES_OF_PROCESS = 100


class Share(NamedTuple):
    """What came of schedules in a row."""

    num: int
    num_events: int
    seconds: float
    """Of virtual time."""
    spent_s: float
    """Of the processor."""
    failed: int | None
    """The seed of the last one, if it failed."""


def _run(form: str, seeds: range) -> Share:
    """Runs them until one fails."""
    start, num_events, seconds = time.process_time(), 0, 0.0
    for num, seed in enumerate(seeds, 1):
        outcome = run(plan(seed, form))
        num_events, seconds = num_events + outcome.num_events, seconds + outcome.seconds
        if outcome.failure:
            return Share(num, num_events, seconds, time.process_time() - start, seed)
    return Share(len(seeds), num_events, seconds, time.process_time() - start, None)


_in_place = contextlib.ExitStack()
"""What a process that runs shares has put in the place of the real modules, for as long as it lives."""


def _begin(mutation: str | None) -> None:
    logging.disable(logging.CRITICAL)
    _in_place.enter_context(installed())
    _in_place.enter_context(mutated(mutation))


@contextlib.contextmanager
def shares(seeds: range, jobs: int, mutation: str | None, form: str) -> Iterator[Iterable[Share]]:
    """Runs them here, or in several processes, each of which ends after a while with what torch holds for good."""
    parts = [seeds[start : start + SHARE] for start in range(0, len(seeds), SHARE)]
    run_share = functools.partial(_run, form)
    if jobs == 1:
        yield map(run_share, parts)
        return
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(jobs, _begin, (mutation,), maxtasksperchild=SHARES_OF_PROCESS) as pool:
        yield pool.imap_unordered(run_share, parts)
