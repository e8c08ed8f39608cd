"""Where sockets of the tcp and shm lanes come in: negotiated over gRPC, opened by a token that works once.

A peer asks over gRPC for a way in and gets a token that is bound to it, to its process life and to one purpose. It
connects and shows the token as the first bytes; whoever shows none, or a wrong one, is dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import os
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Hashable

from stratagem.errors import PeerUnavailableError
from stratagem.rpc.tcp_lane import tune

TOKEN_BYTES = 32
TOKEN_TIMEOUT_S = 5.0
"""Seconds a caller may take to show its token."""
_MAX_TOKENS = 4096


@dataclasses.dataclass(frozen=True)
class Way:
    """How a peer gets in."""

    token: bytes
    port: int = 0
    """TCP port; 0: a Unix socket."""
    socket_name: str = ""
    """Name in the abstract namespace, without its leading zero byte."""


class Door:
    """Listens for one server, on TCP and on an abstract Unix socket, as soon as somebody asks for it.

    Args:
        host: address to listen on with TCP.
        tls: context of the server's side; None: in the clear. Unix sockets are never encrypted: the kernel tells who
            is at the other end.
    """

    def __init__(self, host: str, tls: ssl.SSLContext | None = None) -> None:
        self._host = host
        self._tls = tls
        self._changed = threading.Condition()
        self._tokens: dict[bytes, Hashable] = {}
        self._arrived: dict[Hashable, socket.socket] = {}
        self._listeners: dict[int, socket.socket] = {}
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    def expect(self, who: Hashable, family: socket.AddressFamily) -> Way:
        """Lets ``who`` in once.

        Args:
            who: identity of the visitor and its purpose; :meth:`wait` is asked for the same.
            family: ``AF_INET`` or ``AF_UNIX``.

        Raises:
            PeerUnavailableError: the door is closed, or too many are expected.
        """
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._changed:
            if self._closed.is_set() or len(self._tokens) >= _MAX_TOKENS:
                raise PeerUnavailableError("this task opens no further lanes")
            listener = self._listeners.get(family) or self._listen(family)
            self._tokens = {known: visitor for known, visitor in self._tokens.items() if visitor != who}
            self._tokens[token] = who
            stale = self._arrived.pop(who, None)
        if stale is not None:
            stale.close()
        if family == socket.AF_UNIX:
            return Way(token, socket_name=listener.getsockname()[1:].decode())
        return Way(token, port=listener.getsockname()[1])

    def wait(self, who: Hashable, deadline: float) -> socket.socket:
        """The socket of ``who``, once it has come in; the caller owns it.

        Raises:
            PeerUnavailableError: not before ``deadline`` (``time.monotonic()`` seconds), or the door closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: who in self._arrived or self._closed.is_set(), max(0.0, deadline - time.monotonic())
            )
            if who not in self._arrived:
                raise PeerUnavailableError(f"{who} did not connect in time")
            return self._arrived.pop(who)

    def forget(self, who: Hashable) -> None:
        """Does not let ``who`` in any more."""
        with self._changed:
            self._tokens = {known: visitor for known, visitor in self._tokens.items() if visitor != who}
            stale = self._arrived.pop(who, None)
        if stale is not None:
            stale.close()

    def close(self) -> None:
        """Stops listening; sockets that nobody has taken are closed."""
        with self._changed:
            self._closed.set()
            self._tokens.clear()
            left = [*self._arrived.values()]
            self._arrived.clear()
            self._changed.notify_all()
        for sock in left:
            sock.close()
        for listener in self._listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._threads:
            thread.join(TOKEN_TIMEOUT_S)

    def _listen(self, family: socket.AddressFamily) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        if family == socket.AF_UNIX:
            listener.bind(f"\0stratagem-{os.getpid()}-{secrets.token_hex(8)}")
        else:
            listener.bind((self._host, 0))
        listener.listen(128)
        self._listeners[family] = listener
        thread = threading.Thread(target=self._accept, args=(listener,), name="door", daemon=True)
        self._threads.append(thread)
        thread.start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                visitor, _ = listener.accept()
            except OSError:  # closed (the loop ends), or a visitor that went away again
                continue
            # A visitor of its own thread: one that shows nothing must not keep the others waiting.
            threading.Thread(target=self._check, args=(visitor,), name="door-check", daemon=True).start()

    def _check(self, visitor: socket.socket) -> None:
        try:
            visitor.settimeout(TOKEN_TIMEOUT_S)
            if visitor.family == socket.AF_UNIX:
                if peer_uid(visitor) != os.getuid():
                    raise PermissionError("another user")
            else:
                tune(visitor)
                if self._tls is not None:
                    visitor = self._tls.wrap_socket(visitor, server_side=True)
            who = self._identify(_read_exactly(visitor, TOKEN_BYTES))
            visitor.sendall(b"\1")
        except OSError:  # includes TLS errors, timeouts and wrong tokens
            visitor.close()
            return
        with self._changed:
            if self._closed.is_set():
                visitor.close()
            else:
                self._arrived[who] = visitor
            self._changed.notify_all()

    def _identify(self, shown: bytes) -> Hashable:
        with self._changed:
            for token, who in self._tokens.items():
                if hmac.compare_digest(token, shown):
                    del self._tokens[token]
                    return who
        raise PermissionError("unknown token")


def knock(way: Way, host: str, deadline: float, tls: ssl.SSLContext | None = None) -> socket.socket:
    """Goes in at somebody's door.

    Args:
        way: what the owner of the door answered over gRPC.
        host: where it is; not used for a Unix socket.
        deadline: ``time.monotonic()`` seconds.
        tls: context of the client's side; None: in the clear.

    Raises:
        PeerUnavailableError: nobody is there, or it does not let us in.
    """
    timeout_s = max(0.1, deadline - time.monotonic())
    try:
        if way.socket_name:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            sock.connect(f"\0{way.socket_name}")
        else:
            sock = socket.create_connection((host, way.port), timeout_s)
            tune(sock)
            if tls is not None:
                sock = tls.wrap_socket(sock, server_hostname=host)
        try:
            sock.sendall(way.token)
            if _read_exactly(sock, 1) != b"\1":
                raise PermissionError("the token was refused")
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        where = way.socket_name or f"{host}:{way.port}"
        raise PeerUnavailableError(f"could not open a lane at {where}: {error}") from None
    return sock


def peer_uid(sock: socket.socket) -> int:
    """User at the other end of a Unix socket, as the kernel says."""
    _pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def _read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data
