"""Going through evaluation data: each example counts once, on any number of workers, whatever dies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from stratagem.arguments import whole_number, whole_numbers
from stratagem.data.distribute import distribute
from stratagem.data.distributed import DistributedDataset
from stratagem.data.loaders import why_not_planned
from stratagem.data.placement import InputPlacement
from stratagem.data.split_dataset import SplitDataset
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.strategy.ps.servers import EvaluatedUnits, Servers
from stratagem.training.callbacks.base import CallbackList
from stratagem.training.fit.loop import first_batches, in_eval_mode
from stratagem.training.fit.running_metrics import RunningMetrics, UnitCounts
from stratagem.training.fit.sources import Heard, for_evaluation
from stratagem.training.fit.steps import FitSteps


class Evaluation:
    """Evaluates data, as often as it is asked to.

    Under parameter servers the workers share the batches, which their chief leases; data whose batches have no numbers
    (iterables) are evaluated by one of them. Every worker comes to the same numbers.

    Args:
        source: gives GLOBAL batches, or is a distributed dataset.
        device: of the module; of interest under the pass-through strategy.
        num_steps: batches at most; None: all.
        hear: is given a batch of each time, as a step gets it.
    """

    def __init__(
        self,
        steps: FitSteps,
        new_running_metrics: Callable[[], RunningMetrics],
        source: Any,
        device: torch.device,
        callbacks: CallbackList,
        num_steps: int | None,
        hear: Callable[[Any], None],
    ) -> None:
        self._steps = steps
        self._running = new_running_metrics()
        self._callbacks = callbacks
        self._num_steps = num_steps
        self._leased: tuple[EvaluatedUnits, UnitCounts] | None = None
        strategy = steps.strategy
        if strategy.servers is not None:
            dataset, units = _leased(strategy, strategy.servers, source, num_steps)
            counts = UnitCounts(strategy.servers.chief, new_running_metrics())
            units.counted_by(counts.running.reset, counts.collect)
            self._leased, self._num_steps = (units, counts), None
        else:
            dataset = for_evaluation(strategy, source, device)
        self.in_step = dataset if isinstance(dataset, SplitDataset) else None
        """What workers that run in step go through together; None: that is not how it is done."""
        self._dataset = Heard(dataset, hear)

    def run(self, is_silent: bool = False) -> dict[str, float]:
        """Goes through the data; the logs of all workers. ``is_silent``: no callback hears of it, for this worker only
        does its part of what others evaluate."""
        steps, running = self._steps, self._running
        callbacks = self._callbacks.silenced() if is_silent else self._callbacks
        running.reset()
        callbacks.call("on_test_begin", {})
        with steps.strategy.averaged_buffers(steps.module), in_eval_mode(steps.module), torch.no_grad():
            for number, batch in first_batches(self._dataset, self._num_steps):
                callbacks.call_batch("on_test_batch_begin", number)
                results = steps.strategy.local_results(steps.strategy.run(steps.test, args=(batch,)))
                running.add(results)
                if self._leased is not None:
                    self._leased[1].running.add(results)
                callbacks.call_batch("on_test_batch_end", number, running.logs())
        logs = None
        if self._leased is not None:
            units, counts = self._leased
            logs = counts.result(units.group, units.num_passes - 1)
        elif not running.num_steps:
            raise ConfigurationError("expected batches to evaluate, but there were none")
        logs = running.result() if logs is None else logs
        callbacks.call("on_test_end", logs)
        return logs


def _leased(strategy: Strategy, servers: Servers, source: Any, num_steps: int | None) -> tuple[Any, EvaluatedUnits]:
    if isinstance(source, DistributedDataset):
        source = source.loader
    if not why_not_planned(source):
        return servers.lease_evaluation(source, num_steps)
    return servers.lease_whole(distribute(source, placement=InputPlacement(strategy.local_devices)), num_steps)


def at_epochs(chosen: int | Collection[int]) -> Callable[[int], bool]:
    """Whether an epoch, from 0, has a validation: every so many, or those whose numbers, from 1, are given."""
    if not isinstance(chosen, Collection):
        every = whole_number("validation_freq", chosen)
        return lambda number: not (number + 1) % every
    whole_numbers(**{f"validation_freq[{place}]": number for place, number in enumerate(chosen)})
    return lambda number: number + 1 in chosen
