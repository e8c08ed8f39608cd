"""How often a worker speaks with the chief, and what it says: against the chief's own book, on a clock of the test."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from stratagem.chief.leasing.lease_book import LeaseBook
from stratagem.chief.leasing.lending import TrainingPass
from stratagem.chief.wire import lease_request_from_proto, leases_to_proto
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Plan, Topic, Unit
from stratagem.rpc.generated import chief_pb2
from stratagem.worker.chief_client import ChiefClient
from stratagem.worker.leases import REPORT_S, LeaseClient

A = Incarnation("worker:0", 1)


class Chief:
    """Answers from a book of units, in this process."""

    def __init__(self, plan: Plan) -> None:
        self.book = LeaseBook()
        self.book.open_dataset(1, plan)
        self.accepted: list[int] = []
        self.counted: list[bytes] = []
        self.num_calls = 0

    def next_units(self, request: chief_pb2.NextUnitsRequest) -> chief_pb2.NextUnitsReply:
        self.num_calls += 1
        said = lease_request_from_proto(request)
        assert isinstance(said.units_of, TrainingPass)
        epoch, stop = said.units_of.epoch, said.units_of.stop
        self.accepted += [unit.index for unit in self.book.accept(A, 1, epoch, said.accepted)]
        self.counted += [state.data for state in said.states]
        if said.leave:
            self.book.give_back(self.book.leave(A, 1, epoch).returned)
            return chief_pb2.NextUnitsReply()
        if not said.want:
            return chief_pb2.NextUnitsReply()
        return leases_to_proto(self.book.ask(A, 1, epoch, said.held, said.want, [A], stop, at_most=said.at_most))

    report = next_units

    def start_step(self, dataset: int, epoch: int, accepted: Any, states: Any, clock: int) -> chief_pb2.StartStepReply:
        self.num_calls += 1
        self.accepted += [unit.index for unit in self.book.accept(A, dataset, epoch, accepted)]
        now, limit, late = self.book.start_step(A, dataset, clock, [A])
        assert not late
        return chief_pb2.StartStepReply(clock=now, limit=limit)


class Worker:
    """Trains for ``step_s`` seconds on each unit."""

    def __init__(self, plan: Plan, first: int = 2, stop: int = 0) -> None:
        self.chief = Chief(plan)
        self.now = 0.0
        self.client = LeaseClient(cast(ChiefClient, self.chief), plan, first, lambda: self.now)
        self.client.start_epoch(1, 0, stop)

    def train(self, num: int, step_s: float) -> int:
        """Calls of the chief while it trains on so many units, or all that are left."""
        before = self.chief.num_calls
        for _ in range(num):
            if (lease := self.client.next(wait=False)) is None:
                break
            assert lease.num_examples and self.client.holds(lease.unit)
            self.now += step_s
            self.client.accept(lease.unit)
        return self.chief.num_calls - before


def test_a_lease_covers_about_a_second_of_work_and_follows_the_speed() -> None:
    worker = Worker(Plan(100_000, 1))
    assert worker.train(200, 0.005) <= 8, "2, 8, 32, 128 units, then a second's 200"
    assert worker.train(2000, 0.005) <= 12, "ten seconds: a call each"
    worker.train(200, 0.5)  # what was acquired for a second takes a hundred now
    assert 8 <= worker.train(20, 0.5) <= 12, "ten seconds: two units a call"


def test_a_lease_leaves_others_their_share_and_ends_with_the_part() -> None:
    worker = Worker(Plan(1000, 1), stop=100)
    worker.train(60, 0.001)
    assert len(worker.chief.book.held(A)) == 29, "half of the 58 that were left after two leases"
    worker.train(1000, 0.001)
    assert worker.chief.accepted == [*range(100)]


def test_what_is_held_goes_back_at_once_when_the_loop_is_left() -> None:
    worker = Worker(Plan(10_000, 1))
    worker.train(500, 0.005)
    held = len(worker.chief.book.held(A))
    assert held > 10
    num_calls = worker.chief.num_calls
    worker.client.leave()
    assert not worker.chief.book.held(A) and worker.chief.num_calls == num_calls + 1
    assert worker.chief.accepted == [*range(500)], "what was done is reported with it"
    assert worker.client.held() == []


@given(st.lists(st.tuples(st.sampled_from(["train", "lose", "leave"]), st.integers(1, 30)), max_size=25))
def test_each_unit_is_accepted_once_whatever_is_lost(events: list[tuple[str, int]]) -> None:
    worker = Worker(Plan(120, 1))
    for what, num in events:
        if what == "train":
            worker.train(num, 0.01)
        elif what == "lose":
            worker.chief.next_units(worker.client.request(wait=False))  # the reply gets lost
        else:
            worker.client.leave()
            worker.client.start_epoch(1, 0, 0)
    worker.train(1000, 0.01)
    assert sorted(worker.chief.accepted) == [*range(120)]


def test_a_restarted_chief_hears_of_what_is_held_and_of_what_it_was_not_told() -> None:
    worker = Worker(Plan(10, 1))
    first, second = worker.client.next(wait=False), worker.client.next(wait=False)
    assert first is not None and second is not None
    worker.client.accept(first.unit)
    assert [lease.unit.index for lease in worker.client.held()] == [0, 1]
    assert not worker.client.holds(first.unit) and worker.client.holds(Unit(1, 0, 1))


def test_what_was_counted_is_told_though_all_ps_went_back() -> None:
    """They went back to a checkpoint that has an update of several units, so nobody makes any of these again."""
    worker = Worker(Plan(10, 1))
    first, second = worker.client.next(wait=False), worker.client.next(wait=False)
    assert first is not None and second is not None
    worker.client.count(first.unit, b"one", Topic("fit 1", 0))
    worker.client.accept(first.unit)
    worker.client.roll_back()
    worker.client.count(second.unit, b"two", Topic("fit 1", 0))  # the step that was interrupted comes to its end
    assert worker.client.next(wait=False) is not None
    assert worker.chief.accepted == [] and worker.chief.counted == [b"one", b"two"]
    worker.client.leave()
    assert worker.chief.counted == [b"one", b"two"], "once"


def test_epochs_that_are_over_are_gone_through_without_a_call() -> None:
    worker = Worker(Plan(4, 2))
    for epoch in (*range(100), 101):
        worker.chief.book.accept(A, 1, epoch, [0, 1])
    for epoch in range(100):
        worker.client.start_epoch(1, epoch, 0)
        assert worker.client.next(wait=False) is None and worker.client.next(wait=True) is None
    assert worker.chief.num_calls == 1
    worker.client.start_epoch(1, 100, 0)
    assert not worker.client.is_over() and worker.train(9, 0.01) >= 1, "what is open is asked for"
    assert worker.chief.accepted == [0, 1]
    worker.client.start_epoch(1, 101, 0)
    assert worker.client.is_over() and worker.client.next(wait=True) is None
    worker.client.forget()
    assert not worker.client.is_over(), "after all went back, the chief says anew what is closed"


def test_an_epoch_that_is_closed_in_part_or_without_units_ends_no_other() -> None:
    worker = Worker(Plan(4, 2), stop=1)
    worker.train(1, 0.01)
    assert worker.client.next(wait=True) is None, "the part is over"
    worker.client.start_epoch(1, 0, 2)
    assert not worker.client.is_over() and worker.client.next(wait=False) is not None
    empty = Worker(Plan(0, 2))
    assert empty.client.next(wait=True) is None and not empty.client.is_over()


def test_the_bound_is_asked_for_when_it_may_be_reached_or_others_may_wait() -> None:
    def num_asked(staleness: float, num_steps: int, step_s: float) -> int:
        worker = Worker(Plan(10_000, 1, staleness=staleness), first=1)
        asked, clock = 0, 0
        for _ in range(num_steps):
            clock, has_asked = worker.client.start_step(clock, staleness)
            asked += has_asked
            clock += 1
            worker.now += step_s
        return asked

    assert num_asked(1.0, 20, 0.01) == 20
    assert num_asked(10.0, 20, 0.001) == 4, "half the bound"
    assert num_asked(1000.0, 100, REPORT_S / 10) == 10, "twice a second"
    assert num_asked(1000.0, 20, 2 * REPORT_S) == 20, "a slow worker after every step"


def test_a_worker_that_waits_at_staleness_0_says_what_it_has_done() -> None:
    worker = Worker(Plan(10_000, 1, staleness=0), first=1)
    assert worker.train(600, 0.001) < 60, "steps of a twentieth of a second at once, as of 20 workers"
    assert worker.client.has_ready and len(worker.chief.accepted) < 600
    worker.client.report()
    assert len(worker.chief.accepted) == 600
    calls = worker.chief.num_calls
    worker.client.report()
    assert worker.chief.num_calls == calls, "there is nothing new"


def test_who_may_run_ahead_reports_when_it_asks() -> None:
    worker = Worker(Plan(1000, 1))
    worker.train(1, 0.01)
    calls = worker.chief.num_calls
    worker.client.report()
    assert worker.chief.num_calls == calls
