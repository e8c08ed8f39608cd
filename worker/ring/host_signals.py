"""Small messages between the ranks of one host: who stands where, who is ready, who is gone. No payload.

One signal is 40 bytes: the tag of the collective, the round within it, and three numbers. An exchange sends one to
every peer and waits for one from each. Once there is memory for them, signals are in
:mod:`stratagem.worker.ring.host_cells`, and the AF_UNIX sockets only wake sleepers; before that, and where the
processor reorders memory accesses, signals travel on the sockets. A wait is a blocking system call, after a short spin
if every rank has a core (:mod:`stratagem.rpc.spin`); the end of any peer wakes it. A rank that breaks a collective
tells every peer why before it shuts the sockets, so that all ranks name the same culprit.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType

import torch

from stratagem.errors import CollectiveError, SegmentError
from stratagem.rpc.segment import Segment, receive_descriptor
from stratagem.rpc.socket_lane import close_in_children
from stratagem.rpc.spin import Spin
from stratagem.worker.ring.group import OutOfStepError, Tag
from stratagem.worker.ring.host_cells import IS_ORDERED, Cells

_SIGNAL = struct.Struct("=QIIQQQ")
"""Ordinal, fingerprint, round, three numbers."""
_SIZE = _SIGNAL.size
_ABORT = 2**64 - 1
"""In place of an ordinal: the sender broke off. Fingerprint: the culprit's rank, or :data:`_NOBODY`; round: bytes of
text that follow."""
_BELL = _SIGNAL.pack(2**64 - 2, 0, 0, 0, 0, 0)
"""Wakes who sleeps until there is something in a cell. One that comes too late says nothing."""
_NOBODY = 2**32 - 1
_MAX_TEXT_BYTES = 1000
LONGEST_WAIT_S = 2_000_000.0
"""poll counts milliseconds in 31 bits."""


class Signals:
    """The sockets of one rank: ``links``, a connected AF_UNIX stream socket to every other rank, which this object owns
    from now on. ``timeout_s``: seconds to wait for one signal of a peer before it counts as stalled."""

    def __init__(self, rank: int, links: Mapping[int, socket.socket], timeout_s: float) -> None:
        self.rank = rank
        self.waiting_on: int | None = None
        """The peer whose signal is awaited right now."""
        self.told: dict[int, tuple[int, int, int]] = {}
        """What each peer sent that did not send the same numbers as this rank in the last exchange."""
        self._links = dict(sorted(links.items()))
        self._descriptors = {peer: link.fileno() for peer, link in self._links.items()}
        self.timeout_s = min(timeout_s, LONGEST_WAIT_S)
        self._failure: tuple[type[CollectiveError], str, int | None] | None = None
        self._failing = threading.Lock()
        self._turn = threading.RLock()
        self._tag = Tag(0, 0)
        self._round = 0
        self._cells: Cells | None = None
        interval = struct.pack("@ll", *divmod(max(1, int(self.timeout_s * 1e6)), 1_000_000))
        for link in self._links.values():
            link.setblocking(True)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
            close_in_children(link)
        self._watches = {(more, peer): self._watch(peer, more) for more in (False, True) for peer in self._links}
        self._spin = Spin() if len(links) < len(os.sched_getaffinity(0)) else None

    def _others(self, awaited: int, more: bool) -> list[int]:
        """Whose end has to be noticed while ``awaited``'s signal is to come.

        Signals are taken in rank order: those after ``awaited`` have not been heard yet. Those before it have, and may
        end in peace unless ``more`` rounds follow.
        """
        return [peer for peer in self._links if peer > awaited or (more and peer != awaited)]

    def _watch(self, awaited: int, more: bool) -> select.poll:
        watch = select.poll()
        watch.register(self._descriptors[awaited], select.POLLIN)
        for peer in self._others(awaited, more):
            watch.register(self._descriptors[peer], select.POLLRDHUP)
        return watch

    # -- one collective ---------------------------------------------------------------------------------------

    def collective(self, tag: Tag) -> Signals:
        """``with signals.collective(tag):`` around one collective; whatever is raised inside breaks the group. Raises
        CollectiveError: the group is broken or closed."""
        self._turn.acquire()
        if self._failure is not None:
            self._turn.release()
            raise self._error()
        self._tag = tag
        self._round = 0
        return self

    def __enter__(self) -> Signals:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.waiting_on = None
        try:
            if error is not None and not isinstance(error, CollectiveError | SegmentError):
                left = f"rank {self.rank} left collective {self._tag.ordinal}: {type(error).__name__}"
                self._fail(CollectiveError(left, self.rank))
        finally:
            self._turn.release()

    def exchange(self, more: bool, first: int = 0, second: int = 0, third: int = 0) -> bool:
        """Signals every peer, with three numbers of at least 0, and waits for the signal of each. Writes to memory made
        before it are seen after it. ``more``: another exchange follows in this collective.

        Whether all ranks told the same numbers; if not, :attr:`told` has those that differ.
        """
        tag = self._tag
        message = _SIGNAL.pack(tag.ordinal, tag.fingerprint, self._round, first, second, third)
        self._round += 1
        if (cells := self._cells) is None:
            for peer in self._links:
                self._send(peer, message)
        else:
            if self._failure is not None:
                raise self._error()
            for peer in cells.tell(message):
                # A full socket has enough to wake its other end; who has shut it saw the cell, or is missed below.
                with contextlib.suppress(OSError):
                    self._links[peer].send(_BELL, socket.MSG_DONTWAIT)
        same = True
        theirs: bytes | memoryview
        for peer in self._links:
            if cells is None:
                theirs = self._receive(peer, more)
            else:
                if not cells.has_told(peer):
                    self._wait_for_cell(cells, peer, more)
                theirs = cells.message(peer)
            if theirs != message:
                if same:
                    self.told.clear()
                    same = False
                self.told[peer] = self._differing(peer, theirs, message)
        self.waiting_on = None
        return same

    def use_cells(self, memory: Sequence[torch.Tensor]) -> None:
        """Signals lie in shared memory from now on, where that is possible. Every rank calls it after the same
        exchange. ``memory``: see :class:`stratagem.worker.ring.host_cells.Cells`."""
        if IS_ORDERED:
            self._cells = Cells(self.rank, memory, _SIZE)

    def share(self, num_bytes: int) -> list[torch.Tensor]:
        """New shared memory for every rank: ``result[r]`` is rank r's, mapped here. Raises SegmentError: on every rank
        alike, when one of them cannot have or map its memory. Nothing is broken."""
        refusal: SegmentError | None = None
        own: Segment | None = None
        segments: dict[int, Segment] = {}
        try:
            try:
                own = segments[self.rank] = Segment.create(num_bytes)
            except SegmentError as error:
                refusal = error
            self._send_segment(own)
            for peer in self._links:
                try:
                    segment = self._receive_segment(peer, num_bytes)
                    if segment is not None:
                        segments[peer] = segment
                except SegmentError as error:
                    refusal = refusal or error
            self._round += 1
            same = self.exchange(False, 0 if refusal is None else refusal.errno or errno.EINVAL)
            if refusal is None and not same:
                peer, (number, _, _) = min(self.told.items())
                text = f"no shared memory of {num_bytes:,} bytes for rank {peer}: {os.strerror(number)}"
                refusal = SegmentError(text, number)
            if refusal is not None:
                raise refusal
            return [segments[rank].tensor for rank in sorted(segments)]
        finally:
            for segment in segments.values():
                segment.close()

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Wakes whoever waits, waits until it has left, and closes the sockets."""
        self._fail(CollectiveError(reason), f"rank {self.rank} closed the group: {reason}")
        with self._turn:
            self._cells = None
            for link in self._links.values():
                link.close()

    # -- waiting for one peer ---------------------------------------------------------------------------------

    def _send(self, peer: int, message: bytes) -> None:
        try:
            self._links[peer].send(message)
        except OSError as error:
            raise self._lost(peer, error) from None

    def _receive(self, peer: int, more: bool) -> bytes:
        """A signal on a socket, which may be torn."""
        self.waiting_on = peer
        look = functools.partial(self._watches[more, peer].poll, 0)
        self._wait(peer, more, () if self._spin is None else self._spin.until(look))
        try:
            return self._links[peer].recv(_SIZE, socket.MSG_WAITALL)
        except OSError as error:
            raise self._lost(peer, error) from None

    def _wait_for_cell(self, cells: Cells, peer: int, more: bool) -> None:
        """Returns when a peer has told something in this exchange."""
        self.waiting_on = peer

        def look() -> bool:
            if cells.has_told_soon(peer):
                return True
            self._watches[more, peer].poll(0)  # gives other threads of this process a turn
            return False

        if self._spin is not None and self._spin.until(look):
            return
        cells.sleep_for(peer)
        try:
            while not cells.has_told(peer):
                self._wait(peer, more)
                try:
                    record = self._links[peer].recv(_SIZE, socket.MSG_DONTWAIT)
                except OSError as error:
                    raise self._lost(peer, error) from None
                if record != _BELL:
                    raise self._lost(peer, None, record)
        finally:
            cells.sleep_for(None)

    def _wait(self, peer: int, more: bool, events: Sequence[tuple[int, int]] = ()) -> None:
        """Returns when something can be read from ``peer``, or its socket is shut. ``events``: what was found so
        far."""
        watch = self._watches[more, peer]
        awaited = self._descriptors[peer]
        while True:
            events = events or watch.poll(self.timeout_s * 1000)
            if not events:
                raise self._lost(peer, BlockingIOError())
            ended = {descriptor for descriptor, _ in events}
            if awaited in ended:
                return
            events, watch = (), self._watch(peer, more)
            for other, descriptor in self._descriptors.items():
                if descriptor in ended:
                    if more or not self._has_signalled(other):
                        raise self._lost(other, None)
                    watch.unregister(descriptor)  # it has done its part and ended in peace

    def _has_signalled(self, peer: int) -> bool:
        """Whether a peer that has shut its socket gave its signal before."""
        if self._cells is not None:
            return self._cells.has_told(peer)
        try:
            head = self._links[peer].recv(_SIZE, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except OSError:
            return False
        return len(head) == _SIZE and _SIGNAL.unpack(head)[0] != _ABORT

    def _differing(self, peer: int, theirs: bytes | memoryview, message: bytes) -> tuple[int, int, int]:
        """The numbers of a peer's signal, when it is one of the same place in the same collective."""
        if len(theirs) != _SIZE:
            raise self._lost(peer, None)
        ordinal, fingerprint, place, first, second, third = _SIGNAL.unpack(theirs)
        if ordinal == _ABORT:
            raise self._aborted(peer, fingerprint, place)
        own_ordinal, own_fingerprint, own_place, *_ = _SIGNAL.unpack(message)
        if (ordinal, fingerprint, place) != (own_ordinal, own_fingerprint, own_place):
            raise self._failed(
                f"rank {peer} is at collective {ordinal} (fingerprint {fingerprint:08x}, round {place}), rank "
                f"{self.rank} at collective {own_ordinal} (fingerprint {own_fingerprint:08x}, round {own_place}): all "
                "ranks have to make the same calls in the same order",
                peer,
                OutOfStepError,
            )
        return first, second, third

    # -- segments -----------------------------------------------------------------------------------------------

    def _send_segment(self, segment: Segment | None) -> None:
        message = _SIGNAL.pack(self._tag.ordinal, self._tag.fingerprint, self._round, int(segment is not None), 0, 0)
        for peer, link in self._links.items():
            try:
                if segment is None:
                    link.send(message)
                else:
                    segment.send_to(link, message)
            except OSError as error:
                raise self._lost(peer, error) from None

    def _receive_segment(self, peer: int, num_bytes: int) -> Segment | None:
        """None: the peer has none."""
        self.waiting_on = peer
        message = _BELL
        while message == _BELL:  # one that came too late
            self._wait(peer, True)
            try:
                message, descriptor = receive_descriptor(self._links[peer], _SIZE)
            except OSError as error:
                raise self._lost(peer, error) from None
        try:
            own = _SIGNAL.pack(self._tag.ordinal, self._tag.fingerprint, self._round, 1, 0, 0)
            has_one, _, _ = self._differing(peer, message, own)
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise
        if descriptor is None:
            if has_one:
                raise self._failed(f"rank {peer} sent no descriptor with its shared segment", peer)
            return None
        return Segment.attach(descriptor, num_bytes)

    # -- errors ---------------------------------------------------------------------------------------------------

    def _error(self) -> CollectiveError:
        """A fresh error each time: a kept one would hold the frames of its traceback, and with them shared memory."""
        assert self._failure is not None
        kind, message, rank = self._failure
        return kind(message, rank)

    def _lost(self, peer: int, error: Exception | None, record: bytes = b"") -> CollectiveError:
        """The error for a socket that gave no signal, but perhaps a ``record`` of something else."""
        if self._failure is not None:
            return self._error()
        if isinstance(error, BlockingIOError):
            return self._failed(
                f"rank {peer} was stalled for longer than the timeout of {self.timeout_s:g} s while rank {self.rank} "
                f"waited for it in collective {self._tag.ordinal}",
                peer,
                OutOfStepError,
            )
        try:  # what it said before it shut the socket
            while len(record := record or self._links[peer].recv(_SIZE, socket.MSG_DONTWAIT)) == _SIZE:
                ordinal, culprit, length, *_ = _SIGNAL.unpack(record)
                if ordinal == _ABORT:
                    return self._aborted(peer, culprit, length)
                record = b""
        except OSError:
            pass
        return self._failed(f"rank {peer} has ended: its socket closed in collective {self._tag.ordinal}", peer)

    def _aborted(self, peer: int, culprit: int, num_text_bytes: int) -> CollectiveError:
        """The error that ``peer`` raised, or the reason for which it closed."""
        try:
            data = self._links[peer].recv(min(num_text_bytes, _MAX_TEXT_BYTES), socket.MSG_DONTWAIT)
        except OSError:
            data = b""
        return self._failed(data.decode(errors="replace"), peer if culprit == _NOBODY else culprit)

    def _failed(self, message: str, rank: int | None, kind: type[CollectiveError] = CollectiveError) -> CollectiveError:
        self._fail(kind(message, rank))
        return self._error()

    def _fail(self, error: CollectiveError, told: str = "") -> None:
        """The first failure counts: remembers it, tells every peer (``told``, if given), shuts every socket."""
        with self._failing:
            if self._failure is not None:
                return
            self._failure = type(error), str(error), error.rank
        text = (told or str(error)).encode()[:_MAX_TEXT_BYTES]
        culprit = _NOBODY if error.rank is None else error.rank
        abort = _SIGNAL.pack(_ABORT, culprit, len(text), 0, 0, 0) + text
        for link in self._links.values():
            try:
                link.send(abort, socket.MSG_DONTWAIT)
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
