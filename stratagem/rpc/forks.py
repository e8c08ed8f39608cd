"""Sockets that forked children must not keep (docs/protocol.md 28).

A forked child (a DataLoader's worker) has copies of all descriptors: with them open a peer would not notice that this
process died, and an object that the child's garbage collector frees could speak in this process's name.
"""

from __future__ import annotations

import os
import socket
import weakref

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> None:
    """Closes ``sock`` in every child that is forked from now on; the connection itself goes on here."""
    _sockets.add(sock)


def _close_all() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_all)
