"""The store of another ps, seen from the one that copies it: a lane, an image, and the changes after it."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

import grpc
import torch
from google.rpc import status_pb2

from stratagem.cluster.communication import Transport
from stratagem.errors import FrameError, PeerUnavailableError
from stratagem.ps import wire
from stratagem.ps.copies import StoreImage, tensors_of
from stratagem.ps.frames import CLOSE_UNITS, COMMIT_UPDATE, FOLLOW, FOLLOWED, WEIGHTS
from stratagem.ps.requests import CommitUpdate, Sender
from stratagem.ps.shard_group import Parts
from stratagem.rpc import channels
from stratagem.rpc.codec import Frame, message_of
from stratagem.rpc.errors import error_from_rpc, error_from_status
from stratagem.rpc.generated import common_pb2, frame_pb2, ps_pb2, ps_pb2_grpc
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.ps_lanes import PsLaneOpener
from stratagem.rpc.security import Security

HELLO_S = 5.0
_TRANSFER = 1
"""Of everything on such a lane."""
Change = tuple[CommitUpdate, Mapping[int, Parts]]


class PeerStore:
    """A context: the lane is open inside. ``asker`` is this ps, ``task`` the other one, which serves at ``address``;
    ``goes_on`` is asked now and then while a read waits whether there is still a reason to. PeerUnavailableError: it
    does not answer."""

    def __init__(
        self,
        asker: Sender,
        task: str,
        address: str,
        meter: BytesMeter,
        security: Security,
        goes_on: Callable[[], bool],
        transport: Transport = "auto",
    ) -> None:
        self.incarnation = 0
        """Of the process that serves there."""
        self._task = task
        self._goes_on = goes_on
        self._sender = common_pb2.Sender(task=asker.task, incarnation=asker.incarnation)
        self._channel = channels.connect(address, task, security)
        try:
            stub = ps_pb2_grpc.ParameterServerStub(self._channel)
            reply: ps_pb2.HelloReply = stub.Hello(ps_pb2.HelloRequest(sender=self._sender), timeout=HELLO_S)
            self.incarnation = reply.server.incarnation
            opener = PsLaneOpener(stub, self._sender, task, address, meter, security, on_wait=self._look)
            self._lane = opener.open(transport, reply.place)
        except BaseException as error:
            self._channel.close()
            if isinstance(error, grpc.RpcError):
                raise error_from_rpc(error, task) from None
            raise

    def __enter__(self) -> PeerStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lane.close("nobody follows any more")
        self._channel.close()

    def follow(
        self, whose: str, incarnation: int = 0, number: int = 0, dropped: int = 0, begun: Callable[[], object] = bool
    ) -> StoreImage:
        """Asks for a store, and reads all that it holds. ``incarnation``: of a copy, the process that it must be of;
        ``number``: the how manieth following this is, 0: whoever asks takes over; ``dropped``: copies made in those up
        to this one are gone; ``begun`` is called when the answer begins to come. CheckpointError: there is no such
        copy. StaleStoreError: it has no values of something yet. StratagemError: the other ps is gone, or refuses."""
        request = ps_pb2.FollowRequest(
            sender=self._sender, store=whose, incarnation=incarnation, number=number, dropped=dropped
        )
        message = request.SerializeToString()
        self._lane.send(FOLLOW, _TRANSFER, 0, 0, lambda: (message,), len(message))
        image = wire.image_from(ps_pb2.FollowReply.FromString(message_of(self._next(FOLLOW))))
        begun()
        for group, flat in tensors_of(image.content.groups):
            left = flat.numel()
            while left:
                frame = self._next(WEIGHTS)
                place = group, flat.numel() - left
                if (frame.group, frame.offset) != place or frame.tensor.dtype != flat.dtype or len(frame.tensor) > left:
                    raise FrameError(
                        f"expected the piece of group {group} at {place[1]} from {self._task}, got one of group "
                        f"{frame.group} at {frame.offset}"
                    )
                flat[frame.offset : frame.offset + len(frame.tensor)] = frame.tensor
                left -= frame.tensor.numel()
        return image

    def confirm(self, number: int) -> None:
        """Says how far the copy is; see ``FrameKind.FOLLOWED``."""
        self._lane.send(FOLLOWED, _TRANSFER, 0, number, lambda: (b"\0",), 1)

    def changes(self) -> Iterator[Change | None]:
        """What changes there, as it comes; None: the copy counts as whole from here on. StratagemError: the other ps is
        gone."""
        gradient: dict[int, list[tuple[int, torch.Tensor]]] = collections.defaultdict(list)
        while True:
            frame = self._next()
            if frame.kind == WEIGHTS:
                gradient[frame.group].append((frame.offset, frame.tensor))
            elif frame.kind == FOLLOWED:
                yield None
            elif frame.kind == COMMIT_UPDATE:
                commit = wire.commit_from(ps_pb2.CommitUpdateRequest.FromString(message_of(frame)))
                yield commit, {commit_of.group: gradient.get(commit_of.group, []) for commit_of in commit.groups}
                gradient.clear()
            elif frame.kind == CLOSE_UNITS:
                yield wire.closing_from(ps_pb2.CloseUnitsRequest.FromString(message_of(frame))), {}
            else:
                raise FrameError(f"expected what changes at {self._task}, got a frame of kind {frame.kind}")

    def _next(self, *kinds: int) -> Frame:
        frame = self._lane.receive(_TRANSFER, math.inf)
        if frame.kind == frame_pb2.REFUSED:
            raise error_from_status(status_pb2.Status.FromString(message_of(frame)), self._task)
        if kinds and frame.kind not in kinds:
            raise FrameError(f"expected a frame of kind {kinds} from {self._task}, got {frame.kind}")
        return frame

    def _look(self) -> None:
        if not self._goes_on():
            raise PeerUnavailableError(f"{self._task} is another process now, or away")
