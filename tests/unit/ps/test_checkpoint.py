"""Holding commits, writing shards, going back, reading by anybody."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import threading
import time
from functools import partial
from typing import Any

import pytest
import safetensors.torch
import torch

from stratagem.checkpoint import manifest
from stratagem.checkpoint.server_state import consolidate
from stratagem.cluster.units import Unit, UnitBitmap, Update
from stratagem.errors import CheckpointError, ProtocolError, StaleStoreError, VariableError
from stratagem.ps import snapshot
from stratagem.ps.commit_gate import CommitGate
from stratagem.ps.requests import TransferRef
from stratagem.ps.specs import GroupSpec, ShardSpec
from stratagem.ps.store import Store
from stratagem.ps.units import UnitLedger
from tests.file_sizes import file_size_limit
from tests.polling import until
from tests.unit.ps.driver import CALL, CHIEF, DirectWorker, in_thread, make_spec, weights

torch.set_num_threads(1)

SHAPES: list[tuple[int, ...]] = [(3, 2), (4,), ()]


def unit(index: int) -> Unit:
    return Unit(1, 0, index)


def new_store(index: int = 0) -> Store:
    return Store(f"ps:{index}")


def checkpoint(directory: pathlib.Path, stores: list[Store], step: int, epoch: int = 1) -> pathlib.Path:
    """What the chief does."""
    path = directory / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "nonce").write_text("n")
    files: list[dict[str, Any]] = []
    for store in stores:
        store.checkpoints.hold_commits(CHIEF, 7, 10.0, CALL)
        saved, _ = store.checkpoints.save_shards(7, str(path), "n")
        files += [{"ps": store.task, "name": f.name, "bytes": f.num_bytes, "sha256": f.sha256} for f in saved]
        store.checkpoints.release_commits(7)
    for entry in files:
        content = (path / entry["name"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["bytes"], entry["sha256"])
    (path / "manifest.json").write_bytes(manifest.encode({"step": step, "chief_epoch": epoch, "files": files}))
    return path


def test_a_unit_that_is_closed_while_its_ledger_is_written_is_in_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was neither among those that are closed nor among those that are open."""
    store = new_store()
    worker = DirectWorker(store, "worker:0", make_spec(SHAPES))
    worker.create(torch.zeros(11))
    for index in range(2):
        worker.commit(torch.ones(11), unit(index))
    worker.close(unit(0))
    to_bytes = UnitBitmap.to_bytes

    def closing(bitmap: UnitBitmap) -> bytes:
        found = to_bytes(bitmap)
        in_thread(lambda: worker.close(unit(1))).result()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(UnitBitmap, "to_bytes", closing)
        path = checkpoint(tmp_path, [store], 2)
    ledger = snapshot.load(path, 0).units
    assert all(ledger.is_applied(unit(index), 0) for index in range(2))


@pytest.mark.parametrize(
    ("optimizer", "hyper"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
        ("Adam", {"lr": 0.1, "amsgrad": True}),
        ("NAdam", {"lr": 0.1}),
        ("ASGD", {"lr": 0.1, "t0": 1.0}),
        ("Rprop", {"lr": 0.1}),
    ],
)
def test_restored_training_equals_uninterrupted(tmp_path: pathlib.Path, optimizer: str, hyper: dict[str, Any]) -> None:
    spec = make_spec(SHAPES, optimizer)
    torch.manual_seed(0)
    gradients = [torch.randn(spec.num_elements) for _ in range(12)]
    masks = [b"\x07", b"\x03", b"\x05", b"\x06"]
    stores = [new_store() for _ in range(2)]
    workers = [DirectWorker(store, "worker:0", spec) for store in stores]
    for worker in workers:
        worker.hyper = hyper
        worker.create(torch.arange(float(spec.num_elements)))
    for index, gradient in enumerate(gradients):
        if index == 6:
            path = checkpoint(tmp_path, stores[:1], 6)
            stores[0] = new_store()
            stores[0].checkpoints.restore_shards(str(path))
            workers[0] = DirectWorker(stores[0], "worker:0", spec, incarnation=2)
            workers[0].hyper = hyper
            assert not workers[0].create()
            assert not workers[0].commit(gradients[5], unit(5)).applied
        for worker in workers:
            assert worker.commit(gradient, unit(index), present=masks[index % 4]).applied
    assert torch.equal(weights(stores[0]), weights(stores[1]))
    first, second = (store.state.locked_groups[1].group for store in stores)
    assert first.counts == second.counts and first.scalars == second.scalars
    assert all(torch.equal(flat, second.slots[name]) for name, flat in first.slots.items())


def test_any_number_of_ps_reads_as_one_plain_state_dict(tmp_path: pathlib.Path) -> None:
    table = torch.arange(20.0).view(10, 2)
    head = [ShardSpec("table", (10, 2), 0, 7, 0), ShardSpec("bias", (3,), 0, 3, 14), ShardSpec("scale", (), 0, 1, 17)]
    held = [  # of what has no gradient, ps:0 has slots with the others' in the group, and ps:2 has none
        ([*head, ShardSpec("frozen", (2,), 0, 1, 18)], torch.tensor([*range(14), 1.0, 2, 3, 4, 5]), b"\x07"),
        ([ShardSpec("table", (10, 2), 7, 3, 0)], torch.arange(14.0, 20), b""),
        ([ShardSpec("frozen", (2,), 1, 1, 0)], torch.tensor([6.0]), b"\x00"),
    ]
    stores = [new_store(index) for index in range(3)]
    for store, (shards, values, present) in zip(stores, held, strict=True):
        worker = DirectWorker(store, "worker:0", GroupSpec(1, "Adam", torch.float32, tuple(shards)))
        worker.create(values)
        worker.hyper = {"lr": 0.0}
        num_elements = sum(shard.num_elements for shard in shards if shard.variable != "frozen")
        worker.commit(torch.ones(num_elements), unit(0), present=present)
    path = checkpoint(tmp_path, stores, 1)
    plain = safetensors.torch.load_file(path / "ps-0.safetensors")
    assert sorted(plain) == ["bias", "frozen@0", "scale", "table@0"]
    assert plain["scale"].shape == () and torch.equal(plain["bias"], torch.tensor([1.0, 2, 3]))
    state = consolidate(path)
    assert sorted(state) == ["bias", "frozen", "scale", "table"]
    assert torch.equal(state["table"], table) and float(state["scale"]) == 4.0
    torch.testing.assert_close(consolidate(path, "exp_avg")["table"], torch.full((10, 2), 0.1))
    assert consolidate(path, "exp_avg")["frozen"].tolist() == [0.0, 0.0]
    (path / "ps-1.json").unlink()
    with pytest.raises(CheckpointError, match="expected 10 rows of variable table, found 7"):
        consolidate(path)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="expected a committed checkpoint"):
        consolidate(path)


@pytest.mark.parametrize("harm", ["altered", "missing"])
@pytest.mark.parametrize("name", ["ps-0.safetensors", "ps-0.slots.safetensors", "ps-0.json", "manifest.json"])
def test_a_damaged_part_is_refused_and_the_store_stays_as_it_is(tmp_path: pathlib.Path, name: str, harm: str) -> None:
    store = new_store()
    worker = DirectWorker(store, "worker:0", make_spec(SHAPES, "Adam"))
    worker.create(torch.zeros(11))
    paths = []
    for step in range(1, 3):
        worker.commit(torch.ones(11), unit(step))
        paths.append(checkpoint(tmp_path, [store], step))
    if harm == "missing":
        (paths[1] / name).unlink()
    else:
        content = bytearray((paths[1] / name).read_bytes())
        content[len(content) // 2] ^= 1
        (paths[1] / name).write_bytes(content)
    restored = new_store()
    epoch = restored.checkpoints.restore_shards(str(paths[0]))
    with pytest.raises(CheckpointError, match=f"{name} (was altered|is missing)|cannot be read by ps:0"):
        restored.checkpoints.restore_shards(str(paths[1]))
    assert (restored.state.step, restored.state.store_epoch) == (1, epoch)
    with pytest.raises(CheckpointError, match="was made without ps:5"):
        new_store(5).checkpoints.restore_shards(str(paths[0]))


def test_a_part_larger_than_files_may_be_is_refused_with_the_way_out(tmp_path: pathlib.Path) -> None:
    store = new_store()
    DirectWorker(store, "worker:0", make_spec([(10_000,)])).create(torch.zeros(10_000))
    refused = pytest.raises(CheckpointError, match=r"ps:0 cannot write .*: File too large; raise `ulimit -f`")
    with file_size_limit(20_000), refused:
        checkpoint(tmp_path, [store], 1)


def test_the_nonce_proves_the_directory(tmp_path: pathlib.Path) -> None:
    store = new_store()
    store.checkpoints.hold_commits(CHIEF, 1, 10.0, CALL)
    with pytest.raises(CheckpointError, match=r"read by ps:0 .* file system that the chief and every parameter server"):
        store.checkpoints.save_shards(1, str(tmp_path / "elsewhere"), "n")
    (tmp_path / "nonce").write_text("other")
    with pytest.raises(CheckpointError, match=r"exists at ps:0, .* expected nonce 'n', found 'other'"):
        store.checkpoints.save_shards(1, str(tmp_path), "n")
    assert not list(tmp_path.glob("ps-*"))
    store.checkpoints.release_commits(1)
    with pytest.raises(ProtocolError, match="expected a hold on commits under token 1, found none"):
        store.checkpoints.save_shards(1, str(tmp_path), "n")


def test_hold_lets_admitted_updates_through_and_the_rest_wait() -> None:
    store = new_store()
    workers = [DirectWorker(store, f"worker:{index}", make_spec(SHAPES)) for index in range(2)]
    for worker in workers:
        worker.create(torch.zeros(11))
    workers[0].commit(torch.ones(11), unit(0), num_servers=2)
    described = store.checkpoints.hold_commits(CHIEF, 3, 60.0, CALL)
    assert described.units.open == ((Update((unit(0),), 0), 2),) and described.initialized
    calls = [in_thread(partial(w.commit, torch.ones(11), unit(i))) for i, w in enumerate(workers, 1)]
    assert not store.checkpoints.admit_updates(CHIEF, 3, [Update((unit(9),), 0)], 0.05, CALL)
    assert store.checkpoints.admit_updates(CHIEF, 3, [Update((unit(1),), 0)], 10.0, CALL)
    assert calls[0].result().applied and not calls[1].done and store.state.step == 2
    with pytest.raises(ProtocolError, match="held under token 3"):
        store.checkpoints.hold_commits(CHIEF, 2, 1.0, CALL)
    store.checkpoints.release_commits(3)
    assert calls[1].result().applied and store.state.step == 3


def test_gate_releases_itself() -> None:
    gate = CommitGate()
    gate.hold(1, now=100.0, hold_s=5.0)
    gate.admit(1, [Update((unit(1),), 2)], now=101.0)
    assert gate.lets_through(Update((unit(0), unit(1)), 2), 104.0)
    assert not gate.lets_through(Update((unit(1),), 1), 104.0) and not gate.lets_through(None, 104.0)
    assert gate.lets_through(None, 105.0)
    with pytest.raises(ProtocolError):
        gate.check_token(1, 106.0)
    gate.hold(2, now=107.0, hold_s=5.0)
    gate.release(1)
    assert gate.is_held(108.0)


def test_the_hold_of_a_newer_chief_takes_the_place_of_a_dead_ones() -> None:
    gate = CommitGate()
    gate.hold(1 << 32 | 7, now=100.0, hold_s=60.0)
    gate.admit(1 << 32 | 7, [Update((unit(1),), 0)], now=101.0)
    gate.hold(2 << 32 | 1, now=102.0, hold_s=5.0)
    assert not gate.lets_through(Update((unit(1),), 0), 103.0)
    with pytest.raises(ProtocolError, match="newer than"):
        gate.hold(1 << 32 | 7, now=104.0, hold_s=60.0)
    gate.release(1 << 32 | 7)
    assert gate.is_held(104.0) and not gate.is_held(107.0)


def test_processes_that_go_back_to_one_checkpoint_are_told_apart_though_the_clock_went_back(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that knew the first took the values of the second for those it knew, and went on with its old step."""
    store = new_store()
    DirectWorker(store, "worker:0", make_spec(SHAPES)).create(torch.zeros(11))
    path = str(checkpoint(tmp_path, [store], 1))
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000)
    assert new_store().checkpoints.restore_shards(path) != new_store().checkpoints.restore_shards(path)


def test_restore_sends_everybody_back_to_hello(tmp_path: pathlib.Path) -> None:
    store = new_store()
    spec = make_spec(SHAPES)
    worker = DirectWorker(store, "worker:0", spec)
    worker.create(torch.zeros(11))
    first, before = worker.commit(torch.ones(11), unit(0)).versions[0].version, store.state.store_epoch
    path = checkpoint(tmp_path, [store], 1)
    worker.commit(torch.ones(11), unit(1))
    waiting = in_thread(lambda: worker.send(worker.request(TransferRef(99, 3), [unit(2)])))
    until(lambda: len(store.state.senders.window(worker.sender)._running) == 1)
    epoch = store.checkpoints.restore_shards(str(path))
    assert epoch > before
    with pytest.raises(StaleStoreError):
        waiting.result()
    assert isinstance(worker.lane.closed, StaleStoreError)
    with pytest.raises(StaleStoreError, match="send Hello first"):
        worker.commit(torch.ones(11), unit(1))
    with pytest.raises(StaleStoreError, match="send Hello first"):  # by a stream that was on its way since before
        store.open_lane(worker.sender, worker.lane)
    worker.connect()
    assert worker.pull(first).versions[0].num_frames == 1  # same counter, another epoch: not "unchanged"
    torch.testing.assert_close(worker.received(), torch.full((11,), -0.1))
    assert worker.commit(torch.ones(11), unit(1)).applied
    assert not worker.commit(torch.ones(11), unit(0)).applied
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.checkpoints.restore_shards(str(tmp_path / "none"))
    assert store.state.store_epoch == epoch and store.state.step == 2


def test_lost_units_are_counted_and_closed() -> None:
    store = new_store()
    worker = DirectWorker(store, "worker:0", make_spec(SHAPES))
    worker.create(torch.zeros(11))
    worker.commit(torch.ones(11), unit(0))
    worker.close(unit(0))
    worker.commit(torch.ones(11), unit(1))
    assert store.checkpoints.mark_lost({(1, 0): UnitBitmap.of([0, 1, 2, 5])}) == 3
    assert store.checkpoints.describe_units().units.open == ()
    assert not worker.commit(torch.ones(11), unit(5)).applied


def test_how_many_updates_a_unit_has_here_is_known_from_those_that_are_closed() -> None:
    store = new_store()
    worker = DirectWorker(store, "worker:0", make_spec(SHAPES))
    worker.create(torch.zeros(11))
    for ordinal in range(2):
        worker.commit(torch.ones(11), unit(0), ordinal=ordinal)
    worker.close(unit(0), num_updates=2)
    worker.commit(torch.ones(11), unit(1))
    worker.close(unit(1), num_updates=1)
    worker.commit(torch.ones(11), unit(2))
    assert store.checkpoints.describe_units().units.halves == {(1, 0): UnitBitmap.of([2])}
    assert UnitLedger.from_json(store.state.units.to_json()).describe() == store.state.units.describe()


def test_a_unit_is_a_half_before_any_is_closed_here_where_another_has_more_or_an_optimizer_had_no_update() -> None:
    """A ps that went back to a checkpoint of then said that it had all of a batch of which it lacked an update."""
    store = new_store()
    first, second = (
        DirectWorker(store, f"worker:{group}", make_spec(SHAPES, group=group, prefix=name))
        for group, name in enumerate("ab", start=1)
    )
    first.create(torch.zeros(11))
    first.commit(torch.ones(11), unit(0))
    assert not store.checkpoints.describe_units().units.halves, "of one optimizer it has all"
    second.create(torch.zeros(11))
    assert store.checkpoints.describe_units().units.halves == {(1, 0): UnitBitmap.of([0])}
    second.commit(torch.ones(11), unit(0), ordinal=1)
    assert not store.checkpoints.describe_units().units.halves
    first.commit(torch.ones(11), unit(1))
    assert store.checkpoints.describe_units().units.halves == {(1, 0): UnitBitmap.of([1])}


def test_a_batch_that_its_script_left_between_two_steps_does_not_say_how_many_updates_others_have() -> None:
    """An error that the script caught closed it with one of two; from then on dead workers' halves passed for whole."""
    store = new_store()
    first, second = (
        DirectWorker(store, f"worker:{group}", make_spec(SHAPES, group=group, prefix=name))
        for group, name in enumerate("ab", start=1)
    )
    for worker in (first, second):
        worker.create(torch.zeros(11))
        worker.commit(torch.ones(11), unit(0), ordinal=worker is second)
    first.commit(torch.ones(11), unit(1))
    first.close(unit(1), num_updates=1)
    first.commit(torch.ones(11), unit(2))
    assert store.checkpoints.describe_units().units.halves == {(1, 0): UnitBitmap.of([2])}


def test_units_of_one_update_are_halves_alike() -> None:
    """Two optimizers accumulate over several batches; where a worker died between their updates, the ps said that it
    has all of these."""
    store = new_store()
    for index in range(2):
        update = Update((Unit(1, 0, 2 * index), Unit(1, 0, 2 * index + 1)), 0)
        store.state.units.record(update, 1, (1,))
    assert not store.checkpoints.describe_units().units.halves
    store.state.units.record(update._replace(ordinal=1), 1, (2,))
    assert store.checkpoints.describe_units().units.halves == {(1, 0): UnitBitmap.of([0, 1])}


def test_a_unit_is_a_half_where_others_had_more_among_another_number_of_ps() -> None:
    """Of the first one begun after that nobody knew it, and the rest was lost untold with its worker."""
    store = new_store()
    worker = DirectWorker(store, "worker:0", make_spec(SHAPES))
    worker.create(torch.zeros(11))
    for ordinal in range(2):
        worker.commit(torch.ones(11), unit(0), ordinal=ordinal)
    store.state.units.mark_lost({(1, 0): UnitBitmap.of([0])})
    store.state.units, _ = UnitLedger.joined([store.state.units])
    assert not store.checkpoints.describe_units().units.halves
    worker.commit(torch.ones(11), unit(1))
    assert store.checkpoints.describe_units().units.halves == {(1, 0): UnitBitmap.of([1])}


def test_a_unit_of_which_its_worker_counts_more_is_a_half() -> None:
    """It came in half from a checkpoint of another number of ps: how many others had here was not known, and the rest
    of it, which another process had, was lost untold."""
    store = new_store()
    worker = DirectWorker(store, "worker:0", make_spec(SHAPES))
    worker.create(torch.zeros(11))
    worker.commit(torch.ones(11), unit(0))
    assert not store.checkpoints.describe_units().units.halves
    store.state.units, _ = UnitLedger.joined([store.state.units])
    worker.close(unit(0), num_updates=2)
    assert store.checkpoints.describe_units().units.halves == {(1, 0): UnitBitmap.of([0])}
    assert UnitLedger.from_json(store.state.units.to_json()).describe() == store.state.units.describe()
    assert store.checkpoints.mark_lost({(1, 0): UnitBitmap.of([0])}) == 1
    assert not store.checkpoints.describe_units().units.halves


def test_groups_survive_a_file_only_as_they_are(tmp_path: pathlib.Path) -> None:
    store = new_store()
    worker = DirectWorker(store, "worker:0", make_spec(SHAPES))
    worker.create(torch.zeros(11))
    path = checkpoint(tmp_path, [store], 0)
    restored = new_store()
    restored.checkpoints.restore_shards(str(path))
    other = dataclasses.replace(make_spec(SHAPES), optimizer="Adam")
    with pytest.raises(Exception, match="expected optimizer SGD, got Adam"):
        DirectWorker(restored, "worker:0", other).create()
    text = (path / "ps-0.json").read_text().replace('"num_rows":4', '"num_rows":3')
    (path / "ps-0.json").write_text(text)
    with pytest.raises(CheckpointError):
        new_store().checkpoints.restore_shards(str(path))


def test_a_call_to_go_back_that_is_late_does_not_go_back_a_second_time(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chief repeats a call that it had no answer to: training may have gone on when the first is done reading."""
    store = new_store()
    early, late = (checkpoint(tmp_path / name, [store], 0) for name in ("early", "late"))
    check, reads, answers = snapshot.check, threading.Event(), threading.Event()

    def check_late(path: pathlib.Path, *more: Any) -> bool:
        if path == early:  # on a disk that does not answer yet
            reads.set()
            assert answers.wait(60)
        return check(path, *more)

    monkeypatch.setattr(snapshot, "check", check_late)
    first = in_thread(lambda: store.checkpoints.restore_shards(str(early)))
    assert reads.wait(60)
    epoch = store.checkpoints.restore_shards(str(late))
    answers.set()
    assert first.result() == store.state.store_epoch == epoch


@pytest.mark.parametrize("index", [0, 1])
def test_what_a_checkpoint_has_in_another_group_or_ps_does_not_begin_anew(tmp_path: pathlib.Path, index: int) -> None:
    """A model with one table more numbers its groups otherwise, and places its variables elsewhere."""
    stores = [new_store(at) for at in range(2)]
    for store, name in zip(stores, ("weight", "bias"), strict=True):
        DirectWorker(store, "worker:0", make_spec([(4,)], prefix=name)).create(torch.ones(4))
    path = checkpoint(tmp_path, stores, 1)
    store = new_store(index)
    store.checkpoints.restore_shards(str(path))
    with pytest.raises(VariableError, match=r"weight0: row 0 is placed twice\. .* a checkpoint directory of its own"):
        DirectWorker(store, "worker:0", make_spec([(4,)], group=2, prefix="weight")).create()
    assert DirectWorker(store, "worker:0", make_spec([(4,)], group=2, prefix="new")).create(torch.ones(4))
