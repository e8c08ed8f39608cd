"""The loops of ``fit``, ``evaluate`` and ``predict`` over their batches."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from stratagem.arguments import whole_number, whole_numbers
from stratagem.data.distribute import distribute
from stratagem.data.distributed import DistributedDataset
from stratagem.data.loaders import why_not_planned
from stratagem.data.nested import leaves, map_leaves
from stratagem.data.placement import InputPlacement
from stratagem.data.split_dataset import SplitDataset
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.strategy.ps.servers import EvaluatedUnits, Servers
from stratagem.training.callbacks.base import CallbackList
from stratagem.training.callbacks.early_stopping import ended_by_nan
from stratagem.training.fit.agreement import FitAgreement
from stratagem.training.fit.position import FitPosition
from stratagem.training.fit.running_metrics import RunningMetrics, UnitCounts
from stratagem.training.fit.sources import Heard, Passes, close, for_evaluation
from stratagem.training.fit.steps import FitSteps
from stratagem.training.model_state import ModelState


@dataclasses.dataclass(eq=False, repr=False)
class Training:
    """The epochs of one ``fit``."""

    _model: ModelState
    """Whose training it is; asked for ``stop_training``."""
    _steps: FitSteps
    _running: RunningMetrics
    _position: FitPosition
    _callbacks: CallbackList
    _passes: Passes
    _validate: Callable[[int, bool], dict[str, float]] | None
    """Gives the logs of the validation after an epoch of this number, without a word to callbacks if it is told True;
    None: there is none."""
    _agreement: FitAgreement

    def run(self, epochs: int) -> None:
        """Trains until ``epochs`` epochs are done, or somebody says stop."""
        try:
            with (
                ended_by_nan(self._callbacks.callbacks, self._model.has_servers),
                self._agreement.listening(self._flush),
                self._passes,
            ):
                self._callbacks.call("on_train_begin", {})
                self._agreement.arrive()
                while self._position.epoch < epochs and (self._position.step or not self._position.is_over):
                    number = self._position.epoch
                    logs = self._epoch(number)
                    self._position.end_epoch()
                    if logs is not None:
                        self._position.logs = logs
                        self._callbacks.call("on_epoch_end", number, logs)
                        self._agreement.record(number, logs)
                    if self._stops(number) or self._passes.is_spent:
                        break
            self._callbacks.call("on_train_end", self._position.logs)
        except BaseException:
            self._callbacks.call("on_train_interrupted")
            raise

    def _epoch(self, number: int) -> dict[str, float] | None:
        """The logs of an epoch; None if it is none, or none of this worker's."""
        position, callbacks, running = self._position, self._callbacks, self._running
        if not position.step:
            running.reset()
        others_logs = self._agreement.begin(number)
        batches = iter(()) if position.is_trained else self._passes.epoch(position.step)
        logs: dict[str, float] | None = None
        if self._agreement.shares_epochs:
            first = list(itertools.islice(batches, 1))
            if not first and others_logs is not None:  # others have lived it: callbacks hear only what came of it
                if self._validate is not None and not self._agreement.is_earlier:
                    self._validate(number, True)
                callbacks.call("on_epoch_missed", number, dict(others_logs))
                return None
            if not first and (logs := self._agreement.logs(number, running)) is None:
                return None  # nobody has lived it since the job was resumed
            batches = itertools.chain(first, batches)
        callbacks.call("on_epoch_begin", number, {})
        self._model.check_attributes()
        self._train(batches)
        if not position.step and not position.is_trained and not self._agreement.shares_epochs:
            if self._passes.is_spent and position.num_steps:
                return None  # the epoch before has had the last batch
            raise ConfigurationError(f"expected batches to train on, but there were none in epoch {number + 1}")
        self._model.check_attributes()
        position.is_trained = True
        logs = logs or self._agreement.logs(number, running) or running.result()
        if self._validate is not None:
            logs.update((f"val_{name}", value) for name, value in self._validate(number, False).items())
        return logs

    def _train(self, batches: Iterable[Any]) -> None:
        position, callbacks, running = self._position, self._callbacks, self._running
        self._steps.module.train()
        for batch in batches:
            callbacks.call_batch("on_train_batch_begin", position.step)
            result = self._steps.strategy.run(self._steps.train, args=(batch, position.num_waiting))
            results = self._steps.strategy.local_results(result)
            running.add(results)
            self._agreement.add(results)
            position.num_waiting = (position.num_waiting + 1) % self._steps.compiled.accumulate_steps
            position.step += 1
            position.num_steps += 1
            callbacks.call_batch("on_train_batch_end", position.step - 1, running.logs())
            if self._model.stop_training and self._agreement.is_alone:  # several stop together, after the epoch
                break
        self._flush()

    def _flush(self) -> None:
        """An update does not reach over the end of an epoch."""
        if self._position.num_waiting:
            self._steps.strategy.run(self._steps.update)
            self._position.num_waiting = 0

    def _stops(self, number: int) -> bool:
        """Whether any worker has said stop. A wish that came too late, after the others went on, is said again."""
        stops = self._agreement.stops(number, self._model.stop_training)
        self._model.stop_training = self._model.stop_training or stops
        return stops


def predict(steps: FitSteps, dataset: Iterable[Any], callbacks: CallbackList, num_steps: int | None) -> Any:
    """The outputs for a dataset, of ``num_steps`` batches at most, in its order, joined along their first dimension."""
    parts: list[Any] = []
    callbacks.call("on_predict_begin", {})
    strategy = steps.strategy
    averaged = strategy.averaged_buffers(*[steps.module] if strategy.communicator is None else [])
    with averaged, in_eval_mode(steps.module), torch.no_grad():
        for number, batch in first_batches(dataset, num_steps):
            callbacks.call_batch("on_predict_batch_begin", number)
            results = strategy.local_results(strategy.run(steps.predict, args=(batch,)))
            own = [result for result in results if result is not None]
            parts += own
            logs = {"outputs": own[0] if len(own) == 1 else _joined(own)} if own else {}
            callbacks.call_batch("on_predict_batch_end", number, logs)
    callbacks.call("on_predict_end", {})
    if not parts:
        raise ConfigurationError("predict expects at least one example, got none")
    return _joined(parts)


def _joined(parts: Sequence[Any]) -> Any:
    columns = zip(*map(leaves, parts), strict=True)
    joined = iter([torch.cat(column) if isinstance(column[0], torch.Tensor) else column[0] for column in columns])
    return map_leaves(parts[0], lambda _: next(joined))


@contextlib.contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    was_training = module.training
    try:
        if was_training:
            module.eval()
        yield
    finally:
        if was_training:
            module.train()


def first_batches(dataset: Iterable[Any], number: int | None) -> Generator[tuple[int, Any]]:
    """The first ``number`` batches (None: all), numbered; the others are let go of."""
    batches = iter(dataset)
    try:
        yield from enumerate(itertools.islice(batches, number))
    finally:
        close(batches)


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
        callbacks = self._callbacks.silenced() if is_silent else self._callbacks
        callbacks.call("on_test_begin", {})
        if self._steps.strategy.servers is not None:
            self._steps.strategy.servers.check([self._steps.module])
        place = None if self.in_step is None else self.in_step.next_epoch
        while (logs := self._counted(callbacks)) is None:
            if self.in_step is not None and place is not None:
                self.in_step.begin_at(place)  # the same pass over data that may have another order in each
        callbacks.call("on_test_end", logs)
        return logs

    def _counted(self, callbacks: CallbackList) -> dict[str, float] | None:
        """The logs after one pass; None if a ring has lost a worker since it began."""
        steps, running = self._steps, self._running
        running.reset()
        with steps.strategy.averaged_buffers(steps.module), in_eval_mode(steps.module), torch.no_grad():
            for number, batch in first_batches(self._dataset, self._num_steps):
                callbacks.call_batch("on_test_batch_begin", number)
                results = steps.strategy.local_results(steps.strategy.run(steps.test, args=(batch,)))
                running.add(results)
                if self._leased is not None:
                    self._leased[1].running.add(results)
                callbacks.call_batch("on_test_batch_end", number, running.logs())
        if self._leased is not None:
            units, counts = self._leased
            return counts.result(units.group, units.num_passes - 1) or running.result()
        if not running.num_steps:
            raise ConfigurationError("expected batches to evaluate, but there were none")
        return running.whole_result()


def _leased(strategy: Strategy, servers: Servers, source: Any, num_steps: int | None) -> tuple[Any, EvaluatedUnits]:
    if isinstance(source, DistributedDataset):
        source = source.loader
    if not why_not_planned(source):
        return servers.lease_evaluation(source, num_steps)
    return servers.lease_whole(distribute(source, placement=InputPlacement(strategy.local_devices)), num_steps)


def at_epochs(chosen: int | Collection[int]) -> Callable[[int], bool]:
    """Whether an epoch, from 0, has a validation: every so many, or those whose numbers, from 1, are given."""
    if not isinstance(chosen, Collection) or not getattr(chosen, "ndim", 1):  # also a number of torch
        every = whole_number("validation_freq", chosen)
        return lambda number: not (number + 1) % every
    whole_numbers(**{f"validation_freq[{place}]": number for place, number in enumerate(chosen)})
    return lambda number: number + 1 in chosen
