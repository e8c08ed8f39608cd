"""What one worker may take of a ps, and what is refused before anything is set aside for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stratagem.cluster.units import MAX_UNITS, Unit, UnitBitmap
from stratagem.errors import CheckpointError, ForbiddenError, LimitError, ProtocolError, SequenceError
from stratagem.ps import specs, units
from stratagem.ps.frames import kind_of
from stratagem.ps.requests import AssignValues, Sender, TransferRef
from stratagem.ps.senders import MAX_INCARNATIONS, Senders
from stratagem.ps.specs import Limits
from stratagem.ps.store import Store
from stratagem.ps.units import UnitClose, UnitLedger
from stratagem.rpc.codec import decode_frame, encode_frame
from stratagem.rpc.confinement import AllowedFolders
from stratagem.rpc.generated import frame_pb2
from tests.unit.ps.driver import CALL, CHIEF, DirectWorker, complete, make_spec, staged_bytes

SPEC = make_spec([(1000,)])


def stage(worker: DirectWorker, num_pieces: int) -> TransferRef:
    """A gradient of ones in pieces of one size."""
    worker.transfer += 1
    step = 1000 // num_pieces
    for start in range(0, 1000, step):
        message = encode_frame(frame_pb2.GRADIENT, worker.transfer, 1, start, torch.ones(step))
        worker.store.variables.stage(worker.sender, kind_of(frame := decode_frame(message)), frame)
    return TransferRef(worker.transfer, num_pieces)


def started(**limits: int) -> tuple[Store, DirectWorker]:
    store = Store(limits=Limits(**limits))
    worker = DirectWorker(store, "worker:0", SPEC)
    worker.create(torch.zeros(1000))
    return store, worker


def test_many_small_frames_cost_more_than_their_elements() -> None:
    store, worker = started(max_peer_bytes=8192)
    stage(worker, 4)
    with pytest.raises(LimitError, match=r"over max_peer_bytes of 8,192"):
        stage(worker, 100)
    other = DirectWorker(store, "worker:1", SPEC)
    other.create()
    stage(other, 4)  # has a share of its own


def test_what_was_committed_or_replaced_counts_no_more() -> None:
    store, worker = started(max_peer_bytes=8192)
    for index in range(5):
        stage(worker, 4)
        worker.send(worker.request(stage(worker, 4), [Unit(1, 0, index)]))
    assert staged_bytes(store) == 0
    assert [buffers.num_bytes for buffers in store.state.staging._buffers.values()] == [0]


def test_a_share_that_has_grown_since_it_was_used_up_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "_SPARE_BYTES", 0)
    store, worker = started()
    with pytest.raises(LimitError, match=r"over max_peer_bytes of 16,000"):
        stage(worker, 100)
    DirectWorker(store, "worker:1", make_spec([(100_000,)], group=2, prefix="more")).create(torch.zeros(100_000))
    stage(worker, 100)


def test_the_share_grows_with_what_is_held() -> None:
    assert Limits().peer_bytes(0) == 64 << 20
    assert Limits().peer_bytes(1 << 30) == (64 << 20) + (4 << 30)
    assert Limits(max_peer_bytes=5).peer_bytes(1 << 30) == 5


def test_lives_that_introduce_themselves_are_counted() -> None:
    senders = Senders(max_peers=10)
    for incarnation in range(MAX_INCARNATIONS):
        senders.hello(Sender("worker:0", incarnation), 1)
    senders.hello(Sender("worker:0", 0), 1)  # known already
    with pytest.raises(LimitError, match=rf"{MAX_INCARNATIONS} incarnations of worker:0"):
        senders.hello(Sender("worker:0", 99), 1)
    senders.hello(Sender("worker:1", 1), 1)
    senders.hello(Sender("worker:2", 1), 1)
    with pytest.raises(LimitError, match="10 incarnations are remembered here, which is max_peers"):
        senders.hello(Sender("worker:3", 1), 1)
    senders.fence("worker:0", MAX_INCARNATIONS)
    senders.hello(Sender("worker:3", 1), 1)
    with pytest.raises(SequenceError, match="next request below"):
        senders.hello(Sender("worker:4", 1), (1 << 64) - 1)


def test_closed_units_of_made_up_epochs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "MAX_LEDGER_BYTES", 4096)
    ledger = UnitLedger()
    ledger.close([UnitClose(Unit(1, 0, index), 0) for index in range(8000)])
    with pytest.raises(LimitError, match="bitmaps of all epochs"):
        ledger.close([UnitClose(Unit(1, epoch, 8000), 0) for epoch in range(1, 5)])
    ledger.close([UnitClose(Unit(1, 0, 8001), 0)])  # in an epoch that has its bitmap
    with pytest.raises(LimitError, match="bitmaps of all epochs"):
        ledger.mark_lost({(2, epoch): UnitBitmap.of([8000]) for epoch in range(4)})
    with pytest.raises(LimitError, match="an epoch has at most"):
        ledger.mark_lost({(1, 0): UnitBitmap.of([MAX_UNITS])})
    # What a snapshot brings counts as well.
    full = UnitLedger.from_json({"closed": [[1, 0, "ff" * 3000]], "open": []})
    with pytest.raises(LimitError, match="bitmaps of all epochs"):
        full.close([UnitClose(Unit(1, 1, 8000), 0)])
    with pytest.raises(LimitError, match="bitmaps of all epochs"):
        UnitLedger.from_json({"closed": [[1, 0, "ff" * 3000], [1, 1, "ff" * 3000]], "open": []})


def test_a_number_of_another_request_is_no_resend() -> None:
    store, worker = started()
    number = worker.numbered()
    store.commits.close_units(number, [], CALL)
    with pytest.raises(SequenceError, match="belongs to another one"):
        store.variables.assign_values(AssignValues(number, TransferRef(0, 0), (1,)), CALL)


@pytest.mark.parametrize("hold_s", [float("nan"), float("inf"), -1.0, 1e6])
def test_commits_are_held_for_a_while_only(hold_s: float) -> None:
    store, _ = started()
    with pytest.raises(ProtocolError, match="0 to 300 seconds"):
        store.checkpoints.hold_commits(CHIEF, 1, hold_s, CALL)
    store.checkpoints.hold_commits(CHIEF, 1, 1.0, CALL)


def test_checkpoints_stay_in_their_folders(tmp_path: Path) -> None:
    allowed, elsewhere = tmp_path / "allowed", tmp_path / "elsewhere"
    for folder in (allowed, elsewhere):
        folder.mkdir()
        (folder / "nonce").write_text("n")
    (allowed / "link").symlink_to(elsewhere)
    store = Store(folders=AllowedFolders([str(allowed)]))
    DirectWorker(store, "worker:0", SPEC).create(torch.zeros(1000))
    store.checkpoints.hold_commits(CHIEF, 1, 10.0, CALL)
    for asked in (elsewhere, allowed / "link", allowed / ".." / "elsewhere"):
        with pytest.raises(ForbiddenError, match="--checkpoint-roots"):
            store.checkpoints.save_shards(1, str(asked), "n")
        with pytest.raises(ForbiddenError, match="--checkpoint-roots"):
            store.checkpoints.restore_shards(str(asked))
    assert [path.name for path in elsewhere.iterdir()] == ["nonce"]
    store.checkpoints.save_shards(1, str(allowed), "n")
    complete(allowed)
    store.checkpoints.restore_shards(str(allowed))


def test_a_checkpoint_that_promises_more_than_it_has_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "nonce").write_text("n")
    store, _ = started()
    store.checkpoints.hold_commits(CHIEF, 1, 10.0, CALL)
    store.checkpoints.save_shards(1, str(tmp_path), "n")
    part = tmp_path / "ps-0.json"
    part.write_text(part.read_text().replace("1000", str(1 << 44)))
    complete(tmp_path)
    with pytest.raises(CheckpointError, match="their file is shorter"):
        store.checkpoints.restore_shards(str(tmp_path))
