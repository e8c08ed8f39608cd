"""The place of a scheduler in a job whose workers go each at its own pace."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, cast

import pytest
import torch
from torch.optim import lr_scheduler

from stratagem.strategy.ps.schedules import follow, keep_up, warn_of_unprepared


@dataclasses.dataclass
class Job:
    """What a worker knows of the updates."""

    num_pushed: int = 0
    num_applied: int = 0
    num_of_others: int | None = 0
    in_loop: bool = True
    is_paced: bool = False
    optimizer: Any = None
    num_asked: int = 0
    """What the ps answer."""

    def num_before(self) -> int:
        return self.num_asked

    def update(self, num_others: int) -> None:
        """One update of this worker, after some of others."""
        self.num_pushed += 1
        self.num_applied += 1 + num_others


class Chief:
    """Keeps what was said first of each topic."""

    def __init__(self) -> None:
        self.said: dict[tuple[str, int], dict[str, float]] = {}

    def record_logs(self, group: str, ordinal: int, logs: dict[str, float]) -> dict[str, float]:
        return self.said.setdefault((group, ordinal), logs)

    def logs(self, group: str, ordinal: int) -> dict[str, float] | None:
        return self.said.get((group, ordinal))


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def scheduler(job: Job) -> Any:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 100)
    follow(scheduler, cast(Any, job), lambda: job.in_loop, cast(Any, Chief()), 0)
    optimizer.step()  # torch warns of schedulers that step first
    return scheduler


def test_a_step_after_each_update_counts_those_of_all(job: Job, scheduler: Any) -> None:
    for num_others in (0, 3, 1):
        job.update(num_others)
        scheduler.step()
    assert scheduler.last_epoch == job.num_applied == 7
    twin = lr_scheduler.CosineAnnealingLR(torch.optim.SGD([torch.zeros(1)], 1.0), 100)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        for _ in range(7):
            twin.step()
    assert scheduler.get_last_lr() == twin.get_last_lr()
    assert isinstance(scheduler, lr_scheduler.CosineAnnealingLR) and scheduler.state_dict() == twin.state_dict()


def test_a_step_outside_of_the_loop_counts_once(job: Job, scheduler: Any) -> None:
    job.update(2)
    job.in_loop = False
    scheduler.step()
    assert scheduler.last_epoch == 1
    job.in_loop = True
    job.update(2)
    scheduler.step()
    assert scheduler.last_epoch == 4


def test_a_step_after_several_updates_counts_once_and_says_so(
    job: Job, scheduler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            job.update(4)
            job.update(3)
            scheduler.step()
    assert scheduler.last_epoch == 2
    assert [record.getMessage() for record in caplog.records] == [
        "CosineAnnealingLR.step() after 2 updates of this worker and 7 of others counts once, as after an epoch; call "
        "it after every optimizer.step() to follow the updates of the job"
    ]


def test_steps_while_gradients_accumulate_count_as_many_for_each_update_of_others(job: Job, scheduler: Any) -> None:
    for _ in range(3):
        for call in range(4):
            if call == 3:
                job.update(1)
            scheduler.step()
    assert scheduler.last_epoch == 4 * job.num_applied == 24


def test_a_scheduler_that_came_later_or_was_restored_goes_on_from_there(job: Job, scheduler: Any) -> None:
    job.update(9)
    later = lr_scheduler.StepLR(scheduler.optimizer, 5)
    follow(later, cast(Any, job), lambda: True, cast(Any, Chief()), 1)
    scheduler.load_state_dict({"last_epoch": 40})
    job.update(1)
    scheduler.step()
    later.step()
    assert (scheduler.last_epoch, later.last_epoch) == (42, 2)


def test_a_worker_that_starts_again_takes_the_place_of_the_job(job: Job, scheduler: Any) -> None:
    job.num_pushed, job.num_applied = 1, 31
    scheduler.step()
    assert scheduler.last_epoch == 31


def test_at_staleness_0_only_a_scheduler_of_updates_takes_part_in_missed_steps(job: Job) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    by_step, by_epoch = (lr_scheduler.ExponentialLR(optimizer, 0.5) for _ in range(2))
    dataset = 1
    push, chief = cast(Any, job), cast(Any, Chief())
    missed = [
        keep_up(scheduler, push, lambda: job.in_loop, lambda: dataset, chief, ordinal)
        for ordinal, scheduler in enumerate((by_step, by_epoch))
    ]
    optimizer.step()
    for _ in range(3):
        job.update(0)
        by_step.step()
    job.num_of_others = 2
    for tell in missed:
        tell(5)  # steps were numbered and never made: a loop was left early
    job.in_loop = False
    by_epoch.step()
    job.num_of_others = 3
    for tell in missed:
        tell(0)
    assert (by_step.last_epoch, by_epoch.last_epoch) == (6, 1)
    job.num_of_others = None  # tables have no copies here
    for tell in missed:
        tell(1)
    assert (by_step.last_epoch, by_epoch.last_epoch) == (7, 1)
    dataset = 2  # which another optimizer trains on
    for tell in missed:
        tell(1)
    assert (by_step.last_epoch, by_epoch.last_epoch) == (7, 1)


def test_at_staleness_0_a_worker_that_starts_again_steps_a_scheduler_of_updates_to_its_place() -> None:
    chief = cast(Any, Chief())

    def worker(job: Job) -> tuple[list[Any], list[Any]]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
        schedulers = [lr_scheduler.ExponentialLR(optimizer, 0.5) for _ in range(2)]
        push = cast(Any, job)
        missed = [keep_up(each, push, lambda: job.in_loop, lambda: 1, chief, i) for i, each in enumerate(schedulers)]
        optimizer.step()
        return schedulers, missed

    first = Job()
    (by_step, by_epoch), _ = worker(first)
    for _ in range(2):
        first.update(0)  # a warm-up that no scheduler takes part in
    for _ in range(3):
        first.update(0)
        by_step.step()
    first.in_loop = False
    by_epoch.step()
    again = Job(num_of_others=9)
    schedulers, missed = worker(again)
    schedulers[1].step()  # after a pass that is over
    for _ in range(2):
        for tell in missed:
            tell(0)
    assert [each.last_epoch for each in schedulers] == [7, 1]
    again.update(0)
    schedulers[0].step()
    again.num_of_others = 10
    for tell in missed:
        tell(1)
    assert [each.last_epoch for each in schedulers] == [9, 1]


@pytest.mark.parametrize("every", [1, 2])
def test_a_worker_that_starts_again_has_the_place_of_the_job_before_its_first_update(every: int) -> None:
    """It made its first update with the rate that the job had begun with. Where gradients accumulate, a place says
    nothing."""
    chief = cast(Any, Chief())

    def worker(job: Job) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        begin = follow(scheduler, cast(Any, job), lambda: True, chief, 0)
        optimizer.step()
        return scheduler, begin

    first = Job()
    scheduler, _ = worker(first)
    for number in range(1, 5):
        if number % every == 0:
            first.update(0)
        scheduler.step()
    again = Job(num_of_others=4)
    scheduler, begin = worker(again)
    for _ in range(2):
        begin(0)
    assert scheduler.last_epoch == (4 if every == 1 else 0)
    again.num_applied, again.num_pushed, again.num_of_others = 5, 1, 5
    scheduler.step()
    begin(0)
    assert scheduler.last_epoch == 5


@pytest.mark.parametrize("in_step", [True, False])
def test_the_place_in_a_schedule_of_tables_is_asked_of_the_ps(in_step: bool) -> None:
    chief = cast(Any, Chief())

    def worker(job: Job) -> tuple[Any, Any]:
        scheduler = lr_scheduler.ExponentialLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0), 0.5)
        scheduler.optimizer.step()
        if in_step:
            return scheduler, keep_up(scheduler, cast(Any, job), lambda: True, lambda: 1, chief, 0)
        return scheduler, follow(scheduler, cast(Any, job), lambda: True, chief, 0)

    first = Job(num_of_others=None)
    scheduler, _ = worker(first)
    for _ in range(3):
        first.update(0)
        scheduler.step()
    again = Job(num_of_others=None, num_asked=3)
    scheduler, tell = worker(again)
    tell(0)
    assert scheduler.last_epoch == 3
    again.update(3)
    scheduler.step()
    assert scheduler.last_epoch == 4


def test_at_staleness_0_a_chain_of_schedulers_is_stepped_to_its_place() -> None:
    chief = cast(Any, Chief())

    def worker(job: Job) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
        parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.ExponentialLR(optimizer, 0.5)]
        chain = lr_scheduler.ChainedScheduler(parts, optimizer)
        missed = keep_up(chain, cast(Any, job), lambda: True, lambda: 1, chief, 0)
        optimizer.step()
        return chain, missed

    first = Job()
    chain, _ = worker(first)
    for _ in range(2):
        first.update(0)
        chain.step()
    again, missed = worker(Job(num_of_others=2))
    missed(0)
    assert again.state_dict() == chain.state_dict()
    assert again.get_last_lr() == [0.125]


@pytest.mark.parametrize(
    ("is_prepared", "every", "num_before", "num_others", "num_warnings"),
    [(False, 1, 0, 1, 1), (False, 1, 9, 0, 1), (True, 1, 9, 1, 0), (False, 5, 9, 1, 0), (False, 1, 0, 0, 0)],
)
def test_a_scheduler_of_updates_that_is_not_prepared_is_warned_of(
    job: Job,
    caplog: pytest.LogCaptureFixture,
    is_prepared: bool,
    every: int,
    num_before: int,
    num_others: int,
    num_warnings: int,
) -> None:
    """Not one of epochs, nor where this worker makes all updates. There may have been others before it started."""
    job.num_applied = num_before
    job.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    warn_of_unprepared(cast(Any, job))
    scheduler = lr_scheduler.LinearLR(job.optimizer, total_iters=100)
    if is_prepared:
        follow(scheduler, cast(Any, job), lambda: job.in_loop, cast(Any, Chief()), 0)
    for number in range(1, 21):
        job.update(num_others)
        job.optimizer.step()
        if number % every == 0:
            scheduler.step()
    assert caplog.text.count("a scheduler of SGD is stepped with every update but was not prepared") == num_warnings


@pytest.mark.parametrize("in_step", [True, False])
def test_a_scheduler_by_metrics_that_begins_anew_says_so(caplog: pytest.LogCaptureFixture, in_step: bool) -> None:
    """Weights and data go on in a job that resumes; what it has seen of metrics is lost, unless it is loaded."""
    chief = cast(Any, Chief())

    def worker() -> Any:
        scheduler = lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0))
        if in_step:
            keep_up(scheduler, cast(Any, Job()), lambda: True, lambda: 1, chief, 0)
        else:
            follow(scheduler, cast(Any, Job()), lambda: True, chief, 0)
        return scheduler

    first, beside, none = worker(), worker(), caplog.text
    for scheduler in (first, beside, first):
        scheduler.step(2.0)
    loaded = worker()
    loaded.load_state_dict(first.state_dict())
    loaded.step(2.0)
    assert caplog.text == none
    again = worker()
    for _ in range(2):
        again.step(2.0)
    assert caplog.text.count("ReduceLROnPlateau has not seen the metrics before this worker started") == 1


@pytest.mark.parametrize("is_part", [False, True])
def test_at_staleness_0_updates_that_a_lost_worker_leaves_do_not_end_a_one_cycle_schedule(
    job: Job, caplog: pytest.LogCaptureFixture, is_part: bool
) -> None:
    """It raises after ``total_steps``, and the job ended, again whenever it was started."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0, momentum=0.9)
    scheduler: Any = lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=4)
    if is_part:
        scheduler = lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer), scheduler], [1])
    keep_up(scheduler, cast(Any, job), lambda: True, lambda: 1, cast(Any, Chief()), 0)
    optimizer.step()
    rates = []
    for _ in range(8):
        job.update(0)
        scheduler.step()
        rates.append(scheduler.get_last_lr())
    assert scheduler.last_epoch == 8
    assert rates[-1] == rates[-2] == rates[-3] < [0.5]
    assert caplog.text.count("OneCycleLR stays where it ends") == 1


@pytest.mark.parametrize("in_step", [True, False])
def test_torch_does_not_warn_of_a_scheduler_that_goes_through_epochs_that_are_over(in_step: bool) -> None:
    """Others have made their updates: it is stepped before this worker makes any, and warnings are errors here."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    scheduler: Any = lr_scheduler.ExponentialLR(optimizer, 0.5)
    job, chief = cast(Any, Job(num_of_others=4)), cast(Any, Chief())
    if in_step:
        end_epoch = keep_up(scheduler, job, lambda: False, lambda: 1, chief, 0)
    else:
        end_epoch = follow(scheduler, job, lambda: False, chief, 0)
    end_epoch(0)
    scheduler.step()
    assert scheduler.last_epoch == 1
