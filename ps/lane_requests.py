"""Serves one lane from a worker in the thread that reads it: frames are staged, requests answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from stratagem.errors import ForbiddenError, IdentityError, LimitError, ProtocolError, StaleStoreError, StratagemError
from stratagem.measuring import measures
from stratagem.ps import wire
from stratagem.ps.copies import StoreImage
from stratagem.ps.frames import FOLLOW, FOLLOWED, kind_of
from stratagem.ps.published import ReplyLane
from stratagem.ps.requests import Sender
from stratagem.ps.store import Store
from stratagem.ps.waiting import Call
from stratagem.rpc.codec import Frame, message_of
from stratagem.rpc.errors import failure_message, log_failure, log_refusal, status_message
from stratagem.rpc.fields import to_message
from stratagem.rpc.generated import frame_pb2, ps_pb2
from stratagem.rpc.limits import check_ids


def prepare_update(store: Store, request: ps_pb2.PrepareUpdateRequest, call: Call) -> ps_pb2.PrepareUpdateReply:
    return to_message(ps_pb2.PrepareUpdateReply, store.commits.prepare_update(wire.prepare_from(request), call))


def commit_update(store: Store, request: ps_pb2.CommitUpdateRequest, call: Call) -> ps_pb2.CommitUpdateReply:
    return wire.commit_to(store.commits.commit_update(wire.commit_from(request), call))


def pull_weights(store: Store, request: ps_pb2.PullWeightsRequest, call: Call) -> ps_pb2.PullWeightsReply:
    return wire.pull_to(store.variables.pull_weights(wire.pull_from(request), call))


_Handler = Callable[[Store, Any, Call], Any]
_REQUESTS: dict[int, tuple[str, Any, _Handler]] = {
    int(frame_pb2.COMMIT_UPDATE): ("CommitUpdate", ps_pb2.CommitUpdateRequest, commit_update),
    int(frame_pb2.PREPARE_UPDATE): ("PrepareUpdate", ps_pb2.PrepareUpdateRequest, prepare_update),
    int(frame_pb2.PULL_WEIGHTS): ("PullWeights", ps_pb2.PullWeightsRequest, pull_weights),
}
"""By the kind of their frame: name, message, and what serves it."""


class LaneRequests:
    """Serves one lane. It waits only for the rules: staleness, a hold, an incomplete step. ``sender``: the owner of the
    lane; it may speak for no other."""

    def __init__(self, store: Store, sender: Sender, lane: ReplyLane) -> None:
        self._store = store
        self._sender = sender
        self._lane = lane
        self._follows = sender.task.startswith("ps:")

    def refused(self, error: StratagemError) -> None:
        """The lane ends with this, which :meth:`take` has raised: for the request that waits for what was to come."""
        self._store.state.senders.refused[self._sender.key] = error

    def take(self, frames: list[Frame]) -> None:
        """Serves frames that came together, and takes them away; what answers them leaves together. StratagemError: one
        cannot be what it says, or the sender is dead: the lane has to end."""
        if self._follows:  # to whom other threads send
            while frames:
                self._of_backup(frames.pop(0))
            return
        with self._lane.corked():
            while frames:
                self._take(frames.pop(0))

    def _take(self, frame: Frame) -> None:
        if frame.kind in (FOLLOW, FOLLOWED):
            self._of_backup(frame)
            return
        found = _REQUESTS.get(frame.kind)
        if found is None:
            begun = time.perf_counter_ns()
            self._store.variables.stage(self._sender, kind_of(frame), frame, self._lane)
            self._store.state.totals.add_span(measures.RECEIVE, begun)
            return
        name, cls, handler = found
        self._serve(name, handler, self._read(cls, frame), frame)

    def _serve(self, name: str, handler: _Handler, request: Any, frame: Frame) -> None:
        try:
            reply = handler(self._store, request, self._lane)
        except StratagemError as error:
            log_refusal(name, error)
            self._refuse(frame, status_message(error))
        except Exception as error:
            log_failure(name, error)
            self._refuse(frame, failure_message(error))
        else:
            self._lane.answer(frame.kind, frame.transfer, reply.SerializeToString())

    def _of_backup(self, frame: Frame) -> None:
        if not self._follows or frame.kind not in (FOLLOW, FOLLOWED):
            raise ForbiddenError(
                f"{self._sender} may not send a frame of kind {frame.kind}: a ps follows, workers do not"
            )
        if frame.kind == FOLLOWED:
            if (backup := self._store.state.backup) is not None:
                backup.confirm(self._sender, frame.offset)
            return
        request = self._read(ps_pb2.FollowRequest, frame)

        def answer(image: StoreImage) -> None:
            self._lane.answer(FOLLOW, frame.transfer, wire.image_to(image).SerializeToString())

        try:
            self._store.copies.follow(
                self._sender,
                request.store,
                request.incarnation,
                request.number,
                request.dropped,
                self._lane,
                frame.transfer,
                answer,
            )
        except StratagemError as error:
            if not isinstance(error, StaleStoreError):  # it asks until there are values
                log_refusal("Follow", error)
            self._refuse(frame, status_message(error))

    def _refuse(self, frame: Frame, status: Any) -> None:
        self._lane.answer(frame_pb2.REFUSED, frame.transfer, status.SerializeToString())

    def _read(self, cls: Any, frame: Frame) -> Any:
        limits, num_bytes = self._store.state.limits, frame.num_bytes
        if num_bytes > limits.max_request_bytes:
            raise LimitError(
                f"a {cls.__name__} of {num_bytes:,} bytes is over max_message_bytes of {limits.max_request_bytes:,}"
            )
        try:
            request = cls.FromString(message_of(frame))
        except DecodeError:
            raise ProtocolError(f"expected a {cls.__name__}, got {num_bytes} bytes of something else") from None
        if (request.sender.task, request.sender.incarnation) != self._sender.key:
            name = f"{request.sender.task or 'nobody'} (incarnation {request.sender.incarnation})"
            raise IdentityError(f"{self._sender} may not send a {cls.__name__} in the name of {name}")
        check_ids(request, limits.max_ids_per_request)
        return request
