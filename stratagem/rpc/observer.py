"""The service Observer, of workers and ps: stacks of threads, recent events, and traces."""

from __future__ import annotations

import faulthandler
import linecache
import re
import tempfile
import threading
import time
from collections.abc import Callable

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from stratagem.measuring.flight import FLIGHT, TorchProfile
from stratagem.rpc.generated import observer_pb2
from stratagem.rpc.server import add_servicer

OBSERVER = observer_pb2.DESCRIPTOR.services_by_name["Observer"]

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


class ObserverServicer:
    """Wire side of the flight recorder."""

    def GetStack(
        self, request: observer_pb2.GetStackRequest, context: grpc.ServicerContext
    ) -> observer_pb2.GetStackReply:
        return observer_pb2.GetStackReply(threads=thread_stacks(), flight=FLIGHT.lines())

    def StartTrace(
        self, request: observer_pb2.StartTraceRequest, context: grpc.ServicerContext
    ) -> observer_pb2.StartTraceReply:
        if not request.only_clock:
            FLIGHT.start_trace(TorchProfile() if request.torch else None)
        return observer_pb2.StartTraceReply(clock_ns=time.perf_counter_ns(), num_steps=FLIGHT.num_steps())

    def StopTrace(
        self, request: observer_pb2.StopTraceRequest, context: grpc.ServicerContext
    ) -> observer_pb2.StopTraceReply:
        traced = FLIGHT.stop_trace()
        spans = [
            observer_pb2.Span(
                name=span.words,
                thread=span.thread,
                start_ns=span.start_ns,
                duration_ns=span.end_ns - span.start_ns,
                torch=is_torch,
            )
            for spans_of, is_torch in ((traced.spans, False), (traced.operators, True))
            for span in spans_of
        ]
        return observer_pb2.StopTraceReply(spans=spans, spent=traced.spent, num_dropped=traced.num_dropped)


def observed(service: ServiceDescriptor, servicer: object) -> Callable[[grpc.Server], None]:
    """What registers a service with this one beside it."""

    def register(server: grpc.Server) -> None:
        add_servicer(service, servicer, server)
        add_servicer(OBSERVER, ObserverServicer(), server)

    return register
