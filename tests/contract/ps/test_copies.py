"""Another ps follows a ps, and a third one takes over what it has: over real servers and lanes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import torch

from stratagem.cluster.membership import Member, Membership
from stratagem.errors import PeerUnavailableError, ProtocolError, StratagemError
from stratagem.ps import copies, published
from stratagem.ps.backup import Backup
from stratagem.ps.copies import StoreCopy, StoreImage, tensors_of
from stratagem.ps.following import RETRY_S, Following
from stratagem.ps.peer_client import PeerStore
from stratagem.ps.published import HeldFrame
from stratagem.ps.requests import Sender
from stratagem.ps.specs import Limits
from stratagem.ps.store import Store
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.generated import common_pb2, frame_pb2, ps_pb2
from stratagem.rpc.security import OPEN
from stratagem.rpc.session import SessionClient
from tests.contract.ps.raw_client import TIMEOUT_S, RawClient
from tests.contract.ps.serving import serving
from tests.polling import until
from tests.unit.ps.driver import ListLane

CHIEF = common_pb2.Sender(task="chief:0", incarnation=1)
SIZE = 10
BACKUP = Sender("ps:1", 7)


class Ps:
    """A ps that serves; incarnation 5 of ps:0 unless it is told otherwise."""

    def __init__(self, task: str = "ps:0", incarnation: int = 5, max_store_bytes: int = 64 << 20) -> None:
        self.store = Store(task, limits=Limits(max_store_bytes=max_store_bytes), frames_timeout_s=5.0)
        self.store.incarnation = incarnation
        self.store.state.backup = Backup(lambda: 0)
        self._closing = contextlib.ExitStack()
        self.address = self._closing.enter_context(serving(self.store)).address

    def close(self) -> None:
        assert self.store.state.backup is not None
        self.store.state.backup.close()
        self._closing.close()


class Follower:
    """ps:1, which keeps a copy of ps:0 in a thread of its own."""

    def __init__(self, primary: Ps, holder: Ps) -> None:
        self.goes_on = True
        self.error: StratagemError | None = None
        self.whole = threading.Event()
        self.copy: StoreCopy | None = None
        meter = holder.store.state.lanes
        self._peer = PeerStore(BACKUP, "ps:0", primary.address, meter, OPEN, lambda: self.goes_on)
        self._holder = holder
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._peer as peer:
                image = peer.follow("ps:0", begun=lambda: peer.confirm(0))
                self.copy = self._holder.store.copies.new_copy(image)
                peer.confirm(number := image.number + 1)
                for change in peer.changes():
                    if change is None:
                        self.copy.is_whole = True
                        self.whole.set()
                    else:
                        self.copy.commit(*change)
                        peer.confirm(number := number + 1)
        except StratagemError as error:
            self.error = error

    def close(self) -> None:
        self.goes_on = False
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def closing() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def start(closing: contextlib.ExitStack) -> Callable[..., Ps]:
    def start(*args: Any, **kwargs: Any) -> Ps:
        server = Ps(*args, **kwargs)
        closing.callback(server.close)
        return server

    return start


@pytest.fixture
def follow(closing: contextlib.ExitStack) -> Callable[[Ps, Ps], Follower]:
    def follow(primary: Ps, holder: Ps) -> Follower:
        follower = Follower(primary, holder)
        closing.callback(follower.close)
        return follower

    return follow


@pytest.fixture
def connect(closing: contextlib.ExitStack) -> Callable[[Ps], RawClient]:
    def connect(server: Ps) -> RawClient:
        client = RawClient(server.address)
        closing.callback(client.close)
        return client

    return connect


def commit(worker: RawClient, transfer: int, index: int | None) -> tuple[ps_pb2.CommitUpdateRequest, Any]:
    """A commit with Adam of a gradient that no other has; ``index`` None: of no unit."""
    ref = worker.stage(transfer, torch.arange(SIZE) + float(transfer))
    request = worker.commit_request(transfer, ref, index or 0)
    if index is None:
        request.update.ClearField("units")
    for group in request.groups:
        group.hyper_parameters[0].update({"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0})
        group.hyper_parameters[0].update({"amsgrad": False, "maximize": False})
    return request, worker.stub.CommitUpdate(request, timeout=TIMEOUT_S)


def check_equal(store: Store, other: Any) -> None:
    mine = [locked.group for _, locked in sorted(store.state.locked_groups.items())]
    theirs = [locked.group for _, locked in sorted(other.locked_groups.items())]
    assert mine and [group.spec for group in mine] == [group.spec for group in theirs]
    for one, two in zip(mine, theirs, strict=True):
        assert (one.counts, one.scalars, one.started) == (two.counts, two.scalars, two.started)
        assert (one.counter, one.num_updates, sorted(one.slots)) == (two.counter, two.num_updates, sorted(two.slots))
        assert one.num_skipped == two.num_skipped
    for (_, flat), (_, copied) in zip(tensors_of(mine), tensors_of(theirs), strict=True):
        assert torch.equal(flat, copied)
    assert store.state.units.to_json() == other.units.to_json()
    assert store.state.num_updates == other.num_updates


def take_over(worker: RawClient, server: Ps, holder: Ps, of_incarnation: int) -> str:
    request = ps_pb2.TakeOverRequest(
        sender=CHIEF,
        asked=common_pb2.Sender(task="ps:0", incarnation=server.store.incarnation),
        holder="ps:1",
        address=holder.address,
        incarnation=of_incarnation,
    )
    return str(worker.stub.TakeOver(request, timeout=TIMEOUT_S).refusal)


Start = Callable[..., Ps]
Connect = Callable[[Ps], RawClient]
Follow = Callable[[Ps, Ps], Follower]


def trained(start: Start, connect: Connect, follow: Follow) -> tuple[Ps, Ps, Follower, RawClient]:
    """ps:0, ps:1 with a whole copy of it, and a worker whose transfers up to 6 are used."""
    primary, holder = start(), start("ps:1", BACKUP.incarnation)
    worker = connect(primary)
    worker.create(torch.zeros(SIZE), "Adam")
    primary.store.state.num_moved = 3
    commit(worker, 2, 0)
    follower = follow(primary, holder)
    assert follower.whole.wait(TIMEOUT_S)
    commit(worker, 4, 1)
    return primary, holder, follower, worker


def test_what_a_ps_acknowledges_its_backup_has_bit_for_bit(start: Start, connect: Connect, follow: Follow) -> None:
    primary, _, follower, worker = trained(start, connect, follow)
    for number in range(2, 12):
        _, reply = commit(worker, 2 * number + 2, number)
        assert reply.applied and follower.copy is not None
        check_equal(primary.store, follower.copy.state)
    request = worker.commit_request(30, worker.stage(30, torch.ones(SIZE)), 20)
    request.action = ps_pb2.SKIP
    assert [each.num_skipped for each in worker.stub.CommitUpdate(request, timeout=TIMEOUT_S).versions] == [1]
    close = ps_pb2.UnitClose(unit=common_pb2.Unit(dataset=1, epoch=0, index=3), num_updates=1)
    worker.stub.CloseUnits(ps_pb2.CloseUnitsRequest(sender=worker.sender(), closes=[close]), timeout=TIMEOUT_S)
    assert follower.copy is not None and primary.store.state.units.to_json()["closed"] == [[1, 0, "08"]]
    check_equal(primary.store, follower.copy.state)


def test_a_copy_knows_what_its_ps_has_dropped(start: Start, connect: Connect, follow: Follow) -> None:
    primary, _, follower, worker = trained(start, connect, follow)
    request = worker.commit_request(6, worker.stage(6, torch.ones(SIZE)), 1)
    request.update.units.add(dataset=1, epoch=0, index=2)
    request.groups[0].hyper_parameters[0].update({"lr": 0.1})
    assert not worker.stub.CommitUpdate(request, timeout=TIMEOUT_S).applied
    assert follower.copy is not None and primary.store.state.units.to_json()["dropped"] == [[1, 0, 2]]
    check_equal(primary.store, follower.copy.state)


def test_a_copy_that_is_given_away_is_sent_as_it_lies(start: Start, connect: Connect, follow: Follow) -> None:
    """It may be as large as all else that its holder has, and changes no more."""
    _, _, follower, _ = trained(start, connect, follow)
    assert follower.copy is not None
    lane = ListLane()
    follower.copy.give(lane, 1, lambda image: None)
    lies = [group.group.weights.untyped_storage().data_ptr() for group in follower.copy.state.locked_groups.values()]
    assert lies and {frame.tensor.untyped_storage().data_ptr() for frame in lane.frames} >= {*lies}


def test_an_image_is_copied_once_to_where_its_lane_sends_from(
    start: Start, connect: Connect, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody gets an answer from the ps while it is made."""
    primary, _, _, _ = trained(start, connect, follow)
    lane, rooms = ListLane(), list[HeldFrame]()
    room = lane.room

    def noted(*what: Any) -> HeldFrame:
        rooms.append(room(*what))
        return rooms[-1]

    monkeypatch.setattr(lane, "room", noted)
    copies.send_image(primary.store.state, BACKUP, 0, lane, 1, lambda image: None)
    assert lane.frames and [id(frame) for frame in lane.frames] == [id(frame) for frame in rooms]


def test_a_ps_that_takes_over_is_the_one_that_died(start: Start, connect: Connect, follow: Follow) -> None:
    primary, holder, follower, worker = trained(start, connect, follow)
    of_unit, _ = commit(worker, 6, 2)
    of_none, reply = commit(worker, 8, None)
    heir = start(incarnation=9)
    there = connect(heir)
    assert take_over(there, heir, holder, 5) == ""
    check_equal(primary.store, heir.store.state)
    assert heir.store.state.store_epoch == primary.store.state.store_epoch
    # The worker asks for its last updates again, under their old numbers; both are done, and weights come back.
    worker_there = connect(heir)
    worker_there.sequence = worker.sequence
    for request, transfer in ((of_unit, 12), (of_none, 14)):
        request.gradients.CopyFrom(worker_there.stage(transfer, torch.ones(SIZE)))
        request.reply_transfer = transfer + 1
        request.groups[0].have.CopyFrom(reply.versions[0].version)
        again = worker_there.stub.CommitUpdate(request, timeout=TIMEOUT_S)
        now, before = again.versions[0].version, reply.versions[0].version
        assert not again.applied and (now.counter, again.versions[0].num_frames) == (before.counter, 1)
        assert now.epoch != before.epoch, "who had a version of the process that died may have had more than its copy"
    check_equal(primary.store, heir.store.state)
    _, fresh = commit(worker_there, 16, 3)
    assert fresh.applied
    # A call of before comes to its turn, which the chief has repeated: the copy lacks what was acknowledged since.
    step = heir.store.state.step
    assert (take_over(there, heir, holder, 5), heir.store.state.step) == ("", step)
    # The one that died is still there, cut off from the chief: it acknowledges nothing any more.
    request = worker.commit_request(18, worker.stage(18, torch.ones(SIZE)), 7)
    request.groups[0].CopyFrom(of_unit.groups[0])
    left_alone = worker.stub.CommitUpdate.future(request)
    until(lambda: follower.error is not None)
    assert isinstance(follower.error, PeerUnavailableError) and "was taken over" in str(follower.error)
    backup = primary.store.state.backup
    until(lambda: backup is not None and backup.words == "ps:1 broke off")
    assert not left_alone.done()


def test_a_copy_that_broke_off_is_waited_for_until_its_process_is_declared_dead(
    start: Start, connect: Connect, follow: Follow
) -> None:
    primary, _, follower, worker = trained(start, connect, follow)
    follower.close()
    backup = primary.store.state.backup
    until(lambda: backup is not None and backup.words == "ps:1 broke off")
    request = worker.commit_request(6, worker.stage(6, torch.ones(SIZE)), 2)
    request.groups[0].hyper_parameters[0].update({"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-8})
    request.groups[0].hyper_parameters[0].update({"weight_decay": 0.0, "amsgrad": False, "maximize": False})
    left_alone = worker.stub.CommitUpdate.future(request)
    until(lambda: primary.store.state.step == 3)
    assert not left_alone.done()
    want = ps_pb2.PullWeightsRequest.Want(group=1)
    pull = ps_pb2.PullWeightsRequest(sender=worker.sender(0), groups=[want], reply_transfer=98)
    assert worker.stub.PullWeights(pull, timeout=TIMEOUT_S).versions, "to show what may be gone acknowledges nothing"
    assert not left_alone.done()
    worker.stub.Fence(ps_pb2.FenceRequest(sender=CHIEF, task="ps:1", incarnation=7), timeout=TIMEOUT_S)
    assert left_alone.result(timeout=TIMEOUT_S).applied


@pytest.mark.parametrize("why", ["not whole", "of an earlier process", "none"])
def test_a_copy_that_may_lack_something_is_given_to_nobody(
    start: Start, connect: Connect, follow: Follow, why: str
) -> None:
    _, holder, follower, _ = trained(start, connect, follow)
    assert follower.copy is not None
    if why == "not whole":
        follower.copy.is_whole = False
    elif why == "none":
        holder.store.copies.kept.clear()
    heir = start(incarnation=9)
    there = connect(heir)
    refusal = take_over(there, heir, holder, 6 if why == "of an earlier process" else 5)
    assert "ps:1 has no complete copy of ps:0 (incarnation" in refusal
    assert not heir.store.state.initialized


def test_values_that_are_assigned_end_the_copy(start: Start, connect: Connect, follow: Follow) -> None:
    primary, holder, follower, worker = trained(start, connect, follow)
    ref = worker.stage(6, torch.ones(SIZE), frame_pb2.VALUES)
    assign = ps_pb2.AssignValuesRequest(sender=worker.sender(), values=ref, groups=[1])
    assigned = worker.stub.AssignValues.future(assign)
    until(lambda: follower.error is not None)
    follower.close()
    assert not assigned.done(), "somebody may take the copy, which lacks the values"
    again = follow(primary, holder)
    assigned.result(timeout=TIMEOUT_S)
    assert again.whole.wait(TIMEOUT_S) and again.copy is not None
    check_equal(primary.store, again.copy.state)


@pytest.fixture
def keep_copy(closing: contextlib.ExitStack) -> Callable[[Ps, Ps], Following]:
    """ps:1 follows ps:0 as its process does."""

    def keep_copy(primary: Ps, holder: Ps) -> Following:
        members = Member("ps:0", primary.address, 5, True), Member("ps:1", "", BACKUP.incarnation, True)
        membership = Membership(True, members, "worker:0", num_ps=2)
        session = SimpleNamespace(stopped=None, membership=membership, task="ps:1", incarnation=BACKUP.incarnation)
        following = Following(holder.store, cast(SessionClient, session), OPEN, "auto")
        closing.callback(following.close)
        return following

    return keep_copy


def test_variables_that_come_later_wait_for_no_silent_backup(
    start: Start, connect: Connect, keep_copy: Callable[[Ps, Ps], Following], caplog: pytest.LogCaptureFixture
) -> None:
    """Their values come only when the ps has answered: the backup lets go of its copy, which lacks them, before."""
    primary, holder = start(), start("ps:1", BACKUP.incarnation)
    worker, kept = connect(primary), holder.store.copies.kept
    worker.create(torch.zeros(SIZE))
    keep_copy(primary, holder)
    until(lambda: "ps:0" in kept and kept["ps:0"].is_whole)
    shard = ps_pb2.ShardSpec(variable="b", shape=[SIZE], num_rows=SIZE)
    group = ps_pb2.GroupSpec(group=2, optimizer="SGD", dtype=frame_pb2.FLOAT32, shards=[shard])
    request = ps_pb2.CreateVariablesRequest(sender=worker.sender(), groups=[group], can_initialize=True)
    creating = worker.stub.CreateVariables.future(request, timeout=TIMEOUT_S)
    until(creating.done)
    backup = primary.store.state.backup
    assert backup is not None and not backup.copy_to_drop, "nobody was silent"
    assert list(creating.result().initialize) == [2] and "ps:0" not in kept
    ref = worker.stage(3, torch.ones(SIZE), frame_pb2.VALUES, group=2)
    worker.stub.AssignValues(ps_pb2.AssignValuesRequest(sender=worker.sender(), values=ref, groups=[2]))
    until(lambda: "ps:0" in kept and kept["ps:0"].is_whole)
    check_equal(primary.store, kept["ps:0"].state)
    assert "Follow refused" not in caplog.text


def test_a_copy_for_which_there_is_no_room_is_tried_more_and_more_rarely(
    start: Start, connect: Connect, keep_copy: Callable[[Ps, Ps], Following], caplog: pytest.LogCaptureFixture
) -> None:
    """Each attempt has the other ps pause and send all that it holds, ten times a second."""
    primary, holder = start(), start("ps:1", BACKUP.incarnation, max_store_bytes=8)
    connect(primary).create(torch.zeros(SIZE))
    following = keep_copy(primary, holder)
    until(lambda: following._retry_s > 3 * RETRY_S)
    assert [record.levelname for record in caplog.records if "No copy of another ps" in record.message] == ["WARNING"]


def test_a_copy_is_made_also_after_a_failure_that_nobody_thought_of(
    start: Start,
    connect: Connect,
    keep_copy: Callable[[Ps, Ps], Following],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The thread ended, and no copy was made any more."""
    primary, holder = start(), start("ps:1", BACKUP.incarnation)
    connect(primary).create(torch.zeros(SIZE))
    new_copy, failures = holder.store.copies.new_copy, [RuntimeError("can't allocate memory")]

    def fails_first(image: StoreImage) -> StoreCopy:
        if failures:
            raise failures.pop()
        return new_copy(image)

    monkeypatch.setattr(holder.store.copies, "new_copy", fails_first)
    following = keep_copy(primary, holder)
    until(lambda: "ps:0" in holder.store.copies.kept and holder.store.copies.kept["ps:0"].is_whole)
    assert "No copy of another ps for now: can't allocate memory" in caplog.text
    assert following._retry_s == RETRY_S


def test_an_image_with_a_gap_is_no_copy(
    start: Start, connect: Connect, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as whole, with whatever was in that memory."""
    monkeypatch.setattr(published, "cut_pieces", lambda flat: [(0, flat[:4]), (0, flat[4:])])
    primary, holder = start(), start("ps:1", BACKUP.incarnation)
    connect(primary).create(torch.zeros(SIZE), "Adam")
    follower = follow(primary, holder)
    until(lambda: follower.error is not None or follower.whole.is_set())
    assert "the piece of group 1 at 4 from ps:0, got one of group 1 at 0" in str(follower.error)


def test_a_synchronous_step_is_refused(start: Start, connect: Connect) -> None:
    worker = connect(start())
    worker.create(torch.zeros(SIZE))
    request = worker.commit_request(2, worker.stage(2, torch.ones(SIZE)), 0)
    request.slice.CopyFrom(ps_pb2.StepSlice(step=1, units=request.update.units, weight=1.0, merge=ps_pb2.MEAN))
    with pytest.raises(grpc.RpcError) as caught:
        worker.stub.CommitUpdate(request, timeout=TIMEOUT_S)
    assert "for a staleness above 0" in str(error_from_rpc(caught.value, "ps:0"))


@pytest.mark.parametrize("task", ["worker:0", "ps:1"])
def test_a_ps_follows_and_nothing_else_and_a_worker_does_not_follow(start: Start, connect: Connect, task: str) -> None:
    primary = start()
    connect(primary).create(torch.zeros(SIZE))
    sender = Sender(task, 9)
    with PeerStore(sender, "ps:0", primary.address, primary.store.state.lanes, OPEN, lambda: True) as peer:
        if task == "worker:0":
            with pytest.raises(PeerUnavailableError, match="closed the lane"):
                peer.follow("ps:0")
        else:
            peer._lane.send(frame_pb2.PULL_WEIGHTS, 1, 0, 0, lambda: (b"",), 0)
            with pytest.raises(PeerUnavailableError, match="closed the lane"):
                peer._lane.receive(1, time.monotonic() + TIMEOUT_S)


def test_nobody_follows_where_no_copies_are_kept(start: Start) -> None:
    primary = start()
    primary.store.state.backup = None
    with PeerStore(BACKUP, "ps:0", primary.address, primary.store.state.lanes, OPEN, lambda: True) as peer:
        with pytest.raises(ProtocolError, match="this job keeps no copies"):
            peer.follow("ps:0")
        primary.store.state.backup = Backup(lambda: 0)
