"""``python -m tests.simulation --seeds 1000``: runs schedules, and shows the first that fails, made as small as can be.

``--seed N`` runs one and tells its story; ``--jobs 2`` uses two cores.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import sys

from tests.simulation import threads
from tests.simulation.cluster import remove_leftovers
from tests.simulation.install import installed
from tests.simulation.mutations import MUTATIONS, mutated
from tests.simulation.plans import FORMS, plan
from tests.simulation.schedule import Outcome, Schedule, run
from tests.simulation.shares import shares
from tests.simulation.shrink import shrink
from tests.simulation.world import START

TELL_EVERY = 10_000
"""Schedules after which a long run says that it goes on."""


class _Story(logging.Formatter):
    """Lines of the product's log, at virtual times."""

    def format(self, record: logging.LogRecord) -> str:
        world = threads.here()
        return f"{world.now - START:9.4f} {world.process}: {record.levelname} {super().format(record)}"


def main() -> int:
    """The command; returns 1 when a schedule failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one, and tell its story")
    parser.add_argument("--seeds", type=int, default=1000, help="run so many")
    parser.add_argument("--first", type=int, help="the first of them; else one of today")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many, of the processor")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run them; give as many as there are cores")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="break the protocol in this way; must be found")
    parser.add_argument("--form", choices=FORMS, default="", help="what all are; else as each seed says")
    parser.add_argument("--log", action="store_true", help="with --seed: also what the product logs")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets must be the same each time
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], environment)
    remove_leftovers()
    logging.disable(logging.CRITICAL)
    with installed(), mutated(options.mutation):
        return _one(options) if options.seed is not None else _many(options)


def _one(options: argparse.Namespace) -> int:
    schedule = plan(options.seed, options.form)
    print(schedule)
    if options.log:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(_Story())
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.INFO)
        logging.disable(logging.NOTSET)
    outcome = run(schedule)
    _tell(outcome)
    return 1 if outcome.failure else 0


def _many(options: argparse.Namespace) -> int:
    first = options.first if options.first is not None else int(datetime.date.today().strftime("%Y%m%d")) * 1_000_000
    print(f"schedules from seed {first} on", flush=True)
    num, num_events, seconds, spent_s = 0, 0, 0.0, 0.0
    with shares(range(first, first + options.seeds), options.jobs, options.mutation, options.form) as done:
        for share in done:
            if (num + share.num) // TELL_EVERY > num // TELL_EVERY:
                print(f"{num + share.num:,} so far, in {spent_s + share.spent_s:,.0f} s", flush=True)
            num, num_events = num + share.num, num_events + share.num_events
            seconds, spent_s = seconds + share.seconds, spent_s + share.spent_s
            if share.failed is not None or spent_s > options.seconds:
                break
    if share.failed is not None:
        _report(plan(share.failed, options.form), num, options.form)
        return 1
    print(
        f"{num} schedules, none failed: {num_events:,} events, {seconds:,.0f} s of virtual time in {spent_s:.0f} s of "
        f"the processor, {60 * num / max(spent_s, 1e-3):,.0f} a minute and core"
    )
    return 0


def _report(schedule: Schedule, num: int, form: str) -> None:
    outcome = run(schedule)
    print(f"seed {schedule.seed}, number {num}, failed: {outcome.failure}")
    small, smaller = shrink(schedule, outcome)
    print(f"small: {small!r}")
    _tell(smaller)
    print(f"again: python -m tests.simulation --seed {schedule.seed}{f' --form {form}' * bool(form)} --log")


def _tell(outcome: Outcome) -> None:
    print("\n".join(outcome.trace))
    print(f"{outcome.num_events} events, {outcome.seconds:.1f} s; {outcome.failure or 'nothing failed'}")


if __name__ == "__main__":
    sys.exit(main())
