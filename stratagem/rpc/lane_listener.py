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
from typing import Any, Generic, Literal, TypeVar

from stratagem.cluster.identity import server_name
from stratagem.errors import ConfigurationError, LimitError, PeerUnavailableError
from stratagem.rpc.binding import connected, listening
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.tcp_lane import tune
from stratagem.rpc.tls_files import Stamp, identity_of

logger = logging.getLogger(__name__)

Kind = Literal["tcp", "shm"]
C = TypeVar("C")
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


class ExpectedLanes(Generic[C]):
    """Lanes that peers may open here: each by a token, once; it then waits until somebody takes its connection.
    ``close``: what is done with one that nobody takes; ``max_lanes_per_peer``: how many lanes of one task may be
    expected, or have come and wait, at once."""

    def __init__(self, close: Callable[[C], object], max_lanes_per_peer: int) -> None:
        self.changed = threading.Condition()
        self.closed = threading.Event()
        self.tokens: dict[bytes, tuple[Hashable, str]] = {}
        """Of each: who may come in by it, and the task."""
        self.arrived: dict[Hashable, tuple[str, C]] = {}
        """Task and connection of those who have come in."""
        self._close = close
        self._max_lanes_per_peer = max_lanes_per_peer

    def check_open(self) -> None:
        """PeerUnavailableError: nobody is let in any more."""
        if self.closed.is_set():
            raise PeerUnavailableError("this task opens no further lanes")

    def expect(self, who: Hashable, task: str) -> bytes:
        """The token that lets ``who``, of ``task``, in once: the same one if it asks again, as when the reply was lost.
        LimitError: too many are expected; names the limit."""
        with self.changed:
            self.check_open()
            if (known := next((token for token, (other, _) in self.tokens.items() if other == who), None)) is not None:
                return known
            self.forget(lambda other: other == who)
            num_lanes = sum(owner == task for owner, _ in self.arrived.values())
            num_lanes += sum(owner == task for _, owner in self.tokens.values())
            if num_lanes >= self._max_lanes_per_peer:
                raise LimitError(f"{task} has {num_lanes} lanes that are not open yet, which is max_lanes_per_peer")
            if len(self.tokens) >= _MAX_TOKENS:
                raise LimitError(f"{len(self.tokens)} lanes are expected here, and no more can be added")
            token = secrets.token_bytes(TOKEN_BYTES)
            self.tokens[token] = who, task
            return token

    def identify(self, shown: bytes) -> tuple[Hashable, str] | None:
        """Who shows a token, and the task; None: nobody who is expected."""
        with self.changed:
            known = next((token for token in self.tokens if hmac.compare_digest(token, shown)), None)
            return None if known is None else self.tokens.pop(known)

    def arrive(self, who: Hashable, task: str, connection: C) -> None:
        """Somebody has come in."""
        with self.changed:
            if self.closed.is_set():
                self._close(connection)
            else:
                self.arrived[who] = task, connection
            self.changed.notify_all()

    def leave(self, connection: C) -> None:
        """Somebody has gone; who has taken the connection keeps it."""
        with self.changed:
            self.arrived = {who: pair for who, pair in self.arrived.items() if pair[1] is not connection}

    def wait(self, who: Hashable, deadline: float) -> C:
        """The connection of ``who``, once it has come in; the caller owns it. PeerUnavailableError: not before
        ``deadline`` (``time.monotonic()`` seconds), or nobody is let in any more."""
        with self.changed:
            left_s = max(0.0, deadline - time.monotonic())
            self.changed.wait_for(lambda: who in self.arrived or self.closed.is_set(), left_s)
            if who not in self.arrived:
                task = next((task for other, task in self.tokens.values() if other == who), "the peer")
                raise PeerUnavailableError(f"{task} did not connect in time")
            return self.arrived.pop(who)[1]

    def forget(self, is_meant: Callable[[Any], bool]) -> None:
        """Does not let those in any more of whom ``is_meant(who)`` holds."""
        with self.changed:
            self.tokens = {token: (who, task) for token, (who, task) in self.tokens.items() if not is_meant(who)}
            left = [self.arrived.pop(who)[1] for who in filter(is_meant, [*self.arrived])]
        for connection in left:
            self._close(connection)

    def close(self) -> None:
        """Lets nobody in any more; connections that nobody has taken are closed."""
        with self.changed:
            self.closed.set()
            self.changed.notify_all()
        self.forget(lambda who: True)


class LaneListener:
    """Listens for one server, on TCP and on an abstract Unix socket, from the first request on. With certificates in
    ``security``, TCP is encrypted. Unix sockets never are: the kernel identifies the peer. ``max_lanes_per_peer``: how
    many lanes of one task may be expected, or have come and wait, at once."""

    def __init__(self, host: str, security: Security = OPEN, max_lanes_per_peer: int = MAX_LANES_PER_PEER) -> None:
        self._host = host
        self._security = security
        self._expected = ExpectedLanes[socket.socket](socket.socket.close, max_lanes_per_peer)
        self._changed, self._closed = self._expected.changed, self._expected.closed
        self.wait, self.forget = self._expected.wait, self._expected.forget
        self._pending_peers: dict[threading.Thread, socket.socket] = {}
        """Those being looked at, the oldest first."""
        self._context: tuple[Stamp, ssl.SSLContext | None] = (), None
        self._listeners: dict[Kind, socket.socket] = {}
        self._threads: list[threading.Thread] = []

    def expect(self, who: Hashable, kind: Kind, task: str = "") -> LaneTicket:
        """Lets ``who`` in once. ``who``: identity of the peer and its purpose; :meth:`ExpectedLanes.wait` is asked for
        the same. ``kind``: of the lane: "shm" comes in by a Unix socket. ``task``: task id of the peer; over TLS its
        certificate has to say so too. PeerUnavailableError: the listener is closed, or cannot be opened at its host.
        LimitError: too many are expected; names the limit."""
        with self._changed:
            self._expected.check_open()
            listener = self._listeners.get(kind) or self._listen(kind)
            token = self._expected.expect(who, task)
        if kind == "shm":
            return LaneTicket(token, socket_name=listener.getsockname()[1:].decode())
        return LaneTicket(token, port=listener.getsockname()[1])

    def close(self) -> None:
        """Stops listening; sockets that nobody has taken are closed."""
        self._expected.close()
        with self._changed:
            peers = {**self._pending_peers}
        for peer in peers.values():
            _send_away(peer)
        for listener in self._listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in [*self._threads, *peers]:
            thread.join(TOKEN_TIMEOUT_S)

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
        thread = threading.Thread(target=self._accept, args=(listener,), name="listener", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no memory for one more, or a limit
            listener.close()
            raise PeerUnavailableError(f"cannot listen for {kind} lanes at {self._host}: {error}") from None
        self._listeners[kind] = listener
        self._threads.append(thread)
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
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("A lane cannot come in until something is free here: %s", error)
                with self._changed:
                    self._pending_peers.pop(thread).close()

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
            if (known := self._expected.identify(_read_exactly(peer, TOKEN_BYTES, deadline))) is None:
                raise PermissionError("unknown token")
            who, task = known
            if isinstance(peer, ssl.SSLSocket) and identity_of(peer.getpeercert()) != task:
                raise PermissionError("another task's certificate")
            with self._changed:  # from now on nobody sends it away: it is in before this thread has ended
                self._pending_peers.pop(threading.current_thread(), None)
            peer.settimeout(TOKEN_TIMEOUT_S)
            peer.sendall(b"\1")
        except (OSError, ConfigurationError):  # TLS errors, timeouts, wrong tokens; certificates that cannot be read
            peer.close()
            return
        self._expected.arrive(who, task, peer)

    def _server_context(self) -> ssl.SSLContext | None:
        """For TLS; None: in the clear. Made anew when the files have changed."""
        stamp = self._security.certificates()
        if not stamp or stamp != self._context[0]:
            self._context = stamp, self._security.server_context()
        return self._context[1]


def connect_lane(
    ticket: LaneTicket, host: str, deadline: float, peer: str = "", security: Security = OPEN
) -> socket.socket:
    """Goes in at the listener of ``peer``, by the ticket that it gave over gRPC; over TLS nobody else is accepted.
    ``host``: not used for a Unix socket; ``deadline``: ``time.monotonic()`` seconds. PeerUnavailableError: nobody is
    there, or it does not let us in."""
    timeout_s = max(0.1, deadline - time.monotonic())
    is_unix = bool(ticket.socket_name)
    try:
        sock = socket.socket(socket.AF_UNIX) if is_unix else connected(host, ticket.port, timeout_s)
        try:
            if is_unix:
                sock.settimeout(timeout_s)
                sock.connect(f"\0{ticket.socket_name}")
            else:
                tune(sock)
                if (tls := security.client_context()) is not None:
                    sock = tls.wrap_socket(sock, server_hostname=server_name(peer))
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
