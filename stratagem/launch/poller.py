"""Asks the chief for the status now and then, without ever blocking the launcher's loop."""

from __future__ import annotations

import grpc

from stratagem.cluster.identity import CHIEF
from stratagem.rpc.channels import connect
from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.status_view import StatusView, from_reply

INTERVAL_S = 0.5
TIMEOUT_S = 2.0


class StatusPoller:
    """Newest status of a job; a chief that does not answer leaves the last one standing."""

    def __init__(self, address: str, security: Security = OPEN) -> None:
        self.latest: StatusView | None = None
        self._address, self._security = address, security
        self._connect()
        self._call: grpc.CallFuture[chief_pb2.GetStatusReply] | None = None
        self._asked_at = float("-inf")

    def step(self, now: float) -> bool:
        """Takes an answer that has come, and asks again when it is time; whether there is a new status."""
        new = False
        if self._call is not None and self._call.done():
            call, self._call = self._call, None
            new = self._take(call)
        if self._call is None and now >= self._asked_at + INTERVAL_S:
            self._asked_at = now
            self._call = self._stub.GetStatus.future(chief_pb2.GetStatusRequest(measures=True), timeout=TIMEOUT_S)
        return new

    def ask(self, timeout_s: float) -> bool:
        """Asks and waits at most ``timeout_s`` seconds; whether there is a new status."""
        return self._take(self._stub.GetStatus.future(chief_pb2.GetStatusRequest(measures=True), timeout=timeout_s))

    def _take(self, call: grpc.CallFuture[chief_pb2.GetStatusReply]) -> bool:
        try:
            self.latest = from_reply(call.result())
        except grpc.RpcError:
            if self._security.certificates() != self._certificates:  # a channel keeps the one it was made with
                self._channel.close()
                self._connect()
            return False
        return True

    def move(self, address: str) -> None:
        self._channel.close()
        self._address = address
        self._connect()

    def _connect(self) -> None:
        self._certificates = self._security.certificates()
        self._channel = connect(self._address, CHIEF, self._security)
        self._stub = chief_pb2_grpc.ChiefStub(self._channel)

    def close(self) -> None:
        self._channel.close()
