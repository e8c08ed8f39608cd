"""What comes over one lane from a worker, served in the thread that reads it: frames are staged, requests answered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from google.protobuf.message import DecodeError

from stratagem.errors import IdentityError, LimitError, ProtocolError, StratagemError
from stratagem.ps import wire
from stratagem.ps.frames import kind_of
from stratagem.ps.published import ReplyLane
from stratagem.ps.requests import Sender
from stratagem.ps.state import Call
from stratagem.ps.store import Store
from stratagem.rpc.codec import Frame
from stratagem.rpc.errors import failure_message, log_failure, log_refusal, status_message
from stratagem.rpc.generated import frame_pb2, ps_pb2
from stratagem.rpc.limits import check_ids


def prepare_update(store: Store, request: ps_pb2.PrepareUpdateRequest, call: Call) -> ps_pb2.PrepareUpdateReply:
    """First half of a two-phase update."""
    return wire.facts_to(store.commits.prepare_update(wire.prepare_from(request), call))


def commit_update(store: Store, request: ps_pb2.CommitUpdateRequest, call: Call) -> ps_pb2.CommitUpdateReply:
    """An update."""
    return wire.commit_to(store.commits.commit_update(wire.commit_from(request), call))


def pull_weights(store: Store, request: ps_pb2.PullWeightsRequest, call: Call) -> ps_pb2.PullWeightsReply:
    """A pull."""
    return wire.pull_to(store.variables.pull_weights(wire.pull_from(request), call))


_Handler = Callable[[Store, Any, Call], Any]
_REQUESTS: dict[int, tuple[str, Any, _Handler]] = {
    int(frame_pb2.COMMIT_UPDATE): ("CommitUpdate", ps_pb2.CommitUpdateRequest, commit_update),
    int(frame_pb2.PREPARE_UPDATE): ("PrepareUpdate", ps_pb2.PrepareUpdateRequest, prepare_update),
    int(frame_pb2.PULL_WEIGHTS): ("PullWeights", ps_pb2.PullWeightsRequest, pull_weights),
}
"""By the kind of their frame: name, message, and what serves it."""


class AnsweringLane(ReplyLane, Protocol):
    """A way back that carries replies too."""

    def answer(self, kind: int, transfer: int, message: bytes) -> None:
        """Queues a reply behind the frames it announces. A closed lane drops it."""

    def corked(self) -> contextlib.AbstractContextManager[None]:
        """Inside, what is sent may wait, to leave in one write at the end."""


class LaneRequests:
    """Serves one lane. What it waits for are the rules: staleness, a hold, a step that is not complete.

    Args:
        store: does the work.
        sender: whose lane it is; nobody else is spoken for over it.
        lane: the way back.
        call: whether the worker is still there, while a request waits.
    """

    def __init__(self, store: Store, sender: Sender, lane: AnsweringLane, call: Call) -> None:
        self._store = store
        self._sender = sender
        self._lane = lane
        self._call = call

    def take(self, frame: Frame) -> None:
        """Serves one frame.

        Raises:
            StratagemError: it cannot be what it says, or the sender is dead: the lane has to end.
        """
        found = _REQUESTS.get(frame.kind)
        if found is None:
            self._store.variables.stage(self._sender, kind_of(frame), frame)
            return
        name, cls, handler = found
        request = self._read(cls, frame.tensor)
        with self._lane.corked():
            self._serve(name, handler, request, frame)

    def _serve(self, name: str, handler: _Handler, request: Any, frame: Frame) -> None:
        try:
            reply = handler(self._store, request, self._call)
        except StratagemError as error:
            log_refusal(name, error)
            self._refuse(frame, status_message(error))
        except Exception as error:
            log_failure(name, error)
            self._refuse(frame, failure_message(error))
        else:
            self._lane.answer(frame.kind, frame.transfer, reply.SerializeToString())

    def _refuse(self, frame: Frame, status: Any) -> None:
        self._lane.answer(frame_pb2.REFUSED, frame.transfer, status.SerializeToString())

    def _read(self, cls: Any, payload: torch.Tensor) -> Any:
        limits = self._store.state.limits
        if payload.nbytes > limits.max_request_bytes:
            raise LimitError(
                f"a {cls.__name__} of {payload.nbytes:,} bytes is over max_message_bytes of "
                f"{limits.max_request_bytes:,}"
            )
        try:
            request = cls.FromString(payload.contiguous().view(torch.uint8).numpy().tobytes())
        except DecodeError:
            raise ProtocolError(f"expected a {cls.__name__}, got {payload.nbytes} bytes of something else") from None
        if (request.sender.task, request.sender.incarnation) != self._sender.life:
            name = f"{request.sender.task or 'nobody'} (incarnation {request.sender.incarnation})"
            raise IdentityError(f"{self._sender} may not send a {cls.__name__} in the name of {name}")
        check_ids(request, limits.max_ids_per_request)
        return request
