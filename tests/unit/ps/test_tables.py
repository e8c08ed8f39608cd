"""Tables in a store: made once, asked for by row, changed exactly once, summed at staleness 0, saved and restored."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Any

import pytest
import torch

from stratagem.checkpoint.server_state import consolidate
from stratagem.cluster.initial_rows import InitialRows
from stratagem.cluster.units import Unit
from stratagem.errors import FencedError, FrameError, LimitError, ProtocolError, VariableError
from stratagem.ps import snapshot
from stratagem.ps.requests import AssignValues, FrameKind, Merge, RequestedSlice, TransferRef
from stratagem.ps.row_values import fill_rows
from stratagem.ps.specs import GroupSpec, ShardSpec
from stratagem.ps.store import Store
from stratagem.ps.table_group import TableGroup
from stratagem.rpc.codec import Frame
from stratagem.rpc.generated import frame_pb2
from tests.polling import until
from tests.unit.ps.driver import CALL, CHIEF, SKIP, DirectWorker, complete, in_thread, make_spec, staged_bytes
from tests.unit.ps.tables import TableWorker, beginning_with, packed, table_spec

torch.set_num_threads(1)

ROWS, WIDTH = 12, 3
UNIT = Unit(1, 0, 0)


def store_and_worker(optimizer: str = "SGD") -> tuple[Store, TableWorker]:
    store = Store()
    worker = TableWorker(store, "worker:0", table_spec(ROWS, WIDTH, optimizer))
    return store, worker


def table(store: Store) -> torch.Tensor:
    return store.state.locked_groups[1].group.weights.view(ROWS, WIDTH)


def test_only_the_lead_has_it_made_and_once() -> None:
    store, worker = store_and_worker()
    assert worker.create_table(is_lead=False) == ([], [])
    with pytest.raises(VariableError, match="no values yet"):
        worker.ask(1)
    assert store.state.initialized is False
    assert worker.create_table() == ([], [1])
    assert store.checkpoints.describe_units().initialized
    expected = torch.empty(ROWS, WIDTH)
    fill_rows(expected, 0, InitialRows("normal", 0.0, 1.0, seed=5))
    assert torch.equal(table(store), expected)
    worker.commit_rows([2], torch.ones(1, WIDTH), UNIT)
    other = TableWorker(store, "worker:1", beginning_with(worker.spec, InitialRows("constant", 9)))
    assert other.create_table() == ([], [1])
    assert torch.equal(table(store)[1], expected[1])


def test_initial_rows_are_those_of_the_lead_whoever_was_here_first() -> None:
    store, worker = store_and_worker()
    spec = beginning_with(worker.spec, InitialRows("constant", 9))
    assert TableWorker(store, "worker:1", spec).create_table(is_lead=False) == ([], [])
    worker.create_table()
    expected = torch.empty(ROWS, WIDTH)
    fill_rows(expected, 0, InitialRows("normal", 0.0, 1.0, seed=5))
    assert torch.equal(table(store), expected)


def test_assigned_rows_come_in_order_from_the_lead_and_once() -> None:
    store, other = store_and_worker()  # worker:0 has others in mind, and is not the lead
    spec = beginning_with(other.spec, InitialRows("assigned"))
    leads = [TableWorker(store, f"worker:{index}", spec) for index in (1, 2)]
    rows = torch.randn(ROWS * WIDTH)
    half = ROWS // 2 * WIDTH
    assert other.create_table(is_lead=False) == ([], [])
    assert leads[0].create_table() == ([1], []) and leads[1].create_table() == ([], [])
    waiting = in_thread(lambda: other.pull(wait_s=10.0))
    assign(leads[0], 0, torch.full((half,), 7.0))
    for wrong in (half - WIDTH, half + WIDTH):
        with pytest.raises(ProtocolError, match=f"in order, elements {half} to {ROWS * WIDTH} next, got {wrong}"):
            assign(leads[0], wrong, rows[wrong:])
    with pytest.raises(VariableError, match="no values yet"):
        other.ask(1)
    with pytest.raises(ProtocolError, match=r"worker:1 .* supplies the initial values, not worker:2"):
        assign(leads[1], half, rows[half:])
    assert [store.state.initialized, waiting.done] == [False, False]
    store.fence(CHIEF, "worker:1", 1, CALL)
    assert leads[1].create_table() == ([1], [])
    assign(leads[1], 0, rows[:half])  # anew
    assign(leads[1], half, rows[half:])
    assert waiting.result().versions
    assert store.state.initialized and torch.equal(table(store).flatten(), rows)
    other.commit_rows([2], torch.ones(1, WIDTH), UNIT)
    trained = table(store).clone()
    again = TableWorker(store, "worker:3", spec)
    assert again.create_table() == ([], [1]) and torch.equal(table(store), trained)


def assign(worker: TableWorker, first: int, values: torch.Tensor) -> None:
    """As part of a larger assignment: ``values`` begin at element ``first``."""
    worker.transfer += 1
    frame = Frame(int(frame_pb2.VALUES), worker.transfer, worker.spec.group, first, values)
    worker.store.variables.stage(worker.sender, FrameKind.VALUES, frame)
    values_ref = TransferRef(worker.transfer, 1)
    worker.store.variables.assign_values(AssignValues(worker.numbered(), values_ref, (worker.spec.group,)), CALL)


def test_attaching_as_a_dense_variable_is_refused() -> None:
    store, worker = store_and_worker()
    worker.create_table()
    (shard,) = worker.spec.shards
    shards = (dataclasses.replace(shard, rows=None),)
    dense = DirectWorker(store, "worker:1", GroupSpec(1, "SGD", torch.float32, shards))
    with pytest.raises(VariableError, match="is_table"):
        dense.create(torch.zeros(ROWS * WIDTH))


def test_rows_come_as_they_are_and_weights_never_as_a_whole() -> None:
    store, worker = store_and_worker()
    worker.create_table()
    assert torch.equal(worker.ask(0, 5, ROWS - 1), table(store)[[0, 5, ROWS - 1]])
    result = worker.commit_rows([5], torch.ones(1, WIDTH), UNIT)
    assert result.applied and result.versions[0].num_frames == 0
    assert torch.equal(worker.ask(5), table(store)[[5]])
    assert worker.pull().versions[0].num_frames == 0
    for wrong in ((ROWS,), (-1,)):
        with pytest.raises(FrameError, match="expected row numbers below 12"):
            worker.ask(*wrong)


def test_asking_a_dense_group_for_rows_is_refused() -> None:
    store = Store()
    worker = DirectWorker(store, "worker:0", make_spec([(4,)]))
    worker.create(torch.zeros(4))
    frame = Frame(int(frame_pb2.WANTED_ROWS), 9, 1, 0, torch.tensor([1]))
    with pytest.raises(VariableError, match="no table"):
        store.variables.stage(worker.sender, FrameKind.WANTED_ROWS, frame)
    with pytest.raises(FrameError, match="expected one-dimensional pieces"):
        store.variables.stage(worker.sender, FrameKind.GRADIENT, Frame(5, 9, 1, 0, torch.zeros(12, dtype=torch.uint8)))


def test_a_fenced_worker_gets_no_rows() -> None:
    store, worker = store_and_worker()
    worker.create_table()
    store.fence(CHIEF, "worker:0", 1, CALL)
    with pytest.raises(FencedError):
        worker.ask(1)


def test_exactly_once_whoever_sends_it() -> None:
    store, worker = store_and_worker()
    worker.create_table()
    before = table(store).clone()
    request = worker.request(worker.stage_rows([1, 4], torch.ones(2, WIDTH)), [UNIT])
    assert worker.send(request).applied
    assert not worker.send(request).applied  # a resend
    other = TableWorker(store, "worker:1", worker.spec)
    assert not other.commit_rows([1, 4, 7], torch.ones(3, WIDTH), UNIT).applied  # the unit, leased again
    assert other.commit_rows([7], torch.ones(1, WIDTH), UNIT, ordinal=1).applied
    worker.close(UNIT, num_updates=2)
    assert not other.commit_rows([7], torch.ones(1, WIDTH), UNIT, ordinal=2).applied
    changed = (before - table(store)).div(0.1).round()
    assert changed[:, 0].tolist() == [1.0 if row in (1, 4, 7) else 0.0 for row in range(ROWS)]


def test_an_update_of_no_row_here_counts() -> None:
    store, worker = store_and_worker("SparseAdam")
    worker.create_table()
    before = table(store).clone()
    assert worker.commit_rows([], torch.empty(0, WIDTH), UNIT).applied
    assert store.state.locked_groups[1].group.counts == [1] and torch.equal(table(store), before)
    assert store.state.units.is_applied(UNIT, 0)
    assert worker.commit_rows([3], torch.ones(1, WIDTH), Unit(1, 0, 1), action=SKIP).applied is False
    assert store.state.locked_groups[1].group.counts == [1]


def test_a_gradient_that_begins_anew_replaces_the_first() -> None:
    store, worker = store_and_worker()
    worker.create_table()
    before = table(store).clone()
    first = worker.stage_rows([1, 2, 3], torch.ones(3, WIDTH))
    _, piece = packed(torch.tensor([6]), torch.ones(1, WIDTH))
    store.variables.stage(worker.sender, FrameKind.GRADIENT, Frame(5, first.transfer, 1, 0, piece))
    ref = type(first)(first.transfer, 4)
    assert worker.send(worker.request(ref, [UNIT])).applied
    assert (table(store) != before).any(1).nonzero().flatten().tolist() == [6]
    assert staged_bytes(store) == 0


def test_a_gradient_of_more_than_every_row_is_refused() -> None:
    store, worker = store_and_worker()
    worker.create_table()
    _, piece = packed(torch.arange(ROWS), torch.ones(ROWS, WIDTH))
    store.variables.stage(worker.sender, FrameKind.GRADIENT, Frame(5, 9, 1, 0, piece))
    with pytest.raises((LimitError, FrameError), match="at most"):
        store.variables.stage(worker.sender, FrameKind.GRADIENT, Frame(5, 9, 1, 1, piece[:-20]))
    with pytest.raises(FrameError, match="20 bytes a row"):
        store.variables.stage(worker.sender, FrameKind.GRADIENT, Frame(5, 9, 1, 0, piece[:-1]))


def test_a_bad_row_applies_nothing_to_any_group() -> None:
    store, worker = store_and_worker()
    worker.create_table()
    before = table(store).clone()
    with pytest.raises(ProtocolError, match="ascending"):
        worker.commit_rows([4, 2], torch.ones(2, WIDTH), UNIT)
    assert torch.equal(table(store), before) and not store.state.units.is_applied(UNIT, 0)
    assert worker.commit_rows([2, 4], torch.ones(2, WIDTH), UNIT).applied


@pytest.mark.parametrize("merge", [Merge.MEAN, Merge.SUM])
def test_a_synchronous_step_is_one_update_of_the_union(merge: Merge) -> None:
    store, one = store_and_worker("Adagrad")
    one.create_table()
    two = TableWorker(store, "worker:1", one.spec)
    reference = torch.nn.Parameter(table(store).clone())
    optimizer = torch.optim.Adagrad([reference], lr=0.1)
    units = (UNIT, Unit(1, 0, 1))
    first, second = torch.randn(2, WIDTH), torch.randn(3, WIDTH)
    weights = (3.0, 1.0)
    factors = (0.75, 0.25) if merge is Merge.MEAN else (1.0, 1.0)
    dense = torch.zeros(ROWS, WIDTH)
    dense[[1, 4]] += factors[0] * first
    dense[[2, 4, 9]] += factors[1] * second
    rows = torch.tensor([1, 2, 4, 9])
    reference.grad = torch.sparse_coo_tensor(rows[None], dense[rows], (ROWS, WIDTH), check_invariants=False)
    with torch.sparse.check_sparse_tensor_invariants(False):
        optimizer.step()

    def part(at: int) -> RequestedSlice:
        return RequestedSlice(1, units, weights[at], merge)

    waiting = in_thread(lambda: one.commit_rows([1, 4], first, units[0], slice=part(0)))
    until(lambda: store.state.steps.is_prepared((1, 0), units[0]))
    ref = two.stage_rows([2, 4, 9], second)
    two.prepare(ref, units[1], part(1))
    assert two.send(two.request(ref, [units[1]], slice=part(1))).applied and waiting.result().applied
    torch.testing.assert_close(table(store), reference.detach(), rtol=1e-6, atol=1e-6)
    assert store.state.locked_groups[1].group.counts == [1]


def test_facts_of_a_synchronous_step_are_those_of_the_sum() -> None:
    store, one = store_and_worker()
    one.create_table()
    two = TableWorker(store, "worker:1", one.spec)
    units = (UNIT, Unit(1, 0, 1))
    parts = [RequestedSlice(1, units, 1.0, Merge.MEAN)] * 2
    ref = one.stage_rows([4], torch.full((1, WIDTH), 2.0))
    waiting = in_thread(lambda: one.prepare(ref, units[0], parts[0], want_facts=True))
    facts = two.prepare(two.stage_rows([4], torch.full((1, WIDTH), 4.0)), units[1], parts[1], want_facts=True)
    assert facts.squared_norm == pytest.approx(9.0 * WIDTH) and waiting.result() == facts


def save(store: Store, path: pathlib.Path, hold_token: int = 7) -> None:
    path.mkdir()
    (path / "nonce").write_text("n")
    store.checkpoints.hold_commits(CHIEF, hold_token, 5.0, CALL)
    store.checkpoints.save_shards(hold_token, str(path), "n")
    store.checkpoints.release_commits(hold_token)
    complete(path)


def test_saved_restored_and_trained_on(tmp_path: pathlib.Path) -> None:
    store, worker = store_and_worker("SparseAdam")
    worker.create_table()
    worker.commit_rows([1, 4], torch.ones(2, WIDTH), UNIT)
    saved = table(store).clone()
    save(store, tmp_path / "c")
    worker.commit_rows([1, 5], torch.ones(2, WIDTH), Unit(1, 0, 1))
    after = table(store).clone()
    store.checkpoints.restore_shards(str(tmp_path / "c"))
    assert torch.equal(table(store), saved) and store.state.initialized
    worker.connect()
    assert worker.create_table() == ([], [1])
    assert not worker.commit_rows([1, 4], torch.ones(2, WIDTH), UNIT).applied
    assert worker.commit_rows([1, 5], torch.ones(2, WIDTH), Unit(1, 0, 1)).applied
    assert torch.equal(table(store), after)
    assert torch.equal(consolidate(tmp_path / "c")["t"], saved)
    assert consolidate(tmp_path / "c", "exp_avg")["t"][4].abs().min() > 0


def test_a_table_is_not_made_while_a_checkpoint_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint could have zeros for its rows and say that they have their values."""
    store, worker = store_and_worker()
    make, was_held = TableGroup.make_values, []

    def note(group: TableGroup) -> None:
        was_held.append(store.state.gate.is_held(time.monotonic()))
        make(group)

    monkeypatch.setattr(TableGroup, "make_values", note)
    store.checkpoints.hold_commits(CHIEF, 7, 60.0, CALL)
    made = in_thread(worker.create_table)
    until(lambda: bool(store.state.locked_groups))
    save(store, tmp_path / "c")
    assert made.result() == ([], [1]) and was_held == [False]
    assert not snapshot.load(tmp_path / "c", 0).groups[0].initialized


def test_a_lane_that_ends_waits_for_no_table_that_is_being_made() -> None:
    store, worker = store_and_worker()
    worker.create_table()
    with store.state.locked_groups[1].lock:  # as while its rows are made, seconds long
        giving_back = in_thread(store.give_back)
        until(lambda: giving_back.done, deadline_s=5.0)


def test_two_ps_save_one_tensor(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is allocated once, not for the part of every ps: a second time may be more than there is memory for."""
    initial = InitialRows("normal", 0.0, 1.0, seed=2)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "nonce").write_text("n")
    for index, (first, count) in enumerate([(0, 7), (7, 5)]):
        store = Store(f"ps:{index}")
        shard = ShardSpec("t", (ROWS, WIDTH), first, count, 0, rows=initial)
        TableWorker(store, "worker:0", GroupSpec(1, "SGD", torch.float32, (shard,))).create_table()
        store.checkpoints.hold_commits(CHIEF, 1, 5.0, CALL)
        store.checkpoints.save_shards(1, str(tmp_path / "c"), "n")
    (tmp_path / "c" / "manifest.json").write_text("{}")
    expected = torch.empty(ROWS, WIDTH)
    fill_rows(expected, 0, initial)
    allocated: list[Any] = []
    zeros = torch.zeros

    def counted(shape: Any, **kind: Any) -> torch.Tensor:
        allocated.append(shape)
        return zeros(shape, **kind)

    monkeypatch.setattr(torch, "zeros", counted)
    assert torch.equal(consolidate(tmp_path / "c")["t"], expected) and allocated == [(ROWS, WIDTH)]
