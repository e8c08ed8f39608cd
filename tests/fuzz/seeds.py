"""Real messages of every method, to begin from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor

from stratagem.rpc.codec import encode_frame, encode_together
from stratagem.rpc.generated import chief_pb2, common_pb2, frame_pb2, ps_pb2, worker_pb2

NUM_WORKERS = 8
ATTACKERS = {f"worker:{index}": index + 1 for index in range(2, NUM_WORKERS)}
"""Workers of the job whose certificates were stolen, and their incarnations."""
FENCED = "worker:99"
"""Whom the seeds declare dead and speak for in sessions: somebody else, or every later attack would end at that."""
SERVICES: dict[str, ServiceDescriptor] = {
    "chief": chief_pb2.DESCRIPTOR.services_by_name["Chief"],
    "ps": ps_pb2.DESCRIPTOR.services_by_name["ParameterServer"],
    "worker": worker_pb2.DESCRIPTOR.services_by_name["Worker"],
}
MOST_LEVELS = 4


def unary_methods(server: str) -> list[MethodDescriptor]:
    """Methods with one request and one reply."""
    return [method for method in SERVICES[server].methods if not method.client_streaming]


def path_of(method: MethodDescriptor) -> str:
    """Its name on the wire."""
    return f"/{method.containing_service.full_name}/{method.name}"


def request_of(method: MethodDescriptor, attacker: str) -> Any:
    """A request with something in every field, in the attacker's name."""
    message: Any = message_factory.GetMessageClass(method.input_type)()
    _fill(message, method.input_type, MOST_LEVELS)
    if "sender" in method.input_type.fields_by_name:
        message.sender.CopyFrom(common_pb2.Sender(task=attacker, incarnation=ATTACKERS[attacker]))
    for name, value in (("task", FENCED), ("wait_s", 0.01), ("hold_s", 0.01)):
        if name in method.input_type.fields_by_name:
            setattr(message, name, value)
    return message


def session_requests() -> list[bytes]:
    """What a task says in its session."""
    join = chief_pb2.Join(task=FENCED, address="127.0.0.1:1", pid=1, resume_incarnation=3)
    line = chief_pb2.LogLine(at=1.0, level="INFO", text="x")
    return [
        chief_pb2.SessionRequest(join=join).SerializeToString(),
        chief_pb2.SessionRequest(heartbeat=chief_pb2.Heartbeat()).SerializeToString(),
        chief_pb2.SessionRequest(heartbeat=chief_pb2.Heartbeat(lines=[line])).SerializeToString(),
        chief_pb2.SessionRequest(goodbye=chief_pb2.Goodbye(exit_code=1, message="x")).SerializeToString(),
    ]


def frames() -> Iterator[bytes]:
    """Payload frames for the group that the target has."""
    for kind in (frame_pb2.GRADIENT, frame_pb2.VALUES):
        for offset, num_elements in ((0, 4), (2, 2), (0, 0), (3, 100)):
            yield encode_frame(kind, 1, 1, offset, torch.ones(num_elements))
    yield encode_together([[encode_frame(frame_pb2.GRADIENT, 1, 1, offset, torch.ones(2))] for offset in (0, 2)])


def _fill(message: Any, descriptor: Descriptor, levels: int) -> None:
    for field in descriptor.fields:
        if field.message_type is not None:
            is_map = field.message_type.GetOptions().map_entry
            if not levels or is_map or field.message_type.full_name.startswith("google."):
                continue
            target = getattr(message, field.name)
            _fill(target.add() if field.is_repeated else target, field.message_type, levels - 1)
            if not field.is_repeated:
                target.SetInParent()
            continue
        value = _value(field)
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)


def _value(field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return "SGD" if field.name == "optimizer" else "w"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"\1"
    if field.type == FieldDescriptor.TYPE_BOOL:
        return True
    return 1.0 if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT) else 1
