"""What a server refuses to exceed, and how many calls each peer has in flight."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator

from google.protobuf.message import Message

from stratagem.cluster.config import ServerConfig
from stratagem.errors import LimitError

SPARE_CALLS = 32
"""Calls beyond ``max_calls`` that are let in only to be told so."""
PATIENCE_S = 5.0
"""Seconds for which a call whose request does not come keeps others out."""


@dataclasses.dataclass(eq=False)
class CountedCall:
    peer: str
    cancel: Callable[[], object]
    identity: str = ""
    """Proven name of the caller; empty: nobody was asked."""
    waits_since: float = math.inf
    """``time.monotonic()`` seconds since which its request has not come."""
    counts: bool = True


class CallCounter:
    """Calls in flight, by peer. Thread-safe.

    A caller that begins a call and does not send its request is counted, and cancelled when another needs the place.
    """

    def __init__(self, limits: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._guard = threading.Lock()
        self._by_peer: dict[str, int] = {}
        self._num_calls = 0
        self._waiting: dict[CountedCall, None] = {}

    @contextlib.contextmanager
    def counted(self, peer: str, cancel: Callable[[], object], identity: str = "") -> Iterator[CountedCall]:
        """Around a call; ``LimitError``, which names the limit, where it is one too many."""
        call = CountedCall(peer, cancel, identity)
        with self._guard:
            late = self._late(peer)
            reason = self._refusal(peer)
            if not reason:
                self._by_peer[peer] = self._by_peer.get(peer, 0) + 1
                self._num_calls += 1
        for other in late:
            other.cancel()
        if reason:
            raise LimitError(reason)
        try:
            yield call
        finally:
            with self._guard:
                self._leave(call)

    @contextlib.contextmanager
    def waiting(self, call: CountedCall) -> Iterator[None]:
        call.waits_since = self._clock()
        with self._guard:
            self._waiting[call] = None
        try:
            yield
        finally:
            with self._guard:
                self._waiting.pop(call, None)

    def _late(self, peer: str) -> list[CountedCall]:
        """Where there is no place: the calls that must go, which count no more. A peer that has too many itself costs
        no other one any."""
        if not self._refusal(peer):
            return []
        before = self._clock() - PATIENCE_S
        has_too_many = self._by_peer.get(peer, 0) >= self._limits.max_calls_per_peer
        meant = [call for call in self._waiting if call.peer == peer or not has_too_many]
        late = [call for call in meant if call.waits_since < before]
        for call in late:
            self._leave(call)
        return late

    def _refusal(self, peer: str) -> str:
        """Why a call of a peer cannot be; empty when it can."""
        num_calls = self._by_peer.get(peer, 0)
        if num_calls >= self._limits.max_calls_per_peer:
            return f"{peer} has {num_calls} calls in flight, which is max_calls_per_peer; let some end first"
        if self._num_calls >= self._limits.max_calls:
            return f"{self._num_calls} calls are in flight, which is max_calls; try again, or raise max_calls"
        return ""

    def _leave(self, call: CountedCall) -> None:
        self._waiting.pop(call, None)
        if call.counts:
            call.counts = False
            self._num_calls -= 1
            self._by_peer[call.peer] -= 1
            if not self._by_peer[call.peer]:
                del self._by_peer[call.peer]


def check_ids(request: Message, max_ids: int) -> None:
    """Refuses a request whose lists are too long, before anything of ours is made of them. LimitError: names the
    limit."""
    # An entry takes a byte at least: most requests are too small to hold too many.
    if request.ByteSize() > max_ids and (num_ids := _num_entries(request, max_ids)) > max_ids:
        raise LimitError(
            f"a {request.DESCRIPTOR.name} has {num_ids:,} entries or more, over max_ids_per_request of {max_ids:,}; "
            "send several requests, or raise it"
        )


def _num_entries(message: Message, enough: int) -> int:
    """Entries of all lists in a message; stops counting beyond ``enough``."""
    total = 0
    for field, value in message.ListFields():
        total += len(value) if field.is_repeated else 0
        if total > enough:
            return total
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            parts = value.values() if field.message_type.fields_by_name["value"].message_type is not None else ()
        else:
            parts = value if field.is_repeated else (value,)
        for part in parts:
            total += _num_entries(part, enough - total)
            if total > enough:
                return total
    return total
