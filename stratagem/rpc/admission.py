"""The interceptors that keep limits: calls at once, lengths of lists, and messages that cannot be parsed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from google.protobuf.message import DecodeError, Message

from stratagem.errors import LimitError, ProtocolError
from stratagem.rpc.handlers import AioWrappingInterceptor, WrappingInterceptor, replaced, streaming_like
from stratagem.rpc.limits import CallCounter, CountedCall, ServerLimits, check_ids


@dataclasses.dataclass(frozen=True)
class _Malformed:
    """In the place of a request that cannot be parsed: gRPC itself would log a traceback for each."""

    num_bytes: int


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed(len(data))

    return parse


def peer_of(context: Any) -> str:
    """Whom a call is counted for: the owner of the certificate, without TLS the connection."""
    uris = context.auth_context().get("peer_uri", ())
    return b",".join(uris).decode(errors="replace") if uris else str(context.peer())


class _Gate:
    """Lets calls of one method pass."""

    def __init__(self, method: str, limits: ServerLimits, counter: CallCounter) -> None:
        self._name = method.rpartition("/")[2]
        self._limits = limits
        self.counter = counter

    def check(self, request: Any) -> Any:
        """Refuses a request that did not come, cannot be parsed, or is too long.

        Raises:
            ProtocolError: says which.
        """
        if request is None:
            raise ProtocolError(f"expected a request for {self._name}, got none")
        if isinstance(request, _Malformed):
            raise ProtocolError(f"expected a request for {self._name}, got {request.num_bytes} bytes of something else")
        if isinstance(request, Message):
            check_ids(request, self._limits.max_ids_per_request)
        return request


class AdmissionInterceptor(WrappingInterceptor):
    """Sync servers. Every method takes a stream here: so a call is counted before its request is read."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._counter = CallCounter(limits)

    def wrap(self, handler: Any, inner: Callable[..., Any], method: str) -> Any:
        gate = _Gate(method, self._limits, self._counter)

        def requests_of(call: CountedCall, requests: Iterator[Any]) -> Any:
            if handler.request_streaming:
                return requests if handler.request_deserializer is None else map(gate.check, requests)
            with gate.counter.waiting(call):
                request = next(requests, None)
            return gate.check(request)

        def answering(requests: Iterator[Any], context: Any) -> Any:
            with gate.counter.counted(peer_of(context), context.cancel) as call:
                return inner(requests_of(call, requests), context)

        def streaming(requests: Iterator[Any], context: Any) -> Iterator[Any]:
            with gate.counter.counted(peer_of(context), context.cancel) as call:
                yield from inner(requests_of(call, requests), context)

        return _taking_streams(handler, answering, streaming)


class AioAdmissionInterceptor(AioWrappingInterceptor):
    """The same for ``grpc.aio`` servers."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._counter = CallCounter(limits)

    def wrap(self, handler: Any, inner: Callable[..., Any], method: str) -> Any:
        gate = _Gate(method, self._limits, self._counter)

        async def checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
            async for request in requests:
                yield gate.check(request)

        async def requests_of(call: CountedCall, requests: AsyncIterator[Any]) -> Any:
            if handler.request_streaming:
                return checked(requests)
            try:
                with gate.counter.waiting(call):
                    return gate.check(await anext(aiter(requests), None))
            except asyncio.CancelledError:
                if call.counts:
                    raise
                _this_task().uncancel()  # another has its place: the caller hears of it, and gRPC lets go of the call
                raise LimitError("the request did not come, and its place was needed (max_calls)") from None

        async def answering(requests: AsyncIterator[Any], context: Any) -> Any:
            with gate.counter.counted(peer_of(context), _this_task().cancel) as call:
                return await inner(await requests_of(call, requests), context)

        async def generating(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            with gate.counter.counted(peer_of(context), _this_task().cancel) as call:
                async for reply in inner(await requests_of(call, requests), context):
                    yield reply

        return _taking_streams(handler, answering, streaming_like(inner, answering, generating))


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _taking_streams(handler: Any, unary: Callable[..., Any], streaming: Callable[..., Any]) -> Any:
    """A handler that calls one of these with a stream of requests, and shows it what cannot be parsed as such."""
    tolerant = _tolerant(handler.request_deserializer)
    bare = handler._replace(unary_unary=None, unary_stream=None, stream_unary=None, stream_stream=None)
    return replaced(bare._replace(request_streaming=True, request_deserializer=tolerant), unary, streaming)
