"""The ``Worker`` service: what a worker tells about itself."""

from __future__ import annotations

import sys
import threading
import traceback

import grpc

from stratagem.rpc.generated import worker_pb2, worker_pb2_grpc

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


def thread_stacks() -> list[str]:
    """One text per Python thread of this process: its name and frames, innermost last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        f"{names.get(ident, 'thread')}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Wire side of the worker role."""

    def GetStack(self, request: worker_pb2.GetStackRequest, context: grpc.ServicerContext) -> worker_pb2.GetStackReply:
        return worker_pb2.GetStackReply(threads=thread_stacks())
