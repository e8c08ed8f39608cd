"""``stratagem run … meter_job.py WORKLOAD WARMUP_STEPS NUM_PAIRS [LANE]``, with ps or in a ring.

Blocks of steps with the step meter and without take turns, A B B A, in every worker at the same steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import operator
import sys
import time
from collections.abc import Callable
from types import CellType
from typing import Any

import torch

import stratagem as sg
from benchmarks.job_files import result_path
from benchmarks.meter import BLOCK_STEPS, PairedResult
from benchmarks.training.stratagem_job import make_strategy
from benchmarks.training.torch_models import make_loader, make_model, make_step
from benchmarks.training.workloads import LEARNING_RATE, SEED, WORKLOADS
from stratagem.measuring import measures
from stratagem.worker.step_meter import StepMeter, WaitingOn, active_meter

NOTHING = contextlib.nullcontext()


class Silent:
    """Counts nothing; whatever else is asked of a meter, the real one says."""

    def __init__(self, meter: StepMeter) -> None:
        self._asked = meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._asked, name)

    def exposed(
        self, waiting_on: WaitingOn, step: int = 0, phase: str = measures.WAIT, peer: str = ""
    ) -> contextlib.AbstractContextManager[None]:
        return NOTHING

    def within(self, phase: str, peer: str = "") -> contextlib.AbstractContextManager[None]:
        return NOTHING

    def computes(self, phase: str, after: str = "") -> None:
        pass

    def got_data(self) -> None:
        pass

    def wants_data(self) -> None:
        pass

    def step_done(self, examples: int) -> None:
        pass


def setters_of(meter: StepMeter) -> list[Callable[[Any], None]]:
    """One for each place where the meter is held, which gives that place another.

    A meter whose class or methods changed would be slower afterwards: Python forgets what it knew of them.
    """
    found: list[Callable[[Any], None]] = []
    for holder in gc.get_referrers(meter):
        if isinstance(holder, CellType):
            found.append(functools.partial(setattr, holder, "cell_contents"))
        elif isinstance(holder, dict):
            found += [functools.partial(operator.setitem, holder, key) for key in holder if holder[key] is meter]
        else:
            names = [name for name in ("_meter", "meter") if getattr(holder, name, None) is meter]
            found += [functools.partial(object.__setattr__, holder, name) for name in names]
    return found


def main() -> None:
    """Warms up, times, reports; every worker runs this."""
    workload, warmup_steps, num_pairs = WORKLOADS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(SEED)
    strategy = make_strategy(sys.argv[4] if len(sys.argv) > 4 else None)
    with strategy.scope():
        model = make_model(workload)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = strategy.prepare(model, optimizer)
    train_step = make_step(model, optimizer)
    joined = dataclasses.replace(workload, batch_size=workload.batch_size * strategy.num_replicas_in_sync)
    meter = active_meter()
    assert meter is not None
    for batch in strategy.distribute_dataset(make_loader(joined, warmup_steps)):
        strategy.run(train_step, args=(batch,))
    is_counted, order = True, itertools.cycle((True, False, False, True))
    counted: list[tuple[int, int]] = []
    silent: list[tuple[int, int]] = []
    meters = Silent(meter), meter
    setters: list[Callable[[Any], None]] = []
    begun = 0, 0
    for number, batch in enumerate(strategy.distribute_dataset(make_loader(joined, 2 * num_pairs * BLOCK_STEPS + 1))):
        if number % BLOCK_STEPS == 0:
            now = time.perf_counter_ns(), time.process_time_ns()
            if number:
                (counted if is_counted else silent).append((now[0] - begun[0], now[1] - begun[1]))
            else:  # whoever watches the steps of this loop is there
                setters = setters_of(meter)
            is_counted = next(order)
            for give in setters:
                give(meters[is_counted])
            begun = time.perf_counter_ns(), time.process_time_ns()
        strategy.run(train_step, args=(batch,))
    if sg.is_lead():
        result = PairedResult(counted, silent, meter.steps)
        result_path().write_text(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    main()
