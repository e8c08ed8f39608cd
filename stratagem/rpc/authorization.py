"""The one interceptor that asks every caller who it is, and lets it do what its role may."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from google.protobuf.message import Message

from stratagem.errors import IdentityError
from stratagem.rpc.generated import chief_pb2
from stratagem.rpc.handlers import AioWrappingInterceptor, WrappingInterceptor, replaced, streaming_like
from stratagem.rpc.permissions import OPEN_METHODS, authorize
from stratagem.rpc.security import Security

SENDER_KEY = "stratagem-task"
"""Metadata of a grpc lane: the task that it speaks for."""


class _Guard:
    """Admits calls of one method."""

    def __init__(self, security: Security, method: str) -> None:
        self._security = security
        self._method = method

    def admit(self, context: Any) -> str:
        """The identity of a caller that may make this call.

        Raises:
            SecurityError: it may not.
        """
        if self._method in OPEN_METHODS:
            return ""
        metadata = dict(context.invocation_metadata())
        identity = self._security.who_calls(context.auth_context(), metadata)
        authorize(identity, self._method)
        self._compare(identity, metadata.get(SENDER_KEY))
        return identity

    def check_sender(self, identity: str, request: Any) -> None:
        """Refuses a request in the name of another task.

        Raises:
            IdentityError: names both.
        """
        if identity:
            self._compare(identity, _sender_of(request))

    def around(self, handler: Any, inner: Callable[..., Any], checked: Callable[[str, Any], Any]) -> Callable[..., Any]:
        """``inner`` of ``handler`` for callers that may; ``checked`` looks at a stream of requests of an identity."""

        def admitted(request: Any, context: Any) -> Any:
            identity = self.admit(context)
            if handler.request_streaming:
                return inner(checked(identity, request), context)
            self.check_sender(identity, request)
            return inner(request, context)

        return admitted

    def _compare(self, identity: str, claimed: Any) -> None:
        if claimed is not None and claimed != identity:
            name = self._method.rpartition("/")[2]
            raise IdentityError(f"{identity} may not call {name} in the name of {claimed or 'nobody'}")


def _sender_of(request: Any) -> str | None:
    """The task in whose name a request is made; None: requests of its kind name nobody."""
    if isinstance(request, chief_pb2.SessionRequest):
        return request.join.task if request.HasField("join") else None
    if isinstance(request, Message) and "sender" in request.DESCRIPTOR.fields_by_name:
        message: Any = request
        return str(message.sender.task)
    return None


class AuthorizationInterceptor(WrappingInterceptor):
    """Sync servers."""

    def __init__(self, security: Security) -> None:
        self._security = security

    def wrap(self, handler: Any, inner: Callable[..., Any], method: str) -> Any:
        guard = _Guard(self._security, method)

        def checked(identity: str, requests: Iterator[Any]) -> Iterator[Any]:
            for request in requests:
                guard.check_sender(identity, request)
                yield request

        admitted = guard.around(handler, inner, checked)

        def streaming(request: Any, context: Any) -> Iterator[Any]:
            yield from admitted(request, context)

        return replaced(handler, admitted, streaming)


class AioAuthorizationInterceptor(AioWrappingInterceptor):
    """The same for ``grpc.aio`` servers."""

    def __init__(self, security: Security) -> None:
        self._security = security

    def wrap(self, handler: Any, inner: Callable[..., Any], method: str) -> Any:
        guard = _Guard(self._security, method)

        async def checked(identity: str, requests: Any) -> AsyncIterator[Any]:
            async for request in requests:
                guard.check_sender(identity, request)
                yield request

        admitted = guard.around(handler, inner, checked)

        async def awaiting(request: Any, context: Any) -> Any:
            return await admitted(request, context)

        async def generating(request: Any, context: Any) -> AsyncIterator[Any]:
            async for reply in admitted(request, context):
                yield reply

        return replaced(handler, awaiting, streaming_like(inner, awaiting, generating))
