"""One parameter server, seen from a worker: control calls in sequence, the lane, and reconnecting after a loss."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
from google.rpc import status_pb2

from stratagem.cluster.config import WorkerConfig
from stratagem.cluster.membership import Member
from stratagem.errors import ConfigurationError, FrameError, PeerUnavailableError, StaleStoreError
from stratagem.rpc import channels
from stratagem.rpc.codec import MAX_HEADER_BYTES, Frame, message_of
from stratagem.rpc.errors import NO_DESCRIPTORS, error_from_rpc, error_from_status
from stratagem.rpc.generated import common_pb2, frame_pb2, ps_pb2, ps_pb2_grpc
from stratagem.rpc.handshake import explain_refusal
from stratagem.rpc.lane import Lane, Place
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.ps_lanes import PsLaneOpener
from stratagem.rpc.session import SessionClient

logger = logging.getLogger(__name__)

RETRY_S = 0.1  # between two tries to reach a ps that restarts
SILENCE_S = 5.0  # without a ps, before it is said that it is waited for, and why
POLL_S = 1.0  # how often a waiting call looks whether the job has ended


_ON_LANE: dict[str, tuple[int, Any]] = {
    "CommitUpdate": (int(frame_pb2.COMMIT_UPDATE), ps_pb2.CommitUpdateReply),
    "PrepareUpdate": (int(frame_pb2.PREPARE_UPDATE), ps_pb2.PrepareUpdateReply),
    "PullWeights": (int(frame_pb2.PULL_WEIGHTS), ps_pb2.PullWeightsReply),
}
"""What goes over the lane, in the order of its frames: kind of its frame, and the reply."""
Write = Callable[[Frame], None]
T = TypeVar("T")


class Rerouted(Exception):
    """The number of ps has changed: the placement has to be computed again."""


class PendingCall:
    """A request sent over the lane; its reply comes the same way, behind the frames that it announces."""

    def __init__(self, client: PsClient, kind: int, reply: Any, transfer: int) -> None:
        self._client = client
        self._lane = client.lane
        self._kind = kind
        self._cls = reply
        self._transfer = transfer
        self._kept: list[Frame] = []
        self._reply: Any = None

    @property
    def done(self) -> bool:
        """Whether :meth:`result` would not wait."""
        return self._reply is not None or self._lane.readable

    def result(self, write: Write | None = None, place: Place | None = None) -> Any:
        """The reply, waited for as long as there is a ps. ``write`` takes the frames of weights that the reply brings,
        as they come (None: they are kept for whoever asks for the result again); ``place``: where a lane may receive
        them before. Raises PeerUnavailableError: the ps is gone; see :meth:`PsClient.connect`; StratagemError: what the
        ps raised."""
        if write is None:
            write = self._kept.append
        else:
            for frame in self._kept:
                write(frame)
            self._kept.clear()
        while self._reply is None:
            try:
                frame = self._lane.receive(self._transfer, math.inf, place)
            except PeerUnavailableError:
                self._client.session.raise_if_stopped()
                raise
            if frame.kind == frame_pb2.WEIGHTS:
                write(frame)
                continue
            self._lane.forget(self._transfer)
            message = message_of(frame)
            if frame.kind == frame_pb2.REFUSED:
                raise error_from_status(status_pb2.Status.FromString(message), self._client.task)
            if frame.kind != self._kind:
                raise FrameError(f"expected the reply to a request of kind {self._kind}, got a frame of {frame.kind}")
            self._reply = self._cls.FromString(message)
        return self._reply


@dataclasses.dataclass(eq=False, repr=False)
class PsClient:
    """Talks to one ps."""

    session: SessionClient
    """Knows where the ps is, and this worker's identity."""
    index: int
    _meter: BytesMeter
    _config: WorkerConfig
    """How long to wait for a ps that restarts, and what lanes are like."""
    num_ps: Callable[[], int] = lambda: 0
    """Of how many ps the variables are shared out among; 0: whatever there are."""
    on_wait: Callable[[], None] = lambda: None
    """Called now and then while this worker waits for the ps."""

    def __post_init__(self) -> None:
        self.task = f"ps:{self.index}"
        self.store_epoch = 0
        self._next_sequence = 1
        self._transfers = itertools.count(1)
        self._known_from = 1
        self._abandoned: set[int] = set()
        """Numbers of calls that were not answered: whoever repeats one takes another."""
        self._served_by = (0, 0)
        """Incarnation of the ps, and the routing epoch, that the connection is of."""
        self._control: grpc.Channel | None = None
        self._lane: Lane | None = None
        self._stub: ps_pb2_grpc.ParameterServerStub

    @property
    def lane(self) -> Lane:
        if self._lane is None:
            raise PeerUnavailableError(f"there is no connection to {self.task}")
        return self._lane

    @property
    def is_connected(self) -> bool:
        """Whether there is a lane that works."""
        return self._lane is not None and self._lane.alive

    @property
    def is_replaced(self) -> bool:
        """Whether another process serves by now than the one that is connected, or that one has begun anew, since the
        number of ps changed."""
        epoch, info = self.session.membership.routing_epoch, self._info()
        return info is not None and info.live and (info.incarnation, epoch) != self._served_by

    def new_transfer(self) -> int:
        """An id that no transfer of this worker to this ps had."""
        return next(self._transfers)

    def connect(self) -> None:
        """Opens the connections and agrees on sequence numbers; waits for a ps that restarts. Raises
        PeerUnavailableError: not within ``peer_timeout_s`` seconds; Rerouted: there is another number of ps."""
        self.close("reconnecting")
        deadline = time.monotonic() + self._config.peer_timeout_s
        silent_until = time.monotonic() + SILENCE_S
        while True:
            if self.num_ps() not in (0, self.session.membership.num_ps):
                raise Rerouted
            epoch, info = self.session.membership.routing_epoch, self._info()
            try:
                if info is None or not info.live:
                    what = "is gone, and not back yet" if info and info.incarnation else "has not joined the cluster"
                    raise PeerUnavailableError(f"{self.task} {what}")
                self._open(info)
                self._served_by = info.incarnation, epoch
                return
            except PeerUnavailableError as error:
                self.close(str(error))
                self.session.raise_if_stopped()
                left = deadline - time.monotonic()
                if time.monotonic() >= silent_until:
                    logger.warning("Waiting for %s, %.0f s more: %s", self.task, max(0.0, left), error)
                    silent_until = math.inf
                if left <= 0:
                    refusal = explain_refusal(info.address, self.task, self.session.security) if info else ""
                    how = "it did not come back", " Look at its log; a job with --checkpoint-dir can be resumed."
                    if info is not None and info.live and not refusal:
                        where = f"Its port, {info.address}, has to be open to this machine"
                        advice = "" if NO_DESCRIPTORS in str(error) else f" Is there a firewall? {where}."
                        how = "cannot reach it, though the chief hears from it", advice
                    raise PeerUnavailableError(
                        f"{self.session.task} waited {self._config.peer_timeout_s:.0f} s for {self.task} and {how[0]}: "
                        f"{refusal or error}.{how[1]}"
                    ) from None
                self.session.wait_stopped(min(left, RETRY_S))

    def call(self, method: str, request: Any, *, sequenced: bool = False) -> Any:
        """An RPC, from start to reply; for what is not asked once a step. Errors as :meth:`PendingCall.result`."""
        return self.ask(method, request, sequenced=sequenced)()

    def ask(self, method: str, request: Any, *, sequenced: bool = False) -> Callable[[], Any]:
        """Starts an RPC. What it returns waits for the reply, with the errors of :meth:`call`."""
        self._sign(request, sequenced)
        if self._control is None:
            raise PeerUnavailableError(f"there is no connection to {self.task}")
        future = getattr(self._stub, method).future(request)
        if sequenced:
            self._abandoned.add(request.sender.sequence)
        return functools.partial(self._reply, future, request.sender.sequence)

    def _reply(self, future: Any, sequence: int) -> Any:
        while True:
            try:
                reply = future.result(timeout=POLL_S)
                self._abandoned.discard(sequence)
                return reply
            except grpc.FutureTimeoutError:
                try:
                    self.session.raise_if_stopped()
                except BaseException:
                    future.cancel()
                    raise
            except grpc.FutureCancelledError:
                raise PeerUnavailableError(f"the call to {self.task} was cancelled") from None
            except grpc.RpcError as error:
                self.session.raise_if_stopped()
                raise error_from_rpc(error, self.task) from None

    def start(self, method: str, request: Any, *, sequenced: bool = False) -> PendingCall:
        """Sends a request over the lane. A sequenced one takes the next number; to repeat it, use :meth:`restart`.
        Raises PeerUnavailableError: the lane is broken."""
        self._sign(request, sequenced)
        return self._send(method, request)

    def restart(self, method: str, request: Any) -> PendingCall:
        """Sends a request again: under the number it had, or a new one if the store of the ps cannot know that."""
        if request.sender.sequence < self._known_from:
            request.sender.sequence = self._next_sequence
            self._next_sequence += 1
        return self._send(method, request)

    def close(self, reason: str) -> None:
        if self._lane is not None:
            self._lane.close(reason)
        if self._control is not None:
            self._control.close()
        self._lane = self._control = None

    def _open(self, info: Member) -> None:
        self._control = channels.connect(info.address, self.task, self.session.security)
        self._stub = ps_pb2_grpc.ParameterServerStub(self._control)
        hello = ps_pb2.HelloRequest(sender=self._sender(), next_sequence=self._next_sequence, abandoned=self._abandoned)
        try:
            reply: ps_pb2.HelloReply = self._stub.Hello(hello, timeout=5.0)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.task) from None
        self._abandoned.clear()
        if self._config.frame_bytes + MAX_HEADER_BYTES > reply.max_message_bytes:
            raise ConfigurationError(
                f"{self.task} takes messages of {reply.max_message_bytes} bytes, but this worker sends frames of "
                f"{self._config.frame_bytes}: lower --frame-bytes, or raise --max-message-bytes of the ps"
            )
        if self.num_ps() and reply.num_ps not in (0, self.num_ps()):
            raise PeerUnavailableError(f"{self.task} is one of {reply.num_ps} ps now, which the chief is about to say")
        if reply.store_epoch != self.store_epoch:
            if self.store_epoch:
                logger.warning("%s came back with restored values (store epoch %d)", self.task, reply.store_epoch)
            self.store_epoch, self._known_from = reply.store_epoch, self._next_sequence
        opener = PsLaneOpener(
            self._stub,
            self._sender(),
            self.task,
            info.address,
            self._meter,
            self.session.security,
            self._config.max_inbox_bytes,
            functools.partial(self._look, info.incarnation),
            self._config.frame_bytes,
        )
        self._lane = opener.open(self._config.transport, reply.place)

    def _send(self, method: str, request: Any) -> PendingCall:
        kind, reply = _ON_LANE[method]
        transfer = getattr(request, "reply_transfer", 0) or self.new_transfer()
        call = PendingCall(self, kind, reply, transfer)
        message = request.SerializeToString()
        self.lane.send(kind, transfer, 0, 0, lambda: (message,), len(message))
        return call

    def _sign(self, request: Any, sequenced: bool) -> None:
        sender = request.sender
        sender.task, sender.incarnation = self.session.task, self.session.incarnation
        if sequenced:
            sender.sequence = self._next_sequence
            self._next_sequence += 1

    def _look(self, incarnation: int) -> None:
        """While a read from the lane waits: a ps that the chief has given up will not answer."""
        self.session.raise_if_stopped()
        info = self._info()
        if info is None or not info.live or info.incarnation != incarnation:
            raise PeerUnavailableError(f"the chief has lost {self.task}")
        self.on_wait()

    def _sender(self) -> common_pb2.Sender:
        return common_pb2.Sender(task=self.session.task, incarnation=self.session.incarnation)

    def _info(self) -> Member | None:
        return self.session.membership.member(self.task)


def insist(call: Callable[[], T], reconnect: Callable[[], None]) -> T:
    """What ``call`` returns, called again where a ps was lost meanwhile, which ``reconnect`` waits for."""
    while True:
        try:
            return call()
        except (PeerUnavailableError, StaleStoreError):
            reconnect()
