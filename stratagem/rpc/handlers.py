"""gRPC's handlers, as the interceptors take them apart and put them together again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


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
