"""Units between workers that come and go, against a model of the ps: everything is applied exactly once."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stratagem.chief.lending import Lending, Loan
from stratagem.chief.lives import Life
from stratagem.chief.steps import StepClosing
from stratagem.cluster.units import Plan, Unit, UnitBitmap
from stratagem.errors import ConfigurationError, ProtocolError


class ModelPs:
    """What one ps does with synchronous steps (or with single units at staleness > 0)."""

    def __init__(self) -> None:
        self.planned: dict[int, set[Unit]] = {}
        self.commits: dict[int, set[Unit]] = {}
        self.applied: list[Unit] = []
        self.done: set[int] = set()

    def commit(self, loan: Loan) -> None:
        units = {Unit(loan.unit.dataset, loan.unit.epoch, index) for index in loan.step_units} or {loan.unit}
        number = loan.step or -1 - loan.unit.index
        self.planned.setdefault(number, units)
        self.commits.setdefault(number, set()).add(loan.unit)
        self._apply(number)

    def close(self, closing: StepClosing) -> None:
        if closing.step in self.done:
            assert self.planned[closing.step] <= set(closing.included), "an applied slice was left out"
        self.planned[closing.step] = set(closing.included)
        self.commits.setdefault(closing.step, set()).update(unit for unit, _ in closing.committed)
        self._apply(closing.step)

    def is_done(self, loan: Loan) -> bool:
        return (loan.step or -1 - loan.unit.index) in self.done

    def _apply(self, number: int) -> None:
        if number not in self.done and self.planned[number] <= self.commits[number]:
            self.done.add(number)
            self.applied += sorted(self.planned[number])


class LendingMachine(RuleBasedStateMachine):
    """Workers join, ask, commit, accept, leave and die in any order; each goes through the epoch part by part."""

    @initialize(
        staleness=st.sampled_from([0.0, math.inf]),
        num_examples=st.integers(0, 14),
        batch_size=st.integers(1, 5),
        num_workers=st.integers(1, 3),
        part=st.integers(1, 8),
    )
    def start(self, staleness: float, num_examples: int, batch_size: int, num_workers: int, part: int) -> None:
        slices = num_workers if staleness == 0 else 1
        self.plan = Plan(num_examples, batch_size, num_slices=slices, staleness=staleness)
        self.lending = Lending()
        self.lending.open_dataset(1, self.plan)
        self.ps = ModelPs()
        self.incarnation = 0
        self.live: dict[int, Life] = {}
        self.held: dict[Life, list[Loan]] = {}
        self.stops = [self.plan.units_of(batch)[0] for batch in range(part, self.plan.num_batches, part)]
        self.stops.append(self.plan.num_units)
        self.stop: dict[Life, int] = {}
        """Of the part that a worker is in."""
        self.committed: dict[Life, Loan] = {}
        self.accepted: list[Unit] = []
        for index in range(num_workers):
            self._join(index)
        self.num_workers = num_workers
        self.lending.founders = frozenset(self.live.values())

    def _join(self, index: int) -> None:
        self.incarnation += 1
        self.live[index] = Life(f"worker:{index}", self.incarnation)
        self.held[self.live[index]] = []
        self.stop[self.live[index]] = self.stops[0]

    def _workers(self) -> list[Life]:
        return [self.live[index] for index in sorted(self.live)]

    def _ask(self, life: Life, want: int, lose_reply: bool = False) -> bool:
        """True when the epoch is closed."""
        known = {loan.unit.index for loan in self.held[life]}
        stop = self.stop[life]
        loans = self.lending.ask(life, 1, 0, known, want, self._workers(), stop)
        assert all(loan.unit.index < stop for loan in loans.loans)
        if loans.end:
            assert {unit.index for unit in self.accepted} >= {*range(stop)}
        if loans.end and stop < self.plan.num_units:
            self.stop[life] = self.stops[self.stops.index(stop) + 1]
            return False
        if not lose_reply:
            self.held[life] += loans.loans
            self.held[life].sort(key=lambda loan: (loan.step, loan.unit))
        return loans.end

    def _work(self, life: Life) -> bool:
        """One thing that the worker can do with what it holds; False when it waits."""
        if life in self.committed:
            loan = self.committed[life]
            if not self.ps.is_done(loan):
                return False
            del self.committed[life]
            self.held[life].remove(loan)
            self.accepted += self.lending.accept(life, 1, 0, [loan.unit.index])
        elif self.held[life]:
            self.committed[life] = self.held[life][0]
            self.ps.commit(self.held[life][0])
        else:
            return False
        return True

    def _drop(self, life: Life, leave: bool) -> None:
        removal = (
            self.lending.leave(life, 1, 0)
            if leave
            else self.lending.remove(
                self.lending.held(life),
                {u: [0] for u in self.lending.held(life) if any(u in each for each in self.ps.commits.values())},
            )
        )
        for closing in removal.closings:
            self.ps.close(closing)
        self.accepted += removal.accepted
        self.lending.give_back(life, removal.returned)

    @rule(index=st.integers(0, 2), want=st.integers(1, 2), lose_reply=st.booleans())
    def ask(self, index: int, want: int, lose_reply: bool) -> None:
        if index in self.live and not self.held[self.live[index]]:
            self._ask(self.live[index], want if self.plan.staleness else 1, lose_reply)

    @rule(index=st.integers(0, 2))
    def work(self, index: int) -> None:
        if index in self.live:
            self._work(self.live[index])

    @precondition(lambda self: len(self.live) > 1)
    @rule(index=st.integers(0, 2))
    def die(self, index: int) -> None:
        life = self.live.pop(index, None)
        if life is not None:
            self._drop(life, leave=False)
            self.lending.forget(life)
            self.held.pop(life)
            self.committed.pop(life, None)

    @rule(index=st.integers(0, 2))
    def leave(self, index: int) -> None:
        life = self.live.get(index)
        if life is not None and life not in self.committed:
            self._drop(life, leave=True)
            self.held[life] = []

    @rule(index=st.integers(0, 2))
    def rejoin(self, index: int) -> None:
        if index < self.num_workers and index not in self.live:
            self._join(index)

    @invariant()
    def no_unit_is_on_two_workers(self) -> None:
        held = [loan.unit for loans in getattr(self, "held", {}).values() for loan in loans]
        assert len(held) == len(set(held))

    @invariant()
    def a_worker_has_one_slice_of_a_step(self) -> None:
        for loans in getattr(self, "held", {}).values():
            steps = [loan.step for loan in loans if loan.step]
            assert len(steps) == len(set(steps))

    @invariant()
    def a_refreshing_worker_is_alone_with_its_step(self) -> None:
        for loans in getattr(self, "held", {}).values():
            for loan in loans:
                if loan.refresh:
                    assert all(number >= loan.step for number in self.lending.steps.open)

    def teardown(self) -> None:
        if not hasattr(self, "lending"):
            return
        for _ in range(1000):
            ends = []
            for life in self._workers():
                while self._work(life):
                    pass
                ends.append(not self.held[life] and self._ask(life, 1))
            if all(ends):
                break
        else:
            pytest.fail(f"the epoch does not close: {self.lending.steps.open}, held {self.held}")
        every = [Unit(1, 0, index) for index in range(self.plan.num_units)]
        assert sorted(self.accepted) == every
        assert sorted(self.ps.applied) == every
        assert self.lending.examples_accepted == sum(self.plan.unit_examples(unit.index) for unit in every)


LendingMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLending = LendingMachine.TestCase

A, B = Life("worker:0", 1), Life("worker:1", 2)


def sync_lending(num_examples: int = 8, batch_size: int = 4) -> Lending:
    lending = Lending()
    lending.open_dataset(1, Plan(num_examples, batch_size, num_slices=2, staleness=0))
    lending.founders = frozenset({A, B})
    return lending


def test_a_step_is_one_slice_of_one_batch_for_each_worker() -> None:
    lending = sync_lending()
    [mine] = lending.ask(B, 1, 0, (), 1, [A, B]).loans
    [other] = lending.ask(A, 1, 0, (), 1, [A, B]).loans
    assert (other.unit.index, mine.unit.index) == (0, 1)
    assert (mine.step, mine.step_units, mine.refresh, mine.num_examples) == (1, (0, 1), False, 2)
    assert other.step == 1


def test_slices_of_a_dead_worker_without_a_commit_are_left_out_and_lent_again() -> None:
    lending = sync_lending()
    lending.ask(A, 1, 0, (), 1, [A, B])
    lending.ask(B, 1, 0, (), 1, [A, B])
    removal = lending.remove(lending.held(B), {})
    assert removal.closings == [StepClosing(1, (Unit(1, 0, 0),), ())]
    assert lending.ask(A, 1, 0, {0}, 1, [A]).loans[0].unit.index == 2, "a unit moves only after give_back"
    assert lending.give_back(B, removal.returned) == [Unit(1, 0, 1)]


def test_a_committed_slice_of_a_dead_worker_stays_and_is_accepted_with_its_step() -> None:
    lending = sync_lending()
    lending.ask(A, 1, 0, (), 1, [A, B])
    lending.ask(B, 1, 0, (), 1, [A, B])
    removal = lending.remove(lending.held(B), {Unit(1, 0, 1): [0]})
    assert removal.closings == [StepClosing(1, (Unit(1, 0, 0), Unit(1, 0, 1)), ((Unit(1, 0, 1), 0),))]
    assert (removal.returned, removal.accepted) == ([], [])
    assert lending.accept(A, 1, 0, [0]) == [Unit(1, 0, 0), Unit(1, 0, 1)]


def test_a_newcomer_waits_for_all_earlier_steps_and_refreshes() -> None:
    lending = sync_lending()
    lending.ask(A, 1, 0, (), 1, [A])
    new = Life("worker:1", 3)
    waiting = lending.ask(new, 1, 0, (), 1, [A, new])
    assert (waiting.loans, waiting.waits_for) == ((), (A,))
    lending.accept(A, 1, 0, [0])
    [loan] = lending.ask(new, 1, 0, (), 1, [A, new]).loans
    assert loan.refresh and loan.step == 2


def test_a_worker_that_left_a_step_to_the_others_refreshes() -> None:
    lending = sync_lending()
    lending.ask(A, 1, 0, (), 1, [A, B])
    lending.ask(B, 1, 0, (), 1, [A, B])
    lending.give_back(B, lending.leave(B, 1, 0).returned)
    waiting = lending.ask(B, 1, 1, (), 1, [A, B])
    assert (waiting.loans, waiting.waits_for) == ((), (A,))
    lending.accept(A, 1, 0, [0])
    [loan] = lending.ask(B, 1, 1, (), 1, [A, B]).loans
    assert loan.refresh


def test_a_part_of_an_epoch_ends_when_its_units_are_accepted_and_no_others_are_lent() -> None:
    lending = Lending()
    lending.open_dataset(1, Plan(8, 2))
    assert [loan.unit.index for loan in lending.ask(A, 1, 0, (), 9, [A, B], stop=2).loans] == [0, 1]
    waiting = lending.ask(B, 1, 0, (), 9, [A, B], stop=2)
    assert (waiting.loans, waiting.end, waiting.waits_for) == ((), False, (A,))
    lending.accept(A, 1, 0, [0, 1])
    assert [loan.unit.index for loan in lending.ask(A, 1, 0, (), 1, [A, B], stop=4).loans] == [2]
    assert lending.ask(B, 1, 0, (), 9, [A, B], stop=2).end, "what others do in the next part does not matter"


def test_what_is_reserved_in_a_group_can_be_given_back() -> None:
    lending = sync_lending()
    [mine] = lending.ask(A, 1, 1, (), 1, [A, B], group="fit 1").loans
    assert mine.step_units == (0, 1)
    assert lending.leave(B, 1, 0).returned == [], "it has only left the pass before"
    assert lending.steps.reserved_in(A, "fit 1") == [], "it has got its own"
    assert lending.steps.reserved_in(B, "fit 0") == [], "who leaves an earlier group takes part in the next"
    removal = lending.remove(lending.steps.reserved_in(B, "fit 1"), {})
    assert removal.closings == [StepClosing(1, (Unit(1, 1, 0),), ())] and removal.returned == [Unit(1, 1, 1)]
    lending.give_back(B, removal.returned)
    lending.accept(A, 1, 1, [0])
    [mine] = lending.ask(A, 1, 1, (), 1, [A]).loans
    assert mine.step_units == (1,)


def test_only_the_borrower_gives_a_unit_back() -> None:
    lending = Lending()
    lending.open_dataset(1, Plan(4, 1))
    [loan] = lending.ask(A, 1, 0, (), 1, [A]).loans
    assert lending.give_back(B, [loan.unit]) == []
    assert lending.give_back(A, [loan.unit]) == [loan.unit]
    assert lending.give_back(A, [loan.unit]) == []


def test_a_restarted_worker_is_not_waited_for_before_it_asks() -> None:
    lending = sync_lending()
    new = Life("worker:1", 3)
    [loan] = lending.ask(A, 1, 0, (), 1, [A, new]).loans
    assert loan.step_units == (0,)


def test_a_lost_reply_is_given_again() -> None:
    lending = Lending()
    lending.open_dataset(1, Plan(4, 1))
    first = lending.ask(A, 1, 0, (), 2, [A])
    assert lending.ask(A, 1, 0, (), 2, [A]) == first
    assert [loan.unit.index for loan in lending.ask(A, 1, 0, {0, 1}, 2, [A]).loans] == [2, 3]


def test_another_plan_is_refused_with_every_difference() -> None:
    lending = Lending()
    lending.open_dataset(1, Plan(4, 2, seed=3))
    assert lending.open_dataset(1, Plan(4, 2, seed=5)).seed == 3
    with pytest.raises(ConfigurationError, match=r"num_examples is 4 in the job and 5 here; shuffle is True .* False"):
        lending.open_dataset(1, Plan(5, 2, shuffle=False))


def test_an_unknown_dataset_is_refused() -> None:
    with pytest.raises(ProtocolError, match="dataset 7 is not open"):
        Lending().ask(A, 7, 0, (), 1, [A])


def test_a_roll_back_reopens_units_of_open_epochs_and_loses_those_of_closed_ones() -> None:
    lending = sync_lending(num_examples=4, batch_size=2)
    lending.know_accepted({(1, 0): UnitBitmap.of([0, 1, 2, 3]), (1, 1): UnitBitmap.of([0, 1])})
    back = lending.roll_back({(1, 0): UnitBitmap.of([0, 1, 2])})
    assert back.lost == {(1, 0): UnitBitmap.of([3])}
    assert back.revoked == 2
    assert lending.epoch(1, 0).closed and lending.epoch(1, 1).num_accepted == 0
    assert lending.examples_accepted == 4


def test_after_a_roll_back_units_come_in_the_order_of_the_plan_again() -> None:
    lending = sync_lending()
    for worker in (A, B):
        lending.ask(worker, 1, 0, (), 1, [A, B])
    lending.accept(A, 1, 0, [0])
    back = lending.roll_back({})
    assert back.revoked == 2
    assert not lending.steps.open
    loans = [lending.ask(worker, 1, 0, (), 1, [A, B]).loans[0] for worker in (B, A)]
    assert [(loan.unit.index, loan.step, loan.step_units) for loan in loans] == [(1, 2, (0, 1)), (0, 2, (0, 1))]


def test_a_resumed_worker_keeps_its_slice_after_a_restart_of_the_chief() -> None:
    before = sync_lending()
    [loan] = before.ask(B, 1, 0, (), 1, [A, B]).loans
    after = sync_lending()
    after.resume(B, [loan])
    assert after.held(B) == [loan.unit]
    assert after.steps.orphans() == [Unit(1, 0, 0)]
    assert after.steps.reserve_orphans([A, B]) == [(Unit(1, 0, 0), A)]
    assert after.steps.next_number == 2


def test_units_lent_before_a_restore_are_doubtful() -> None:
    lending = sync_lending()
    lending.ask(A, 1, 0, (), 1, [A, B])
    assert lending.doubtful(A, 1, 0, [0]) == []
    lending.restores += 1
    lending.ask(B, 1, 0, (), 1, [A, B])
    assert lending.doubtful(A, 1, 0, [0, 2]) == [Unit(1, 0, 0), Unit(1, 0, 2)]
