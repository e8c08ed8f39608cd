"""What surrounds every call of a server: who may call, how many at once, and errors that become statuses."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from stratagem.cluster.config import ServerConfig
from stratagem.errors import IdentityError, LimitError, ProtocolError
from stratagem.rpc.errors import Caught
from stratagem.rpc.generated import chief_pb2
from stratagem.rpc.limits import CallCounter, CountedCall, check_ids
from stratagem.rpc.permissions import OPEN_METHODS, authorize
from stratagem.rpc.security import Security

SENDER_KEY = "stratagem-task"
"""Metadata of a grpc lane: the task that it speaks for."""


@dataclasses.dataclass(frozen=True)
class _Malformed:
    """Stands for a request that cannot be parsed: gRPC itself would log a traceback for each."""

    num_bytes: int


class _Gate:
    """Lets calls of one method pass, and their requests."""

    def __init__(self, method: str, limits: ServerConfig, counter: CallCounter, security: Security) -> None:
        self._method = method
        self._name = method.rpartition("/")[2]
        self._limits = limits
        self._security = security
        self.counter = counter

    def entered(self, context: Any, cancel: Callable[[], object]) -> contextlib.AbstractContextManager[CountedCall]:
        """Around a call: of the owner of a certificate, without TLS over a connection. SecurityError: the caller may
        not make it. LimitError: it is one too many."""
        proven, identity = context.auth_context(), ""
        if self._security.asks_who_calls and self._method not in OPEN_METHODS:
            metadata = dict(context.invocation_metadata())
            identity = self._security.who_calls(proven, metadata)
            authorize(identity, self._method)
            self._compare(identity, metadata.get(SENDER_KEY))
        uris = proven.get("peer_uri", ())
        peer = b",".join(uris).decode(errors="replace") if uris else str(context.peer())
        return self.counter.counted(peer, cancel, identity)

    def check(self, identity: str, request: Any) -> Any:
        """Refuses a request that did not come, cannot be parsed, is in the name of another task, or is too long.
        ProtocolError, IdentityError, LimitError: says which."""
        if request is None:
            raise ProtocolError(f"expected a request for {self._name}, got none")
        if isinstance(request, _Malformed):
            raise ProtocolError(f"expected a request for {self._name}, got {request.num_bytes} bytes of something else")
        if isinstance(request, Message):
            if identity:
                self._compare(identity, _sender_of(request))
            check_ids(request, self._limits.max_ids_per_request)
        return request

    def _compare(self, identity: str, claimed: Any) -> None:
        if claimed is not None and claimed != identity:
            raise IdentityError(f"{identity} may not call {self._name} in the name of {claimed or 'nobody'}")


class _Gated:
    def __init__(self, limits: ServerConfig, security: Security) -> None:
        self._gate = functools.partial(_Gate, limits=limits, counter=CallCounter(limits), security=security)
        """Makes that of a method; those of a server count together."""


class Interceptor(_Gated, grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """For sync servers. Every method takes a stream here, so a call is counted before its request is read."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = continuation(handler_call_details)
        return None if handler is None else self.wrap(handler, handler_call_details.method)

    def wrap(self, handler: Any, method: str) -> Any:
        """The handler of a method in the place of ``handler``."""
        gate, inner = self._gate(method), _behaviour_of(handler)

        def requests_of(call: CountedCall, requests: Iterator[Any]) -> Any:
            check = functools.partial(gate.check, call.identity)
            if handler.request_streaming:
                return requests if handler.request_deserializer is None else map(check, requests)
            with gate.counter.waiting(call):
                request = next(requests, None)
            return check(request)

        def answering(requests: Iterator[Any], context: Any) -> Any:
            with Caught(method, context.is_active) as caught, gate.entered(context, context.cancel) as call:
                return inner(requests_of(call, requests), context)
            context.abort_with_status(caught.status)

        def streaming(requests: Iterator[Any], context: Any) -> Iterator[Any]:
            with Caught(method, context.is_active) as caught, gate.entered(context, context.cancel) as call:
                yield from inner(requests_of(call, requests), context)
            if caught.status is not None:
                context.abort_with_status(caught.status)

        return _replaced(handler, answering, streaming)


class AioInterceptor(_Gated, grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """The same for ``grpc.aio`` servers."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        return None if handler is None else self.wrap(handler, handler_call_details.method)

    def wrap(self, handler: Any, method: str) -> Any:
        """See :meth:`Interceptor.wrap`."""
        gate, inner = self._gate(method), _behaviour_of(handler)

        async def checked(identity: str, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
            async for request in requests:
                yield gate.check(identity, request)

        async def requests_of(call: CountedCall, requests: AsyncIterator[Any]) -> Any:
            if handler.request_streaming:
                return checked(call.identity, requests)
            try:
                with gate.counter.waiting(call):
                    return gate.check(call.identity, await anext(aiter(requests), None))
            except asyncio.CancelledError:
                if call.counts:
                    raise
                _this_task().uncancel()  # another has its place: the caller hears of it, and gRPC lets go of the call
                raise LimitError("the request did not arrive, and its slot was needed (max_calls)") from None

        async def answering(requests: AsyncIterator[Any], context: Any) -> Any:
            caught = Caught(method, lambda: not context.done())
            with caught, gate.entered(context, _this_task().cancel) as call:
                return await inner(await requests_of(call, requests), context)
            await _abort(context, caught.status)

        async def generating(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            caught = Caught(method, lambda: not context.done())
            with caught, gate.entered(context, _this_task().cancel) as call:
                async for reply in inner(await requests_of(call, requests), context):
                    yield reply
            if caught.status is not None:
                await _abort(context, caught.status)

        # A streaming behaviour may also be a coroutine that writes to the context, as health's Watch is.
        return _replaced(handler, answering, answering if inspect.iscoroutinefunction(inner) else generating)


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def _abort(context: Any, status: Any) -> None:
    """Not while an error is handled: gRPC keeps what it raises here with the call, and the error would keep the frames
    that keep the call, until garbage is collected."""
    await context.abort(status.code, status.details, status.trailing_metadata)


def _behaviour_of(handler: Any) -> Any:
    """What a handler calls; it has one of four."""
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


def _replaced(handler: Any, unary: Callable[..., Any], streaming: Callable[..., Any]) -> Any:
    """A handler that calls one of these with a stream of requests, and shows it what cannot be parsed as such."""
    deserialize = handler.request_deserializer

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed(len(data))

    return handler._replace(
        request_streaming=True,
        request_deserializer=None if deserialize is None else parse,
        unary_unary=None,
        unary_stream=None,
        stream_unary=None if handler.response_streaming else unary,
        stream_stream=streaming if handler.response_streaming else None,
    )


def _sender_of(request: Any) -> str | None:
    """The task in whose name a request is made; None: requests of its kind name nobody."""
    if isinstance(request, chief_pb2.SessionRequest):
        return request.join.task if request.HasField("join") else None
    return str(request.sender.task) if "sender" in request.DESCRIPTOR.fields_by_name else None
