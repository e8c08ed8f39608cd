"""How the workers of one ``fit`` reach the same history and stop together."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stratagem.cluster.units import EARLIER_LOGS, EPOCH_LOGS, Plan, Topic
from stratagem.errors import ConfigurationError, StratagemError
from stratagem.strategy.ps.servers import Servers
from stratagem.training.fit.position import FitPosition
from stratagem.training.fit.running_metrics import RunningMetrics, StepResult, UnitCounts
from stratagem.worker.ring.agreement import gather_json
from stratagem.worker.ring.communicator import Communicator, any_says


class FitAgreement:
    """What a worker has in common with the others; of this one there are no others."""

    is_alone = True
    """There are no others: it may stop in the middle of an epoch."""
    shares_epochs = False
    """Others may do all of an epoch before this worker does anything of it."""
    is_earlier = False
    """The epoch was over when the job was resumed: nobody validates it again."""

    def listening(self, flush: Callable[[], None]) -> contextlib.AbstractContextManager[Any]:
        """Around the training; ``flush`` makes an update of gradients that wait for further ones."""
        return contextlib.nullcontext()

    def meet(self, given: Mapping[str, Any]) -> None:
        """``fit`` was given these; a ConfigurationError where it has to be the same everywhere, and is not."""

    def arrive(self) -> None:
        """The first epoch is about to begin."""

    def begin(self, epoch: int) -> dict[str, float] | None:
        """An epoch is about to begin. Its logs, if it is over for the others."""
        return None

    def add(self, results: Sequence[StepResult]) -> None:
        """A step was made."""

    def logs(self, epoch: int, running: RunningMetrics) -> dict[str, float] | None:
        """What all workers have counted in an epoch; None if nobody has counted anything."""
        return running.result()

    def record(self, epoch: int, logs: dict[str, float]) -> None:
        """The epoch is over, its callbacks have been called."""

    def stops(self, epoch: int, wish: bool) -> bool:
        """Whether anybody wants to stop after an epoch."""
        return wish


@dataclasses.dataclass(eq=False, repr=False)
class InStep(FitAgreement):
    """Of workers that run in step."""

    is_alone = False

    _workers: Communicator
    _dataset: Any
    _position: FitPosition

    @contextlib.contextmanager
    def listening(self, flush: Callable[[], None]) -> Iterator[None]:
        healing = self._workers.healing
        if healing is not None:
            healing.loop = self._position
        try:
            yield
        finally:
            if healing is not None:
                healing.loop = None

    def meet(self, given: Mapping[str, Any]) -> None:
        if self._is_new:  # the others have met
            return
        check_alike(self._workers, "fit", given)

    def arrive(self) -> None:
        """A newcomer to a ring goes on where the others are."""
        if self._is_new:
            self._dataset.arrive()

    @property
    def _is_new(self) -> bool:
        return self._workers.healing is not None and self._workers.healing.is_new

    def stops(self, epoch: int, wish: bool) -> bool:
        return any_says(self._workers, wish)


class FitOnServers(FitAgreement):
    """Under parameter servers, as a :class:`UnitListener`: the chief keeps all counts."""

    is_alone = False
    shares_epochs = True

    def __init__(self, servers: Servers, running: RunningMetrics) -> None:
        self._servers = servers
        self._chief = servers.chief
        self._units = UnitCounts(self._chief, running)
        self._counted = self._chief.new_group("fit")
        self._logs = self._counted + EPOCH_LOGS
        self.group = f"{self._counted}, ends of epochs"
        self._epoch = 0
        servers.place = f"{self._counted}, "
        self._flush: Callable[[], None] = lambda: None

    # What units are counted under; UnitListener

    def begin_unit(self) -> None:
        self._units.running.reset()

    def collect(self) -> tuple[Topic, bytes]:
        return Topic(self._counted, self._epoch), self._units.collect()

    def flush(self) -> None:
        self._flush()

    # Agreement

    @contextlib.contextmanager
    def listening(self, flush: Callable[[], None]) -> Iterator[None]:
        self._flush = flush
        try:
            with self._servers.listened(self):
                yield
        except BaseException:
            with contextlib.suppress(StratagemError):  # a job that ends has nobody to tell
                self._chief.leave_group(self.group)  # the others go on without this worker
            raise
        finally:
            self._servers.place = f"after {self._counted}, "

    def meet(self, given: Mapping[str, Any]) -> None:
        check_alike_on_servers(self._servers, "fit", self._counted, given)

    def begin(self, epoch: int) -> dict[str, float] | None:
        self._epoch = epoch
        self._servers.place = f"{self._counted}, epoch {epoch + 1}, "
        earlier = self._chief.logs(self._counted + EARLIER_LOGS, epoch)
        self.is_earlier = earlier is not None
        return earlier or self._chief.logs(self._logs, epoch)

    def add(self, results: Sequence[StepResult]) -> None:
        self._units.running.add(results)

    def logs(self, epoch: int, running: RunningMetrics) -> dict[str, float] | None:
        return self._units.result(self._counted, epoch)

    def record(self, epoch: int, logs: dict[str, float]) -> None:
        self._chief.record_logs(self._logs, epoch, {name: float(value) for name, value in logs.items()})

    def stops(self, epoch: int, wish: bool) -> bool:
        return bool(self._chief.agree(self.group, epoch, int(wish)))


def check_alike(workers: Communicator, called: str, given: Mapping[str, Any]) -> None:
    """Refuses, on all workers that run in step, what one of them has given otherwise to what is ``called``. Raises
    ConfigurationError: names it, and both values."""
    first, *others = gather_json(workers, given)
    for rank, its in enumerate(others, start=1):
        for name, value in first.items():
            if its[name] != value:
                raise ConfigurationError(
                    f"every worker must give {called} the same, but {name} is {value} on worker 0, {its[name]} on "
                    f"worker {rank}: all workers save, restore and evaluate together. What only one worker does "
                    "(strategy.is_lead) belongs in a callback that only prints or writes"
                )


def check_alike_on_servers(servers: Servers, called: str, place: str, given: Mapping[str, Any]) -> None:
    """As :func:`check_alike`, under parameter servers, at a ``place`` of the script, of the lead and each other worker:
    whoever comes later sees it. A worker that goes on after a loss may begin at another epoch, and what the lead alone
    saves or evaluates is saved and evaluated. Raises ConfigurationError: names it, and both values."""
    for task, first, its in servers.beside(f"{place}, given", given):
        for name, value in first.items():
            match name:
                case "initial_epoch":
                    continue
                case "callbacks":
                    is_refused = bool(Counter(its[name]) - Counter(value))
                case "the epochs with a validation":
                    is_refused = its[name] > value
                case _:
                    is_refused = its[name] != value
            if is_refused:
                raise ConfigurationError(
                    f"every worker must give {called} the same, but {name} is {value} on the lead, {its[name]} on "
                    f"{task}: the lead saves, and its values count. Give all workers the same; what saves or evaluates "
                    "may be on the lead only"
                )


def check_groups(
    servers: Servers | None, dataset: Any, accumulate_steps: int, steps_per_epoch: int | None = None
) -> None:
    """Refuses accumulation on parameter servers where workers would not make the updates of one process, together.
    ConfigurationError: an update would be of batches of two passes over the data; or at staleness 0 workers have
    another share of the last batch than of the others."""
    plan: Plan | None = getattr(dataset, "plan", None)
    if servers is None or accumulate_steps == 1 or plan is None:
        return
    is_over_passes = plan.num_batches % (steps_per_epoch or plan.num_batches or 1)
    if is_over_passes and (plan.num_batches % accumulate_steps or (steps_per_epoch or 0) % accumulate_steps):
        raise ConfigurationError(
            f"accumulate_steps={accumulate_steps} on parameter servers makes an update at the end of each pass over "
            f"the data, but an epoch of steps_per_epoch={steps_per_epoch} does not end with one of {plan.num_batches} "
            "batches: leave out steps_per_epoch, or use multiples of accumulate_steps"
        )
    if servers.staleness > 0:
        return
    if plan.num_batches and _shares(plan, plan.num_batches - 1) != _shares(plan, 0):
        raise ConfigurationError(
            f"accumulate_steps={accumulate_steps} at staleness 0 needs the same share of each batch for every worker, "
            "and the last batch is too small for that: use a DataLoader with drop_last=True, or another batch_size "
            f"than {plan.batch_size}"
        )


def _shares(plan: Plan, batch: int) -> list[float]:
    """The part of a global batch that each slice is."""
    sizes = [stop - start for start, stop in map(plan.bounds, plan.units_of(batch))]
    return [size / sum(sizes) for size in sizes]
