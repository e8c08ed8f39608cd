"""Limits on real servers: each refusal is RESOURCE_EXHAUSTED with the limit's name, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from stratagem.cluster.config import ServerConfig
from stratagem.errors import LimitError, ProtocolError, StratagemError
from stratagem.rpc import limits as limits_module
from stratagem.rpc.channels import connect
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc
from stratagem.rpc.server import serve, serve_aio
from tests.polling import until

# The poller thread of grpc.aio lives as long as the process; started here, before the first test looks for leaks.
grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # the stubs lack it

NEXT_UNITS = "/stratagem.Chief/NextUnits"
LIMITS = ServerConfig(
    task="ps:0",
    max_message_bytes=1 << 16,
    max_connections=3,
    max_calls=6,
    max_calls_per_peer=4,
    max_ids_per_request=100,
)


class Waiting(chief_pb2_grpc.ChiefServicer):
    """GetStatus answers when it is let go; NextUnits at once; a session answers each message."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.began = threading.Semaphore(0)

    def GetStatus(self, request: Any, context: Any) -> Any:
        self.began.release()
        self.let_go.wait(30)
        return chief_pb2.GetStatusReply()

    def NextUnits(self, request: Any, context: Any) -> Any:
        return chief_pb2.NextUnitsReply()

    def Session(self, request_iterator: Any, context: Any) -> Any:
        for _ in request_iterator:
            yield chief_pb2.SessionEvent()


class AioWaiting(Waiting):
    """The same as coroutines."""

    async def GetStatus(self, request: Any, context: Any) -> Any:
        self.began.release()
        await asyncio.to_thread(self.let_go.wait, 30)
        return chief_pb2.GetStatusReply()

    async def NextUnits(self, request: Any, context: Any) -> Any:
        return chief_pb2.NextUnitsReply()

    async def Session(self, request_iterator: Any, context: Any) -> Any:
        async for _ in request_iterator:
            yield chief_pb2.SessionEvent()


@contextlib.contextmanager
def sync_server(servicer: Waiting, limits: ServerConfig) -> Iterator[str]:
    running = serve(
        limits,
        lambda server: chief_pb2_grpc.add_ChiefServicer_to_server(servicer, server),
        services=["stratagem.Chief"],
    )
    yield running.address
    servicer.let_go.set()
    running.stop(0)


@contextlib.contextmanager
def aio_server(servicer: Waiting, limits: ServerConfig) -> Iterator[str]:
    address: list[str] = []
    ready, over = threading.Event(), threading.Event()

    async def run() -> None:
        running = await serve_aio(
            limits,
            lambda server: chief_pb2_grpc.add_ChiefServicer_to_server(servicer, server),
            services=["stratagem.Chief"],
        )
        address.append(running.address)
        ready.set()
        await asyncio.to_thread(over.wait)
        servicer.let_go.set()
        await running.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    ready.wait(30)
    yield address[0]
    over.set()
    thread.join()


KINDS: dict[str, tuple[type[Waiting], Callable[[Waiting, ServerConfig], Any]]] = {
    "sync": (Waiting, sync_server),
    "aio": (AioWaiting, aio_server),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


@contextlib.contextmanager
def served(kind: Any, limits: ServerConfig = LIMITS) -> Iterator[tuple[Waiting, str]]:
    servicer = kind[0]()
    with kind[1](servicer, limits) as address:
        yield servicer, address


@contextlib.contextmanager
def stub(address: str) -> Iterator[chief_pb2_grpc.ChiefStub]:
    channel = connect(address)
    yield chief_pb2_grpc.ChiefStub(channel)
    channel.close()


def refusal(call: Callable[[], Any]) -> StratagemError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return error_from_rpc(caught.value, "chief:0")


def status_of(call: Callable[[], Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code()  # type: ignore[no-any-return]


def test_one_peer_has_so_many_calls_and_others_are_served_meanwhile(kind: Any) -> None:
    with served(kind) as (servicer, address), stub(address) as greedy, stub(address) as other:
        calls = [greedy.GetStatus.future(chief_pb2.GetStatusRequest(), timeout=30) for _ in range(4)]
        for _ in calls:
            assert servicer.began.acquire(timeout=30)

        def ask() -> Any:
            return greedy.NextUnits(chief_pb2.NextUnitsRequest(), timeout=30)

        assert status_of(ask) is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = refusal(ask)
        assert isinstance(error, LimitError) and "4 calls in flight, which is max_calls_per_peer" in str(error)
        other.NextUnits(chief_pb2.NextUnitsRequest(), timeout=30)
        servicer.let_go.set()
        for call in calls:
            call.result()
        ask()


def test_streams_are_calls_too(kind: Any) -> None:
    with served(kind) as (_, address), stub(address) as greedy:
        over = threading.Event()

        def requests() -> Iterator[chief_pb2.SessionRequest]:
            yield chief_pb2.SessionRequest()
            over.wait(30)

        streams = [greedy.Session(requests(), timeout=30) for _ in range(4)]
        for stream in streams:
            next(iter(stream))
        error = refusal(lambda: next(iter(greedy.Session(requests(), timeout=30))))
        assert isinstance(error, LimitError) and "max_calls_per_peer" in str(error)
        over.set()
        for stream in streams:
            assert list(stream) == []


def test_all_peers_together_have_so_many_calls(kind: Any) -> None:
    with served(kind) as (servicer, address), stub(address) as one, stub(address) as two:
        status = chief_pb2.GetStatusRequest()
        calls = [each.GetStatus.future(status, timeout=30) for each in (one, two) for _ in range(3)]
        for _ in calls:
            assert servicer.began.acquire(timeout=30)
        error = refusal(lambda: two.NextUnits(chief_pb2.NextUnitsRequest(), timeout=30))
        assert isinstance(error, LimitError) and "6 calls are in flight, which is max_calls;" in str(error)
        servicer.let_go.set()
        for call in calls:
            call.result()


def test_a_call_without_a_free_thread_waits_and_others_are_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No server answered any more after that: two workers of a ring waited for each other, with deadlines, for ever."""
    start, num_short = threading.Thread.start, 1

    def start_unless_short(self: threading.Thread) -> None:
        nonlocal num_short
        if self.name.startswith("rpc") and num_short:
            num_short -= 1
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_unless_short)
    with served(KINDS["sync"]) as (_, address), stub(address) as one:
        first = one.NextUnits.future(chief_pb2.NextUnitsRequest(), timeout=30)
        until(lambda: bool(caplog.records))
        one.NextUnits(chief_pb2.NextUnitsRequest(), timeout=30)
        first.result()
    assert [record.message for record in caplog.records] == [
        "A call is not answered until something is free here: can't start new thread"
    ]


def test_long_lists_and_large_messages_are_refused(kind: Any) -> None:
    with served(kind) as (_, address), stub(address) as client:
        client.NextUnits(chief_pb2.NextUnitsRequest(accepted=range(100)), timeout=30)
        error = refusal(lambda: client.NextUnits(chief_pb2.NextUnitsRequest(accepted=range(101)), timeout=30))
        assert isinstance(error, LimitError) and "max_ids_per_request of 100" in str(error)
        large = chief_pb2.NextUnitsRequest(accepted=range(1 << 16))
        error = refusal(lambda: client.NextUnits(large, timeout=30))
        assert isinstance(error, LimitError) and "max_message_bytes" in str(error)


def test_a_small_message_that_unpacks_to_a_large_one_is_refused(kind: Any) -> None:
    with served(kind) as (_, address):
        channel = grpc.insecure_channel(address, compression=grpc.Compression.Gzip)
        call: Any = channel.unary_unary(NEXT_UNITS, None, None)
        code = status_of(lambda: call(bytes(8 << 20), timeout=30))
        channel.close()
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_what_cannot_be_parsed_is_a_protocol_error(kind: Any) -> None:
    with served(kind) as (_, address):
        channel = connect(address)
        call: Any = channel.unary_unary(NEXT_UNITS, None, None)
        error = refusal(lambda: call(b"\xff" * 20, timeout=30))
        assert isinstance(error, ProtocolError) and "for NextUnits, got 20 bytes of something else" in str(error)
        session: Any = channel.stream_stream("/stratagem.Chief/Session", None, None)
        error = refusal(lambda: next(session(iter([b"\xff" * 7]), timeout=30)))
        assert isinstance(error, ProtocolError) and "got 7 bytes of something else" in str(error)
        channel.close()


def test_connections_beyond_the_limit_are_closed_and_those_that_stand_go_on(kind: Any) -> None:
    with served(kind) as (_, address), stub(address) as first:
        first.NextUnits(chief_pb2.NextUnitsRequest(), timeout=30)
        host, port = address.split(":")
        silent = [socket.create_connection((host, int(port)), 10) for _ in range(2)]
        for sock in silent:
            assert sock.recv(9)  # the server speaks: it is in
        with socket.create_connection((host, int(port)), 10) as beyond:
            assert beyond.recv(9) == b""
        first.NextUnits(chief_pb2.NextUnitsRequest(), timeout=30)
        for sock in silent:
            sock.close()
        with stub(address) as later:
            later.NextUnits(chief_pb2.NextUnitsRequest(), timeout=30, wait_for_ready=True)


def test_calls_without_their_request_keep_nobody_out(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "PATIENCE_S", 60.0)
    with served(kind) as (_, address), stub(address) as client:
        channel = connect(address)
        over = threading.Event()

        def nothing() -> Iterator[bytes]:
            over.wait(30)
            yield from ()

        begin: Any = channel.stream_unary(NEXT_UNITS, None, None)
        calls: list[Any] = []
        deadline = time.monotonic() + 20
        while not calls or not is_refused(channel):  # the calls are counted although nothing came of them
            assert time.monotonic() < deadline
            # One that arrived after a probe of ours was itself one too many.
            calls = [call for call in calls if not call.done()]
            calls += [begin.future(nothing(), timeout=30) for _ in range(4 - len(calls))]
        client.NextUnits(chief_pb2.NextUnitsRequest(), timeout=30)
        monkeypatch.setattr(limits_module, "PATIENCE_S", -1.0)
        assert not is_refused(channel)
        with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
            calls[0].result()
        over.set()
        channel.close()


def is_refused(channel: grpc.Channel) -> bool:
    """Whether a call over a channel is one too many."""
    try:
        chief_pb2_grpc.ChiefStub(channel).NextUnits(chief_pb2.NextUnitsRequest(), timeout=30)
    except grpc.RpcError as error:
        call: Any = error
        assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return True
    return False


def test_a_refused_call_keeps_nothing_until_garbage_is_collected(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Calls that are kept count as streams of their connection, which refuses all others in the end.
    monkeypatch.setattr(logging.getLogger("stratagem.rpc.errors"), "disabled", True)  # pytest keeps what is logged
    raised: list[weakref.ref[StratagemError]] = []

    def refuse() -> None:
        error = ProtocolError("a refusal of the test")
        raised.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    class Refusing(Waiting):
        def NextUnits(self, request: Any, context: Any) -> Any:
            refuse()

    class AioRefusing(AioWaiting):
        async def NextUnits(self, request: Any, context: Any) -> Any:
            refuse()

    servicer = AioRefusing if kind is KINDS["aio"] else Refusing
    gc.disable()
    try:
        with served((servicer, kind[1])) as (_, address), stub(address) as chief:
            refused = [status_of(lambda: chief.NextUnits(chief_pb2.NextUnitsRequest(), timeout=30)) for _ in range(5)]
            deadline = time.monotonic() + 10
            while any(error() is not None for error in raised) and time.monotonic() < deadline:
                time.sleep(0.01)
            left = [error for error in raised if error() is not None]
    finally:
        gc.enable()
    assert refused == 5 * [grpc.StatusCode.INVALID_ARGUMENT] and len(raised) == 5
    assert not left
