"""A caller without a certificate says who it is and shows the token, with every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from stratagem.rpc.security import CALLER_KEY, TOKEN_KEY, Security


def declaration(security: Security) -> tuple[tuple[str, str], ...]:
    """The metadata that says who calls; empty without a token."""
    if security.token is None:
        return ()
    return ((TOKEN_KEY, security.token.header), (CALLER_KEY, security.identity))


# The interceptors of gRPC are generic in the stubs only.
class DeclaringInterceptor(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    """Sync channels."""

    def __init__(self, security: Security) -> None:
        self._declaration = declaration(security)

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(self._declared(details), request)

    def intercept_stream_stream(self, continuation: Callable[..., Any], details: Any, requests: Any) -> Any:
        return continuation(self._declared(details), requests)

    def _declared(self, details: Any) -> Any:
        return details._replace(metadata=(*(details.metadata or ()), *self._declaration))


class AioDeclaringInterceptor(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Unary calls of ``grpc.aio`` channels, which make no others: each kind would want an interceptor of its own."""

    def __init__(self, security: Security) -> None:
        self._declaration = declaration(security)

    async def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *self._declaration)
        return await continuation(details._replace(metadata=metadata), request)
