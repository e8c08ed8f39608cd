"""Connected groups for the contract suite: every rank is a thread of this process."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, Generic, Protocol, TypeVar

import grpc
import pytest
import torch

from stratagem.errors import PeerUnavailableError
from stratagem.rpc.channels import connect
from stratagem.rpc.codec import Frame
from stratagem.rpc.grpc_lane import EXCHANGE_METHOD, GrpcLane, ServedGrpcLane
from stratagem.rpc.lane import Pieces, Place, ReceivingLane, SendingLane
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.tcp_lane import TcpReceiver, TcpSender, tune
from stratagem.worker.ring import host_signals
from stratagem.worker.ring.group import Group
from stratagem.worker.ring.host_group import HostGroup
from stratagem.worker.ring.ring_group import RingGroup
from stratagem.worker.ring.two_level_group import TwoLevelGroup

T = TypeVar("T")
TIMEOUT_S = 20.0
JOIN_S = 60.0
CHUNK_BYTES = 4096  # small, so that short tensors take several chunks
LanePair = tuple[SendingLane, ReceivingLane]


def tcp_lane(stack: contextlib.ExitStack) -> LanePair:
    """A lane over loopback: where it is sent into, and where it comes out."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        outward = socket.create_connection(listener.getsockname())
        inward, _ = listener.accept()
    tune(outward)
    tune(inward)
    return TcpSender(outward, "the next", BytesMeter()), TcpReceiver(inward, "the last", BytesMeter())


def grpc_lane(stack: contextlib.ExitStack) -> LanePair:
    """The same over a gRPC stream."""
    receiver = ServedGrpcLane("the last", BytesMeter())

    def exchange(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        receiver.serve(messages, context.cancel)
        yield from ()

    pool = stack.enter_context(futures.ThreadPoolExecutor(1))
    server = grpc.server(pool, options=[("grpc.max_receive_message_length", -1)])
    handlers = {"Exchange": grpc.stream_stream_rpc_method_handler(exchange)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("stratagem.Worker", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    stack.callback(lambda: server.stop(0).wait())
    channel = connect(f"127.0.0.1:{port}")
    stack.callback(channel.close)
    return GrpcLane(channel, EXCHANGE_METHOD, (), "the next", BytesMeter()), receiver


class LateLane:
    """A lane within the process that reads what it sends as late as a lane may: when the receiver asks for it."""

    name = "memory"

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames: collections.deque[tuple[int, int, int, int, Pieces]] = collections.deque()
        self._error: PeerUnavailableError | None = None

    @property
    def alive(self) -> bool:
        return self._error is None

    def takes_at_once(self, num_bytes: int) -> bool:
        return True

    def send(self, kind: int, transfer: int, group: int, offset: int, pieces: Pieces, num_elements: int) -> None:
        with self._changed:
            if self._error is not None:
                raise self._error
            self._frames.append((kind, transfer, group, offset, pieces))
            self._changed.notify_all()

    def flush(self, deadline: float) -> None:
        self._wait(lambda: not self._frames, deadline)

    def receive(self, transfer: int, deadline: float, into: torch.Tensor | Place | None = None) -> Frame:
        with self._changed:
            self._wait(lambda: bool(self._frames), deadline)
            kind, number, group, offset, pieces = self._frames.popleft()
            self._changed.notify_all()
            return Frame(kind, number, group, offset, torch.cat(list(pieces())))

    def forget(self, transfer: int) -> None:
        raise AssertionError("a ring forgets nothing")

    def close(self, reason: str) -> None:
        with self._changed:
            self._error = self._error or PeerUnavailableError(reason)
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], deadline: float) -> None:
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            came = self._changed.wait_for(lambda: condition() or self._error is not None, left)
            if not condition():
                raise self._error or PeerUnavailableError("nothing moves" if not came else "the lane broke")


def late_lane(stack: contextlib.ExitStack) -> LanePair:
    """Both ends are one object."""
    lane = LateLane()
    return lane, lane


class MakeRing(Protocol):
    """Makes the ranks of one ring."""

    def __call__(self, size: int, stack: contextlib.ExitStack, timeout_s: float) -> list[RingGroup]: ...


def ring_over(make_lane: Callable[[contextlib.ExitStack], LanePair], wire_dtype: torch.dtype | None = None) -> MakeRing:
    """Rings over lanes of one kind."""

    def make(size: int, stack: contextlib.ExitStack, timeout_s: float) -> list[RingGroup]:
        lanes = [make_lane(stack) for _ in range(size)] if size > 1 else []
        return [
            RingGroup(
                rank,
                size,
                lanes[rank][0] if lanes else None,
                lanes[rank - 1][1] if lanes else None,
                chunk_bytes=CHUNK_BYTES,
                wire_dtype=wire_dtype,
                timeout_s=timeout_s,
            )
            for rank in range(size)
        ]

    return make


def host_groups(size: int, stack: contextlib.ExitStack, timeout_s: float) -> list[HostGroup]:
    """Shared memory among threads; the ranks make their groups together."""
    links: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            links[low][high], links[high][low] = socket.socketpair()
    make = functools.partial(HostGroup, timeout_s=timeout_s)
    return in_threads([functools.partial(make, rank, size, links[rank]) for rank in range(size)])


def host_groups_on_sockets(size: int, stack: contextlib.ExitStack, timeout_s: float) -> list[HostGroup]:
    """As on a machine whose processors reorder what memory sees."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_signals, "IS_ORDERED", False)
        return host_groups(size, stack, timeout_s)


def two_level_groups(size: int, stack: contextlib.ExitStack, timeout_s: float) -> list[TwoLevelGroup]:
    """Even ranks on one host, odd ranks on another."""
    hosts = [list(range(first, size, 2)) for first in range(min(2, size))]
    leaders = [ranks[0] for ranks in hosts]
    make_ring = ring_over(tcp_lane)
    flat, between = make_ring(size, stack, timeout_s), make_ring(len(hosts), stack, timeout_s)
    groups: list[TwoLevelGroup | None] = [None] * size
    for number, ranks in enumerate(hosts):
        for host, rank in zip(host_groups(len(ranks), stack, timeout_s), ranks, strict=True):
            ring = between[number] if rank == ranks[0] else None
            groups[rank] = TwoLevelGroup(host, ring, flat[rank], host_ranks=ranks, leader_ranks=leaders)
    return [group for group in groups if group is not None]


class MakeGroups(Protocol):
    """Makes connected groups, one for each rank; ``stack`` frees what is left after the groups are closed."""

    def __call__(self, size: int, stack: contextlib.ExitStack, timeout_s: float) -> Sequence[Group]: ...


FACTORIES: dict[str, MakeGroups] = {
    "ring over memory": ring_over(late_lane),
    "ring over tcp": ring_over(tcp_lane),
    "ring over grpc": ring_over(grpc_lane),
    "shm": host_groups,
    "shm, signals on sockets": host_groups_on_sockets,
    "two levels": two_level_groups,
}
"""A new kind of group gets a row here, and has to pass the whole suite."""


@contextlib.contextmanager
def connected(kind: str, size: int, timeout_s: float = TIMEOUT_S) -> Iterator[Sequence[Group]]:
    """The ranks of one group, closed at the end."""
    with contextlib.ExitStack() as stack:
        made = FACTORIES[kind](size, stack, timeout_s)
        for group in made:
            stack.callback(group.close, "the test is over")
        yield made


@dataclasses.dataclass
class Outcome(Generic[T]):
    """What became of one rank's call."""

    values: list[T] = dataclasses.field(default_factory=list)
    """One, or none after an error."""
    error: BaseException | None = None


def outcomes_of(calls: Sequence[Callable[[], T]]) -> list[Outcome[T]]:
    """Runs every call in a thread of its own, to its end, whatever that is."""
    outcomes: list[Outcome[T]] = [Outcome() for _ in calls]

    def run(outcome: Outcome[T], call: Callable[[], T]) -> None:
        try:
            outcome.values.append(call())
        except BaseException as error:
            outcome.error = error

    threads = [
        threading.Thread(target=run, args=pair, name=f"rank-{rank}", daemon=True)
        for rank, pair in enumerate(zip(outcomes, calls, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), f"{thread.name} does not end"
    return outcomes


def in_threads(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Runs every call in a thread of its own; raises the first rank's error when all have ended."""
    outcomes = outcomes_of(calls)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.values[0] for outcome in outcomes]
