"""Ways to send what nobody expects. Each gives what came of it, counted by name."""

from __future__ import annotations

import collections
import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from stratagem.errors import PeerUnavailableError
from stratagem.rpc.channels import connect
from stratagem.rpc.generated import common_pb2, lane_pb2, ps_pb2_grpc, worker_pb2_grpc
from stratagem.rpc.lane_listener import LaneTicket, connect_lane
from tests.fuzz.mutations import distorted, mutated
from tests.fuzz.seeds import ATTACKERS, frames, path_of, request_of, session_requests, unary_methods

Outcomes = collections.Counter[str]
CALL_TIMEOUT_S = 0.5
WINDOW = 48
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_TCP_HEADER = struct.Struct("<4sBB2xIQQQ")
_SHM_MESSAGE = struct.Struct("<4sBB2xIQQQIQI4x")


class Requests:
    """Mutated requests of every method, ``WINDOW`` at once.

    Args:
        addresses: of each server, by its name.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._channels = {server: connect(address) for server, address in addresses.items()}
        self._methods = [
            (self._channels[server].unary_unary(path_of(method), None, None), request_of(method, attacker))
            for server in addresses
            for method in unary_methods(server)
            for attacker in ATTACKERS
        ]

    def run(self, rng: random.Random, count: int) -> Outcomes:
        """Sends ``count`` of them."""
        outcomes = Outcomes()
        room = threading.Semaphore(WINDOW)
        calls = []
        for _ in range(count):
            call, request = rng.choice(self._methods)
            if rng.randrange(4):
                twin = type(request)()
                twin.CopyFrom(request)
                data = distorted(twin, rng)
            else:
                data = mutated(request.SerializeToString(), rng)
            room.acquire()
            calls.append(call.future(data, timeout=CALL_TIMEOUT_S))
            calls[-1].add_done_callback(lambda _: room.release())
        for each in calls:
            outcomes[_code(each)] += 1
        return outcomes

    def close(self) -> None:
        """Hangs up."""
        for channel in self._channels.values():
            channel.close()


class Streams:
    """Mutated frames and session messages, each on a stream of its own."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._channels = {server: connect(address) for server, address in addresses.items()}
        self._transfer = self._channels["ps"].stream_stream("/stratagem.ParameterServer/Transfer", None, None)
        self._session = self._channels["chief"].stream_stream("/stratagem.Chief/Session", None, None)
        self._exchange = self._channels["worker"].stream_stream("/stratagem.Worker/Exchange", None, None)
        self._worker = worker_pb2_grpc.WorkerStub(self._channels["worker"])
        self._frames, self._requests = [*frames()], session_requests()

    def run(self, rng: random.Random, count: int) -> Outcomes:
        """Sends ``count`` of them."""
        outcomes = Outcomes()
        for start in range(0, count, 8):
            calls = [self._open(rng) for _ in range(min(8, count - start))]
            for call in calls:
                outcomes[_end_of(call)] += 1
        return outcomes

    def close(self) -> None:
        """Hangs up."""
        for channel in self._channels.values():
            channel.close()

    def _open(self, rng: random.Random) -> Any:
        kind = rng.randrange(3)
        if kind == 0:
            message = mutated(rng.choice(self._requests), rng)
            return self._session(iter([message]), timeout=CALL_TIMEOUT_S)
        message = mutated(rng.choice(self._frames), rng)
        if kind == 1:
            metadata = (
                ("stratagem-task", rng.choice([*ATTACKERS])),
                ("stratagem-incarnation", str(rng.randrange(1, 40))),
            )
            return self._transfer(iter([message]), metadata=metadata, timeout=CALL_TIMEOUT_S)
        token = rng.randbytes(32)
        if rng.randrange(2):
            request = lane_pb2.OpenLaneRequest(
                sender=_sender(rng), generation=1, kind=lane_pb2.GRPC, purpose=str(rng.randrange(64))
            )
            with contextlib.suppress(grpc.RpcError):
                token = self._worker.OpenLane(request, timeout=5.0).token
        metadata = (("stratagem-token-bin", token),)  # type: ignore[assignment]
        return self._exchange(iter([message]), metadata=metadata, timeout=CALL_TIMEOUT_S)


class Sockets:
    """Bytes on the ports of gRPC, and at the door: without a token, with a wrong one, and behind it."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = addresses
        self._channel = connect(addresses["ps"])
        self._ps = ps_pb2_grpc.ParameterServerStub(self._channel)
        self._worker_channel = connect(addresses["worker"])
        self._worker = worker_pb2_grpc.WorkerStub(self._worker_channel)
        self._frames = [*frames()]

    def run(self, rng: random.Random, count: int) -> Outcomes:
        """Sends ``count`` of them."""
        attacks = (self._on_grpc, self._at_door, self._behind_door, self._behind_ps_door)
        return Outcomes(self._attack(rng.choices(attacks, weights=(6, 6, 2, 1))[0], rng) for _ in range(count))

    def close(self) -> None:
        """Hangs up."""
        self._channel.close()
        self._worker_channel.close()

    @staticmethod
    def _attack(attack: Callable[[random.Random], str], rng: random.Random) -> str:
        try:
            return attack(rng)
        except (grpc.RpcError, PeerUnavailableError):
            return "no ticket in"

    def _on_grpc(self, rng: random.Random) -> str:
        host, port = self._addresses[rng.choice([*self._addresses])].rsplit(":", 1)
        data = rng.randbytes(rng.randrange(1, 200)) if rng.randrange(2) else mutated(_PREFACE + rng.randbytes(64), rng)
        with socket.create_connection((host, int(port)), 10) as sock:
            return "grpc: " + _say(sock, data)

    def _at_door(self, rng: random.Random) -> str:
        ticket = self._way(rng, rng.choice((lane_pb2.TCP, lane_pb2.SHM)))
        with _connected(ticket) as sock:
            return "door: " + _say(sock, mutated(ticket.token, rng) if rng.randrange(2) else rng.randbytes(40))

    def _behind_door(self, rng: random.Random) -> str:
        """Opens a lane that nobody asked for at the worker: it is kept until the next with this purpose."""
        ticket = self._way(rng, rng.choice((lane_pb2.TCP, lane_pb2.SHM)))
        with connect_lane(ticket, "127.0.0.1", time.monotonic() + 10) as sock:
            return "lane: " + _say(sock, mutated(_tcp_frame(rng), rng))

    def _behind_ps_door(self, rng: random.Random) -> str:
        kind = rng.choice((lane_pb2.TCP, lane_pb2.SHM))
        deadline = time.monotonic() + 10
        sender = _sender(rng)
        tickets = [
            self._ps.OpenLane(lane_pb2.OpenLaneRequest(sender=sender, kind=kind, purpose=purpose), timeout=10)
            for purpose in ("up", "down")
        ]
        message = _tcp_frame(rng) if kind == lane_pb2.TCP else _shm_message(rng)
        with contextlib.ExitStack() as stack:
            up, _ = (
                stack.enter_context(
                    connect_lane(LaneTicket(ticket.token, ticket.port, ticket.socket_name), "127.0.0.1", deadline)
                )
                for ticket in tickets
            )
            return "ps lane: " + _say(up, mutated(message, rng))

    def _way(self, rng: random.Random, kind: lane_pb2.LaneKind.ValueType) -> LaneTicket:
        request = lane_pb2.OpenLaneRequest(sender=_sender(rng), generation=1, kind=kind, purpose=str(rng.randrange(64)))
        reply = self._worker.OpenLane(request, timeout=10)
        return LaneTicket(reply.token, reply.port, reply.socket_name)


def _sender(rng: random.Random) -> common_pb2.Sender:
    task = rng.choice([*ATTACKERS])
    return common_pb2.Sender(task=task, incarnation=ATTACKERS[task])


def _tcp_frame(rng: random.Random) -> bytes:
    return _TCP_HEADER.pack(b"SGF1", 1, 1, 1, 1, 0, rng.choice((0, 4, 1 << 40))) + bytes(16)


def _shm_message(rng: random.Random) -> bytes:
    magic = rng.choice((b"SGFR", b"SGSG"))
    return _SHM_MESSAGE.pack(magic, 1, 1, 1, 1, 0, rng.choice((0, 4, 1 << 40)), 0, 0, 1)


@contextlib.contextmanager
def _connected(ticket: LaneTicket) -> Iterator[socket.socket]:
    if ticket.socket_name:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(10)
            sock.connect(f"\0{ticket.socket_name}")
            yield sock
    else:
        with socket.create_connection(("127.0.0.1", ticket.port), 10) as sock:
            yield sock


def _say(sock: socket.socket, data: bytes) -> str:
    """Sends, says no more, and listens for as long as anything comes."""
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(0.05)
        while sock.recv(4096):
            pass
    except TimeoutError:
        return "left open"
    except OSError:
        return "cut off"
    return "closed"


UNEXPECTED = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)
"""How a call ends when the server's code failed."""


def _code(call: Any) -> str:
    code = call.code()
    return f"{code.name}: {call.details()[:300]}" if code in UNEXPECTED else str(code.name)


def _end_of(call: Any) -> str:
    with contextlib.suppress(grpc.RpcError):
        for _ in call:
            pass
    return _code(call)
