"""A caller without a certificate says who it is and shows the token, with every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from stratagem.rpc.security import CALLER_KEY, TOKEN_KEY, Security

if TYPE_CHECKING:  # generic in the stubs only
    _UnaryUnary = grpc.UnaryUnaryClientInterceptor[Any, Any]
    _StreamStream = grpc.StreamStreamClientInterceptor[Any, Any]
    _AioUnaryUnary = grpc.aio.UnaryUnaryClientInterceptor[Any, Any]
    _AioStreamStream = grpc.aio.StreamStreamClientInterceptor[Any, Any]
else:
    _UnaryUnary, _StreamStream = grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor
    _AioUnaryUnary = grpc.aio.UnaryUnaryClientInterceptor
    _AioStreamStream = grpc.aio.StreamStreamClientInterceptor


def declaration(security: Security) -> tuple[tuple[str, str], ...]:
    """The metadata that says who calls; empty without a token."""
    if security.token is None:
        return ()
    return ((TOKEN_KEY, security.token.header), (CALLER_KEY, security.identity))


class DeclaringInterceptor(_UnaryUnary, _StreamStream):
    """Sync channels."""

    def __init__(self, security: Security) -> None:
        self._declaration = declaration(security)

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(self._declared(details), request)

    def intercept_stream_stream(self, continuation: Callable[..., Any], details: Any, requests: Any) -> Any:
        return continuation(self._declared(details), requests)

    def _declared(self, details: Any) -> Any:
        return details._replace(metadata=(*(details.metadata or ()), *self._declaration))


class _AioDeclaring:
    def __init__(self, security: Security) -> None:
        self._declaration = declaration(security)

    def _declared(self, details: Any) -> Any:
        return details._replace(metadata=grpc.aio.Metadata(*(details.metadata or ()), *self._declaration))


class AioUnaryDeclaringInterceptor(_AioDeclaring, _AioUnaryUnary):
    """Unary calls of ``grpc.aio`` channels; gRPC wants an interceptor of its own for each kind of call."""

    async def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return await continuation(self._declared(details), request)


class AioStreamDeclaringInterceptor(_AioDeclaring, _AioStreamStream):
    """Streams of ``grpc.aio`` channels."""

    async def intercept_stream_stream(self, continuation: Callable[..., Any], details: Any, requests: Any) -> Any:
        return await continuation(self._declared(details), requests)
