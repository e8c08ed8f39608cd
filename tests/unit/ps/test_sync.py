"""Staleness 0: a step of several slices equals one update with the joined gradient, whoever dies."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from stratagem.cluster.units import Unit, Update
from stratagem.errors import ConfigurationError, FencedError, ProtocolError
from stratagem.ps.locked_group import LockedGroup
from stratagem.ps.requests import Merge, RequestedSlice
from stratagem.ps.store import Store
from tests.polling import until
from tests.unit.ps.driver import CALL, CHIEF, SKIP, Background, DirectWorker, in_thread, make_spec, weights

torch.set_num_threads(1)

SPEC = make_spec([(3, 2), (4,), ()], "Adam")
SIZE = SPEC.num_elements


def started(num_workers: int) -> tuple[Store, list[DirectWorker]]:
    store = Store()
    workers = [DirectWorker(store, f"worker:{index}", SPEC) for index in range(num_workers)]
    for worker in workers:
        worker.hyper = {"lr": 0.1}
        worker.create(torch.arange(float(SIZE)))
    return store, workers


def units_of(step: int, num_slices: int) -> tuple[Unit, ...]:
    return tuple(Unit(1, 0, step * 10 + index) for index in range(num_slices))


def part_of(step: int, units: tuple[Unit, ...], weight: float, merge: Merge = Merge.MEAN) -> RequestedSlice:
    return RequestedSlice(step, units, weight, merge)


def commit(worker: DirectWorker, gradient: torch.Tensor, unit: Unit, part: RequestedSlice, **fields: Any) -> Background:
    ref = worker.stage(gradient)
    worker.prepare(ref, unit, part, present=fields.get("present", b""))
    request = worker.request(ref, [unit], slice=part, **fields)
    return in_thread(lambda: worker.send(request))


def reference(steps: list[torch.Tensor]) -> torch.Tensor:
    """One process that applies the joined gradients."""
    parameter = torch.nn.Parameter(torch.arange(float(SIZE)))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    for gradient in steps:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("merge", [Merge.MEAN, Merge.SUM])
def test_steps_equal_one_process_on_the_joined_batch(merge: Merge) -> None:
    store, workers = started(3)
    torch.manual_seed(2)
    joined = []
    for step in range(1, 13):
        sizes = [4.0, 4.0, 1.0] if step % 4 == 0 else [4.0, 4.0, 4.0]
        gradients = [torch.randn(SIZE) for _ in workers]
        share = [size / sum(sizes) for size in sizes] if merge is Merge.MEAN else [1.0] * 3
        joined.append(sum((g * s for g, s in zip(gradients, share, strict=True)), torch.zeros(SIZE)))
        units = units_of(step, 3)
        order = [(step + index) % 3 for index in range(3)]
        calls = [commit(workers[i], gradients[i], units[i], part_of(step, units, sizes[i], merge)) for i in order]
        assert all(call.result().applied for call in calls)
        for worker in workers:
            assert torch.equal(worker.received(), weights(store))
            assert worker.lane.frames[-1] is workers[0].lane.frames[-1]  # copied once for all
    torch.testing.assert_close(weights(store), reference(joined), rtol=1e-6, atol=1e-6)
    assert store.state.step == 12


def test_nothing_is_applied_before_every_slice_is_committed() -> None:
    store, (one, two) = started(2)
    units = units_of(1, 2)
    first = commit(one, torch.ones(SIZE), units[0], part_of(1, units, 2))
    two.prepare(two.stage(torch.ones(SIZE)), units[1], part_of(1, units, 2))
    until(lambda: store.state.steps.committed_by("worker:0", 1) == [((1, 0), units[0])])
    assert not first.done and store.state.step == 0
    two.send(two.request(two.stage(torch.ones(SIZE)), [units[1]], slice=part_of(1, units, 2)))
    assert first.result().applied and store.state.step == 1


def test_facts_are_those_of_the_merged_gradient_and_scale_is_applied() -> None:
    store, (one, two) = started(2)
    units = units_of(1, 2)
    gradients = [torch.ones(SIZE), torch.full((SIZE,), 4.0)]
    parts = [part_of(1, units, 2), part_of(1, units, 1)]
    refs = [worker.stage(gradient) for worker, gradient in zip((one, two), gradients, strict=True)]
    first = in_thread(lambda: one.prepare(refs[0], units[0], parts[0], want_facts=True))
    second = two.prepare(refs[1], units[1], parts[1], want_facts=True)
    assert first.result() == second
    assert second.squared_norm == pytest.approx(SIZE * 4.0) and second.finite
    requests = [
        worker.request(ref, [unit], slice=part, scale=0.5)
        for worker, ref, unit, part in zip((one, two), refs, units, parts, strict=True)
    ]
    calls = [in_thread(partial(worker.send, request)) for worker, request in zip((one, two), requests, strict=True)]
    assert all(call.result().applied for call in calls)
    torch.testing.assert_close(weights(store), reference([torch.ones(SIZE)]))


def test_a_step_that_there_is_no_memory_for_is_over_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    _, workers = started(2)
    units = units_of(1, 2)
    part = part_of(1, units, 2)

    def scratch(group: LockedGroup) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(LockedGroup, "scratch", scratch)
    pairs = zip(workers, units, strict=True)
    calls = [commit(worker, torch.ones(SIZE), unit, part) for worker, unit in pairs]
    for call in calls:
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            call.result(10.0)


def test_dead_worker_without_a_commit_is_left_out() -> None:
    store, (one, two) = started(2)
    units = units_of(1, 2)
    first = commit(one, torch.ones(SIZE), units[0], part_of(1, units, 3))
    two.prepare(two.stage(torch.full((SIZE,), 9.0)), units[1], part_of(1, units, 3))
    assert store.fence(CHIEF, "worker:1", 1, CALL) == []
    store.commits.sync.close_step(CHIEF, 1, [units[0]], [], CALL)
    assert first.result().applied
    torch.testing.assert_close(weights(store), reference([torch.ones(SIZE)]))
    assert not store.state.units.is_applied(units[1], 0)


def test_a_sum_stays_as_it_is_when_a_slice_is_left_out() -> None:
    """Its examples come in a later step: over the epoch each counts once."""
    store, (one, two) = started(2)
    units = units_of(1, 2)
    first = commit(one, torch.ones(SIZE), units[0], part_of(1, units, 3, Merge.SUM))
    two.prepare(two.stage(torch.ones(SIZE)), units[1], part_of(1, units, 1, Merge.SUM))
    store.fence(CHIEF, "worker:1", 1, CALL)
    store.commits.sync.close_step(CHIEF, 1, [units[0]], [], CALL)
    assert first.result().applied
    torch.testing.assert_close(weights(store), reference([torch.ones(SIZE)]))
    later = (units[1],)
    assert commit(one, torch.full((SIZE,), 0.5), units[1], part_of(2, later, 1, Merge.SUM)).result().applied
    torch.testing.assert_close(weights(store), reference([torch.ones(SIZE), torch.full((SIZE,), 0.5)]))


def step_of_the_dead() -> tuple[Store, DirectWorker, tuple[Unit, ...]]:
    """A step whose second worker died when it had committed elsewhere; applied, with the first one and the slices."""
    store, (one, two) = started(2)
    units = units_of(1, 2)
    first = commit(one, torch.zeros(SIZE), units[0], part_of(1, units, 2))
    two.prepare(two.stage(torch.full((SIZE,), 2.0)), units[1], part_of(1, units, 2))
    store.fence(CHIEF, "worker:1", 1, CALL)
    store.commits.sync.close_step(CHIEF, 1, units, [Update((units[1],), 0)], CALL)
    assert first.result().applied
    return store, one, units


def test_dead_worker_that_committed_elsewhere_counts_with_its_prepared_slice() -> None:
    store, _, units = step_of_the_dead()
    torch.testing.assert_close(weights(store), reference([torch.ones(SIZE)]))
    assert store.state.units.is_applied(units[1], 0)


def test_nobody_waits_for_a_dead_worker_in_an_update_that_it_had_not_committed() -> None:
    store, one, units = step_of_the_dead()
    second = one.request(one.stage(torch.full((SIZE,), 0.5)), [units[0]], ordinal=1, slice=part_of(1, units, 2))
    assert one.send(second).applied
    torch.testing.assert_close(weights(store), reference([torch.ones(SIZE), torch.full((SIZE,), 0.5)]))
    assert not store.state.units.is_applied(units[1], 1)


def test_an_update_that_was_here_before_need_not_have_come_again() -> None:
    """Its batch is computed again for the rest of its updates, and the worker that did is dead before it sent this."""
    store, (one, two) = started(2)
    before, units = units_of(1, 2), units_of(2, 2)
    assert commit(two, torch.ones(SIZE), before[1], part_of(1, (before[1],), 2)).result().applied
    units = (units[0], before[1])
    store.fence(CHIEF, "worker:1", 1, CALL)
    store.commits.sync.close_step(CHIEF, 2, units, [Update((before[1],), 0)], CALL)
    assert commit(one, torch.full((SIZE,), 0.5), units[0], part_of(2, units, 2)).result().applied
    torch.testing.assert_close(weights(store), reference([torch.ones(SIZE), torch.full((SIZE,), 0.5)]))


def test_workers_that_step_after_other_batches_are_told_so() -> None:
    """Each would wait for ever for what the other has put into another update."""
    store, (one, two) = started(2)
    first, second = units_of(1, 2), units_of(2, 2)
    waiting = commit(one, torch.ones(SIZE), first[0], part_of(1, first, 2))
    until(lambda: store.state.steps.is_prepared((1, 0), first[0]))
    ref = two.stage(torch.ones(SIZE))
    request = two.request(ref, [first[1], second[1]], slice=part_of(2, second, 4))
    with pytest.raises(ConfigurationError, match=r"worker:0 .* after the batch of step 1, and worker:1 .* of step 2"):
        two.send(request)
    store.fence(CHIEF, "worker:0", 1, CALL)
    with pytest.raises(FencedError):
        waiting.result()


def test_a_worker_that_steps_after_a_batch_which_another_has_accumulated_over_is_told_so() -> None:
    """It waited for ever for what was in an update of a later step, which was over: the other one was alone in it."""
    _, (one, two) = started(2)
    first, second = units_of(1, 2), units_of(2, 1)
    ref = two.stage(torch.ones(SIZE))
    assert two.send(two.request(ref, [first[1], second[0]], slice=part_of(2, second, 4))).applied
    with pytest.raises(ConfigurationError, match=r"worker:0 .* after the batch of step 1, and worker:1 .* of step 2"):
        commit(one, torch.ones(SIZE), first[0], part_of(1, first, 2)).result()


@pytest.mark.parametrize("waits", ["for facts", "for the step", "later"])
def test_a_worker_that_goes_on_without_an_update_is_waited_for_by_nobody(waits: str) -> None:
    """Its script leaves out a step, for a loss that is NaN say: the others waited for ever."""
    store, (one, two) = started(2)
    units = units_of(1, 2)
    part, said = part_of(1, units, 2), r"worker:0 .* makes update 1 of this batch, and worker:1 .* continued without it"
    ref = one.stage(torch.ones(SIZE))
    if waits != "later":
        want_facts = waits == "for facts"
        call = in_thread(partial(one.prepare, ref, units[0], part, want_facts=want_facts))
        if not want_facts:
            call.result()
            request = one.request(ref, [units[0]], slice=part)
            call = in_thread(lambda: one.send(request))
        until(lambda: store.state.steps.is_prepared((1, 0), units[0]))
        two.close(units[1], num_updates=0)
        with pytest.raises(ConfigurationError, match=said):
            call.result()
        return
    two.close(units[1], num_updates=0)
    with pytest.raises(ConfigurationError, match=said):
        one.prepare(ref, units[0], part)


def test_a_batch_that_is_in_another_step_once_more_is_not_one_that_was_left() -> None:
    """A chief whose disk lost its last lines leases it again: the job ended with an update that was left out."""
    store, (one, two) = started(2)
    before, units = units_of(1, 2), units_of(2, 2)
    assert commit(two, torch.ones(SIZE), before[1], part_of(1, (before[1],), 2)).result().applied
    two.close(before[1], num_updates=1)
    units = (units[0], before[1])
    call = commit(one, torch.full((SIZE,), 0.5), units[0], part_of(2, units, 2))
    until(lambda: store.state.steps.is_prepared((2, 0), units[0]))
    assert commit(two, torch.full((SIZE,), 9.0), units[1], part_of(2, units, 2)).result().applied
    assert call.result().applied
    torch.testing.assert_close(weights(store), reference([torch.ones(SIZE), torch.full((SIZE,), 0.5)]))


def test_chief_completes_a_step_whose_workers_are_all_dead() -> None:
    store, (one, two) = started(2)
    units = units_of(1, 2)
    call = commit(one, torch.ones(SIZE), units[0], part_of(1, units, 2))
    two.prepare(two.stage(torch.ones(SIZE)), units[1], part_of(1, units, 2))
    until(lambda: store.state.steps.committed_by("worker:0", 1) == [((1, 0), units[0])])
    assert store.fence(CHIEF, "worker:0", 1, CALL) == [((1, 0), units[0])]
    store.fence(CHIEF, "worker:1", 1, CALL)
    store.commits.sync.close_step(CHIEF, 1, [units[0]], [Update((units[0],), 0)], CALL)
    store.commits.sync.close_step(CHIEF, 1, [units[0]], [Update((units[0],), 0)], CALL)
    assert store.state.step == 1
    with pytest.raises(FencedError):
        call.result()
    torch.testing.assert_close(weights(store), reference([torch.ones(SIZE)]))


def test_a_fence_says_of_an_update_each_unit_that_was_accumulated_for_it() -> None:
    """The first was leased again, beside the update of the dead worker that had it, and counted twice."""
    store, (one, _) = started(2)
    first, second = units_of(1, 2), units_of(2, 2)
    request = one.request(one.stage(torch.ones(SIZE)), [first[0], second[0]], slice=part_of(2, second, 4))
    waiting = in_thread(lambda: one.send(request))
    expected = [((2, 0), first[0]), ((2, 0), second[0])]
    until(lambda: store.state.steps.committed_by("worker:0", 1) == expected)
    assert store.fence(CHIEF, "worker:0", 1, CALL) == expected
    with pytest.raises(FencedError):
        waiting.result()


def test_what_a_chief_has_closed_out_stays_out_though_its_calls_overtake_each_other() -> None:
    """Two workers leave a loop at once. The chief that follows this one may have lost that from its journal."""
    store, (one, two) = started(2)
    units, followed = units_of(1, 3), CHIEF._replace(incarnation=CHIEF.incarnation + 1)
    for included in (units[:1], units[:2]):
        store.commits.sync.close_step(CHIEF, 1, included, [], CALL)
    assert commit(one, torch.ones(SIZE), units[0], part_of(1, units, 2)).result(10.0).applied
    others = units_of(2, 2)
    for chief, included in ((CHIEF, others[:1]), (followed, others)):
        store.commits.sync.close_step(chief, 2, included, [], CALL)
    pairs = zip((one, two), others, strict=True)
    calls = [commit(worker, torch.ones(SIZE), unit, part_of(2, others, 2)) for worker, unit in pairs]
    assert all(call.result(10.0).applied for call in calls)


def test_live_worker_left_out_is_told_so() -> None:
    store, (one, two) = started(2)
    units = units_of(1, 2)
    first = commit(one, torch.ones(SIZE), units[0], part_of(1, units, 2))
    store.commits.sync.close_step(CHIEF, 1, [units[1]], [], CALL)
    result = first.result()
    assert result.left_out and not result.applied
    assert commit(two, torch.ones(SIZE), units[1], part_of(1, units, 2)).result().applied
    torch.testing.assert_close(weights(store), reference([torch.ones(SIZE)]))


def test_a_slice_applied_here_already_adds_nothing() -> None:
    """Torn step: its worker died after this ps had applied it; the unit comes back in a later step."""
    store, (one, two) = started(2)
    early = units_of(1, 1)
    assert commit(one, torch.ones(SIZE), early[0], part_of(1, early, 2)).result().applied
    units = (early[0], Unit(1, 0, 77))
    calls = [
        commit(worker, torch.full((SIZE,), value), unit, part_of(2, units, 2))
        for worker, unit, value in ((one, units[0], 50.0), (two, units[1], 3.0))
    ]
    assert all(call.result().versions for call in calls)
    torch.testing.assert_close(weights(store), reference([torch.ones(SIZE), torch.full((SIZE,), 3.0)]))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_restarted_chief_leases_what_is_left_of_a_step_without_the_slice_that_was_closed_out(is_first: bool) -> None:
    store, workers = started(2)
    units = units_of(1, 3)
    store.commits.sync.close_step(CHIEF, 1, units[:2], [], CALL)
    plans = [units, units[:2]] if is_first else [units[:2], units]
    calls = [
        commit(worker, torch.full((SIZE,), value), unit, part_of(1, plan, 2))
        for worker, unit, plan, value in zip(workers, units, plans, (1.0, 3.0), strict=False)
    ]
    assert all(call.result().applied for call in calls)
    torch.testing.assert_close(weights(store), reference([torch.full((SIZE,), 2.0)]))
    short, long = units_of(2, 2), units_of(2, 3)  # nothing is closed out of this step
    workers[0].prepare(workers[0].stage(torch.ones(SIZE)), short[0], part_of(2, short, 2))
    with pytest.raises(ProtocolError, match="expected the planned slices"):
        workers[1].prepare(workers[1].stage(torch.ones(SIZE)), long[2], part_of(2, long, 2))


def test_resent_commit_of_an_applied_step_gets_the_weights() -> None:
    store, (one,) = started(1)
    units = units_of(1, 1)
    part = part_of(1, units, 2)
    ref = one.stage(torch.ones(SIZE))
    request = one.request(ref, units, slice=part)
    assert one.send(request).applied
    assert not one.send(request).applied
    again = one.request(one.stage(torch.ones(SIZE)), units, slice=part)
    assert not one.send(again).applied and store.state.step == 1
    assert torch.equal(one.received(), weights(store))


def test_contributors_that_differ_are_refused_by_name() -> None:
    _, (one, two) = started(2)
    units = units_of(1, 2)
    one.prepare(one.stage(torch.ones(SIZE)), units[0], part_of(1, units, 2))
    two.hyper = {"lr": 0.2}
    ref = two.stage(torch.ones(SIZE))
    with pytest.raises(ConfigurationError, match=r"lr .* worker:0 \(incarnation 1\) has 0.1, worker:1 .* has 0.2"):
        two.prepare(ref, units[1], part_of(1, units, 2))
    two.hyper = {"lr": 0.1}
    with pytest.raises(ConfigurationError, match="merges by mean"):
        two.prepare(two.stage(torch.ones(SIZE)), units[1], part_of(1, units, 2, Merge.SUM))
    with pytest.raises(ProtocolError, match="expected the planned slices"):
        two.prepare(two.stage(torch.ones(SIZE)), units[1], part_of(1, units[::-1], 2))
    waiting = commit(one, torch.ones(SIZE), units[0], part_of(1, units, 2))
    until(lambda: one.store.state.steps.committed_by("worker:0", 1) == [((1, 0), units[0])])
    with pytest.raises(ConfigurationError, match=r"commits apply with scale 1.0, worker:1 .* scale 0.5; call prepare"):
        commit(two, torch.ones(SIZE), units[1], part_of(1, units, 2), scale=0.5).result()
    one.store.fence(CHIEF, "worker:0", 1, CALL)
    with pytest.raises(FencedError):
        waiting.result()


def test_zero_weight_slices_are_selected_not_multiplied() -> None:
    store, (one, two) = started(2)
    units = units_of(1, 2)
    calls = [
        commit(one, torch.ones(SIZE), units[0], part_of(1, units, 2)),
        commit(two, torch.full((SIZE,), torch.nan), units[1], part_of(1, units, 0)),
    ]
    assert all(call.result().applied for call in calls)
    torch.testing.assert_close(weights(store), reference([torch.ones(SIZE)]))


def test_a_weight_that_one_script_alone_has_set_is_refused() -> None:
    """It was mixed with the examples of the others, without a word; 0 is 0 in either unit."""
    store, (one, two) = started(2)
    for step, weight in enumerate((0.0, 0.5), start=1):
        units = units_of(step, 2)
        part = part_of(step, units, weight)
        first = commit(one, torch.ones(SIZE), units[0], dataclasses.replace(part, is_set=True))
        if not weight:
            assert commit(two, torch.ones(SIZE), units[1], part_of(step, units, 2)).result().applied
            assert first.result().applied
            continue
        until(lambda: store.state.steps.is_prepared((2, 0), units_of(2, 2)[0]))
        with pytest.raises(ConfigurationError, match=r"worker:0 .* set_weight\(0.5\), and worker:1 .* its 2 examples"):
            two.prepare(two.stage(torch.ones(SIZE)), units[1], part_of(step, units, 2))
        store.fence(CHIEF, "worker:0", 1, CALL)
        with pytest.raises(FencedError):
            first.result()


def test_an_update_of_weight_zero_is_made_of_zeros() -> None:
    """As in one process: momentum goes on, and weight decay. It was not made, without a word."""
    store, (one, two) = started(2)
    for step, (weight, gradient) in enumerate([(2.0, 1.0), (0.0, float("nan"))], start=1):
        units = units_of(step, 2)
        pairs = zip((one, two), units, strict=True)
        calls = [
            commit(worker, torch.full((SIZE,), gradient), unit, part_of(step, units, weight)) for worker, unit in pairs
        ]
        assert all(call.result().applied for call in calls)
    torch.testing.assert_close(weights(store), reference([torch.ones(SIZE), torch.zeros(SIZE)]))


def test_skip_by_all_changes_nothing_and_counts() -> None:
    store, workers = started(2)
    units = units_of(1, 2)
    calls = [
        commit(worker, torch.full((SIZE,), torch.nan), unit, part_of(1, units, 2), action=SKIP)
        for worker, unit in zip(workers, units, strict=True)
    ]
    assert not any(call.result().applied for call in calls)
    assert store.state.step == 0 and store.state.units.is_applied(units[0], 0)
    assert [call.result().versions[0].num_skipped for call in calls] == [1, 1]


def test_parameter_without_a_gradient_in_some_slices() -> None:
    store, (one, two) = started(2)
    units = units_of(1, 2)
    gradient = torch.ones(SIZE)
    calls = [
        commit(worker, gradient, unit, part_of(1, units, 1), present=mask)
        for worker, unit, mask in ((one, units[0], b"\x01"), (two, units[1], b"\x03"))
    ]
    assert all(call.result().applied for call in calls)
    assert store.state.locked_groups[1].group.counts == [1, 1, 0]
    joined = gradient.clone()
    joined[6:10] = 0.5
    torch.testing.assert_close(weights(store)[:10], reference([joined])[:10])
    assert float(weights(store)[10]) == 10.0
