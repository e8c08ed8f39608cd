"""One parameter server, seen from a worker: control calls in sequence, the lane, and coming back after a loss."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc

from stratagem.cluster.communication import Transport
from stratagem.errors import ConfigurationError, PeerUnavailableError
from stratagem.rpc import channels
from stratagem.rpc.codec import Frame
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.generated import chief_pb2, common_pb2, ps_pb2, ps_pb2_grpc
from stratagem.rpc.handshake import explain_refusal
from stratagem.rpc.inbox import INBOX_BYTES
from stratagem.rpc.lane import BytesMeter, Lane
from stratagem.rpc.session import SessionClient
from stratagem.worker.ps_lanes import PsLaneOpener

logger = logging.getLogger(__name__)

RETRY_S = 0.1  # between two tries to reach a ps that restarts
FRAME_OVERHEAD_BYTES = 4096  # header of a frame, generously
POLL_S = 1.0  # how often a waiting call looks whether the job has ended


class PendingCall:
    """A control call on its way; :meth:`result` waits for it."""

    def __init__(self, client: PsClient, future: Any) -> None:
        self._client = client
        self._future = future

    @property
    def done(self) -> bool:
        """Whether :meth:`result` would not wait."""
        return bool(self._future.done())

    def result(self) -> Any:
        """The reply.

        Raises:
            PeerUnavailableError: the ps is gone; see :meth:`PsClient.connect`.
            StratagemError: what the ps raised.
        """
        while True:
            try:
                return self._future.result(timeout=POLL_S)
            except grpc.FutureTimeoutError:
                try:
                    self._client.session.raise_if_stopped()
                except BaseException:
                    self._future.cancel()
                    raise
            except grpc.FutureCancelledError:
                raise PeerUnavailableError(f"the call to {self._client.task} was cancelled") from None
            except grpc.RpcError as error:
                self._client.session.raise_if_stopped()
                raise error_from_rpc(error, self._client.task) from None


class PsClient:
    """Talks to one ps.

    Args:
        session: knows where the ps is, and this worker's identity.
        index: index of the ps.
        meter: counts payload bytes.
        timeout_s: seconds to wait for a ps that restarts.
        frame_bytes: payload bytes of the frames that will be sent.
        transport: which lane to take; auto: shm on the same host, else tcp, else grpc.
        max_inbox_bytes: of a lane, see ``WorkerConfig``.
    """

    def __init__(
        self,
        session: SessionClient,
        index: int,
        meter: BytesMeter,
        timeout_s: float,
        frame_bytes: int,
        transport: Transport = "grpc",
        max_inbox_bytes: int = INBOX_BYTES,
    ) -> None:
        self.session = session
        self.index = index
        self.task = f"ps:{index}"
        self.store_epoch = 0
        self._meter = meter
        self._timeout_s = timeout_s
        self._frame_bytes = frame_bytes
        self._transport: Transport = transport
        self._max_inbox_bytes = max_inbox_bytes
        self._next_sequence = 1
        self._transfers = itertools.count(1)
        self._server_life = (0, 0)
        self._known_from = 1
        self._control: grpc.Channel | None = None
        self._lane: Lane | None = None
        self._stub: ps_pb2_grpc.ParameterServerStub

    @property
    def lane(self) -> Lane:
        """The lane to this ps."""
        if self._lane is None:
            raise PeerUnavailableError(f"there is no connection to {self.task}")
        return self._lane

    @property
    def is_connected(self) -> bool:
        """Whether there is a lane that works."""
        return self._lane is not None and self._lane.alive

    def new_transfer(self) -> int:
        """An id that no transfer of this worker to this ps had."""
        return next(self._transfers)

    def connect(self) -> None:
        """Opens the connections and agrees on sequence numbers; waits for a ps that restarts.

        Raises:
            PeerUnavailableError: not within ``timeout_s`` seconds.
        """
        self.close("reconnecting")
        deadline = time.monotonic() + self._timeout_s
        while True:
            info = self._info()
            try:
                if info is None or not info.live:
                    raise PeerUnavailableError(f"{self.task} has not joined the cluster")
                self._open(info)
                return
            except PeerUnavailableError as error:
                self.close(str(error))
                self.session.raise_if_stopped()
                left = deadline - time.monotonic()
                if left <= 0:
                    refusal = explain_refusal(info.address, self.task, self.session.security) if info else ""
                    raise PeerUnavailableError(
                        f"{self.session.task} waited {self._timeout_s:.0f} s for {self.task} and it did not come back: "
                        f"{refusal or error}. Look at its log; a job with --checkpoint-dir can be resumed."
                    ) from None
                self.session.wait_stopped(min(left, RETRY_S))

    def call(self, method: str, request: Any, *, sequenced: bool = False) -> Any:
        """One control call, from start to reply."""
        return self.start(method, request, sequenced=sequenced).result()

    def start(self, method: str, request: Any, *, sequenced: bool = False) -> PendingCall:
        """Starts a control call. A sequenced one takes the next number; to repeat it, use :meth:`restart`."""
        request.sender.CopyFrom(self._sender(self._next_sequence if sequenced else 0))
        if sequenced:
            self._next_sequence += 1
        return self._send(method, request)

    def restart(self, method: str, request: Any) -> PendingCall:
        """Sends a request again: under the number it had, or a new one if the ps restarted and cannot know that."""
        if request.sender.sequence < self._known_from:
            request.sender.sequence = self._next_sequence
            self._next_sequence += 1
        return self._send(method, request)

    def receive(self, transfer: int, num_frames: int, write: Callable[[Frame], None]) -> None:
        """Takes the frames of a reply as they come."""
        for _ in range(num_frames):
            write(self.lane.receive(transfer, time.monotonic() + self._timeout_s))
        self.lane.forget(transfer)

    def close(self, reason: str) -> None:
        """Ends the connections."""
        if self._lane is not None:
            self._lane.close(reason)
        if self._control is not None:
            self._control.close()
        self._lane = self._control = None

    def _open(self, info: common_pb2.TaskInfo) -> None:
        self._control = channels.connect(info.address, self.task, self.session.security)
        self._stub = ps_pb2_grpc.ParameterServerStub(self._control)
        hello = ps_pb2.HelloRequest(sender=self._sender(0), next_sequence=self._next_sequence)
        try:
            reply: ps_pb2.HelloReply = self._stub.Hello(hello, timeout=5.0)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.task) from None
        if self._frame_bytes + FRAME_OVERHEAD_BYTES > reply.max_message_bytes:
            raise ConfigurationError(
                f"{self.task} takes messages of {reply.max_message_bytes} bytes, but this worker sends frames of "
                f"{self._frame_bytes}: lower --frame-bytes, or raise --max-message-bytes of the ps"
            )
        if self.store_epoch and reply.store_epoch != self.store_epoch:
            logger.warning("%s came back with restored values (store epoch %d)", self.task, reply.store_epoch)
        self.store_epoch = reply.store_epoch
        if self._server_life != (life := (reply.server.incarnation, reply.store_epoch)):
            self._server_life, self._known_from = life, self._next_sequence
        opener = PsLaneOpener(
            self._stub,
            self._sender(0),
            self.task,
            info.address,
            self._meter,
            self.session.security,
            self._max_inbox_bytes,
        )
        self._lane = opener.open(self._transport, reply.place)

    def _send(self, method: str, request: Any) -> PendingCall:
        if self._control is None:
            raise PeerUnavailableError(f"there is no connection to {self.task}")
        future = getattr(self._stub, method).future(request)
        return PendingCall(self, future)

    def _sender(self, sequence: int) -> common_pb2.Sender:
        return common_pb2.Sender(task=self.session.task, incarnation=self.session.incarnation, sequence=sequence)

    def _info(self) -> common_pb2.TaskInfo | None:
        membership: chief_pb2.Membership = self.session.membership
        return next((info for info in membership.tasks if info.task == self.task), None)
