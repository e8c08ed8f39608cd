"""gRPC's handlers, and interceptors that put something around what a handler calls."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

if TYPE_CHECKING:  # generic in the stubs only
    _Sync = grpc.ServerInterceptor[Any, Any]
    _Aio = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Sync = grpc.ServerInterceptor
    _Aio = grpc.aio.ServerInterceptor


class WrappingInterceptor(_Sync):
    """Of sync servers: every method is called through what :meth:`wrap` makes of it."""

    def wrap(self, handler: Any, inner: Callable[..., Any], method: str) -> Any:
        """The handler of a method in the place of ``handler``, which calls ``inner``."""
        raise NotImplementedError

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        return self.wrap(handler, behaviour_of(handler), handler_call_details.method)  # type: ignore[no-any-return]


class AioWrappingInterceptor(_Aio):
    """The same for ``grpc.aio`` servers."""

    def wrap(self, handler: Any, inner: Callable[..., Any], method: str) -> Any:
        """See :meth:`WrappingInterceptor.wrap`."""
        raise NotImplementedError

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        return None if handler is None else self.wrap(handler, behaviour_of(handler), handler_call_details.method)


def behaviour_of(handler: Any) -> Callable[..., Any]:
    """What a handler calls; it has one of four."""
    found: Callable[..., Any] = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    return found


def replaced(handler: Any, unary: Callable[..., Any], streaming: Callable[..., Any]) -> Any:
    """A handler that calls one of these instead, whichever its replies ask for."""
    kind = ("stream" if handler.request_streaming else "unary") + (
        "_stream" if handler.response_streaming else "_unary"
    )
    return handler._replace(**{kind: streaming if handler.response_streaming else unary})


def streaming_like(
    inner: Callable[..., Any], awaiting: Callable[..., Any], generating: Callable[..., Any]
) -> Callable[..., Any]:
    """Which of two wraps a streaming behaviour of ``grpc.aio``: it may also be a coroutine that writes to the context,
    as health's Watch is."""
    return awaiting if inspect.iscoroutinefunction(inner) else generating
