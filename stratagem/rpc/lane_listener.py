"""Accepts the sockets of the tcp and shm lanes: negotiated over gRPC, opened by a token that works once.

Over gRPC a peer requests admission and gets a token that is bound to it, to its incarnation and to one purpose. It
connects and sends the token as the first bytes; a connection with no token, or a wrong one, is dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hmac
import logging
import os
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Literal

from stratagem.cluster.identity import server_name
from stratagem.errors import ConfigurationError, LimitError, PeerUnavailableError
from stratagem.rpc.binding import connected, listening
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.tcp_lane import tune
from stratagem.rpc.tls_files import Stamp, identity_of

logger = logging.getLogger(__name__)

Kind = Literal["tcp", "shm"]
TOKEN_BYTES = 32
TOKEN_TIMEOUT_S = 5.0
"""Seconds a peer may take for the TLS handshake and its token, both together."""
MAX_PENDING_PEERS = 64
"""Pending peers, each by a thread. When one more comes, the one that has taken longest is sent away: an
honest peer is done within milliseconds."""
MAX_LANES_PER_PEER = 128
_MAX_TOKENS = 4096
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors under which who wants to come in waits until something is free."""
_RETRY_S = 0.1


@dataclasses.dataclass(frozen=True)
class LaneTicket:
    token: bytes
    port: int = 0
    """TCP port; 0: a Unix socket."""
    socket_name: str = ""
    """Name in the abstract namespace, without its leading zero byte."""


class LaneListener:
    """Listens for one server, on TCP and on an abstract Unix socket, from the first request on. With certificates in
    ``security``, TCP is encrypted. Unix sockets never are: the kernel identifies the peer. ``max_lanes_per_peer``: how
    many lanes of one task may be expected, or have come and wait, at once."""

    def __init__(self, host: str, security: Security = OPEN, max_lanes_per_peer: int = MAX_LANES_PER_PEER) -> None:
        self._host = host
        self._security = security
        self._max_lanes_per_peer = max_lanes_per_peer
        self._changed = threading.Condition()
        self._tokens: dict[bytes, tuple[Hashable, str]] = {}
        """Of each: who may come in by it, and the task."""
        self._arrived: dict[Hashable, tuple[str, socket.socket]] = {}
        """Task and socket of those who have come in."""
        self._pending_peers: dict[threading.Thread, socket.socket] = {}
        """Those being looked at, the oldest first."""
        self._context: tuple[Stamp, ssl.SSLContext | None] = (), None
        self._listeners: dict[Kind, socket.socket] = {}
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    def expect(self, who: Hashable, kind: Kind, task: str = "") -> LaneTicket:
        """Lets ``who`` in once. ``who``: identity of the peer and its purpose; :meth:`wait` is asked for the same.
        ``kind``: of the lane: "shm" comes in by a Unix socket. ``task``: task id of the peer; over TLS its certificate
        has to say so too. PeerUnavailableError: the listener is closed, or cannot be opened at its host. LimitError:
        too many are expected; names the limit."""
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._changed:
            if self._closed.is_set():
                raise PeerUnavailableError("this task opens no further lanes")
            self._withdraw(lambda other: other == who)
            self._check_room(task)
            listener = self._listeners.get(kind) or self._listen(kind)
            self._tokens[token] = who, task
        if kind == "shm":
            return LaneTicket(token, socket_name=listener.getsockname()[1:].decode())
        return LaneTicket(token, port=listener.getsockname()[1])

    def wait(self, who: Hashable, deadline: float) -> socket.socket:
        """The socket of ``who``, once it has come in; the caller owns it. PeerUnavailableError: not before ``deadline``
        (``time.monotonic()`` seconds), or the listener closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: who in self._arrived or self._closed.is_set(), max(0.0, deadline - time.monotonic())
            )
            if who not in self._arrived:
                task = next((task for other, task in self._tokens.values() if other == who), "the peer")
                raise PeerUnavailableError(f"{task} did not connect in time")
            return self._arrived.pop(who)[1]

    def forget(self, is_meant: Callable[[Any], bool]) -> None:
        """Does not let those in any more of whom ``is_meant(who)`` holds."""
        with self._changed:
            self._withdraw(is_meant)

    def _withdraw(self, is_meant: Callable[[Any], bool]) -> None:
        self._tokens = {token: (who, task) for token, (who, task) in self._tokens.items() if not is_meant(who)}
        for who in filter(is_meant, [*self._arrived]):
            self._arrived.pop(who)[1].close()

    def close(self) -> None:
        """Stops listening; sockets that nobody has taken are closed."""
        with self._changed:
            self._closed.set()
            self._tokens.clear()
            left = [sock for _, sock in self._arrived.values()]
            self._arrived.clear()
            peers = {**self._pending_peers}
            self._changed.notify_all()
        for sock in left:
            sock.close()
        for peer in peers.values():
            _send_away(peer)
        for listener in self._listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in [*self._threads, *peers]:
            thread.join(TOKEN_TIMEOUT_S)

    def _check_room(self, task: str) -> None:
        num_lanes = sum(owner == task for _, owner in self._tokens.values())
        num_lanes += sum(owner == task for owner, _ in self._arrived.values())
        if num_lanes >= self._max_lanes_per_peer:
            raise LimitError(f"{task} has {num_lanes} lanes that are not open yet, which is max_lanes_per_peer")
        if len(self._tokens) >= _MAX_TOKENS:
            raise LimitError(f"{len(self._tokens)} lanes are expected here, and no more can be added")

    def _listen(self, kind: Kind) -> socket.socket:
        try:
            if kind == "tcp":
                listener = listening(self._host)
            else:
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                listener.bind(f"\0stratagem-{os.getpid()}-{secrets.token_hex(8)}")
                listener.listen(128)
        except OSError as error:
            raise PeerUnavailableError(f"cannot listen for {kind} lanes at {self._host}: {error}") from None
        self._listeners[kind] = listener
        thread = threading.Thread(target=self._accept, args=(listener,), name="listener", daemon=True)
        self._threads.append(thread)
        thread.start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        is_told = False
        while not self._closed.is_set():
            try:
                peer, _ = listener.accept()
            except OSError as error:  # else closed (the loop ends), or a peer that went away again
                if error.errno in _SHORT:
                    if not is_told:
                        logger.warning("No lane can come in until something is free here: %s", error)
                    is_told = True
                    self._closed.wait(_RETRY_S)
                continue
            is_told = False
            # A peer of its own thread: one that shows nothing must not keep the others waiting.
            thread = threading.Thread(target=self._attend, args=(peer,), name="listener-check", daemon=True)
            with self._changed:
                while len(self._pending_peers) >= MAX_PENDING_PEERS and not self._closed.is_set():
                    _send_away(next(iter(self._pending_peers.values())))
                    self._changed.wait(0.1)
                self._pending_peers[thread] = peer
            thread.start()

    def _attend(self, peer: socket.socket) -> None:
        try:
            self._check(peer)
        finally:
            with self._changed:
                self._pending_peers.pop(threading.current_thread(), None)
                self._changed.notify_all()

    def _check(self, peer: socket.socket) -> None:
        deadline = time.monotonic() + TOKEN_TIMEOUT_S
        try:
            peer.settimeout(TOKEN_TIMEOUT_S)
            if peer.family == socket.AF_UNIX:
                if peer_uid(peer) != os.getuid():
                    raise PermissionError("another user")
            else:
                tune(peer)
                if (tls := self._server_context()) is not None:
                    peer = tls.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)
                    with self._changed:  # wrapping has moved it: who sends it away must find it
                        self._pending_peers[threading.current_thread()] = peer
                    peer.do_handshake()
            who, task = self._identify(_read_exactly(peer, TOKEN_BYTES, deadline))
            if isinstance(peer, ssl.SSLSocket) and identity_of(peer.getpeercert()) != task:
                raise PermissionError("another task's certificate")
            with self._changed:  # from now on nobody sends it away: it is in before this thread has ended
                self._pending_peers.pop(threading.current_thread(), None)
            peer.settimeout(TOKEN_TIMEOUT_S)
            peer.sendall(b"\1")
        except (OSError, ConfigurationError):  # TLS errors, timeouts, wrong tokens; certificates that cannot be read
            peer.close()
            return
        with self._changed:
            if self._closed.is_set():
                peer.close()
            else:
                self._arrived[who] = (task, peer)
            self._changed.notify_all()

    def _server_context(self) -> ssl.SSLContext | None:
        """For TLS; None: in the clear. Made anew when the files have changed."""
        stamp = self._security.certificates()
        if not stamp or stamp != self._context[0]:
            self._context = stamp, self._security.server_context()
        return self._context[1]

    def _identify(self, shown: bytes) -> tuple[Hashable, str]:
        with self._changed:
            for token in self._tokens:
                if hmac.compare_digest(token, shown):
                    return self._tokens.pop(token)
        raise PermissionError("unknown token")


def connect_lane(
    ticket: LaneTicket, host: str, deadline: float, peer: str = "", security: Security = OPEN
) -> socket.socket:
    """Goes in at the listener of ``peer``, by the ticket that it gave over gRPC; over TLS nobody else is accepted.
    ``host``: not used for a Unix socket; ``deadline``: ``time.monotonic()`` seconds. PeerUnavailableError: nobody is
    there, or it does not let us in."""
    timeout_s = max(0.1, deadline - time.monotonic())
    try:
        if ticket.socket_name:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            sock.connect(f"\0{ticket.socket_name}")
        else:
            sock = connected(host, ticket.port, timeout_s)
            tune(sock)
            if (tls := security.client_context()) is not None:
                sock = tls.wrap_socket(sock, server_hostname=server_name(peer))
        try:
            sock.sendall(ticket.token)
            if _read_exactly(sock, 1, max(deadline, time.monotonic() + 0.1)) != b"\1":
                raise PermissionError("the token was refused")
            sock.settimeout(timeout_s)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        where = ticket.socket_name or f"{host}:{ticket.port}"
        raise PeerUnavailableError(f"could not open a lane at {where}: {error}") from None
    return sock


def peer_uid(sock: socket.socket) -> int:
    """User at the other end of a Unix socket, as the kernel says."""
    _pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def _send_away(peer: socket.socket) -> None:
    """Ends what its thread waits for; the thread closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(peer, socket.SHUT_RDWR)  # of TLS sockets too: theirs is not for other threads


def _read_exactly(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it took too long")
        sock.settimeout(left_s)
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data
