"""A TCP relay in front of a task: its connections can be reset, or go silent, while the processes live."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator

_RESET = struct.pack("ii", 1, 0)


class Relay:
    """Passes bytes between its own port and ``target`` (host:port) in one thread."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._peers: dict[socket.socket, socket.socket] = {}
        self._resets_until = self._silent_until = 0.0
        self.num_reset = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def reset(self, seconds: float) -> None:
        """Resets every connection, and each new one in the next ``seconds``."""
        self._resets_until = time.monotonic() + seconds

    def silence(self, seconds: float) -> None:
        """Lets nothing through for ``seconds``; what comes meanwhile arrives later."""
        self._silent_until = time.monotonic() + seconds

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        for one in (self._listener, *self._peers):
            one.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closed.is_set():
                now = time.monotonic()
                if now < self._resets_until:
                    for one in [*self._peers]:
                        self._drop(selector, one)
                elif now < self._silent_until:
                    self._closed.wait(0.02)
                    continue
                for key, _ in selector.select(0.02):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fileobj in self._peers:
                        self._pass(selector, key.fileobj)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        one, _ = self._listener.accept()
        try:
            other = socket.create_connection(self._target, 5.0)
        except OSError:
            one.close()
            return
        self._peers |= {one: other, other: one}
        for each in (one, other):
            selector.register(each, selectors.EVENT_READ)

    def _pass(self, selector: selectors.BaseSelector, one: socket.socket) -> None:
        try:
            data = one.recv(1 << 20)
            self._peers[one].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._drop(selector, one)

    def _drop(self, selector: selectors.BaseSelector, one: socket.socket) -> None:
        other = self._peers.pop(one, None)
        if other is None:
            return
        del self._peers[other]
        self.num_reset += 1
        for each in (one, other):
            selector.unregister(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            each.close()


@contextlib.contextmanager
def relay(target: str) -> Iterator[Relay]:
    """A relay for the length of a block."""
    passing = Relay(target)
    try:
        yield passing
    finally:
        passing.close()
