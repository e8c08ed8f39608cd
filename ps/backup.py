"""What this ps sends to the backup that keeps its copy, and what may be acknowledged to workers meanwhile.

The backup is whole once it has confirmed everything sent before: from then on a change is acknowledged when the backup
has it. If it then disconnects, every acknowledgement waits until the backup has dropped its copy or is dead: no copy
that lacks something acknowledged may be there to be taken over. If the two cannot reach one another, the chief carries
the message (:attr:`Backup.copy_to_drop`).
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Mapping

from stratagem.cluster.membership import Membership
from stratagem.errors import PeerUnavailableError
from stratagem.ps.frames import FOLLOWED
from stratagem.ps.published import HeldFrame, ReplyLane
from stratagem.ps.requests import Sender
from stratagem.ps.shard_group import Parts

AsItCame = Callable[[], bytes]
"""A request as the worker sent it."""
MIN_TOLD_BYTES = 64 << 20
"""Of gradients that may be on their way to the backup, however small the variables are."""
SILENCE_S = 5.0
"""How long a backup that is waited for may confirm nothing before this ps goes on without it."""


class Backup:
    """The copy of this ps; its lock is taken inside all others of the store. ``held_bytes``: of variables and slots
    here."""

    def __init__(self, held_bytes: Callable[[], int]) -> None:
        self._held_bytes = held_bytes
        self._changed = threading.Condition()
        self._lane: ReplyLane | None = None
        self._closed = False
        self._transfer = 0
        self._asker: tuple[str, int] | None = None
        """The process at the other end of the lane."""
        self._number = 0
        """Of its following."""
        self._whole: tuple[str, int] | None = None
        """The process that may have a copy with everything acknowledged so far."""
        self._whole_number = 0
        """Of the following in which it was made."""
        self._ended: list[ReplyLane] = []
        self._waiting = 0
        self._silent_since = 0.0
        """Threads that wait for the backup, and since when it has confirmed nothing that one of them waits for."""
        self._told = 0
        self._confirmed = 0
        """Changes told, and of these how many the backup has; they only grow."""
        self._unconfirmed: collections.deque[int] = collections.deque()
        self._unconfirmed_bytes = 0
        """Bytes of each change told and not confirmed, and their sum."""

    @property
    def words(self) -> str:
        """For the status: who has a copy, or why nobody has. Heartbeats say it, so it waits for nobody: an image of
        gigabytes is made with the lock held."""
        lane, asker, whole = self._lane, self._asker, self._whole
        if lane is not None and asker is not None:
            return asker[0] if self._is_told else f"{asker[0]} copies"
        return f"{whole[0]} broke off" if whole is not None else "none"

    @property
    def copy_to_drop(self) -> int:
        """The following whose copy the backup is to drop, because replies wait for it and it is silent; 0: none. It
        waits for nobody, as :attr:`words`."""
        number, whole = self._whole_number, self._whole
        is_silent = self._waiting and time.monotonic() - self._silent_since > SILENCE_S
        return number if is_silent and whole is not None else 0

    def begin(self, asker: Sender, number: int, lane: ReplyLane, transfer: int, begin: Callable[[int], None]) -> None:
        """The backup ``asker`` is told everything from here on, in answer to its request ``transfer`` for its following
        ``number``. ``begin`` sends all that is held, given the changes told so far; nobody changes anything meanwhile.
        """
        with self._changed:
            before, self._lane = self._lane, lane
            self._transfer, self._asker, self._number = transfer, asker.key, number
            self._confirmed = self._told
            self._unconfirmed.clear()
            self._unconfirmed_bytes = 0
            begin(self._told)
            self._changed.notify_all()
        if before is not None and before is not lane:
            before.close(PeerUnavailableError(f"{asker} is the backup now"))

    def tell(self, kind: int, as_it_came: AsItCame, gradient: Mapping[int, Parts]) -> None:
        """A change is made here; those of one group in the order of these calls.

        The gradient is sent from where it lies. While the backup lags behind by more than is held here, this waits.
        """
        num_bytes = sum(piece.nbytes for parts in gradient.values() for _, piece in parts)
        with self._changed:
            limit = max(MIN_TOLD_BYTES, self._held_bytes())
            self._wait(lambda: self._lane is None or not gradient or self._unconfirmed_bytes <= limit)
            if (lane := self._lane) is None:
                return
            with lane.corked():
                for group, parts in gradient.items():
                    for offset, piece in parts:
                        lane.send(self._transfer, HeldFrame(group, offset, piece))
                lane.answer(kind, self._transfer, as_it_came())
            self._told += 1
            self._unconfirmed.append(num_bytes)
            self._unconfirmed_bytes += num_bytes

    def confirm(self, asker: Sender, number: int) -> None:
        """The backup has the changes up to ``number``; 0: it has dropped the copy it had."""
        with self._changed:
            if self._lane is None or asker.key != self._asker:
                return
            if not number:
                self._whole = None
            elif self._whole is None:  # everything that was acknowledged is on its way: nothing more is without it
                self._whole, self._whole_number = self._asker, self._number
                self._lane.answer(FOLLOWED, self._transfer, b"\0")
            while self._unconfirmed and self._confirmed < number - 1:
                self._confirmed += 1
                self._unconfirmed_bytes -= self._unconfirmed.popleft()
            self._silent_since = time.monotonic()
            self._changed.notify_all()

    def has_dropped(self, asker: Sender, number: int) -> None:
        """A process has no copy any more that it made in followings up to ``number``."""
        with self._changed:
            if self._whole == asker.key and self._whole_number <= number:
                self._go_on_alone()
        self._close_ended()

    def settle(self) -> None:
        """Waits until everything told so far may be acknowledged; ``PeerUnavailableError`` where this ps ends."""
        with self._changed:
            told = self._told

            def is_settled() -> bool:
                return self._whole is None or (self._is_told and self._confirmed >= told)

            self._wait(lambda: is_settled() or self._closed)
            if not is_settled():
                raise PeerUnavailableError("this parameter server is shutting down, and its backup lacks some of it")
        self._close_ended()

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._closed = True
            self._lane = None
            self._changed.notify_all()

    def outdate(self) -> None:
        """Something has changed that is not told: the copy has to be made again."""
        with self._changed:
            self._end(self._lane)
        self._close_ended()

    def lost(self, lane: object) -> None:
        """A lane is over, perhaps the backup's."""
        with self._changed:
            if lane is self._lane:
                self._lane = None
                self._changed.notify_all()

    def look(self, membership: Membership) -> None:
        """The cluster has changed: a process whose place another has, or that has dropped it, has no copy to take.

        One that is not live is not over: a chief that has just started has not heard of all of them yet.
        """
        with self._changed:
            member = membership.member(self._whole[0]) if self._whole is not None else None
            if self._whole is None or member is None:
                return
            has_dropped = member.incarnation == self._whole[1] and member.copies_dropped >= self._whole_number
            if member.incarnation > self._whole[1] or has_dropped:
                self._go_on_alone()
        self._close_ended()

    def fence(self, task: str, incarnation: int) -> None:
        """Processes of ``task`` up to ``incarnation`` are over: nobody takes a copy from them."""
        with self._changed:
            if self._whole is not None and self._whole[0] == task and self._whole[1] <= incarnation:
                self._go_on_alone()
        self._close_ended()

    @property
    def _is_told(self) -> bool:
        """Whether the copy with everything acknowledged is the one that is told what changes; the lock is held where
        something depends on it. It is not while its process follows anew, until that says that it has dropped it."""
        is_same = (self._whole, self._whole_number) == (self._asker, self._number)
        return self._lane is not None and self._whole is not None and is_same

    def _go_on_alone(self) -> None:
        """With the lock held."""
        lane = self._lane if self._is_told else None
        self._whole = None
        self._end(lane)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Waits with the lock held. Whoever waits for a copy that is not whole yet does without it after a while."""
        if is_over():
            return
        if not self._waiting:
            self._silent_since = time.monotonic()
        self._waiting += 1
        try:
            while not self._changed.wait_for(is_over, SILENCE_S):
                if self._whole is None and time.monotonic() - self._silent_since > SILENCE_S:
                    self._end(self._lane)
        finally:
            self._waiting -= 1

    def _end(self, lane: ReplyLane | None) -> None:
        """With the lock held; it is closed without it, by :meth:`_close_ended`."""
        if lane is not None:
            self._lane = None
            self._ended.append(lane)
        self._changed.notify_all()

    def _close_ended(self) -> None:
        with self._changed:
            ended, self._ended = self._ended, []
        for lane in ended:
            lane.close(PeerUnavailableError("nothing more is sent here: follow again"))
