"""Units between workers that come and go, against a model of the ps: everything is applied exactly once."""

from __future__ import annotations

import functools
import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stratagem.chief.leasing import lease_book
from stratagem.chief.leasing.lease_book import MAX_AHEAD, LeaseBook
from stratagem.chief.leasing.steps import StepClosing
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Lease, Plan, Unit, UnitBitmap
from stratagem.errors import ConfigurationError, LimitError, ProtocolError
from tests.unit.chief.calls import calls


class ModelPs:
    """What one ps does with synchronous steps (or with single units at staleness > 0)."""

    def __init__(self) -> None:
        self.planned: dict[int, set[Unit]] = {}
        self.commits: dict[int, set[Unit]] = {}
        self.applied: list[Unit] = []
        self.done: set[int] = set()

    def commit(self, lease: Lease) -> None:
        units = {Unit(lease.unit.dataset, lease.unit.epoch, index) for index in lease.step_units} or {lease.unit}
        number = lease.step or -1 - lease.unit.index
        self.planned.setdefault(number, units)
        self.commits.setdefault(number, set()).add(lease.unit)
        self._apply(number)

    def close(self, closing: StepClosing) -> None:
        if closing.step in self.done:
            assert self.planned[closing.step] <= set(closing.included), "an applied slice was left out"
        self.planned[closing.step] = set(closing.included)
        self.commits.setdefault(closing.step, set()).update(unit for unit, _ in closing.committed)
        self._apply(closing.step)

    def is_done(self, lease: Lease) -> bool:
        return (lease.step or -1 - lease.unit.index) in self.done

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
        self.lease_book = LeaseBook()
        self.lease_book.open_dataset(1, self.plan)
        self.ps = ModelPs()
        self.incarnation = 0
        self.live: dict[int, Incarnation] = {}
        self.held: dict[Incarnation, list[Lease]] = {}
        self.unreported: dict[Incarnation, list[int]] = {}
        self.stops = [self.plan.units_of(batch)[0] for batch in range(part, self.plan.num_batches, part)]
        self.stops.append(self.plan.num_units)
        self.stop: dict[Incarnation, int] = {}
        """Of the part that a worker is in."""
        self.committed: dict[Incarnation, Lease] = {}
        self.accepted: list[Unit] = []
        for index in range(num_workers):
            self._join(index)
        self.num_workers = num_workers
        self.lease_book.founders = frozenset(self.live.values())

    def _join(self, index: int) -> None:
        self.incarnation += 1
        self.live[index] = Incarnation(f"worker:{index}", self.incarnation)
        self.held[self.live[index]], self.unreported[self.live[index]] = [], []
        self.stop[self.live[index]] = self.stops[0]

    def _workers(self) -> list[Incarnation]:
        return [self.live[index] for index in sorted(self.live)]

    def _report(self, incarnation: Incarnation) -> None:
        self.accepted += self.lease_book.accept(incarnation, 1, 0, self.unreported[incarnation])
        self.unreported[incarnation] = []

    def _ask(self, incarnation: Incarnation, want: int, lose_reply: bool = False, at_most: int = 0) -> bool:
        """True when the epoch is closed."""
        self._report(incarnation)
        known = {lease.unit.index for lease in self.held[incarnation]}
        stop = self.stop[incarnation]
        workers = self._workers()
        granted = self.lease_book.ask(incarnation, 1, 0, known, want, workers, stop, at_most=at_most)
        assert all(lease.unit.index < stop for lease in granted.granted)
        if granted.end:
            assert {unit.index for unit in self.accepted} >= {*range(stop)}
        if granted.end and stop < self.plan.num_units:
            self.stop[incarnation] = self.stops[self.stops.index(stop) + 1]
            return False
        if not lose_reply:
            self.held[incarnation] += granted.granted
            self.held[incarnation].sort(key=lambda lease: (lease.step, lease.unit))
        return granted.end

    def _work(self, incarnation: Incarnation) -> bool:
        """One thing that the worker can do with what it holds; False when it waits."""
        if incarnation in self.committed:
            lease = self.committed[incarnation]
            if not self.ps.is_done(lease):
                return False
            del self.committed[incarnation]
            self.held[incarnation].remove(lease)
            self.unreported[incarnation].append(lease.unit.index)
        elif self.held[incarnation]:
            self.committed[incarnation] = self.held[incarnation][0]
            self.ps.commit(self.held[incarnation][0])
        else:
            return False
        return True

    def _drop(self, incarnation: Incarnation, leave: bool) -> None:
        removal = (
            self.lease_book.leave(incarnation, 1, 0)
            if leave
            else self.lease_book.remove(
                self.lease_book.held(incarnation),
                {
                    u: {0: 0}
                    for u in self.lease_book.held(incarnation)
                    if any(u in each for each in self.ps.commits.values())
                },
            )
        )
        for closing in removal.closings:
            self.ps.close(closing)
        self.accepted += self.lease_book.mark_accepted(removal.accepted)
        self.lease_book.give_back(removal.returned)

    @rule(
        index=st.integers(0, 2), want=st.integers(1, 2), lose_reply=st.booleans(), at_most=st.sampled_from([0, 20, 50])
    )
    def ask(self, index: int, want: int, lose_reply: bool, at_most: int) -> None:
        if index in self.live and not self.held[self.live[index]]:
            self._ask(self.live[index], want if self.plan.staleness else 1, lose_reply, at_most)

    @rule(index=st.integers(0, 2))
    def report(self, index: int) -> None:
        if index in self.live:
            self._report(self.live[index])

    @rule(index=st.integers(0, 2))
    def work(self, index: int) -> None:
        if index in self.live:
            self._work(self.live[index])

    @precondition(lambda self: len(self.live) > 1)
    @rule(index=st.integers(0, 2))
    def die(self, index: int) -> None:
        incarnation = self.live.pop(index, None)
        if incarnation is not None:
            self._drop(incarnation, leave=False)
            self.lease_book.forget(incarnation)
            self.held.pop(incarnation)
            self.committed.pop(incarnation, None)

    @rule(index=st.integers(0, 2))
    def leave(self, index: int) -> None:
        incarnation = self.live.get(index)
        if incarnation is not None and incarnation not in self.committed:
            self._report(incarnation)
            self._drop(incarnation, leave=True)
            self.held[incarnation] = []

    @rule(index=st.integers(0, 2))
    def rejoin(self, index: int) -> None:
        if index < self.num_workers and index not in self.live:
            self._join(index)

    @invariant()
    def no_unit_is_on_two_workers(self) -> None:
        held = [lease.unit for granted in getattr(self, "held", {}).values() for lease in granted]
        assert len(held) == len(set(held))

    @invariant()
    def a_worker_has_one_slice_of_a_step(self) -> None:
        for granted in getattr(self, "held", {}).values():
            steps = [lease.step for lease in granted if lease.step]
            assert len(steps) == len(set(steps))

    @invariant()
    def a_refreshing_worker_is_alone_with_its_step(self) -> None:
        for granted in getattr(self, "held", {}).values():
            for lease in granted:
                if lease.refresh:
                    assert all(number >= lease.step for number in self.lease_book.steps.open)

    def teardown(self) -> None:
        if not hasattr(self, "lease_book"):
            return
        for _ in range(1000):
            ends = []
            for incarnation in self._workers():
                while self._work(incarnation):
                    pass
                self._report(incarnation)  # others may have to wait for what is accepted
                ends.append(not self.held[incarnation] and self._ask(incarnation, 1))
            if all(ends):
                break
        else:
            pytest.fail(f"the epoch does not close: {self.lease_book.steps.open}, held {self.held}")
        every = [Unit(1, 0, index) for index in range(self.plan.num_units)]
        assert sorted(self.accepted) == every
        assert sorted(self.ps.applied) == every
        assert self.lease_book.examples_accepted == sum(self.plan.unit_examples(unit.index) for unit in every)


LendingMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLending = LendingMachine.TestCase

A, B = Incarnation("worker:0", 1), Incarnation("worker:1", 2)


def sync_lending(num_examples: int = 8, batch_size: int = 4) -> LeaseBook:
    lease_book = LeaseBook()
    lease_book.open_dataset(1, Plan(num_examples, batch_size, num_slices=2, staleness=0))
    lease_book.founders = frozenset({A, B})
    return lease_book


def test_a_step_is_one_slice_of_one_batch_for_each_worker() -> None:
    lease_book = sync_lending()
    [mine] = lease_book.ask(B, 1, 0, (), 1, [A, B]).granted
    [other] = lease_book.ask(A, 1, 0, (), 1, [A, B]).granted
    assert (other.unit.index, mine.unit.index) == (0, 1)
    assert (mine.step, mine.step_units, mine.refresh, mine.num_examples) == (1, (0, 1), False, 2)
    assert other.step == 1


def test_slices_of_a_dead_worker_without_a_commit_are_left_out_and_lent_again() -> None:
    lease_book = sync_lending()
    lease_book.ask(A, 1, 0, (), 1, [A, B])
    lease_book.ask(B, 1, 0, (), 1, [A, B])
    removal = lease_book.remove(lease_book.held(B), {})
    assert removal.closings == [StepClosing(1, (Unit(1, 0, 0),), ())]
    assert lease_book.ask(A, 1, 0, {0}, 1, [A]).granted[0].unit.index == 2, "a unit moves only after give_back"
    assert lease_book.give_back(removal.returned) == [Unit(1, 0, 1)]


def test_a_committed_slice_of_a_dead_worker_stays_and_is_accepted_with_its_step() -> None:
    lease_book = sync_lending()
    lease_book.ask(A, 1, 0, (), 1, [A, B])
    lease_book.ask(B, 1, 0, (), 1, [A, B])
    removal = lease_book.remove(lease_book.held(B), {Unit(1, 0, 1): {0: 1}})
    assert removal.closings == [StepClosing(1, (Unit(1, 0, 0), Unit(1, 0, 1)), ((Unit(1, 0, 1), 0),))]
    assert (removal.returned, removal.accepted) == ({}, [])
    assert lease_book.accept(A, 1, 0, [0]) == [Unit(1, 0, 0), Unit(1, 0, 1)]


def test_an_accumulated_slice_of_a_dead_worker_is_accepted_with_the_step_of_its_update() -> None:
    """It was accepted with its own step: a checkpoint named it, and did not have its update."""
    lease_book = sync_lending()
    asked = (A, ()), (B, ()), (A, (0,)), (B, (1,))
    held = [lease_book.ask(one, 1, 0, has, 1, [A, B]).granted[0].unit for one, has in asked]
    assert held == [Unit(1, 0, index) for index in range(4)]
    removal = lease_book.remove(lease_book.held(B), {unit: {0: 2} for unit in held[1::2]})
    assert [closing.included for closing in removal.closings] == [tuple(held[:2]), tuple(held[2:])]
    assert lease_book.accept(A, 1, 0, [0]) == [held[0]]
    assert [*lease_book.steps.open] == [1, 2], "a chief that follows has to know the first one, too"
    assert sorted(lease_book.accept(A, 1, 0, [2])) == held[1:]
    assert not lease_book.steps.open


def test_a_slice_that_lacks_an_update_is_lent_again_when_the_other_worker_dies_too() -> None:
    """It stayed with the dead one, for which all waited for ever: what the second held was given back alone."""
    lease_book = sync_lending()
    lease_book.steps.per_unit = 2
    lease_book.ask(A, 1, 0, (), 1, [A, B])
    lease_book.ask(B, 1, 0, (), 1, [A, B])
    assert not lease_book.give_back(lease_book.remove(lease_book.held(B), {Unit(1, 0, 1): {0: 1}}).returned)
    removal = lease_book.remove(lease_book.held(A), {})
    assert lease_book.give_back(removal.returned) == [Unit(1, 0, 0), Unit(1, 0, 1)]


def test_a_slice_of_a_dead_worker_that_lacks_an_update_is_lent_again_after_its_step() -> None:
    lease_book = sync_lending(4)
    lease_book.steps.per_unit = 2
    lease_book.ask(A, 1, 0, (), 1, [A, B])
    lease_book.ask(B, 1, 0, (), 1, [A, B])
    removal = lease_book.remove(lease_book.held(B), {Unit(1, 0, 1): {0: 1}})
    assert (removal.returned, removal.accepted) == ({}, [])
    assert not lease_book.ask(A, 1, 0, {0}, 1, [A]).granted, "its first update may not be on the ps yet"
    assert lease_book.accept(A, 1, 0, [0]) == [Unit(1, 0, 0)]
    [lease] = lease_book.ask(A, 1, 0, (), 1, [A]).granted
    assert (lease.unit, lease.step, lease.step_units) == (Unit(1, 0, 1), 2, (1,))


def test_a_newcomer_waits_for_all_earlier_steps_and_refreshes() -> None:
    lease_book = sync_lending()
    lease_book.ask(A, 1, 0, (), 1, [A])
    new = Incarnation("worker:1", 3)
    waiting = lease_book.ask(new, 1, 0, (), 1, [A, new])
    assert (waiting.granted, waiting.waits_for) == ((), (A,))
    lease_book.accept(A, 1, 0, [0])
    [lease] = lease_book.ask(new, 1, 0, (), 1, [A, new]).granted
    assert lease.refresh and lease.step == 2


def test_a_worker_that_left_a_step_to_the_others_refreshes() -> None:
    lease_book = sync_lending()
    lease_book.ask(A, 1, 0, (), 1, [A, B])
    lease_book.ask(B, 1, 0, (), 1, [A, B])
    lease_book.give_back(lease_book.leave(B, 1, 0).returned)
    waiting = lease_book.ask(B, 1, 1, (), 1, [A, B])
    assert (waiting.granted, waiting.waits_for) == ((), (A,))
    lease_book.accept(A, 1, 0, [0])
    lease_book.leave(A, 1, 0)
    [lease] = lease_book.ask(B, 1, 1, (), 1, [A, B]).granted
    assert lease.refresh


@pytest.mark.parametrize("after", [(1, 1), (2, 0)])
def test_who_left_a_loop_begins_the_next_one_when_nobody_has_that_loop_to_go_through(after: tuple[int, int]) -> None:
    """It made a step with a slice for the other one, who had later steps to make before: each waited for the other."""
    lease_book = sync_lending()
    lease_book.open_dataset(2, Plan(8, 4, num_slices=2, staleness=0))
    lease_book.ask(B, 1, 0, (), 1, [A, B])  # A has not even come to it
    lease_book.give_back(lease_book.leave(B, 1, 0).returned)
    if after[0] == 1:
        assert lease_book.ask(B, *after, (), 1, [A, B]).waits_for == (A,)
    for indices in ([0], [1], [2], [3]):
        lease_book.ask(A, 1, 0, (), 1, [A, B])
        assert lease_book.ask(B, *after, (), 1, [A, B]).waits_for == (A,)
        lease_book.accept(A, 1, 0, indices)
    assert lease_book.ask(A, 1, 0, (), 1, [A, B]).end
    [lease] = lease_book.ask(B, *after, (), 1, [A, B]).granted
    assert len(lease.step_units) == 2, "the other one has its slice"


def test_a_part_of_an_epoch_ends_when_its_units_are_accepted_and_no_others_are_lent() -> None:
    lease_book = LeaseBook()
    lease_book.open_dataset(1, Plan(8, 2))
    assert [lease.unit.index for lease in lease_book.ask(A, 1, 0, (), 9, [A, B], stop=2).granted] == [
        0,
        1,
    ]
    waiting = lease_book.ask(B, 1, 0, (), 9, [A, B], stop=2)
    assert (waiting.granted, waiting.end, waiting.waits_for) == ((), False, (A,))
    lease_book.accept(A, 1, 0, [0, 1])
    assert [lease.unit.index for lease in lease_book.ask(A, 1, 0, (), 1, [A, B], stop=4).granted] == [2]
    assert lease_book.ask(B, 1, 0, (), 9, [A, B], stop=2).end, "what others do in the next part does not matter"


def test_what_is_reserved_in_a_group_can_be_given_back() -> None:
    lease_book = sync_lending()
    for worker in (A, B):
        lease_book.loops.left(worker, 1, 0)
    [mine] = lease_book.ask(A, 1, 1, (), 1, [A, B], group="fit 1").granted
    assert mine.step_units == (0, 1)
    assert lease_book.leave(B, 1, 0).returned == {}, "it has only left the pass before"
    assert lease_book.steps.reserved_in(A, "fit 1") == [], "it has got its own"
    assert lease_book.steps.reserved_in(B, "fit 0") == [], "who leaves an earlier group takes part in the next"
    removal = lease_book.remove(lease_book.steps.reserved_in(B, "fit 1"), {})
    assert removal.closings == [StepClosing(1, (Unit(1, 1, 0),), ())] and removal.returned == {Unit(1, 1, 1): B}
    lease_book.give_back(removal.returned)
    lease_book.accept(A, 1, 1, [0])
    [mine] = lease_book.ask(A, 1, 1, (), 1, [A]).granted
    assert mine.step_units == (1,)


def test_who_asks_first_in_an_epoch_leaves_as_many_to_each_other_worker() -> None:
    lease_book = LeaseBook()
    lease_book.open_dataset(1, Plan(50, 1))
    workers = [Incarnation(f"worker:{index}", 1 + index) for index in range(12)]
    asked = [
        len(lease_book.ask(each, 1, epoch, (), 1, workers, at_most=10).granted) for epoch in (0, 1) for each in workers
    ]
    assert asked[0] == 10, "nobody else has asked yet"
    assert max(asked[12:]) == 2 == 50 // (2 * 12)
    lease_book.forget(workers[-1])
    assert len(lease_book.ask(workers[0], 1, 2, (), 1, workers, at_most=10).granted) == 50 // (2 * 11)


def test_only_the_borrower_gives_a_unit_back() -> None:
    lease_book = LeaseBook()
    lease_book.open_dataset(1, Plan(4, 1))
    [lease] = lease_book.ask(A, 1, 0, (), 1, [A]).granted
    assert lease_book.give_back({lease.unit: B}) == []
    assert lease_book.give_back({lease.unit: A}) == [lease.unit]
    assert lease_book.give_back({lease.unit: A}) == []


def test_a_restarted_worker_is_not_waited_for_before_it_asks() -> None:
    lease_book = sync_lending()
    new = Incarnation("worker:1", 3)
    [lease] = lease_book.ask(A, 1, 0, (), 1, [A, new]).granted
    assert lease.step_units == (0,)


def test_a_lost_reply_is_given_again() -> None:
    lease_book = LeaseBook()
    lease_book.open_dataset(1, Plan(4, 1))
    first = lease_book.ask(A, 1, 0, (), 2, [A])
    assert lease_book.ask(A, 1, 0, (), 2, [A]) == first
    assert [lease.unit.index for lease in lease_book.ask(A, 1, 0, {0, 1}, 2, [A]).granted] == [2, 3]


def test_another_plan_is_refused_with_every_difference() -> None:
    lease_book = LeaseBook()
    lease_book.open_dataset(1, Plan(4, 2, seed=3))
    assert lease_book.open_dataset(1, Plan(4, 2, seed=5)).seed == 3
    with pytest.raises(ConfigurationError, match=r"num_examples is 4 in the job and 5 here; shuffle is True .* False"):
        lease_book.open_dataset(1, Plan(5, 2, shuffle=False))


def test_an_unknown_dataset_is_refused() -> None:
    with pytest.raises(ProtocolError, match="dataset 7 is not open"):
        LeaseBook().ask(A, 7, 0, (), 1, [A])


def test_a_roll_back_reopens_units_of_open_epochs_and_loses_those_of_closed_ones() -> None:
    lease_book = sync_lending(num_examples=4, batch_size=2)
    lease_book.know_accepted({(1, 0): UnitBitmap.of([0, 1, 2, 3]), (1, 1): UnitBitmap.of([0, 1])})
    back = lease_book.roll_back({(1, 0): UnitBitmap.of([0, 1, 2])}, {})
    assert back.lost == {(1, 0): UnitBitmap.of([3])}
    assert back.revoked == 2
    assert lease_book.epoch(1, 0).closed and lease_book.epoch(1, 1).num_accepted == 0
    assert lease_book.examples_accepted == 4
    assert lease_book.roll_back({}, {(1, 0): 4, (1, 1): 4}).lost == {(1, 0): UnitBitmap.of([0, 1, 2, 3])}
    lease_book.know_accepted({(1, 1): UnitBitmap.of([0])})
    assert (1, 1) in lease_book.roll_back({}, {(1, 0): 4, (1, 1): 4}).lost, "nobody asks for an open epoch again either"


def test_a_roll_back_loses_the_units_of_a_part_that_a_worker_knows_to_be_over() -> None:
    lease_book = sync_lending(num_examples=16, batch_size=4)
    lease_book.know_accepted({(1, 0): UnitBitmap.of([0, 1, 2, 3])})
    assert len(lease_book.ask(A, 1, 0, (), 1, [A, B], stop=8).granted) == 1
    back = lease_book.roll_back({(1, 0): UnitBitmap.of([0])}, {(1, 0): 4})
    assert back.lost == {(1, 0): UnitBitmap.of([1, 2, 3])}, "who waits at the end of the part does not ask for it again"
    assert lease_book.ask(B, 1, 0, (), 1, [A, B], stop=4).end


def after_epochs(num: int) -> LeaseBook:
    """All but the last one are over, in which A has a unit."""
    lease_book = LeaseBook()
    lease_book.open_dataset(1, Plan(8, 4, staleness=2))
    for epoch in range(num):
        while not (leases := lease_book.ask(A, 1, epoch, (), 1, [A])).end and epoch < num - 1:
            lease_book.accept(A, 1, epoch, [lease.unit.index for lease in leases.granted])
    return lease_book


def test_what_a_step_a_loss_and_a_look_cost_does_not_grow_with_the_epochs_that_are_over() -> None:
    for do in (
        lambda book: book.start_step(A, 1, 0, [A, B]),
        lambda book: book.held(A),
        lambda book: book.ask(B, 1, book.current[1], (), 1, [A, B]),
    ):
        few, many = (calls(functools.partial(do, after_epochs(num))) for num in (3, 300))
        assert many <= few  # the first call of all may fill caches
    lease_book = after_epochs(300)
    assert lease_book.current == (1, 299)
    assert [unit.epoch for unit in lease_book.held(A)] == [299]
    assert lease_book.roll_back({}, {}).revoked == 1, "what is leased comes back"


def test_to_take_over_a_long_epoch_costs_a_chief_as_much_as_a_short_one() -> None:
    def take_over(num_units: int) -> tuple[LeaseBook, int]:
        lease_book = LeaseBook()
        lease_book.open_dataset(1, Plan(4 * num_units + 3, 4))
        accepted = {(1, 0): UnitBitmap.of(range(num_units)), (1, 1): UnitBitmap.of(range(0, num_units + 9, 2))}
        return lease_book, calls(lambda: lease_book.know_accepted(accepted))

    (_, few), (lease_book, many) = take_over(8), take_over(8000)
    assert many == few
    assert lease_book.epoch(1, 0).num_accepted == 8000 and lease_book.epoch(1, 1).num_accepted == 4001
    assert lease_book.examples_accepted == 4 * 8000 + 4 * 4000 + 3
    assert lease_book.know_accepted({(1, 0): UnitBitmap.of([7, 8000, 8001])}) == {(1, 0): UnitBitmap.of([8000])}


def test_what_is_shown_is_the_newest_epoch_that_is_not_over() -> None:
    lease_book = after_epochs(3)
    lease_book.open_dataset(2, Plan(8, 4))
    lease_book.ask(A, 2, 0, (), 1, [A])
    assert lease_book.current == (1, 2), "it is open yet"
    lease_book.ask(A, 1, 0, (), 1, [A])
    lease_book.know_accepted({(1, 2): UnitBitmap.of([0, 1])})
    lease_book.ask(A, 1, 1, (), 1, [A])
    assert lease_book.current == (1, 2), "a worker that walks through what is over shows nothing new"
    lease_book.ask(A, 2, 0, (0, 1), 1, [A])
    assert lease_book.current == (2, 0)


@pytest.mark.parametrize(
    ("counts", "accumulates", "comes_again"), [(False, False, False), (True, False, True), (True, True, False)]
)
def test_a_unit_that_the_checkpoint_has_comes_again_only_to_be_counted(
    counts: bool, accumulates: bool, comes_again: bool
) -> None:
    """Its worker had yet to report it. Of an update of several units a part alone is refused by the ps."""
    lease_book = sync_lending()
    lease_book.note_counts(A, counts)
    lease_book.ask(A, 1, 0, (), 1, [A, B])
    lease_book.roll_back({(1, 0): UnitBitmap.of([0])}, {}, accumulates=accumulates)
    assert (0 in lease_book.epoch(1, 0).accepted) is not comes_again
    assert lease_book.is_pending(Unit(1, 0, 0)) is comes_again


def test_steps_that_workers_tell_a_new_chief_of_are_in_their_order() -> None:
    after = LeaseBook(next_step=1, num_unsynced=64)
    after.open_dataset(1, Plan(12, 4, num_slices=2, staleness=0))
    for worker, first in ((A, 2), (B, 1)):
        units = [Unit(1, 0, 2 * (step - 1) + (worker == B)) for step in range(first, 4)]
        told = [Lease(each, 2, 1 + each.index // 2, (each.index & ~1, each.index | 1)) for each in units]
        after.resume(worker, told)
    assert [*after.steps.open] == [1, 2, 3]


def test_after_a_roll_back_units_come_in_the_order_of_the_plan_again() -> None:
    lease_book = sync_lending()
    for worker in (A, B):
        lease_book.ask(worker, 1, 0, (), 1, [A, B])
    lease_book.accept(A, 1, 0, [0])
    back = lease_book.roll_back({}, {})
    assert back.revoked == 2
    assert not lease_book.steps.open
    granted = [lease_book.ask(worker, 1, 0, (), 1, [A, B]).granted[0] for worker in (B, A)]
    assert [(lease.unit.index, lease.step, lease.step_units) for lease in granted] == [
        (1, 2, (0, 1)),
        (0, 2, (0, 1)),
    ]


def test_a_resumed_worker_keeps_its_slice_after_a_restart_of_the_chief() -> None:
    before = sync_lending()
    [lease] = before.ask(B, 1, 0, (), 1, [A, B]).granted
    after = sync_lending()
    after.resume(B, [lease])
    assert after.held(B) == [lease.unit]
    assert after.steps.orphans() == [Unit(1, 0, 0)]
    assert after.steps.reserve_orphans([A, B], after.loops.is_elsewhere) == [(Unit(1, 0, 0), A)]
    assert after.steps.next_number == 2


def test_a_worker_that_accumulates_has_what_a_lost_reply_granted_it_at_once() -> None:
    """It waited until its slice of the step before was accepted, and that waited for this one."""
    before = sync_lending()
    leases = [before.ask(worker, 1, 0, (), 1, [A, B]).granted[0] for worker in (A, B)]
    [later] = before.ask(A, 1, 0, (0,), 1, [A, B]).granted
    after = sync_lending()
    after.resume(A, [leases[0], later])
    after.resume(B, [leases[1]])
    assert after.steps.reserve_orphans([A, B], after.loops.is_elsewhere) == [(Unit(1, 0, 3), B)]
    after.epoch(1, 0).acquire(3, B, after.restores)
    [lost] = after.ask(B, 1, 0, (1,), 1, [A, B]).granted
    assert (lost.unit.index, lost.step, lost.refresh) == (3, 2, False)


def test_so_it_has_where_numbers_leap_because_a_chief_had_begun() -> None:
    """A worker of which nobody had lost anything was refused: another was in the middle of an update."""
    after = sync_lending()
    steps = {number: (Unit(1, 0, first), Unit(1, 0, first + 1)) for number, first in ((1, 0), (66, 2))}
    after.readmit(steps)
    a, b = (
        [Lease(units[place], 1, number, tuple(unit.index for unit in units)) for number, units in steps.items()]
        for place in (0, 1)
    )
    after.resume(A, a[:1])
    after.resume(B, b)
    after.steps.accumulating |= {A, B}
    assert after.steps.reserve_orphans([A, B], after.loops.is_elsewhere) == [(Unit(1, 0, 2), A)]
    after.epoch(1, 0).acquire(2, A, after.restores)
    [lost] = after.ask(A, 1, 0, (0,), 1, [A, B]).granted
    assert (lost.unit.index, lost.step, lost.refresh) == (2, 66, False)


def test_who_may_have_missed_the_newest_step_of_an_earlier_chief_waits_for_it() -> None:
    """It trained on weights without the update of that step, which it had left to others."""
    after = LeaseBook(3, num_unsynced=64)
    after.open_dataset(1, Plan(8, 4, num_slices=2, staleness=0))
    after.founders = frozenset({A, B})
    after.know_accepted({(1, 0): UnitBitmap.of([0, 1])})
    only = Lease(Unit(1, 0, 2), 1, 2, (2,))  # unit 3 is in a step of its own
    after.readmit({2: [only.unit]})
    after.resume(A, [only])
    assert after.ask(B, 1, 0, (), 1, [A, B]).waits_for == (A,)
    after.accept(A, 1, 0, [2])
    [lease] = after.ask(B, 1, 0, (), 1, [A, B]).granted
    assert (lease.unit.index, lease.step, lease.refresh) == (3, 67, True)


def test_a_slice_of_nobody_is_for_none_who_has_yet_to_come_to_its_epoch() -> None:
    """It got that of a worker which had left the epoch before, and waited for its own slice of a later step."""
    after = sync_lending()
    after.loops.left(B, 1, 0)
    after.readmit({4: [Unit(1, 1, 0)]})
    assert after.steps.reserve_orphans([A, B], after.loops.is_elsewhere) == [(Unit(1, 1, 0), B)]


def test_a_worker_that_was_started_again_is_before_each_pass_on_its_way() -> None:
    """It got a slice of a later pass, where others were, and waited for a slice of its own before it came there."""
    lease_book = sync_lending()
    lease_book.open_dataset(2, Plan(8, 4, num_slices=2, staleness=0))
    loops, passes = lease_book.loops, [(1, 0), (2, 0), (1, 1), (2, 1), (2, 2)]
    for each in passes:
        loops.asked(A, *each)
        loops.left(A, *each)
    lease_book.know_accepted({(1, 0): UnitBitmap.of(range(4))})
    loops.asked(B, 1, 0)
    assert [loops.is_before(B, *each) for each in passes] == [False, False, True, True, True]
    for each in passes[:3]:
        loops.asked(B, *each)
        loops.left(B, *each)
    assert [loops.is_before(B, *each) for each in passes] == [False, False, False, False, True]
    assert not loops.is_before(A, 2, 2)


def test_a_chief_that_follows_knows_the_passes_that_somebody_left_before() -> None:
    """Who was on in the second pass of one dataset got a step with those that were started again, which had to go
    through the rest of the other dataset first: they waited for each other until the job ended."""
    after = sync_lending()
    after.open_dataset(2, Plan(8, 4, num_slices=2, staleness=0))
    after.loops.left(A, 2, 0)
    after.know_accepted({(1, 0): UnitBitmap.of(range(4))})
    assert after.ask(A, 1, 1, (), 1, [A, B]).waits_for == (B,)
    after.loops.asked(B, 1, 0)
    assert after.ask(B, 2, 0, (), 1, [A, B]).granted[0].step_units == (0,)


def test_slices_of_several_steps_are_leased_at_once_where_nobody_has_to_wait() -> None:
    lease_book = sync_lending(400)

    def ask(worker: Incarnation, held: tuple[int, ...] = (), at_most: int = 50) -> list[tuple[int, int]]:
        leases = lease_book.ask(worker, 1, 0, held, 1, [A, B], at_most=at_most)
        return [(lease.step, lease.unit.index) for lease in leases.granted]

    first = ask(A)
    assert first == [(step, 2 * step - 2) for step in range(1, 6)], "two of 20 workers: a tenth of what it wants"
    assert ask(A) == first, "the reply was lost"
    assert ask(B) == [(step, 2 * step - 1) for step in range(1, 6)]
    lease_book.accept(A, 1, 0, [0, 2, 4, 6, 8])
    assert len(ask(A, at_most=5000)) == MAX_AHEAD
    lease_book.accept(B, 1, 0, [1, 3, 5, 7, 9])
    lease_book.steps.accumulating.add(B)
    assert ask(B) == [(6, 11)]


def test_no_step_is_leased_ahead_that_another_worker_has_to_wait_for() -> None:
    """It would wait for the report of who waits for its slice."""
    lease_book = sync_lending()
    lease_book.know_accepted({(1, 0): UnitBitmap.of([1])})
    assert [lease.step for lease in lease_book.ask(A, 1, 0, (), 1, [A, B], at_most=80).granted] == [1]
    assert lease_book.ask(B, 1, 0, (), 1, [A, B]).waits_for == (A,)
    lease_book.accept(A, 1, 0, [0])
    assert lease_book.ask(B, 1, 0, (), 1, [A, B]).granted[0].refresh


def test_nobody_begins_where_another_accumulates() -> None:
    lease_book = sync_lending()
    for held in ((), (0,)):
        assert lease_book.ask(A, 1, 0, held, 1, [A, B]).granted
    lease_book.give_back(lease_book.remove(lease_book.held(B), {}).returned)
    lease_book.forget(B)
    again = Incarnation("worker:1", 9)
    assert lease_book.ask(again, 1, 0, (), 1, [A, again]).waits_for == (A,), "A reads its batches ahead"
    lease_book.steps.accumulating.add(A)
    with pytest.raises(ConfigurationError, match=r"worker:1 cannot continue at .* or a batch has too few examples"):
        lease_book.ask(again, 1, 0, (), 1, [A, again])


def test_who_has_left_a_loop_early_waits_for_those_who_accumulate_in_it_yet() -> None:
    lease_book = sync_lending()
    for worker, held in ((A, ()), (B, ()), (A, (0,)), (B, (1,))):
        assert lease_book.ask(worker, 1, 0, held, 1, [A, B]).granted
    lease_book.give_back(lease_book.leave(B, 1, 0).returned)
    early = lease_book.ask(B, 1, 1, (), 1, [A, B])
    assert (early.granted, early.waits_for) == ((), (A,))
    lease_book.give_back(lease_book.leave(A, 1, 0).returned)
    assert lease_book.ask(B, 1, 1, (), 1, [A, B]).granted[0].step == 3


def test_what_a_worker_tells_of_steps_counts_where_no_journal_can_know_them() -> None:
    after = LeaseBook(next_step=3, num_unsynced=64)
    after.open_dataset(1, Plan(8, 4, num_slices=2, staleness=0))
    assert after.resume(A, [Lease(Unit(1, 0, 0), 2, 2, (0, 1))]) == [] and not after.held(A), "that step is over"
    assert after.resume(A, [Lease(Unit(1, 0, 0), 2, 3, (0, 1))]) == [3] and after.held(A) == [Unit(1, 0, 0)]
    assert after.resume(B, [Lease(Unit(1, 0, 1), 2, 3, (0, 1))]) == [] and after.held(B) == [Unit(1, 0, 1)]


def test_a_unit_that_a_worker_has_in_a_later_step_is_in_no_earlier_one() -> None:
    """Its worker died with half of it; that it was leased anew was not on the disk when the machine crashed."""
    after = LeaseBook(next_step=2, num_unsynced=64)
    after.open_dataset(1, Plan(8, 4, num_slices=2, staleness=0))
    after.readmit({1: [Unit(1, 0, 0), Unit(1, 0, 1)]})
    assert after.resume(B, [Lease(Unit(1, 0, 0), 2, 2, (0,))]) == [2] and after.held(B) == [Unit(1, 0, 0)]
    assert after.steps.orphans() == [Unit(1, 0, 1)]
    after.accept(B, 1, 0, [0])
    after.steps.accept(Unit(1, 0, 1))
    assert not after.steps.open


def test_units_lent_before_a_restore_are_doubtful() -> None:
    lease_book = sync_lending()
    lease_book.ask(A, 1, 0, (), 1, [A, B])
    assert lease_book.doubtful(A, 1, 0, [0]) == []
    lease_book.restores += 1
    lease_book.ask(B, 1, 0, (), 1, [A, B])
    assert lease_book.doubtful(A, 1, 0, [0, 2]) == [Unit(1, 0, 0), Unit(1, 0, 2)]


def test_what_a_worker_brings_back_was_perhaps_computed_before_a_ps_went_back() -> None:
    """Its session broke while all ps were put back: what it reported then was believed, and was on none of them."""
    lease_book = sync_lending()
    lease_book.restores = 1
    lease_book.resume(A, [Lease(Unit(1, 0, 0), 2, 1, (0, 1))])
    assert lease_book.doubtful(A, 1, 0, [0]) == [Unit(1, 0, 0)]


def test_a_report_of_a_slice_that_is_yet_to_be_leased_was_computed_before_all_ps_went_back() -> None:
    """A worker that had stood still told it to the chief that followed, which took it for its part of the new step; the
    other worker waited for that for ever."""
    lease_book = sync_lending()
    lease_book.restores = 1  # as of every chief that follows
    lease_book.ask(B, 1, 0, (), 1, [A, B])
    assert lease_book.is_reserved(Unit(1, 0, 0), A)
    assert lease_book.doubtful(A, 1, 0, [0]) == [Unit(1, 0, 0)]
    lease_book.ask(A, 1, 0, (), 1, [A, B])
    assert lease_book.doubtful(A, 1, 0, [0]) == []


def test_a_report_that_is_repeated_after_all_ps_went_back_is_looked_at_again() -> None:
    """The unit was leased anew in a reply that was lost with it: the report was about what the ps had no more."""
    lease_book = sync_lending()
    lease_book.ask(A, 1, 0, (), 1, [A])
    lease_book.accept(A, 1, 0, [0])
    lease_book.restores += 1
    lease_book.roll_back({}, {})
    assert [lease.unit.index for lease in lease_book.ask(A, 1, 0, (), 1, [A]).granted] == [0]
    assert lease_book.doubtful(A, 1, 0, [0]) == [Unit(1, 0, 0)]


def test_there_are_so_many_datasets_and_epochs_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_book, "MAX_DATASETS", 1)
    monkeypatch.setattr(lease_book, "MAX_EPOCHS", 2)
    book = LeaseBook()
    book.open_dataset(1, Plan(4, 2))
    book.open_dataset(1, Plan(4, 2))
    with pytest.raises(LimitError, match="distribute each once"):
        book.open_dataset(2, Plan(4, 2))
    for epoch in (0, 1 << 31, 0):
        book.epoch(1, epoch)
    with pytest.raises(LimitError, match="make them longer"):
        book.epoch(1, 1)
    assert len(book.plans) == 1 and len(book.epochs) == 2
