"""A crowd of connections that mean no good, each acting about once a second: ``python -m tests.fuzz.crowd JSON``.

Silent ones, noise, streams that stay open and say nothing, readers that do not read, mutated requests, visitors of the
door without a token. The argument says the addresses and the number; prints a line when all have acted, and what they
did when standard input ends.
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection_pb2

from stratagem.rpc.channels import connect
from stratagem.rpc.generated import common_pb2, lane_pb2, ps_pb2_grpc
from tests.fuzz.mutations import mutated
from tests.fuzz.seeds import ATTACKERS, path_of, request_of, unary_methods

PACE_S = 1.0
NUM_UNREAD = 50
"""Replies that a reader who does not read asks for at once: more than connections hold."""
STACK_BYTES = 256 << 10
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class Crowd:
    """The connections.

    Args:
        addresses: of the servers: "chief", "ps", "worker".
        number: of connections.
    """

    def __init__(self, addresses: dict[str, str], number: int) -> None:
        self.acts: collections.Counter[str] = collections.Counter()
        self._addresses = addresses
        self._over = threading.Event()
        self._guard = threading.Lock()
        kinds = [self._silent, self._noise, self._idle_stream, self._unread, self._mutated, self._visitor]
        self._threads = [
            threading.Thread(target=self._act, args=(kinds[index % len(kinds)], index), daemon=True)
            for index in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends all."""
        self._over.set()
        for thread in self._threads:
            thread.join(30)

    def _act(self, kind: Callable[[random.Random], Iterator[None]], index: int) -> None:
        rng = random.Random(index)
        self._over.wait(rng.random() * PACE_S)
        while not self._over.is_set():
            with contextlib.suppress(OSError, grpc.RpcError):
                for _ in kind(rng):
                    with self._guard:
                        self.acts[kind.__name__.strip("_")] += 1
                    if self._over.wait(PACE_S):
                        return
            self._over.wait(PACE_S)

    def _address(self, rng: random.Random) -> tuple[str, int]:
        host, port = rng.choice([*self._addresses.values()]).rsplit(":", 1)
        return host, int(port)

    def _silent(self, rng: random.Random) -> Iterator[None]:
        with socket.create_connection(self._address(rng), 10) as sock:
            sock.settimeout(0.01)
            while True:
                yield
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(4096):
                        return

    def _noise(self, rng: random.Random) -> Iterator[None]:
        with socket.create_connection(self._address(rng), 10) as sock:
            while True:
                sock.sendall(rng.randbytes(rng.randrange(1, 400)))
                yield

    def _idle_stream(self, rng: random.Random) -> Iterator[None]:
        channel = connect(self._addresses["ps"])
        try:
            call: Any = channel.stream_stream("/stratagem.ParameterServer/Transfer", None, None)
            metadata = (("stratagem-task", f"worker:{rng.randrange(1000, 2000)}"), ("stratagem-incarnation", "1"))
            stream = call(self._nothing(), metadata=metadata)
            while stream.is_active():
                yield
        finally:
            channel.close()

    def _unread(self, rng: random.Random) -> Iterator[None]:
        channel = connect(rng.choice([self._addresses["chief"], self._addresses["ps"]]))
        try:
            call: Any = channel.stream_stream(REFLECTION, None, None)
            request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="stratagem.Chief")
            stream = call(self._many(request.SerializeToString()))
            while stream.is_active():
                yield
        finally:
            channel.close()

    def _mutated(self, rng: random.Random) -> Iterator[None]:
        server = rng.choice([*self._addresses])
        channel = connect(self._addresses[server])
        try:
            while True:
                method = rng.choice([method for method in unary_methods(server) if method.name not in DEADLY])
                request = request_of(method, rng.choice([*ATTACKERS])).SerializeToString()
                call: Any = channel.unary_unary(path_of(method), None, None)
                with contextlib.suppress(grpc.RpcError):
                    call(mutated(request, rng), timeout=PACE_S)
                yield
        finally:
            channel.close()

    def _visitor(self, rng: random.Random) -> Iterator[None]:
        channel = connect(self._addresses["ps"])
        try:
            sender = common_pb2.Sender(task=f"worker:{rng.randrange(2000, 3000)}", incarnation=1)
            request = lane_pb2.OpenLaneRequest(sender=sender, kind=lane_pb2.TCP, purpose="up")
            ticket = ps_pb2_grpc.ParameterServerStub(channel).OpenLane(request, timeout=10)
        finally:
            channel.close()
        with socket.create_connection(("127.0.0.1", ticket.port), 10) as sock:
            sock.settimeout(0.01)
            while True:
                yield
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(1):
                        return

    def _nothing(self) -> Iterator[bytes]:
        self._over.wait()
        yield from ()

    def _many(self, request: bytes) -> Iterator[bytes]:
        for _ in range(NUM_UNREAD):
            yield request
        while not self._over.wait(PACE_S):
            yield request


DEADLY = ("Fence", "HoldCommits", "RestoreShards", "AssignValues", "Abort")
"""What nobody but members may say. Without certificates everybody may, and a job ends by it."""


def main() -> None:
    threading.stack_size(STACK_BYTES)
    told = json.loads(sys.argv[1])
    crowd = Crowd(told["addresses"], told["number"])
    while sum(crowd.acts.values()) < 2 * told["number"] or len(crowd.acts) < min(told["number"], 6):
        threading.Event().wait(0.05)
    print("all are there", flush=True)
    sys.stdin.read()
    crowd.close()
    print(json.dumps(crowd.acts), flush=True)


if __name__ == "__main__":
    main()
