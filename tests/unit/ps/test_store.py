"""Variables, exactly-once commits, fences, versions."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch

from stratagem.cluster.units import Unit, UnitBitmap
from stratagem.errors import (
    FencedError,
    FrameError,
    LimitError,
    ProtocolError,
    SequenceError,
    StaleStoreError,
    UnsupportedOptimizerError,
    VariableError,
)
from stratagem.ps import waiting
from stratagem.ps.requests import AssignValues, FrameKind, GroupCommit, Sender, TransferRef
from stratagem.ps.specs import GroupSpec, Limits, ShardSpec
from stratagem.ps.store import Store
from stratagem.ps.units import UnitLedger
from tests.polling import until
from tests.unit.ps.driver import CALL, CHIEF, SKIP, DirectWorker, in_thread, make_spec, staged_bytes, weights

torch.set_num_threads(1)

SPEC = make_spec([(3, 2), (4,)])


def new_store(**limits: int) -> Store:
    return Store(limits=Limits(**limits))


def started(num_workers: int = 1) -> tuple[Store, list[DirectWorker]]:
    store = new_store()
    workers = [DirectWorker(store, f"worker:{index}", SPEC) for index in range(num_workers)]
    for worker in workers:
        worker.create(torch.zeros(10))
    return store, workers


def unit(index: int) -> Unit:
    return Unit(1, 0, index)


def test_a_model_that_only_a_follower_has_come_to_takes_nothing_away_from_one_with_values() -> None:
    """The chief took the ps for one that had come back without values, and sent the lead to it without end."""
    store = new_store()
    lead, follower = (DirectWorker(store, f"worker:{index}", SPEC) for index in range(2))

    def has() -> tuple[bool, bool]:
        described = store.checkpoints.describe_units()
        return described.initialized, described.complete

    follower.create()
    assert has() == (False, False)
    lead.create(torch.zeros(10))
    assert has() == (True, True)
    second = make_spec([(5,)], group=2, prefix="second")
    lead.spec = follower.spec = second
    follower.create()
    assert has() == (True, True)
    store.variables.create_variables(lead.numbered(), [second], True, CALL)
    assert has() == (False, False)
    lead.assign(torch.zeros(5))
    assert has() == (True, True)


def test_only_the_token_holder_initialises() -> None:
    store = new_store()
    lead, other = DirectWorker(store, "worker:0", SPEC), DirectWorker(store, "worker:1", SPEC)
    assert not other.create()
    assert store.variables.create_variables(lead.numbered(), [SPEC], True, CALL) == ([1], [])
    with pytest.raises(ProtocolError, match=r"worker:0 .* supplies the initial values, not worker:1"):
        other.assign(torch.ones(10))
    waiting = in_thread(lambda: other.pull(wait_s=10.0))
    lead.assign(torch.arange(10.0))
    assert waiting.result().versions[0].num_frames == 1
    assert torch.equal(other.received(), torch.arange(10.0))
    assert store.variables.create_variables(other.numbered(), [SPEC], True, CALL) == ([], [1])


def test_pull_without_initial_values_returns_none() -> None:
    store = new_store()
    worker = DirectWorker(store, "worker:0", SPEC)
    worker.create()
    assert worker.pull(wait_s=0.01).versions == ()


def test_token_goes_to_the_next_lead_when_its_holder_is_fenced() -> None:
    store = new_store()
    lead, other = DirectWorker(store, "worker:0", SPEC), DirectWorker(store, "worker:1", SPEC)
    assert store.variables.create_variables(lead.numbered(), [SPEC], True, CALL)[0] == [1]
    assert store.variables.create_variables(other.numbered(), [SPEC], True, CALL)[0] == []
    store.fence(CHIEF, "worker:0", 1, CALL)
    assert other.create(torch.ones(10))
    assert torch.equal(weights(store), torch.ones(10))


def test_who_took_the_token_gives_the_values_also_when_it_is_the_lead_no_more() -> None:
    """It had lost the connection as it gave them, and the lead was back: each waited for the other."""
    store = new_store()
    lead, stood_in = DirectWorker(store, "worker:0", SPEC), DirectWorker(store, "worker:1", SPEC)
    assert store.variables.create_variables(stood_in.numbered(), [SPEC], True, CALL)[0] == [1]
    assert not lead.create(torch.zeros(10))
    assert store.variables.create_variables(stood_in.numbered(), [SPEC], False, CALL)[0] == [1]
    stood_in.assign(torch.ones(10))
    assert torch.equal(weights(store), torch.ones(10))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (make_spec([(3, 2), (5,)]), r"v1: expected shape \[4\].*got shape \[5\]"),
        (make_spec([(3, 2), (4,)], "Adam"), "expected optimizer SGD, got Adam"),
        (GroupSpec(1, "SGD", torch.float64, SPEC.shards), "expected dtype torch.float32, got torch.float64"),
        (make_spec([(3, 2)]), "expected variable v1 too"),
        (make_spec([(3, 2), (4,)], prefix="w"), "variable w0 are not held here"),
    ],
)
def test_attaching_as_something_else_is_refused(spec: GroupSpec, match: str) -> None:
    _, (worker,) = started()
    worker.spec = spec
    with pytest.raises(VariableError, match=match):
        worker.create()


@pytest.mark.parametrize(
    ("shard", "optimizer", "error", "match"),
    [
        (ShardSpec("w", (1 << 40, 1 << 20), 0, 1 << 40, 0), "SGD", LimitError, "max_store_bytes"),
        (ShardSpec("w", (10,), 5, 6, 0), "SGD", VariableError, "rows within 10"),
        (ShardSpec("w", (10,), 0, 10, 3), "SGD", VariableError, "expected offset 0, got 3"),
        (ShardSpec("", (10,), 0, 10, 0), "SGD", VariableError, "expected a name"),
        (ShardSpec("w", (1,) * 1000, 0, 1, 0), "SGD", VariableError, "at most 32 dimensions"),
        (ShardSpec("v0", (3, 2), 1, 1, 0), "SGD", VariableError, "row 1 is placed twice"),
        (ShardSpec("v0", (9, 2), 4, 1, 0), "SGD", VariableError, "expected shape"),
        (ShardSpec("w", (10,), 0, 10, 0), "LBFGS", UnsupportedOptimizerError, "closure"),
    ],
)
def test_hostile_groups_are_refused_before_allocation(
    shard: ShardSpec, optimizer: str, error: type[Exception], match: str
) -> None:
    store, (worker,) = started()
    spec = GroupSpec(2, optimizer, torch.float32, (shard,))
    with pytest.raises(error, match=match):
        store.variables.create_variables(worker.numbered(), [spec], True, CALL)
    assert list(store.state.locked_groups) == [1]


def test_limits_count_shards_and_slots() -> None:
    many = make_spec([(1,)] * 5)
    with pytest.raises(LimitError, match="5 shards"):
        DirectWorker(new_store(max_variables=4), "worker:0", many).create()
    adam = make_spec([(100,)], "Adam")
    with pytest.raises(LimitError, match=r"1,600 bytes .* 1,599 .*free when it started.* on more machines"):
        DirectWorker(new_store(max_store_bytes=1599), "worker:0", adam).create()
    DirectWorker(new_store(max_store_bytes=1600), "worker:0", adam).create()


def test_commit_applies_and_brings_the_weights() -> None:
    _, (worker,) = started()
    result = worker.commit(torch.ones(10), unit(0))
    assert result.applied and result.versions[0].num_frames == 1
    torch.testing.assert_close(worker.received(), torch.full((10,), -0.1))
    have = result.versions[0].version
    pulled = worker.pull(have)
    assert pulled.versions[0].num_frames == 0 and pulled.step_counts == (1, 1)
    assert len(worker.lane.messages) == 1


def test_a_version_is_copied_once_for_all_readers() -> None:
    _, workers = started(3)
    workers[0].commit(torch.ones(10), unit(0))
    for worker in workers[1:]:
        worker.pull()
        assert worker.lane.frames[-1] is workers[0].lane.frames[-1]  # shared, not copied
        assert torch.equal(worker.received(), workers[0].received())


def test_a_published_version_never_changes() -> None:
    _, (worker,) = started()
    worker.commit(torch.ones(10), unit(0))
    kept = [frame.tensor for frame in worker.lane.frames]
    copies = [tensor.clone() for tensor in kept]
    for index in range(1, 5):
        worker.commit(torch.ones(10), unit(index))
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(kept, copies, strict=True))


def test_hundred_resends_reorderings_and_other_senders_apply_each_update_once() -> None:
    """Each update is committed several times, by several senders, in any order, some under old numbers."""
    store, workers = started(3)
    rng = random.Random(5)
    expected = torch.zeros(10)
    torch.manual_seed(3)
    for index in range(20):
        gradient = torch.randn(10)
        expected -= 0.1 * gradient
        first = workers[rng.randrange(3)]
        request = first.request(first.stage(gradient, rng=rng), [unit(index)])
        assert first.send(request).applied
        resent = []
        for _ in range(5):
            kind = rng.randrange(3)
            if kind == 0:  # the same request again
                resent.append((first, request))
            elif kind == 1:  # the same sender computed it again
                resent.append((first, first.request(first.stage(gradient, rng=rng), [unit(index)])))
            else:  # another worker computed it
                other = workers[rng.randrange(3)]
                resent.append((other, other.request(other.stage(gradient), [unit(index)])))
        rng.shuffle(resent)
        for sender, again in resent:
            result = sender.send(again)
            assert not result.applied
            assert torch.equal(sender.received(), weights(store))
        if index % 3 == 0:
            workers[0].close(unit(index))
            late = workers[1]
            assert not late.commit(gradient, unit(index), ordinal=rng.randrange(4)).applied
    torch.testing.assert_close(weights(store), expected)
    group = store.state.locked_groups[1].group
    assert group.num_updates == 20 and group.counts == [20, 20]
    assert staged_bytes(store) == 0


def test_the_same_request_twice_at_once_applies_once() -> None:
    store, (worker,) = started()
    request = worker.request(TransferRef(worker.transfer + 1, 1), [])
    both = [in_thread(lambda: worker.send(request)) for _ in range(2)]
    worker.transfer = request.gradients.transfer - 1
    worker.stage(torch.ones(10))
    results = [call.result() for call in both]
    assert sorted(result.applied for result in results) == [False, True]
    torch.testing.assert_close(weights(store), torch.full((10,), -0.1))


def test_requests_out_of_order_within_the_window() -> None:
    store, (worker,) = started()
    refs = worker.stage(torch.ones(10))
    late = worker.request(refs, [])
    worker.send(worker.request(worker.stage(torch.ones(10)), []))  # overtakes
    late = worker.request(worker.stage(torch.ones(10)), [], sequence=late.sender.sequence)
    assert worker.send(late).applied
    assert not worker.send(late).applied
    with pytest.raises(SequenceError, match=f"expected request {worker.sequence + 1} .* got {worker.sequence + 65}"):
        worker.send(worker.request(refs, [], sequence=worker.sequence + 65))
    assert store.state.step == 2


def test_requests_that_never_came_are_not_waited_for_once_their_sender_says_so() -> None:
    """The first values of a model, say, whose connection broke: 64 updates later the worker was refused."""
    store, (worker,) = started()
    worker.sequence += 2
    lost = [worker.sequence - 1, worker.sequence]
    assert worker.send(worker.request(worker.stage(torch.ones(10)), [])).applied
    greeting = store.hello(worker.sender, worker.sequence + 1, [*lost, worker.sequence, worker.sequence + 1_000])
    assert greeting.next_sequence == worker.sequence + 1


def test_a_failed_request_may_be_tried_again_under_its_number() -> None:
    store, (worker,) = started()
    store.state.frames_timeout_s = 0.01
    request = worker.request(TransferRef(worker.transfer + 10, 1), [])
    with pytest.raises(ProtocolError, match=r"ps:0 expected 1 frames of transfer .* got 0 .* its MTU"):
        worker.send(request)
    assert store.state.step == 0
    worker.transfer = request.gradients.transfer - 1
    worker.stage(torch.ones(10))
    assert worker.send(request).applied


def test_frames_whose_lane_broke_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that gave a ps its values waited for 30 s, and then its script ended."""
    monkeypatch.setattr(waiting, "LANE_S", 0.01)
    store, (worker,) = started()
    store.close_lane(worker.sender, worker.lane)
    request = AssignValues(worker.numbered(), TransferRef(worker.transfer + 10, 1), (1,))
    with pytest.raises(StaleStoreError, match="broke before all of transfer"):
        store.variables.assign_values(request, CALL)


def test_an_update_without_units_whose_reply_is_lost_is_not_applied_again() -> None:
    store, (worker,) = started()
    store.state.frames_timeout_s = 0.01  # of the lane that is closed
    request = worker.request(worker.stage(torch.ones(10)), [])
    with store.state.locked_groups[1].lock:
        call = in_thread(lambda: worker.send(request))
        until(lambda: bool(store.state.inside))
        store.close_lane(worker.sender, worker.lane)
    with pytest.raises(ProtocolError, match="has no lane to send weights over"):
        call.result()
    worker.connect()
    assert not worker.send(request).applied
    assert store.state.step == 1 and torch.equal(worker.received(), weights(store))


def test_torn_update_completes_where_it_is_missing() -> None:
    stores = [started()[0] for _ in range(2)]
    first = [DirectWorker(store, "worker:1", SPEC) for store in stores]
    assert first[0].commit(torch.ones(10), unit(7)).applied  # ... and dies before the second ps
    for store in stores:
        store.fence(CHIEF, "worker:1", 1, CALL)
    second = [DirectWorker(store, "worker:2", SPEC) for store in stores]
    results = [worker.commit(torch.ones(10), unit(7)).applied for worker in second]
    assert results == [False, True]
    assert torch.equal(weights(stores[0]), weights(stores[1]))
    assert [store.state.step for store in stores] == [1, 1]


def test_an_update_over_units_of_which_some_are_applied_is_dropped_and_the_others_are_told_to_be_lost() -> None:
    """It was refused, and the job ended."""
    store, (worker,) = started()
    worker.commit(torch.ones(10), unit(0), unit(1))
    assert not worker.commit(torch.ones(10), unit(0), unit(1)).applied
    assert not worker.commit(torch.ones(10), unit(1), unit(2)).applied
    assert not worker.commit(torch.ones(10), unit(2)).applied, "it is to be counted, and would be there all the same"
    assert store.state.step == 1 and staged_bytes(store) == 0
    worker.close(unit(0), unit(1), unit(2))
    store.state.units = UnitLedger.from_json(json.loads(json.dumps(store.state.units.to_json())))
    described = store.checkpoints.describe_units().units
    assert (described.closed, described.dropped) == ({(1, 0): UnitBitmap.of([0, 1])}, {(1, 0): UnitBitmap.of([2])})
    assert store.checkpoints.mark_lost(described.dropped) == 1
    described = store.checkpoints.describe_units().units
    assert (described.closed, described.dropped) == ({(1, 0): UnitBitmap.of([0, 1, 2])}, {})


def test_several_optimizer_steps_in_a_unit() -> None:
    store, (worker,) = started()
    for ordinal in (0, 1, 2, 1):
        worker.commit(torch.ones(10), unit(0), ordinal=ordinal)
    assert store.state.step == 3
    described = store.checkpoints.describe_units()
    assert [(update.ordinal, servers) for update, servers in described.units.open] == [(0, 1), (1, 1), (2, 1)]
    worker.close(unit(0))
    described = store.checkpoints.describe_units()
    assert not described.units.open and list(described.units.closed[1, 0]) == [0]


def test_skip_counts_as_done_and_changes_nothing() -> None:
    store, (worker,) = started()
    result = worker.send(worker.request(TransferRef(0, 0), [unit(0)], action=SKIP))
    assert not result.applied and not weights(store).any()
    assert not worker.commit(torch.ones(10), unit(0)).applied
    assert store.state.step == 0


def test_absent_gradients_leave_shards_alone() -> None:
    store, (worker,) = started()
    worker.transfer += 1
    ref = worker.stage(torch.ones(10))
    worker.send(worker.request(ref, [unit(0)], present=b"\x02"))
    assert not weights(store)[:6].any() and (weights(store)[6:] != 0).all()
    assert store.state.locked_groups[1].group.counts == [0, 1]
    with pytest.raises(ProtocolError, match="presence mask of 1 bytes, got 2"):
        worker.commit(torch.ones(10), unit(1), present=b"\x01\x00")


def test_prepare_tells_norm_and_finiteness_of_what_is_present() -> None:
    store, (worker,) = started()
    gradient = torch.arange(10.0)
    ref = worker.stage(gradient)
    from stratagem.cluster.units import Update
    from stratagem.ps.requests import PrepareUpdate

    def facts(present: bytes) -> object:
        group = GroupCommit(1, present, ({"lr": 0.1},))
        return store.commits.prepare_update(
            PrepareUpdate(worker.numbered(), Update((unit(0),), 0), ref, (group,), None, True), CALL
        )

    assert facts(b"").squared_norm == pytest.approx(285.0)  # type: ignore[attr-defined]
    assert facts(b"\x01").squared_norm == pytest.approx(55.0)  # type: ignore[attr-defined]
    gradient[7] = torch.nan
    ref = worker.stage(gradient)
    assert facts(b"").not_finite == ("v1",)  # type: ignore[attr-defined]
    assert facts(b"\x01").finite  # type: ignore[attr-defined]
    gradient[7] = 1e30
    ref = worker.stage(gradient)
    assert facts(b"").finite  # type: ignore[attr-defined]


def test_fenced_sender_is_refused_everywhere_and_woken() -> None:
    store, (lead, worker) = started(2)
    waiting = in_thread(lambda: worker.send(worker.request(TransferRef(99, 5), [unit(0)])))
    worker.stage(torch.ones(10))
    until(lambda: staged_bytes(store) == 40)
    store.fence(CHIEF, "worker:1", 1, CALL)
    with pytest.raises(FencedError, match="declared dead"):
        waiting.result()
    assert staged_bytes(store) == 0
    assert isinstance(worker.lane.closed, FencedError)
    for call in (
        worker.connect,
        worker.create,
        lambda: worker.stage(torch.ones(10)),
        lambda: worker.send(worker.request(TransferRef(1, 1), [unit(0)])),
        lambda: worker.pull(),
        lambda: worker.close(unit(0)),
    ):
        with pytest.raises(FencedError):
            call()
    DirectWorker(store, "worker:1", SPEC, incarnation=2).commit(torch.ones(10), unit(0))
    assert lead.commit(torch.ones(10), unit(1)).applied


def test_a_sender_must_introduce_itself() -> None:
    store, (worker,) = started()
    stranger = Sender("worker:5", 3, 1)
    with pytest.raises(StaleStoreError, match="send Hello first"):
        store.commits.commit_update(
            worker.request(TransferRef(0, 0), []).__class__(
                stranger, worker.request(TransferRef(0, 0), []).update, TransferRef(1, 1), (), 1
            ),
            CALL,
        )


def test_staging_replaces_supersedes_and_bounds() -> None:
    store, (worker,) = started()
    stage = store.variables.stage
    from stratagem.rpc.codec import Frame

    def frame(transfer: int, offset: int, values: list[float], kind: FrameKind = FrameKind.GRADIENT) -> None:
        stage(worker.sender, kind, Frame(1, transfer, 1, offset, torch.tensor(values)))

    frame(5, 0, [1.0] * 5)
    frame(5, 5, [1.0] * 5)
    frame(5, 0, [2.0] * 5)
    assert staged_bytes(store) == 40
    with pytest.raises(LimitError, match="at most 40 bytes can be staged"):
        frame(5, 3, [1.0])
    with pytest.raises(FrameError, match="expected elements below 10"):
        frame(5, 8, [1.0] * 5)
    with pytest.raises(VariableError, match="group 9 is unknown"):
        stage(worker.sender, FrameKind.GRADIENT, Frame(1, 5, 9, 0, torch.ones(1)))
    with pytest.raises(FrameError, match=r"pieces of torch.float32, got 1 dimensions of torch.float64"):
        stage(worker.sender, FrameKind.GRADIENT, Frame(1, 5, 1, 0, torch.ones(1, dtype=torch.float64)))
    frame(6, 0, [3.0] * 10)  # a newer gradient: the older one goes
    frame(5, 0, [9.0] * 5)  # late: dropped
    assert staged_bytes(store) == 40
    with pytest.raises(ProtocolError, match="transfer 5 was replaced by transfer 6"):
        worker.send(worker.request(TransferRef(5, 3), [unit(0)]))
    for transfer in range(10, 14):
        frame(transfer, 0, [0.0] * 10, FrameKind.VALUES)
    with pytest.raises(LimitError, match="at most 4 transfers of values"):
        frame(14, 0, [0.0], FrameKind.VALUES)
    worker.connect()  # after a loss everything is sent again
    assert staged_bytes(store) == 0


def test_memory_stays_within_rule_33() -> None:
    """Staged gradients of many workers, resent and replaced: never more than one gradient shard each."""
    store, workers = started(4)
    peak = 0
    for index, worker in itertools.product(range(10), workers):
        for _ in range(3):
            worker.stage(torch.ones(10))
            peak = max(peak, staged_bytes(store))
        if index % 2:
            worker.commit(torch.ones(10), unit(index * 4 + workers.index(worker)))
    assert 0 < peak <= len(workers) * SPEC.num_bytes


def test_optimizer_state_travels() -> None:
    spec = make_spec([(3, 2), (4,)], "NAdam")
    stores = [new_store() for _ in range(2)]
    first, second = (DirectWorker(store, "worker:0", spec) for store in stores)
    first.create(torch.arange(10.0))
    for index in range(3):
        first.commit(torch.ones(10) * (index + 1), unit(index))
    second.create(weights(stores[0]).clone())
    for slot in first.pull().slots:
        progress = first.pull(slot=slot)
        second.assign(first.received(), slot, step_counts=progress.step_counts, scalars=progress.scalars)
    for worker in (first, second):
        worker.commit(torch.full((10,), 0.5), unit(9))
    assert torch.equal(weights(stores[0]), weights(stores[1]))
    with pytest.raises(ProtocolError, match=r"expected one of its slots \(exp_avg, exp_avg_sq\), got 'ax'"):
        first.pull(slot="ax")


def test_processes_count_versions_under_epochs_of_their_own_though_a_script_seeds_them_alike() -> None:
    def version() -> object:
        random.seed(1)
        store, _ = started()
        return store.state.locked_group(SPEC.group).version

    assert version() != version()
