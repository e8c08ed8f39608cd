"""Every RPC of every service, called by every role and by nobody, on real servers: allowed is what is written here."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from stratagem.cluster.config import ServerConfig
from stratagem.cluster.identity import ROLES
from stratagem.rpc.channels import connect
from stratagem.rpc.generated import chief_pb2, ps_pb2, worker_pb2
from stratagem.rpc.observer import OBSERVER
from stratagem.rpc.permissions import OPEN_METHODS, PERMISSIONS
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.server import serve, serve_aio
from tests.contract.rpc.securities import make_certificates, with_tls, with_token

# The poller thread of grpc.aio lives as long as the process; started here, before the first test looks for leaks.
grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # the stubs lack it

SERVICES: list[ServiceDescriptor] = [
    chief_pb2.DESCRIPTOR.services_by_name["Chief"],
    ps_pb2.DESCRIPTOR.services_by_name["ParameterServer"],
    worker_pb2.DESCRIPTOR.services_by_name["Worker"],
    OBSERVER,
]
BUILT_IN: list[Any] = [
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
]
IDENTITIES = {
    "chief": "chief:0",
    "worker": "worker:1",
    "ps": "ps:0",
    "evaluator": "evaluator:0",
    "operator": "operator",
}
HEALTH = {"Health.Check", "Health.Watch", "Health.List"}
REFLECTION = {"ServerReflection.ServerReflectionInfo"}
ALLOWED: dict[str, set[str]] = {
    "": HEALTH,
    "chief": HEALTH
    | REFLECTION
    | {
        *("ParameterServer.Fence", "ParameterServer.CloseStep", "ParameterServer.DescribeUnits"),
        *("ParameterServer.HoldCommits", "ParameterServer.AdmitUpdates", "ParameterServer.SaveShards"),
        *("ParameterServer.ReleaseCommits", "ParameterServer.RestoreShards", "ParameterServer.MarkLost"),
        "ParameterServer.TakeOver",
    },
    "worker": HEALTH
    | REFLECTION
    | {
        *("Chief.Session", "Chief.OpenDataset", "Chief.NextUnits", "Chief.StartStep"),
        *("Chief.GetMetricStates", "Chief.RecordLogs", "Chief.Agree", "Chief.TakeIn"),
        *("Chief.SaveCheckpoint", "Chief.GetStatus"),
        *("ParameterServer.Hello", "ParameterServer.Transfer", "ParameterServer.OpenLane"),
        *("ParameterServer.CreateVariables", "ParameterServer.AssignValues", "ParameterServer.PrepareUpdate"),
        *("ParameterServer.CommitUpdate", "ParameterServer.CloseUnits", "ParameterServer.PullWeights"),
        *("Worker.Meet", "Worker.OpenLane", "Worker.Exchange", "Worker.Abort", "Worker.GetPosition"),
    },
    "ps": HEALTH
    | REFLECTION
    | {"Chief.Session", "ParameterServer.Hello", "ParameterServer.Transfer", "ParameterServer.OpenLane"},
    "evaluator": HEALTH | REFLECTION | {"Chief.Session", "Chief.GetStatus"},
    "operator": HEALTH
    | REFLECTION
    | {"Chief.GetStatus", "Chief.Scale", "Observer.GetStack", "Observer.StartTrace", "Observer.StopTrace"},
}
"""Which role may call what; "" is a caller without an identity."""


def full_name(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def short_name(method: MethodDescriptor) -> str:
    return f"{method.containing_service.name}.{method.name}"


METHODS = [method for service in [*SERVICES, *BUILT_IN] for method in service.methods]


def test_the_table_names_every_method_and_no_other() -> None:
    assert PERMISSIONS.keys() | OPEN_METHODS == {full_name(method) for method in METHODS}
    assert not PERMISSIONS.keys() & OPEN_METHODS
    assert set(ALLOWED) == {"", *ROLES} and set(IDENTITIES) == set(ROLES)


@dataclasses.dataclass
class Answering:
    """Every method of the services, answered with an empty reply and written down."""

    called: list[str] = dataclasses.field(default_factory=list)

    def handlers(self, make: Callable[[MethodDescriptor], Any]) -> list[grpc.GenericRpcHandler[Any, Any]]:
        return [
            grpc.method_handlers_generic_handler(
                service.full_name, {method.name: make(method) for method in service.methods}
            )
            for service in SERVICES
        ]

    def sync(self, method: MethodDescriptor) -> Any:
        request_class: Any = message_factory.GetMessageClass(method.input_type)
        reply_class: Any = message_factory.GetMessageClass(method.output_type)

        def unary(request: Any, context: Any) -> Any:
            self.called.append(short_name(method))
            return reply_class()

        def stream(requests: Any, context: Any) -> Any:
            for _ in requests:
                self.called.append(short_name(method))
                yield reply_class()

        kind = "stream_stream" if method.client_streaming else "unary_unary"
        maker: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        behaviour = stream if method.client_streaming else unary
        return maker(behaviour, request_class.FromString, reply_class.SerializeToString)

    def aio(self, method: MethodDescriptor) -> Any:
        request_class: Any = message_factory.GetMessageClass(method.input_type)
        reply_class: Any = message_factory.GetMessageClass(method.output_type)

        async def unary(request: Any, context: Any) -> Any:
            self.called.append(short_name(method))
            return reply_class()

        async def stream(requests: Any, context: Any) -> Any:
            async for _ in requests:
                self.called.append(short_name(method))
                yield reply_class()

        kind = "stream_stream" if method.client_streaming else "unary_unary"
        maker: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        behaviour = stream if method.client_streaming else unary
        return maker(behaviour, request_class.FromString, reply_class.SerializeToString)


@contextlib.contextmanager
def sync_server(security: Security, answering: Answering) -> Iterator[str]:
    running = serve(
        ServerConfig(task="ps:0", max_message_bytes=1 << 20),
        lambda server: server.add_generic_rpc_handlers(answering.handlers(answering.sync)),
        services=[service.full_name for service in SERVICES],
        security=security,
    )
    yield running.address
    running.stop(0)


def request_of(method: MethodDescriptor, task: str) -> Any:
    """A request in the name of ``task``."""
    request: Any = message_factory.GetMessageClass(method.input_type)()
    if "sender" in method.input_type.fields_by_name:
        request.sender.task = task
    if isinstance(request, chief_pb2.SessionRequest):
        request.join.task = task
    if isinstance(request, reflection_pb2.ServerReflectionRequest):
        request.list_services = ""
    return request


def call(channel: grpc.Channel, method: MethodDescriptor, task: str) -> tuple[grpc.StatusCode, str]:
    """What came of a call."""
    request = request_of(method, task)
    reply_class: Any = message_factory.GetMessageClass(method.output_type)
    kind = ("stream" if method.client_streaming else "unary") + ("_stream" if method.server_streaming else "_unary")
    stub: Any = getattr(channel, kind)(
        full_name(method),
        request_serializer=type(request).SerializeToString,
        response_deserializer=reply_class.FromString,
    )
    try:
        if method.server_streaming:
            replies = stub(iter([request]) if method.client_streaming else request, timeout=30)
            next(replies)
            replies.cancel()
        else:
            stub(request, timeout=30)
    except grpc.RpcError as error:
        call: Any = error
        return call.code(), call.details()
    return grpc.StatusCode.OK, ""


def answer_of(method: MethodDescriptor) -> grpc.StatusCode:
    """What comes of a call that is allowed; grpcio has no Health.List yet."""
    return grpc.StatusCode.UNIMPLEMENTED if short_name(method) == "Health.List" else grpc.StatusCode.OK


def check_every_call(address: str, server: str, security_of: Callable[[str], Security], roles: Iterable[str]) -> int:
    """Calls everything as each of ``roles``; returns the number of calls that were allowed to services of our own."""
    num_allowed = 0
    for role in roles:
        allowed = ALLOWED[role]
        identity = IDENTITIES.get(role, "")
        channel = connect(address, server, security_of(identity))
        for method in METHODS:
            code, details = call(channel, method, identity or "worker:1")
            if short_name(method) in allowed:
                assert code is answer_of(method), (role, short_name(method), details)
                num_allowed += method.containing_service in SERVICES
            else:
                expected = grpc.StatusCode.PERMISSION_DENIED if role else grpc.StatusCode.UNAUTHENTICATED
                assert code is expected, (role, short_name(method), code, details)
        channel.close()
    return num_allowed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"), *IDENTITIES.values())


def test_every_role_and_method_with_a_token() -> None:
    answering = Answering()
    with sync_server(with_token("ps:0"), answering) as address:
        num_allowed = check_every_call(address, "ps:0", lambda name: with_token(name) if name else OPEN, ALLOWED)
    assert len(answering.called) == num_allowed > 0  # what was refused never reached the service


def test_every_role_and_method_with_certificates(folder: Path) -> None:
    answering = Answering()
    with sync_server(with_tls(folder, "ps:0"), answering) as address:
        num_allowed = check_every_call(address, "ps:0", lambda name: with_tls(folder, name), ROLES)
        plain = connect(address)  # without a certificate there is no connection at all
        assert {call(plain, method, "chief:0")[0] for method in METHODS} == {grpc.StatusCode.UNAVAILABLE}
        plain.close()
    assert len(answering.called) == num_allowed > 0


@pytest.mark.parametrize("kind", ["token", "certificates"])
def test_every_role_and_method_on_an_aio_server(folder: Path, kind: str) -> None:
    answering = Answering()
    security_of = with_token if kind == "token" else lambda name: with_tls(folder, name)

    async def check() -> int:
        server = await serve_aio(
            ServerConfig(task="ps:0", max_message_bytes=1 << 20),
            lambda server: server.add_generic_rpc_handlers(tuple(answering.handlers(answering.aio))),
            services=[service.full_name for service in SERVICES],
            security=security_of("chief:0"),
        )
        num_allowed = await asyncio.to_thread(
            check_every_call,
            server.address,
            "chief:0",
            lambda name: security_of(name) if name else OPEN,
            ALLOWED if kind == "token" else ROLES,
        )
        await server.stop(0)
        return num_allowed

    num_allowed = asyncio.run(check())
    assert len(answering.called) == num_allowed > 0


def methods_with_a_sender() -> list[MethodDescriptor]:
    return [
        method
        for service in SERVICES
        for method in service.methods
        if "sender" in method.input_type.fields_by_name or method.name == "Session"
    ]


@pytest.mark.parametrize("kind", ["token", "certificates"])
def test_nobody_speaks_in_the_name_of_another_task(folder: Path, kind: str) -> None:
    answering = Answering()
    security_of = with_token if kind == "token" else lambda name: with_tls(folder, name)
    with sync_server(security_of("ps:0"), answering) as address:
        channels = {role: connect(address, "ps:0", security_of(name)) for role, name in IDENTITIES.items()}
        for method in methods_with_a_sender():
            role = next(role for role, allowed in ALLOWED.items() if short_name(method) in allowed)
            code, details = call(channels[role], method, "worker:0")
            assert code is grpc.StatusCode.UNAUTHENTICATED, short_name(method)
            assert IDENTITIES[role] in details and "in the name of worker:0" in details
        lane: Any = channels["worker"].stream_stream("/stratagem.ParameterServer/Transfer", None, None)
        with pytest.raises(grpc.RpcError) as refused:
            next(lane(iter([b""]), metadata=(("stratagem-task", "worker:0"),), timeout=30))
        error: Any = refused.value
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        for channel in channels.values():
            channel.close()
    assert answering.called == []


@pytest.mark.parametrize("token", ["another token of tests", "a token of the test", ""])
def test_a_wrong_token_is_refused_and_not_repeated(token: str, caplog: pytest.LogCaptureFixture) -> None:
    answering = Answering()
    method = SERVICES[0].methods_by_name["GetStatus"]
    with sync_server(with_token("chief:0"), answering) as address:
        channel = connect(address, "chief:0", with_token("operator", token))
        code, details = call(channel, method, "")
        channel.close()
    assert code is grpc.StatusCode.UNAUTHENTICATED and "token" in details
    assert answering.called == []
    assert "a token of the tests" not in caplog.text + details and (not token or token not in caplog.text + details)


@pytest.mark.parametrize("name", ["", "boss:0", "worker", "worker:x", "Operator"])
def test_a_token_without_a_known_name_is_refused(name: str) -> None:
    answering = Answering()
    with sync_server(with_token("chief:0"), answering) as address:
        channel = connect(address, "chief:0", with_token(name))
        code, _ = call(channel, SERVICES[0].methods_by_name["GetStatus"], "")
        channel.close()
    assert code is grpc.StatusCode.UNAUTHENTICATED and answering.called == []


def test_without_certificates_and_token_everybody_may_do_everything() -> None:
    answering = Answering()
    with sync_server(OPEN, answering) as address:
        channel = connect(address)
        assert all(call(channel, method, "anybody")[0] is answer_of(method) for method in METHODS)
        channel.close()
    assert len(answering.called) == sum(len(service.methods) for service in SERVICES)
