"""Client channels: one place for their arguments (measurements: ``docs/design/grpc.md``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio

from stratagem.cluster.identity import server_name
from stratagem.errors import IdentityError, PeerUnavailableError
from stratagem.rpc.binding import check_token_path
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.handshake import explain_refusal
from stratagem.rpc.security import OPEN, Declaration, Security

LOOKAHEAD_BYTES = 4 << 20
"""Of a stream that nobody reads, at each end. More costs memory for each lane, 1 MiB costs a worker 5 % more CPU."""

_Option = tuple[str, int | str]


def channel_options(max_message_bytes: int = -1) -> list[_Option]:
    """Arguments of a channel inside the cluster: dead peers noticed within 3 s, large frames, reconnects within 1 s,
    messages of at most ``max_message_bytes``; -1: any."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 2000),
        ("grpc.keepalive_timeout_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_frame_size", (1 << 24) - 1),
        # What a peer may send before anybody reads it: a frame, and not what gRPC finds the link to bear.
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # How long one attempt may take, TLS included: a busy machine, or a link with delay, needs more than a moment.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # A pod that is made again has another address: gRPC asks for it once in 30 s otherwise.
        ("grpc.dns_min_time_between_resolutions_ms", 500),
        # Control and data must not share a connection: a channel with its own pool has its own.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]


def connect(address: str, peer: str = "", security: Security = OPEN) -> grpc.Channel:
    """A channel of its own connection to ``host:port``. With TLS nobody but ``peer`` is accepted there.
    ConfigurationError: the certificates cannot be used, or the token would travel in the clear."""
    options, credentials = _prepared(address, peer, security)
    if credentials is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, credentials, options=options)
    if security.token is not None:
        channel = grpc.intercept_channel(channel, _Declaring(security.declaration))
    return channel


def connect_aio(address: str, peer: str = "", security: Security = OPEN) -> grpc.aio.Channel:
    """The same for ``grpc.aio``, for unary calls: streams would not show the token."""
    options, credentials = _prepared(address, peer, security)
    declare: list[Any] = [] if security.token is None else [_AioDeclaring(security.declaration)]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=declare)
    return grpc.aio.secure_channel(address, credentials, options=options, interceptors=declare)


@contextlib.contextmanager
def asking(address: str, task: str, security: Security, words: str) -> Iterator[grpc.Channel]:
    """A channel to ``task`` for the ``with`` block; what goes wrong in it is raised as an error of ours. ``address``:
    host:port; ``words``: the task, in the error. IdentityError: TLS does not come about, or the task does not know us.
    PeerUnavailableError: it does not answer."""
    channel = connect(address, task, security)
    try:
        yield channel
    except grpc.RpcError as error:
        found = error_from_rpc(error, words)
        if isinstance(found, PeerUnavailableError) and (reason := explain_refusal(address, task, security)):
            raise IdentityError(reason) from None
        raise found from None
    finally:
        channel.close()


def _prepared(address: str, peer: str, security: Security) -> tuple[list[_Option], grpc.ChannelCredentials | None]:
    """Options of a channel, and its credentials; None: it is in the clear."""
    options = channel_options()
    if security.tls is not None:
        pems = security.tls.read_or_keep()
        credentials = grpc.ssl_channel_credentials(pems.authority, pems.key, pems.certificate)
        return [*options, ("grpc.ssl_target_name_override", server_name(peer))], credentials
    if security.token is not None:
        check_token_path(address, security.insecure)
    return options, None


# The interceptors of gRPC are generic in the stubs only.
class _Declaring(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    """Declares the caller in every call."""

    def __init__(self, declaration: Declaration) -> None:
        self._declaration = declaration

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=(*(details.metadata or ()), *self._declaration)), request)

    intercept_stream_stream = intercept_unary_unary  # type: ignore[assignment]  # requests pass as one does


class _AioDeclaring(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Unary calls of ``grpc.aio`` channels, which make no others: each kind would need its own interceptor."""

    def __init__(self, declaration: Declaration) -> None:
        self._declaration = declaration

    async def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *self._declaration)
        return await continuation(details._replace(metadata=metadata), request)
