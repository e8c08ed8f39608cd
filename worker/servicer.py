"""The wire of a worker: each method decodes, makes one call, encodes."""

from __future__ import annotations

import faulthandler
import linecache
import re
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from stratagem.rpc.generated import lane_pb2, worker_pb2
from stratagem.worker.ring.ring_service import RingService

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"]


_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in ')


def thread_stacks() -> list[str]:
    """One text per Python thread of this process: its name and frames, innermost last.

    Not from ``sys._current_frames``: walking the frames of threads that run goes wrong now and then (Python 3.11.7,
    found by fuzzing: it stood still for good, or met what is no frame), and a dict of frames with one's own keeps all
    of them, and their calls, until garbage is collected.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        dump = file.read().decode(errors="replace")
    stacks = []
    for block in dump.split("\n\n"):
        head, *frames = block.splitlines()
        found = _THREAD.match(head)
        name = names.get(int(found[1], 16), "thread") if found else head
        stacks.append("\n".join([name, *(_with_source(frame) for frame in reversed(frames))]) + "\n")
    return stacks


def _with_source(frame: str) -> str:
    found = _FRAME.match(frame)
    source = linecache.getline(found[1], int(found[2])).strip() if found else ""
    return f"{frame}\n    {source}" if source else frame


class WorkerServicer:
    """Wire side of the worker role.

    Args:
        entrance: the ring's side.
    """

    def __init__(self, entrance: RingService) -> None:
        self._entrance = entrance

    def GetStack(self, request: worker_pb2.GetStackRequest, context: grpc.ServicerContext) -> worker_pb2.GetStackReply:
        return worker_pb2.GetStackReply(threads=thread_stacks())

    def Meet(self, request: worker_pb2.MeetRequest, context: grpc.ServicerContext) -> worker_pb2.MeetReply:
        return self._entrance.meet(request)

    def OpenLane(self, request: lane_pb2.OpenLaneRequest, context: grpc.ServicerContext) -> lane_pb2.OpenLaneReply:
        ticket = self._entrance.open_lane(request)
        return lane_pb2.OpenLaneReply(token=ticket.token, port=ticket.port, socket_name=ticket.socket_name)

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
