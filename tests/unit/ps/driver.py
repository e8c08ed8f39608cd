"""A worker that talks to a store directly: no sockets."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stratagem.checkpoint.durable import hash_file
from stratagem.checkpoint.manifest import MANIFEST, encode
from stratagem.cluster.units import Unit, Update
from stratagem.errors import StratagemError
from stratagem.ps.frames import WEIGHTS, kind_of
from stratagem.ps.published import HeldFrame
from stratagem.ps.requests import (
    AssignValues,
    CommitResult,
    CommitUpdate,
    Facts,
    FrameKind,
    GroupCommit,
    PrepareUpdate,
    PullResult,
    PullWeights,
    RequestedSlice,
    Sender,
    TransferRef,
    UpdateAction,
    Version,
)
from stratagem.ps.shard_group import Parts, ShardGroup
from stratagem.ps.specs import GroupSpec, ShardSpec
from stratagem.ps.store import Store
from stratagem.ps.units import UnitClose
from stratagem.rpc.codec import decode_frame, encode_frame
from stratagem.rpc.generated import frame_pb2


class LocalCall:
    """A call from this process: its caller is always there."""

    def is_active(self) -> bool:
        return True


CALL = LocalCall()
CHIEF = Sender("chief:0", 1)


def make_spec(
    shapes: Sequence[tuple[int, ...]], optimizer: str = "SGD", group: int = 1, prefix: str = "v"
) -> GroupSpec:
    """A group of whole float32 variables."""
    shards: list[ShardSpec] = []
    for index, shape in enumerate(shapes):
        offset = shards[-1].stop if shards else 0
        shards.append(ShardSpec(f"{prefix}{index}", shape, 0, shape[0] if shape else 1, offset))
    return GroupSpec(group, optimizer, torch.float32, tuple(shards))


def update(
    group: ShardGroup,
    parts: Parts,
    present: Sequence[bool],
    hyper_parameters: Sequence[Mapping[str, Any]],
    scale: float = 1.0,
) -> None:
    """One update of one group."""
    group.prepare(parts, present, hyper_parameters)
    group.apply(parts, present, scale)


def staged_bytes(store: Store) -> int:
    """Payload bytes that wait for a commit."""
    transfers = [each for kept in store.state.staging._buffers.values() for each in kept.transfers.values()]
    return sum(piece.nbytes for each in transfers for parts in each.parts.values() for piece in parts.values())


class ListLane:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.frames: list[HeldFrame] = []
        self.answers: list[tuple[int, bytes]] = []
        self.closed: StratagemError | None = None

    def room(self, group: int, offset: int, num_elements: int, dtype: torch.dtype) -> HeldFrame:
        return HeldFrame(group, offset, torch.empty(num_elements, dtype=dtype))

    def hold(self, transfer: int, group: int, offset: int, piece: torch.Tensor) -> HeldFrame:
        return HeldFrame(group, offset, piece.clone())

    def send(self, transfer: int, frame: HeldFrame) -> None:
        self.frames.append(frame)
        self.messages.append(encode_frame(WEIGHTS, transfer, frame.group, frame.offset, frame.tensor))

    def close(self, error: StratagemError) -> None:
        self.closed = error

    def answer(self, kind: int, transfer: int, message: bytes) -> None:
        self.answers.append((kind, message))

    def corked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_active(self) -> bool:
        return True


class DirectWorker:
    """One process life of a worker."""

    def __init__(self, store: Store, task: str, spec: GroupSpec, incarnation: int = 1) -> None:
        self.store, self.spec = store, spec
        self.sender = Sender(task, incarnation)
        self.sequence = 0
        self.transfer = 0
        self.hyper: dict[str, Any] = {"lr": 0.1}
        self.have: Version | None = None
        self.connect()

    def connect(self) -> None:
        """Introduces itself and opens a lane."""
        greeting = self.store.hello(self.sender, self.sequence + 1)
        self.sequence = greeting.next_sequence - 1
        self.lane = ListLane()
        self.store.open_lane(self.sender, self.lane)

    def numbered(self, sequence: int | None = None) -> Sender:
        """This sender with the next number, or a given one."""
        if sequence is None:
            self.sequence += 1
            sequence = self.sequence
        return Sender(self.sender.task, self.sender.incarnation, sequence)

    def create(self, values: torch.Tensor | None = None) -> bool:
        """Creates or attaches; assigns ``values`` where asked to. True when it was asked."""
        initialize, _ = self.store.variables.create_variables(self.numbered(), [self.spec], values is not None, CALL)
        if initialize and values is not None:
            self.assign(values)
        return bool(initialize)

    def assign(self, values: torch.Tensor, slot: str = "", **progress: Any) -> None:
        """Assigns weights or a slot."""
        ref = self.stage(values, FrameKind.VALUES)
        self.store.variables.assign_values(
            AssignValues(self.numbered(), ref, (self.spec.group,), slot, **progress), CALL
        )

    def stage(
        self, flat: torch.Tensor, kind: FrameKind = FrameKind.GRADIENT, rng: random.Random | None = None
    ) -> TransferRef:
        """Stages a flat tensor in pieces, shuffled when there is an ``rng``."""
        self.transfer += 1
        number = frame_pb2.GRADIENT if kind is FrameKind.GRADIENT else frame_pb2.VALUES
        cuts = [0, flat.numel()]
        if rng is not None:
            cuts = sorted({*cuts, *(rng.randrange(flat.numel()) for _ in range(3))})
        pieces = [(start, stop) for start, stop in itertools.pairwise(cuts) if stop > start]
        if rng is not None:
            rng.shuffle(pieces)
        for start, stop in pieces:
            message = encode_frame(number, self.transfer, self.spec.group, start, flat[start:stop])
            self.store.variables.stage(self.sender, kind_of(frame := decode_frame(message)), frame)
        return TransferRef(self.transfer, len(pieces))

    def request(
        self, ref: TransferRef, units: Sequence[Unit], ordinal: int = 0, sequence: int | None = None, **fields: Any
    ) -> CommitUpdate:
        """A commit of one group."""
        present = fields.pop("present", b"")
        self.transfer += 1
        group = GroupCommit(self.spec.group, present, (dict(self.hyper),), self.have)
        return CommitUpdate(
            self.numbered(sequence), Update(tuple(units), ordinal), ref, (group,), self.transfer, **fields
        )

    def commit(self, flat: torch.Tensor, *units: Unit, ordinal: int = 0, **fields: Any) -> CommitResult:
        """Stages and commits."""
        return self.send(self.request(self.stage(flat), units, ordinal, **fields))

    def send(self, request: CommitUpdate) -> CommitResult:
        """Commits."""
        return self.store.commits.commit_update(request, CALL)

    def prepare(
        self, ref: TransferRef, unit: Unit, part: RequestedSlice, *, present: bytes = b"", want_facts: bool = False
    ) -> Facts:
        """First phase."""
        group = GroupCommit(self.spec.group, present, (dict(self.hyper),), self.have)
        request = PrepareUpdate(self.numbered(), Update((unit,), 0), ref, (group,), part, want_facts)
        return self.store.commits.prepare_update(request, CALL)

    def pull(self, have: Version | None = None, slot: str = "", wait_s: float = 0.0) -> PullResult:
        """Pulls the group."""
        self.transfer += 1
        return self.store.variables.pull_weights(
            PullWeights(self.sender, ((self.spec.group, have),), self.transfer, slot, wait_s), CALL
        )

    def received(self) -> torch.Tensor:
        """The flat tensor that the newest transfer brought."""
        flat = torch.full((self.spec.num_elements,), torch.nan)
        frames = [decode_frame(message) for message in self.lane.messages]
        for frame in frames:
            if frame.transfer == frames[-1].transfer:
                flat[frame.offset : frame.offset + frame.tensor.numel()] = frame.tensor
        return flat

    def close(self, *units: Unit, num_updates: int = 1) -> None:
        """Closes units."""
        self.store.commits.close_units(self.sender, [UnitClose(unit, num_updates) for unit in units], CALL)


SKIP = UpdateAction.SKIP


def complete(directory: Path) -> None:
    """Writes the manifest of a checkpoint in which parameter servers have written what is there."""
    files = [
        {"ps": path.name.split(".")[0].replace("-", ":"), "name": path.name, "sha256": hash_file(path)}
        for path in directory.glob("ps-*")
    ]
    (directory / MANIFEST).write_bytes(encode({"step": 1, "chief_epoch": 1, "files": files}))


def save_all(stores: Sequence[Store], directory: Path) -> None:
    """Has all of them write a checkpoint."""
    (directory / "nonce").write_text("n")
    for store in stores:
        store.checkpoints.hold_commits(CHIEF, 5, 60, CALL)
        store.checkpoints.save_shards(5, str(directory), "n")
        store.checkpoints.release_commits(5)
    complete(directory)


def weights(store: Store, group: int = 1) -> torch.Tensor:
    """The weights as they stand."""
    return store.state.locked_groups[group].group.weights


def in_thread(function: Callable[[], Any]) -> Background:
    """Runs a call that waits."""
    return Background(function)


class Background:
    """A call in a thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self._outcome.append(function())
        except Exception as error:
            self._outcome.append(error)

    @property
    def done(self) -> bool:
        """Whether it has returned."""
        return not self._thread.is_alive()

    def result(self, timeout_s: float = 60.0) -> Any:
        """What it returned; raises what it raised."""
        self._thread.join(timeout_s)
        assert self._outcome, "the call did not return in time"
        if isinstance(self._outcome[0], Exception):
            raise self._outcome[0]
        return self._outcome[0]
