"""The traffic over the lanes of a process, lane by lane, and what the kernel knows of their links."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import weakref

from stratagem.measuring import measures
from stratagem.measuring.measures import labelled

_TCP_INFO = struct.Struct("=8x24I4Q6I4Q")
"""Linux's struct tcp_info up to tcpi_sndbuf_limited."""
_ROUND_TRIP, _BUSY, _NO_ROOM = 15, 35, 36


class LaneMeter:
    """Counts the traffic over the lanes of one kind to one task. Each field is written by one thread at a time."""

    __slots__ = ("received_bytes", "received_frames", "sent_bytes", "sent_frames", "sockets")

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = self.sent_frames = self.received_frames = 0
        self.sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        """That send over tcp."""


class BytesMeter:
    """All lanes of a process, both directions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lanes: dict[str, LaneMeter] = {}
        self.notes: dict[str, str] = {}
        """Words about the lanes, by "lane|ps:0" (which, and why) and "fallback|ps:0" (what would be faster)."""

    def lane(self, peer: str, kind: str, sock: socket.socket | None = None) -> LaneMeter:
        """Counts one more lane to ``peer`` of a ``kind`` ("grpc", "tcp", "shm"): one that comes back goes on where it
        was. ``sock``: what a tcp lane sends over."""
        with self._lock:
            meter = self._lanes.setdefault(f"{peer}/{kind}", LaneMeter())
            if sock is not None:
                meter.sockets.add(sock)
            return meter

    def chose(self, peer: str, lane: str, why: str, better: str = "") -> None:
        """Notes which lane was taken, and what would be faster and is not had."""
        self.notes[labelled("lane", peer)] = f"{lane}, because {why}"
        self.notes.pop(labelled("fallback", peer), None)
        if better:
            self.notes[labelled("fallback", peer)] = better

    def values(self) -> dict[str, float]:
        """By the names of :mod:`stratagem.measuring.measures`."""
        found: dict[str, float] = {}
        with self._lock:
            lanes = dict(self._lanes)
        for name, lane in lanes.items():
            found[labelled(measures.SENT, name)] = lane.sent_bytes
            found[labelled(measures.RECEIVED, name)] = lane.received_bytes
            found[labelled(measures.SENT_FRAMES, name)] = lane.sent_frames
            found[labelled(measures.RECEIVED_FRAMES, name)] = lane.received_frames
            links = [link for sock in [*lane.sockets] if (link := _link(sock)) is not None]
            if links:
                found[labelled(measures.ROUND_TRIP, name)] = min(round_trip_s for round_trip_s, _ in links)
                found[labelled(measures.LINK_BUSY, name)] = sum(busy_s for _, busy_s in links) / len(links)
        return found


def _link(sock: socket.socket) -> tuple[float, float] | None:
    """Round trip, and how long bytes were under way while the receiver had room for more, in seconds."""
    with contextlib.suppress(OSError, struct.error, ValueError):
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        fields = _TCP_INFO.unpack(info)
        return fields[_ROUND_TRIP] / 1e6, max(0, fields[_BUSY] - fields[_NO_ROOM]) / 1e6
    return None
