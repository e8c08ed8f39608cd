"""Signals between the ranks of one host without a system call: words in shared memory.

Every rank has three cache lines that the others read: two *cells*, used in turn, and a word that says for whom it
*sleeps*. A cell holds a message, and before it the number of the exchange, written last: a rank that sees the number
sees the message and all that its writer wrote to memory before. Two cells suffice for the same reason as two slots
(:mod:`stratagem.worker.ring.host_memory`).

Before it sleeps, a rank says so and looks once more; a rank that signals writes its cell, looks who sleeps for it, and
wakes those. Each has to see the other's word if the other did not see its own, so each takes a lock between its two
steps: on x86 that is a full fence.

Only where the processor keeps the order of a rank's stores, and of another's loads (:data:`IS_ORDERED`): an aligned
word of a memoryview is one store and one load of it, but Python has no fence for weaker machines.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Sequence
from typing import Any

import torch

IS_ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Total store order: Intel's manual, volume 3, 8.2.2; AMD's, volume 2, 7.2."""
NUM_BYTES = 192
"""Of each rank: three cache lines."""
_LINE_WORDS = 8
_WORD_BYTES = 8
_NUM_LOOKS = 16
"""About a microsecond."""


class Cells:
    """The cells of one rank, and those of its peers as it sees them. ``memory``: flat uint8 of :data:`NUM_BYTES`, all
    zero, for each rank in rank order; begins at a cache line."""

    def __init__(self, rank: int, memory: Sequence[torch.Tensor], message_bytes: int) -> None:
        self._rank = rank
        self._count = self._turn = 0
        arrays: list[Any] = [part.numpy() for part in memory]
        views = [memoryview(array) for array in arrays]
        self._words = [view.cast("Q") for view in views]
        starts = [_WORD_BYTES * (turn * _LINE_WORDS + 1) for turn in (0, 1)]
        self._messages = [[view[start : start + message_bytes] for start in starts] for view in views]
        self._peers = [(peer, words) for peer, words in enumerate(self._words) if peer != rank]
        self._fence = threading.Lock()

    def tell(self, message: bytes) -> Sequence[int]:
        """Gives the peers the message of the next exchange; returns which of them have to be woken."""
        self._count += 1
        self._turn = self._count & 1
        self._messages[self._rank][self._turn][:] = message
        self._words[self._rank][self._turn * _LINE_WORDS] = self._count
        with self._fence:
            sleepers: tuple[int, ...] = ()
        for peer, words in self._peers:
            if words[2 * _LINE_WORDS] == self._rank + 1:
                sleepers += (peer,)
        return sleepers

    def has_told(self, peer: int) -> bool:
        """Whether a peer's message of this exchange is there."""
        return self._words[peer][self._turn * _LINE_WORDS] == self._count

    def has_told_soon(self, peer: int) -> bool:
        """The same, after a few looks."""
        words, place, count = self._words[peer], self._turn * _LINE_WORDS, self._count
        left = _NUM_LOOKS
        while left and words[place] != count:
            left -= 1
        return left > 0

    def message(self, peer: int) -> memoryview:
        """What a peer has told in this exchange; stays until this rank tells more."""
        return self._messages[peer][self._turn]

    def sleep_for(self, peer: int | None) -> None:
        """From now on that peer has to wake this rank; None: nobody."""
        self._words[self._rank][2 * _LINE_WORDS] = 0 if peer is None else peer + 1
        with self._fence:
            pass
