"""gRPC between simulated processes: messages travel for a while, connections break, directions are cut."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
import types
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import grpc

from stratagem.cluster.config import ServerConfig
from stratagem.rpc.interceptors import AioInterceptor, Interceptor
from stratagem.rpc.security import OPEN
from tests.simulation.loop import Loop
from tests.simulation.threads import Condition
from tests.simulation.world import Process, World

KEEPALIVE_S = 3.0
"""A connection over which nothing comes back breaks after this."""


class RpcError(grpc.RpcError):
    """What a call raises, as gRPC's own."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Sequence[tuple[str, Any]] = ()) -> None:
        super().__init__(details)
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._metadata


class AioRpcError(RpcError, grpc.aio.AioRpcError):
    """The same for ``grpc.aio``."""

    def __init__(self, error: RpcError) -> None:
        RpcError.__init__(self, error._code, error._details, error._metadata)


class Aborted(Exception):
    """Raised by ``context.abort``: gRPC stops the handler by an exception of its own."""

    def __init__(self, error: RpcError) -> None:
        super().__init__(error.details())
        self.error = error


def unavailable(details: str) -> RpcError:
    return RpcError(grpc.StatusCode.UNAVAILABLE, details)


@dataclasses.dataclass
class Conditions:
    """Of the network: chances for each message, times in seconds."""

    delay_s: float = 0.001
    slow: float = 0.0
    """A message takes up to a hundred times as long."""
    reset: float = 0.0
    """A connection is reset when a message would have gone over it."""
    duplicate: float = 0.0
    """A call arrives once more."""


class Network:
    """Who can reach whom.

    Args:
        world: the queue.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.conditions = Conditions()
        self.servers: dict[str, Server] = {}
        self.calls: dict[Call, None] = {}
        self._cuts: collections.Counter[tuple[str, str]] = collections.Counter()
        self._held: dict[tuple[str, str], list[tuple[Process, float, Callable[..., None], tuple[Any, ...]]]] = {}

    def delay(self) -> float:
        """Of the next message."""
        random, conditions = self.world.random, self.conditions
        delay_s = conditions.delay_s * (0.2 + random.random())
        if conditions.slow and random.random() < conditions.slow:
            delay_s *= 100 * random.random()
        return delay_s

    def is_cut(self, source: str, target: str) -> bool:
        """Whether messages from a task to another stay away."""
        return bool(self._cuts[source, target])

    def cut(self, source: str, target: str) -> None:
        """Messages from ``source`` to ``target`` stay away; connections break when it lasts."""
        self._cuts[source, target] += 1
        self.world.after(KEEPALIVE_S, None, self._break_silent, source, target)

    def heal(self, source: str, target: str) -> None:
        """The reverse of :meth:`cut`; what was held comes now, behind what was on its way before."""
        self._cuts[source, target] -= 1
        if not self._cuts[source, target]:
            for process, at, run, arguments in self._held.pop((source, target), []):
                self.world.after(max(0.0, at - self.world.now), process, run, *arguments)

    def _break_silent(self, source: str, target: str) -> None:
        if not self.is_cut(source, target):
            return
        self._held.pop((source, target), None)
        for call in [call for call in self.calls if {call.client.name, call.server_name} == {source, target}]:
            call.break_off(unavailable("keepalive watchdog timeout"))

    def reset(self, source: str, target: str) -> None:
        """All connections between two tasks are reset now."""
        for call in [call for call in self.calls if {call.client.name, call.server_name} == {source, target}]:
            call.break_off(unavailable("connection reset by peer"))

    def post(self, source: Process, target: Process, at: float, run: Callable[..., None], *arguments: Any) -> None:
        """Has ``run`` called in ``target``, unless the message stays away."""
        if self._cuts and self.is_cut(source.name, target.name):
            self._held.setdefault((source.name, target.name), []).append((target, at, run, arguments))
        else:
            self.world.after(at - self.world.now, target, run, *arguments)

    def connect_error(self, client: Process, address: str) -> RpcError | None:
        """Why there is no connection; None: there is."""
        server = self.servers.get(address)
        if server is None or not server.process.alive:
            return unavailable("connection refused")
        return None

    def try_connection(self, client: Process, address: str) -> None:
        """As a socket would.

        Raises:
            OSError: nothing listens there, or nobody can be reached.
        """
        server = self.servers.get(address)
        if server is not None and (
            self.is_cut(client.name, server.process.name) or self.is_cut(server.process.name, client.name)
        ):
            raise TimeoutError("timed out")
        if server is None or not server.process.alive:
            raise ConnectionRefusedError("connection refused")

    def lose(self, process: Process) -> None:
        """Its machine is gone, and what was on its way from there."""
        for call in [call for call in self.calls if call.server is process]:
            self.world.after(0.0, call.client, call._end_at_client, unavailable("Socket closed"))
        process.kill()

    def process_died(self, process: Process) -> None:
        """Its kernel closes its connections."""
        for address in [address for address, server in self.servers.items() if server.process is process]:
            del self.servers[address]
        for call in [call for call in self.calls if call.client is process or call.server is process]:
            call.break_off(unavailable("Socket closed"))


class Server:
    """A gRPC server: handlers by the name of their method.

    Args:
        network: where it listens.
        process: whose it is.
        loop: of a ``grpc.aio`` server; None: it has threads.
    """

    def __init__(self, network: Network, process: Process, loop: Loop | None = None) -> None:
        self.network = network
        self.process = process
        self.loop = loop
        self.is_stopped: Callable[[], bool] = lambda: False
        kind: Any = Interceptor if loop is None else AioInterceptor
        self._interceptor = kind(ServerConfig(task="ps:0"), OPEN)
        self._generic: list[Any] = []
        self._handlers: dict[str, Any] = {}
        network.servers[process.address] = self

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """The same as the generic ones."""

    def handler(self, method: str) -> Any:
        """What serves a method, inside the product's interceptor."""
        if method not in self._handlers:
            details: Any = types.SimpleNamespace(method=method, invocation_metadata=())
            found = next(handler for each in self._generic if (handler := each.service(details)) is not None)
            self._handlers[method] = self._interceptor.wrap(found, method)
        return self._handlers[method]


class Context:
    """Of a call, as a servicer sees it."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def is_active(self) -> bool:
        return not self._call.over_at_server

    def done(self) -> bool:
        return self._call.over_at_server

    def time_remaining(self) -> float:
        return max(0.0, self._call.deadline - self._call.world.now)

    def add_callback(self, callback: Callable[[], None]) -> bool:
        if self._call.over_at_server:
            return False
        self._call.callbacks.append(callback)
        return True

    def invocation_metadata(self) -> Sequence[tuple[str, Any]]:
        return self._call.metadata

    def auth_context(self) -> dict[str, Any]:
        return {}

    def peer(self) -> str:
        return str(self._call.client)

    def cancel(self) -> None:
        self._call.end_at_server(RpcError(grpc.StatusCode.CANCELLED, "cancelled"))

    def abort_with_status(self, status: Any) -> None:
        raise Aborted(RpcError(status.code, status.details, status.trailing_metadata))


class AioContext(Context):
    """The same for ``grpc.aio``."""

    async def abort(self, code: grpc.StatusCode, details: str = "", metadata: Any = ()) -> None:
        raise Aborted(RpcError(code, details, metadata))


class Call:
    """One call, unary or a stream, from both ends.

    Args:
        network: over which.
        client: who calls.
        address: of the server.
        method: full name.
        metadata: of the call.
    """

    def __init__(
        self, network: Network, client: Process, address: str, method: str, metadata: Sequence[tuple[str, Any]] = ()
    ) -> None:
        self.network = network
        self.world = network.world
        self.client = client
        self.method = method
        self.metadata = metadata
        self.callbacks: list[Callable[[], None]] = []
        self.over_at_server = False
        self.deadline = math.inf
        self.error: RpcError | None = None
        self._broken = False
        self.ended = False
        """At the client: no further reply comes."""
        self.replies: collections.deque[bytes] = collections.deque()
        self.requests: collections.deque[bytes | None] = collections.deque()
        self.on_reply: Callable[[], None] = self._notify
        self._changed = Condition()
        self._requests_changed = Condition()
        self._aio_requests: asyncio.Event | None = None
        self._task: asyncio.Task[Any] | None = None
        self._last = {True: 0.0, False: 0.0}
        """When the last message to the server, and to the client, arrives: they stay in order."""
        self.server: Process | None = None
        self.server_name = ""
        self._target: Server | None = None
        if (error := network.connect_error(client, address)) is not None:
            self.world.after(network.delay(), client, self._end_at_client, error)
            return
        self._target = network.servers[address]
        self.server = self._target.process
        self.server_name = self.server.name
        network.calls[self] = None

    # -- the way there -----------------------------------------------------------------------------------------

    def _arrival(self, to_server: bool) -> float:
        at = max(self.world.now + self.network.delay(), self._last[to_server] + 1e-7)
        self._last[to_server] = at
        return at

    def _is_reset(self) -> bool:
        chance = self.network.conditions.reset
        if chance and self.world.random.random() < chance:
            self.break_off(unavailable("connection reset by peer"))
            return True
        return False

    def begin(self, request: bytes | None) -> None:
        """Has the server serve it: with a request, or as a stream."""
        if self._target is None or self.ended or self._is_reset():
            return
        assert self.server is not None
        self.network.post(self.client, self.server, self._arrival(True), self._serve, request)
        duplicate = self.network.conditions.duplicate
        is_repeated = not self.method.endswith("/SaveShards")  # it has one caller, which never does
        if request is not None and is_repeated and duplicate and self.world.random.random() < duplicate:
            twin = Call(self.network, self.client, self.server.address, self.method, self.metadata)
            twin.on_reply = lambda: None
            if twin.server is self.server:  # an earlier attempt, whose connection broke: it comes first, or beside
                at = self.world.now + self.network.delay() * self.world.random.random()
                self.network.post(self.client, self.server, at, twin._serve, request)
                self.world.after(2 * self.network.delay(), self.server, twin._cancel_at_server)

    def send_request(self, message: bytes | None) -> None:
        """A further message of a stream; None: there is none any more."""
        if self._target is None or self.ended or self.server is None or self._broken or self._is_reset():
            return
        self.network.post(self.client, self.server, self._arrival(True), self._take_request, message)

    def _take_request(self, message: bytes | None) -> None:
        self.requests.append(message)
        self._happened("message ")
        if self._aio_requests is not None:
            self._aio_requests.set()
        else:
            self._requests_changed.notify_all()

    def _happened(self, what: str) -> None:
        self.world.faults.happened(what + self.method.rpartition("/")[2])  # type: ignore[attr-defined]

    def _serve(self, request: bytes | None) -> None:
        if self.over_at_server or self._target is None:
            return
        self._happened("")
        handler = self._target.handler(self.method)
        if self._target.loop is not None:
            loop = self._target.loop
            serve = self._serve_aio(handler, request)
            loop.enter(lambda: self._begin_task(loop, serve))
        else:
            assert self.server is not None
            self.server.spawn(lambda: self._serve_sync(handler, request), f"rpc {self.method.rpartition('/')[2]}")

    def _begin_task(self, loop: Loop, serve: Any) -> None:
        self._task = loop.create_task(serve)

    def _serve_sync(self, handler: Any, request: bytes | None) -> None:
        context = Context(self)
        try:
            if request is not None:
                reply = handler.stream_unary(iter([handler.request_deserializer(request)]), context)
                self.send_reply(handler.response_serializer(reply))
            else:
                for reply in handler.stream_stream(self._iterate_requests(handler.request_deserializer), context):
                    self.send_reply(handler.response_serializer(reply) if handler.response_serializer else reply)
        except Aborted as aborted:
            self.end_at_server(aborted.error)
        except Exception as error:
            if not self.over_at_server:
                self.world.fail(f"{self.server}: {self.method} failed: {type(error).__name__}: {error}")
            self.end_at_server(RpcError(grpc.StatusCode.UNKNOWN, f"Exception calling application: {error}"))
        else:
            self.end_at_server(None)

    def _iterate_requests(self, decode: Any) -> Iterator[Any]:
        while True:
            while not self.requests:
                if self.over_at_server:
                    raise Exception  # as gRPC's iterator does when a stream breaks
                self._requests_changed.wait()
            message = self.requests.popleft()
            if message is None:
                return
            yield decode(message) if decode else message

    async def _serve_aio(self, handler: Any, request: bytes | None) -> None:
        context = AioContext(self)
        try:
            if request is not None:
                reply = await handler.stream_unary(_only(handler.request_deserializer(request)), context)
                self.send_reply(handler.response_serializer(reply))
            else:
                self._aio_requests = asyncio.Event()
                requests = self._iterate_requests_aio(handler.request_deserializer)
                async for reply in handler.stream_stream(requests, context):
                    self.send_reply(handler.response_serializer(reply))
        except Aborted as aborted:
            self.end_at_server(aborted.error)
        except asyncio.CancelledError:
            self.end_at_server(RpcError(grpc.StatusCode.CANCELLED, "cancelled"))
        except Exception as error:
            if self._target is not None and not self._target.is_stopped():
                self.world.fail(f"{self.server}: {self.method} failed: {type(error).__name__}: {error}")
            self.end_at_server(RpcError(grpc.StatusCode.UNKNOWN, f"Exception: {error}"))
        else:
            self.end_at_server(None)

    async def _iterate_requests_aio(self, decode: Any) -> AsyncIterator[Any]:
        assert self._aio_requests is not None
        while True:
            while not self.requests:
                self._aio_requests.clear()
                await self._aio_requests.wait()
            message = self.requests.popleft()
            if message is None:
                return
            yield decode(message)

    # -- the way back ------------------------------------------------------------------------------------------

    def send_reply(self, message: bytes) -> None:
        """A reply leaves the server."""
        if self.over_at_server or self.server is None or self._broken or self._is_reset():
            return
        self.network.post(self.server, self.client, self._arrival(False), self._take_reply, message)
        self._happened("reply ")

    def end_at_server(self, error: RpcError | None) -> None:
        """The handler is through."""
        if self.over_at_server:
            return
        self.over_at_server = True
        self._call_back()
        if self.server is not None and not self._broken:
            self.network.post(self.server, self.client, self._arrival(False), self._end_at_client, error)

    def _take_reply(self, message: bytes) -> None:
        if not self.ended:
            self.replies.append(message)
            self.on_reply()

    def _end_at_client(self, error: RpcError | None) -> None:
        if not self.ended:
            self.ended, self.error = True, error
            self.network.calls.pop(self, None)
            self.on_reply()

    def _notify(self) -> None:
        self._changed.notify_all()

    def _call_back(self) -> None:
        callbacks, self.callbacks = self.callbacks, []
        if self.server is not None and self.server.alive:
            for callback in callbacks:
                self.server.spawn(callback, "callback")
            if self._requests_changed.is_waited_for:
                self.world.after(0.0, self.server, self._requests_changed.notify_all)

    def break_off(self, error: RpcError) -> None:
        """The connection is gone; each end hears of it a moment later."""
        if self._broken:
            return
        self._broken = True
        self.network.calls.pop(self, None)
        delay = self.network.delay
        self.world.after(delay(), self.client, self._end_at_client, error)
        if self.server is not None:
            self.world.after(delay(), self.server, self._cancel_at_server)

    def _cancel_at_server(self) -> None:
        """The client is gone, or waits no more."""
        if self.over_at_server:
            return
        self.over_at_server = True
        self._call_back()
        if self._task is not None and self._target is not None and self._target.loop is not None:
            self._target.loop.enter(self._task.cancel)

    # -- the client --------------------------------------------------------------------------------------------

    def cancel(self) -> bool:
        """The client waits no more."""
        self._give_up(RpcError(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
        return True

    def _give_up(self, error: RpcError) -> None:
        if self.ended:
            return
        self._end_at_client(error)
        if self.server is not None:
            self.network.post(self.client, self.server, self._arrival(True), self._cancel_at_server)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether there is a reply or the end within so many seconds."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self.replies or self.ended, timeout_s))

    def exceeded(self) -> None:
        """Its deadline is over."""
        self._give_up(RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))


class Stream:
    """The replies of a stream, for a client with threads."""

    def __init__(self, call: Call, decode: Any) -> None:
        self._call = call
        self._decode = decode

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        call = self._call
        call.wait(None)
        if call.replies:
            message = call.replies.popleft()
            return self._decode(message) if self._decode else message
        if call.error is not None:
            raise call.error
        raise StopIteration

    def cancel(self) -> bool:
        return self._call.cancel()


class Pending:
    """The future of a unary call."""

    def __init__(self, call: Call, decode: Any) -> None:
        self._call = call
        self._decode = decode

    def result(self, timeout: float | None = None) -> Any:
        call = self._call
        if not call.wait(timeout):
            raise grpc.FutureTimeoutError
        if call.replies:
            return self._decode(call.replies.popleft())
        assert call.error is not None
        if call.error.code() is grpc.StatusCode.CANCELLED and not call.error.trailing_metadata():
            raise grpc.FutureCancelledError
        raise call.error

    def cancel(self) -> bool:
        return self._call.cancel()


class Channel:
    """In the place of ``grpc.Channel``.

    Args:
        network: over which.
        client: whose it is.
        address: where the server is; whoever listens there now.
    """

    def __init__(self, network: Network, client: Process, address: str) -> None:
        self._network = network
        self._client = client
        self._address = address
        self._closed = False
        self._calls: list[Call] = []

    def _begin(self, method: str, metadata: Sequence[tuple[str, Any]] = ()) -> Call:
        if self._closed:
            raise ValueError("Cannot invoke RPC on closed channel!")
        call = Call(self._network, self._client, self._address, method, metadata)
        if len(self._calls) > 20:
            self._calls = [call for call in self._calls if not call.ended]
        self._calls.append(call)
        return call

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Unary:
        return Unary(lambda: self._begin(method), request_serializer, response_deserializer)

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., Stream]:
        def start(requests: Iterator[Any], metadata: Sequence[tuple[str, Any]] = ()) -> Stream:
            call = self._begin(method, metadata)
            call.begin(None)

            def feed() -> None:
                for request in requests:
                    if call.ended:
                        return
                    call.send_request(request_serializer(request) if request_serializer else request)
                call.send_request(None)

            self._client.spawn(feed, "requests")
            return Stream(call, response_deserializer)

        return start

    unary_stream = stream_unary = stream_stream

    def close(self, grace: Any = None) -> None:
        self._closed = True
        for call in self._calls:
            call.cancel()


class Unary:
    """A unary method of a channel."""

    def __init__(self, begin: Callable[[], Call], encode: Any, decode: Any) -> None:
        self._begin_call, self._encode, self._decode = begin, encode, decode

    def _begin(self, request: Any, timeout: float | None) -> Call:
        call = self._begin_call()
        call.deadline = math.inf if timeout is None else call.world.now + timeout
        call.begin(self._encode(request))
        return call

    def future(self, request: Any, timeout: float | None = None) -> Pending:
        return Pending(self._begin(request, timeout), self._decode)

    def __call__(self, request: Any, timeout: float | None = None) -> Any:
        call = self._begin(request, timeout)
        if not call.wait(timeout):
            call.exceeded()
        if call.replies:
            return self._decode(call.replies.popleft())
        assert call.error is not None
        raise call.error


class AioChannel(Channel):
    """In the place of ``grpc.aio.Channel``."""

    def unary_unary(  # type: ignore[override]
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., Any]:
        async def start(request: Any, timeout: float | None = None) -> Any:
            call = self._begin(method)
            loop: Any = asyncio.get_running_loop()
            future = loop.create_future()

            def tell() -> None:
                if not future.done() and isinstance(loop, Loop):
                    loop.enter(lambda: future.set_result(None))

            call.on_reply = tell
            call.begin(request_serializer(request))
            timer = loop.call_later(timeout, call.exceeded) if timeout is not None else None
            try:
                await future
            except asyncio.CancelledError:
                call.cancel()
                raise
            finally:
                if timer is not None:
                    timer.cancel()
            if call.replies:
                return response_deserializer(call.replies.popleft())
            assert call.error is not None
            raise AioRpcError(call.error)

        return start

    async def close(self, grace: Any = None) -> None:  # type: ignore[override]
        super().close()


async def _only(request: Any) -> AsyncIterator[Any]:
    yield request
