"""A ps begins from the checkpoint of another number of ps, and training goes on as if nothing had been."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from stratagem.cluster.units import Unit, UnitBitmap, Update
from stratagem.errors import CheckpointError, StaleStoreError, VariableError
from stratagem.ps import variables, waiting
from stratagem.ps.specs import GroupSpec, ShardSpec
from stratagem.ps.store import Store
from stratagem.ps.units import UnitClose, UnitLedger
from stratagem.strategy.partitioners import FixedShardsPartitioner, place
from tests.unit.ps.driver import CALL, DirectWorker, make_spec
from tests.unit.ps.test_checkpoint import checkpoint, new_store, unit

SHAPES: dict[str, tuple[int, ...]] = {"table": (10, 2), "bias": (3,), "scale": (), "wide": (2, 9)}


def specs_of(num_ps: int, optimizer: str) -> list[GroupSpec]:
    """What each of ``num_ps`` holds; some hold nothing."""
    placed = place([(shape, torch.float32) for shape in SHAPES.values()], FixedShardsPartitioner(3), [0] * num_ps)
    specs = []
    for ps in range(num_ps):
        shards: list[ShardSpec] = []
        for (name, shape), rows in zip(SHAPES.items(), placed, strict=True):
            for _, first, count in (row for row in rows if row[0] == ps):
                shards.append(ShardSpec(name, shape, first, count, shards[-1].stop if shards else 0))
        specs.append(GroupSpec(1, optimizer, torch.float32, tuple(shards)))
    return specs


def flat_of(spec: GroupSpec, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    parts = [
        values[each.variable].reshape(each.shape[0] if each.shape else 1, -1)[each.first_row :][: each.num_rows]
        for each in spec.shards
    ]
    return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)


def join(stores: Sequence[Store], optimizer: str, hyper: dict[str, Any], incarnation: int) -> list[DirectWorker]:
    workers = [
        DirectWorker(store, "worker:0", spec, incarnation)
        for store, spec in zip(stores, specs_of(len(stores), optimizer), strict=True)
        if spec.shards
    ]
    for worker in workers:
        worker.hyper = hyper
    return workers


def step(workers: Sequence[DirectWorker], index: int, is_new: bool = True) -> None:
    """One update; the gradient of ``bias`` is absent every third time."""
    generator = torch.Generator().manual_seed(index)
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for worker in workers:
        is_there = [shard.variable != "bias" or index % 3 > 0 for shard in worker.spec.shards]
        mask = sum(bit << place for place, bit in enumerate(is_there)).to_bytes(-(-len(is_there) // 8), "little")
        commit = worker.commit(flat_of(worker.spec, values), unit(index), present=mask, num_servers=len(workers))
        assert commit.applied is is_new
        worker.close(unit(index))


def num_of(stores: Sequence[Store]) -> int:
    """Updates that all tell together."""
    return sum(store.checkpoints.describe_units().num_updates for store in stores)


def whole(stores: Sequence[Store], optimizer: str) -> dict[str, torch.Tensor]:
    values = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for store, spec in zip(stores, specs_of(len(stores), optimizer), strict=True):
        for shard in spec.shards:
            flat = store.state.locked_groups[1].group.weights[shard.offset : shard.stop]
            target = values[shard.variable].narrow(0, shard.first_row, shard.num_rows) if shard.shape else None
            (values[shard.variable] if target is None else target).copy_(flat.view(shard.local_shape))
    return values


@pytest.mark.parametrize(
    ("optimizer", "hyper"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
        ("Adam", {"lr": 0.1, "amsgrad": True}),
        ("NAdam", {"lr": 0.1}),
        ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5}),
    ],
)
def test_training_goes_on_with_another_number_of_ps(
    tmp_path: pathlib.Path, optimizer: str, hyper: dict[str, Any]
) -> None:
    values = {name: torch.arange(float(torch.Size(shape).numel())).reshape(shape) for name, shape in SHAPES.items()}
    stays, moves = [new_store()], [new_store()]
    for stores in (stays, moves):
        [worker] = join(stores, optimizer, hyper, 1)
        worker.create(flat_of(worker.spec, values))
    workers = join(moves, optimizer, hyper, 1)
    unmoved = join(stays, optimizer, hyper, 1)
    index = 0
    for num_ps in (3, 2, 5, 1):
        for _ in range(4):
            step(workers, index)
            step(unmoved, index)
            index += 1
        for store in moves:
            store.state.locked_groups[1].group.num_skipped += 1
        path = checkpoint(tmp_path, moves, index)
        num_updates = num_of(moves)
        moves = [*moves, *(new_store(at) for at in range(len(moves), num_ps))][:num_ps]
        epochs = [store.checkpoints.restore_shards(str(path), num_ps) for store in moves]
        with pytest.raises(StaleStoreError):
            workers[0].create()
        workers = join(moves, optimizer, hyper, index)
        described = [store.checkpoints.describe_units() for store in moves]
        assert [(each.initialized, each.step, each.taken_elements) for each in described] == [(True, index, 0)] * num_ps
        assert [store.hello(workers[0].sender, 1).num_ps for store in moves] == [num_ps] * num_ps
        workers = join(moves, optimizer, hyper, index)
        for worker in workers:
            assert not worker.create(torch.zeros(0)), "its values are there"
        step(workers, index - 1, is_new=False)
        assert num_of(moves) == num_updates, "the same checkpoint has it"
        described = [store.checkpoints.describe_units() for store in moves]
        assert sum(each.taken_elements for each in described) == described[0].origin_elements
        assert epochs == [store.state.store_epoch for store in moves]
    step(workers, index)
    step(unmoved, index)
    assert num_of(moves) == num_updates + 1
    again = new_store()
    again.checkpoints.restore_shards(str(checkpoint(tmp_path, moves, index + 1)))
    assert num_of([again]) == num_updates + 1, "its own checkpoint tells it"
    assert again.state.locked_groups[1].group.num_skipped == 4
    expected = whole(stays, optimizer)
    for name, value in whole(moves, optimizer).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)


def test_what_is_taken_must_be_there(tmp_path: pathlib.Path) -> None:
    store = new_store()
    worker = DirectWorker(store, "worker:0", make_spec([(4,)], "Adam"))
    worker.create(torch.ones(4))
    worker.commit(torch.ones(4), Unit(1, 0, 0))
    path = checkpoint(tmp_path, [store], 1)
    second = new_store(1)
    second.checkpoints.restore_shards(str(path), 2)

    def attach(*shards: ShardSpec, optimizer: str = "Adam", group: int = 1) -> list[int]:
        worker = DirectWorker(second, "worker:0", GroupSpec(group, optimizer, torch.float32, shards))
        return second.variables.create_variables(worker.numbered(), [worker.spec], False, CALL)[1]

    with pytest.raises(VariableError, match=r"the checkpoint has it as \('Adam', torch.float32, \(4,\)\)"):
        attach(ShardSpec("v0", (5,), 0, 2, 0))
    with pytest.raises(VariableError, match="the checkpoint has it as"):
        attach(ShardSpec("v0", (4,), 0, 2, 0), optimizer="SGD")
    with pytest.raises(VariableError, match=r"expected rows 0 to 1 in the checkpoint .* found 0"):
        attach(ShardSpec("v0", (4,), 2, 2, 0), ShardSpec("v1", (1,), 0, 1, 2))
    assert attach(ShardSpec("v7", (4,), 0, 2, 0), group=2) == [], "a variable that is new has no values yet"
    for file in path.iterdir():
        file.unlink()  # a newer checkpoint has taken its place: the rows can be read all the same
    assert attach(ShardSpec("v0", (4,), 2, 2, 0)) == [1]
    second.state.origin.close()  # type: ignore[union-attr]
    described = second.checkpoints.describe_units()
    assert (described.origin_elements, described.taken_elements) == (4, 2), "the others may have the rest, or not yet"
    third = new_store(2)
    with pytest.raises(CheckpointError, match="cannot be read"):
        third.checkpoints.restore_shards(str(path), 2)


def test_what_was_not_trained_is_given_again_where_some_of_it_is_lacking(tmp_path: pathlib.Path) -> None:
    """The number of ps had changed between the values of one ps and those of another: no worker could go on."""
    stores = [new_store(0), new_store(1)]
    shards = [ShardSpec("v0", (4,), 0, 4, 0), ShardSpec("v1", (3,), 0, 3, 0)]
    workers = [
        DirectWorker(store, "worker:0", GroupSpec(1, "Adam", torch.float32, (shard,)))
        for store, shard in zip(stores, shards, strict=True)
    ]
    workers[0].create(torch.ones(4))
    path = checkpoint(tmp_path, stores, 1)
    stores[0].checkpoints.restore_shards(str(path), 1)
    both = GroupSpec(1, "Adam", torch.float32, (shards[0], ShardSpec("v1", (3,), 0, 3, 4)))
    assert DirectWorker(stores[0], "worker:0", both).create(torch.zeros(7)), "it is to give the values"
    described = stores[0].checkpoints.describe_units()
    assert described.initialized and described.taken_elements == described.origin_elements == 4


def test_one_more_variable_of_a_group_that_every_ps_had_is_another_model(tmp_path: pathlib.Path) -> None:
    """Also where nothing was trained: rows that were loaded would be gone."""
    stores, shards = [new_store(0), new_store(1)], [ShardSpec("v0", (4,), first, 2, 0) for first in (0, 2)]
    for store, shard in zip(stores, shards, strict=True):
        DirectWorker(store, "worker:0", GroupSpec(1, "", torch.float32, (shard,))).create(torch.ones(2))
    stores[0].checkpoints.restore_shards(str(checkpoint(tmp_path, stores, 1)), 1)
    more = GroupSpec(1, "", torch.float32, (ShardSpec("v0", (4,), 0, 4, 0), ShardSpec("v1", (3,), 0, 3, 4)))
    with pytest.raises(
        VariableError, match=r"v1: expected rows 0 to 3 .* found 0.* another model begins in a checkpoi"
    ):
        DirectWorker(stores[0], "worker:0", more).create(torch.zeros(7))


def test_a_file_of_any_ps_that_was_altered_is_refused(tmp_path: pathlib.Path) -> None:
    stores = [new_store(0), new_store(1)]
    for store in stores:
        DirectWorker(store, "worker:0", make_spec([(4,)], "Adam", prefix=store.task)).create(torch.ones(4))
    path = checkpoint(tmp_path, stores, 1)
    with (path / "ps-1.safetensors").open("ab") as file:
        file.write(b"x")
    new_store(0).checkpoints.restore_shards(str(path), 2)
    with pytest.raises(CheckpointError, match=r"ps-1\.safetensors was altered"):
        new_store(0).checkpoints.restore_shards(str(path), 3)


def test_ledgers_of_one_cut_are_joined() -> None:
    first, second = UnitLedger(), UnitLedger()
    parted = Unit(1, 0, 5)
    for ledger in (first, second):
        ledger.record(Update((Unit(1, 0, 0),), 0), 2, (0,))
        ledger.record(Update((Unit(1, 0, 1),), 0), 2, (0,))
    first.close([UnitClose(Unit(1, 0, 0), 1)])  # the other has not heard of it yet
    first.record(Update((parted,), 0), 1, (0,))  # one optimizer's variables lie here, another's there
    second.record(Update((parted,), 1), 1, (1,))
    joined, num_torn = UnitLedger.joined([first, second])
    assert num_torn == 0
    described = joined.describe()
    assert described.closed == {(1, 0): UnitBitmap.of([0])}
    assert [(update.units[0].index, update.ordinal, num) for update, num in described.open] == [
        (1, 0, 1),
        (5, 0, 1),
        (5, 1, 1),
    ]
    first.record(Update((Unit(1, 0, 7),), 0), 2, (0,))
    joined, num_torn = UnitLedger.joined([first, second])
    assert num_torn == 1 and not joined.is_new(Update((Unit(1, 0, 7),), 0))


def test_what_came_from_other_ps_is_half_until_it_has_an_update_of_each_kind_that_comes_here() -> None:
    """Of two optimizers: the one whose variables lie elsewhere had stepped, and that was taken for the whole batch."""
    first, second, one, another = UnitLedger(), UnitLedger(), Unit(1, 0, 0), Unit(1, 0, 1)
    first.record(Update((one,), 0), 1, (0,))
    first.record(Update((another,), 0), 1, (0,))
    second.record(Update((another,), 1), 1, (1,))
    saved = [UnitLedger.from_json(each.to_json()) for each in (first, second)]
    joined, _ = UnitLedger.joined(saved)
    assert not joined.describe((0,)).halves
    before_any, _ = UnitLedger.joined(saved[:1])  # of the other optimizer
    assert before_any.describe((0, 1), lacks_first=True).halves == {(1, 0): UnitBitmap.of([0, 1])}
    for ledger in (joined, UnitLedger.from_json(joined.to_json())):
        assert ledger.describe((1,)).halves == ledger.describe((0, 1)).halves == {(1, 0): UnitBitmap.of([0])}
        ledger.record(Update((one,), 1), 1, (1,))
        assert not ledger.describe((0, 1)).halves


def test_a_unit_from_other_ps_is_not_closed_by_a_number_that_an_update_of_variables_elsewhere_makes_up() -> None:
    """Of two optimizers: the ps went back to what it began from, where the batch had the first one's update. A worker
    that counted one, the second one's, closed it, and that was lost untold."""
    first, one, another = UnitLedger(), Unit(1, 0, 0), Unit(1, 0, 1)
    first.record(Update((one,), 0), 1, (0,))
    joined, _ = UnitLedger.joined([first])
    joined.close([UnitClose(one, 1)], lambda: (1,))
    joined.record(Update((another,), 1), 1, (1,))
    assert joined.describe((1,)).halves == {(1, 0): UnitBitmap.of([0])}
    joined.record(Update((one,), 1), 1, (1,))
    joined.close([UnitClose(one, 2)], lambda: (1,))  # the worker has counted the first one's, among other ps
    assert joined.describe((1,)).closed == {(1, 0): UnitBitmap.of([0])}


@pytest.mark.parametrize("is_restored", [False, True])
def test_what_a_worker_counted_among_other_ps_says_nothing_of_how_many_updates_come_here(is_restored: bool) -> None:
    """Of two optimizers, one of whose variables lie elsewhere by now: each batch was a half, and told to be lost."""
    first, one, another = UnitLedger(), Unit(1, 0, 0), Unit(1, 0, 1)
    first.record(Update((one,), 0), 1, (0,))
    first.record(Update((one,), 1), 1, (1,))
    first.close([UnitClose(one, 2)])
    joined, _ = UnitLedger.joined([first])
    if is_restored:
        joined = UnitLedger.from_json(joined.to_json())
    joined.record(Update((another,), 0), 1, (0,))
    joined.close([UnitClose(one, 2)])
    assert not joined.describe((0,)).halves


def test_the_number_of_ps_changes_while_a_worker_attaches(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ps took the rows of its old share, and refused every worker from then on."""
    store = new_store()
    [worker] = join([store], "SGD", {"lr": 0.1}, 1)
    worker.create(torch.zeros(sum(shard.num_elements for shard in worker.spec.shards)))
    path = checkpoint(tmp_path, [store], 1)
    noted = waiting.noted

    @contextlib.contextmanager
    def change(*arguments: Any) -> Iterator[None]:
        with noted(*arguments):
            store.checkpoints.restore_shards(str(path), 3)
            yield

    [late] = join([store], "SGD", {"lr": 0.1}, 2)
    monkeypatch.setattr(variables, "noted", change)
    with pytest.raises(StaleStoreError, match="one of 3 ps"):
        store.variables.create_variables(late.sender, [late.spec], True, CALL, 1)
    assert not store.state.locked_groups
