"""The wire of a worker: each method decodes, makes one call, encodes."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import grpc

from stratagem.rpc.generated import lane_pb2, worker_pb2
from stratagem.worker.ring.entrance import Entrance

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"]


_LOOKING = threading.Lock()


def thread_stacks() -> list[str]:
    """One text per Python thread of this process: its name and frames, innermost last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with _LOOKING:
        # Python (3.11.7, found by fuzzing) stops for good when it collects garbage inside of this call, which holds a
        # lock of the interpreter, and a finalizer lets another thread run that makes the same call.
        collects = gc.isenabled()
        gc.disable()
        try:
            frames = sys._current_frames()
        finally:
            if collects:
                gc.enable()
    try:
        return [
            f"{names.get(ident, 'thread')}\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames.items()
        ]
    finally:
        frames.clear()  # this frame is among them: all would live, with their calls, until garbage is collected


class WorkerServicer:
    """Wire side of the worker role.

    Args:
        entrance: the ring's side.
    """

    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance

    def GetStack(self, request: worker_pb2.GetStackRequest, context: grpc.ServicerContext) -> worker_pb2.GetStackReply:
        return worker_pb2.GetStackReply(threads=thread_stacks())

    def Meet(self, request: worker_pb2.MeetRequest, context: grpc.ServicerContext) -> worker_pb2.MeetReply:
        return self._entrance.meet(request)

    def OpenLane(self, request: lane_pb2.OpenLaneRequest, context: grpc.ServicerContext) -> lane_pb2.OpenLaneReply:
        way = self._entrance.open_lane(request)
        return lane_pb2.OpenLaneReply(token=way.token, port=way.port, socket_name=way.socket_name)

    def Exchange(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        token: Any = dict(context.invocation_metadata()).get("stratagem-token-bin", b"")
        self._entrance.exchange(token, messages, context)
        yield from ()

    def Abort(self, request: worker_pb2.AbortRequest, context: grpc.ServicerContext) -> worker_pb2.AbortReply:
        self._entrance.abort(request)
        return worker_pb2.AbortReply()

    def GetPosition(
        self, request: worker_pb2.GetPositionRequest, context: grpc.ServicerContext
    ) -> worker_pb2.GetPositionReply:
        return self._entrance.position()
