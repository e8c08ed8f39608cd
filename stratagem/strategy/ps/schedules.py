"""Schedulers under parameter servers whose workers run at their own pace: they follow the updates of the job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from stratagem.cluster.units import IN_CHECKPOINTS
from stratagem.errors import ConfigurationError
from stratagem.strategy.one_cycle import watch_one_cycles
from stratagem.worker.chief_client import ChiefClient
from stratagem.worker.push.gradient_push import GradientPush

logger = logging.getLogger(__name__)

UPDATES_IN_A_ROW = 3
"""After so many that each found other learning rates, a scheduler is stepped with every update, not every epoch."""


def push_of(scheduler: LRScheduler, pushes: Sequence[GradientPush]) -> GradientPush:
    """What pushes for the optimizer of a scheduler; a ConfigurationError where nothing does."""
    for push in pushes:
        if push.optimizer is scheduler.optimizer:
            return push
    raise ConfigurationError(
        f"{type(scheduler).__name__} changes the settings of an optimizer that is not prepared; prepare the optimizer "
        "with it or before it"
    )


class _JobPlace:
    """Where the job is in a schedule that is stepped with each update, ``ordinal`` among the schedulers. A worker that
    starts again, as in a job that resumes, has to know before its first update."""

    def __init__(self, scheduler: LRScheduler, push: GradientPush, chief: ChiefClient, ordinal: int) -> None:
        self._scheduler, self._push, self._chief = scheduler, push, chief
        self._topic = f"{IN_CHECKPOINTS}place of {type(scheduler).__name__}", ordinal
        self._is_told = False
        self.num_before = 0
        """Updates of the job before this worker's first, when it lacked steps."""

    def stepped(self, num_since: int, num_updates: int) -> None:
        """A step of this worker's loop, ``num_since`` of its updates after the last one. Whoever first makes one with
        an update tells how many updates of the job there are more than steps, unless there are steps
        without an update, too."""
        if num_since == 1 and not self._is_told:
            self._chief.record_logs(*self._topic, {"more": num_updates - _place(self._scheduler)})
        self._is_told |= num_since <= 1

    def lacking(self) -> int | None:
        """Steps to it; None: this worker has made updates since it started, or nobody has told."""
        num_updates = 0 if self._push.num_pushed else self._push.num_of_others
        if num_updates is None:  # of tables there are no copies here
            num_updates = self._push.num_before()
        if num_updates:  # by others: torch warns of a scheduler that steps first
            vars(self._scheduler.optimizer)["_opt_called"] = True
        told = self._chief.logs(*self._topic) if num_updates else None
        if told is None:
            return None
        self.num_before = num_updates
        return num_updates - int(told["more"]) - _place(self._scheduler)


def follow(
    scheduler: LRScheduler, push: GradientPush, is_in_loop: Callable[[], bool], chief: ChiefClient, ordinal: int
) -> Callable[[int], None]:
    """Has ``scheduler.step()``, called for each update of this worker, count the updates of all; changes it in place.

    The place in the schedule is then the number of updates that the job has applied, or skipped for a NaN, as
    TensorFlow's schedules read ``optimizer.iterations``, which the parameter servers hold. A step after the loop over
    the data, or after several updates of this worker, is an epoch's and counts once; one with arguments does what
    these say. ``is_in_loop``: whether the script goes through a dataset now, or has none; ``ordinal``: among the
    schedulers. Returns what to call before each batch.
    """
    push.is_paced = True
    _warn_of_lost_metrics(scheduler, chief, ordinal)
    kind: Any = type(scheduler)
    job = _JobPlace(scheduler, push, chief, ordinal)
    # What began with its optimizer, perhaps in a worker that starts again, follows the job from its first update.
    num_applied, num_pushed, num_calls = push.num_applied if push.num_pushed else 0, push.num_pushed, 0
    has_warned = False

    def restart() -> None:
        """Later steps count from here."""
        nonlocal num_applied, num_pushed, num_calls
        num_applied, num_pushed, num_calls = push.num_applied, push.num_pushed, 0

    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        nonlocal has_warned, num_calls
        own, of_all = push.num_pushed - num_pushed, push.num_applied - num_applied  # updates since the last step
        times, is_of_loop = 1, not args and not kwargs and is_in_loop()
        if not is_of_loop:
            restart()
        elif own > 1:
            if of_all > own and not has_warned:
                has_warned = True
                logger.warning(
                    "%s.step() after %d updates of this worker and %d of others counts once, as after an epoch; call "
                    "it after every optimizer.step() to follow the updates of the job",
                    *(kind.__name__, own, of_all - own),
                )
            restart()
        elif own:
            times = max(0, (num_calls + 1) * of_all - num_calls)  # makes up for what the other workers did
            restart()
        else:  # gradients are accumulated
            num_calls += 1
        for _ in range(times):
            kind.step(self, *args, **kwargs)
        if is_of_loop:
            job.stepped(own, push.num_applied)

    def begin(_: int) -> None:
        nonlocal num_applied
        if (number := job.lacking()) is not None:
            num_applied = job.num_before
            for _ in range(number):
                kind.step(scheduler)

    def load_state_dict(self: LRScheduler, state_dict: dict[str, Any]) -> None:
        kind.load_state_dict(self, state_dict)
        restart()

    _replace(scheduler, step=step, load_state_dict=load_state_dict)
    return begin


def keep_up(
    scheduler: LRScheduler,
    push: GradientPush,
    is_in_loop: Callable[[], bool],
    dataset: Callable[[], int],
    chief: ChiefClient,
    ordinal: int,
) -> Callable[[int], None]:
    """Staleness 0: has a scheduler that is stepped with each update take part in those that this worker missed; changes
    it in place.

    A small last batch has no slice for some workers; all must have the same settings in the next step. ``is_in_loop``:
    see :func:`follow`; ``dataset``: number of the one whose batch this worker had last. Returns what to call when
    newer weights may be here, with the numbers of steps of the job between this worker's last two: of these some may
    not have been made, which only those do not see who train tables alone. Steps that were missed are of the same
    dataset; a scheduler that was stepped over another one has no part in them.
    """
    push.is_paced = True
    watch_one_cycles()
    _warn_of_lost_metrics(scheduler, chief, ordinal)
    kind: Any = type(scheduler)
    job = _JobPlace(scheduler, push, chief, ordinal)
    num_pushed, num_of_others, follows = push.num_pushed, push.num_of_others, -1

    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        nonlocal num_pushed, follows
        is_of_loop, num_since = not args and not kwargs and is_in_loop(), push.num_pushed - num_pushed
        follows = dataset() if is_of_loop and num_since == 1 else -1
        num_pushed = push.num_pushed
        kind.step(self, *args, **kwargs)
        if is_of_loop:
            others = push.num_of_others
            job.stepped(num_since, push.num_applied if others is None else others + num_pushed)

    def missed(gap: int) -> None:
        nonlocal num_of_others
        before, num_of_others = num_of_others, push.num_of_others
        number = gap if before is None or num_of_others is None else num_of_others - before
        number = number if follows == dataset() else 0
        lacking = job.lacking()
        for _ in range(number if lacking is None else lacking):
            kind.step(scheduler)

    _replace(scheduler, step=step)
    return missed


def warn_of_unprepared(push: GradientPush) -> None:
    """Says once that a scheduler which was not prepared is stepped with every update, and does not hear of those of
    other workers, nor of those before this worker was started again or the job resumed."""
    before: list[float] = []
    in_a_row, has_warned = 0, False

    def updated(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal before, in_a_row, has_warned
        if push.is_paced or has_warned or "initial_lr" not in optimizer.param_groups[0]:
            return
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        in_a_row = in_a_row + 1 if rates != before else 0
        before = rates
        if in_a_row > UPDATES_IN_A_ROW and push.num_applied > push.num_pushed:
            has_warned = True
            logger.warning(
                "a scheduler of %s is stepped with every update but was not prepared: it counts only this worker's "
                "updates since it started, not the job's. Pass it to strategy.prepare, with its optimizer or later",
                type(optimizer).__name__,
            )

    push.optimizer.register_step_post_hook(updated)


def _warn_of_lost_metrics(scheduler: LRScheduler, chief: ChiefClient, ordinal: int) -> None:
    """Has ReduceLROnPlateau say once that it begins anew in a worker that starts again, or in a job that resumes, as
    the job does not know the metrics that it goes by; changes it in place. ``ordinal``: among the schedulers."""
    if not isinstance(scheduler, ReduceLROnPlateau):
        return
    kind: Any = type(scheduler)
    topic = f"{IN_CHECKPOINTS}{kind.__name__}, metrics", ordinal
    is_known, is_told = chief.logs(*topic) is None, False

    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        nonlocal is_told
        if not is_told and is_known:
            chief.record_logs(*topic, {"stepped": 1.0})
        elif not is_told:
            logger.warning(
                "%s has not seen the metrics before this worker started, and begins anew: save it by sg.Checkpoint "
                "with the model, and restore it before the loop",
                kind.__name__,
            )
        is_told = True
        kind.step(self, *args, **kwargs)

    def load_state_dict(self: LRScheduler, state_dict: dict[str, Any]) -> None:
        nonlocal is_known
        is_known = True
        kind.load_state_dict(self, state_dict)

    _replace(scheduler, step=step, load_state_dict=load_state_dict)


def _place(scheduler: LRScheduler) -> int:
    while isinstance(scheduler, ChainedScheduler):  # it has none of its own, and steps all in it together
        scheduler = scheduler._schedulers[0]
    return scheduler.last_epoch


def _replace(scheduler: LRScheduler, **methods: Callable[..., Any]) -> None:
    kind = type(scheduler)
    body = {"__module__": kind.__module__, "__doc__": kind.__doc__, **methods}
    scheduler.__class__ = type(kind.__name__, (kind,), body)
