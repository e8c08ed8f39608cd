"""Reading rows of tables: what a lookup asks parameter servers for, and tables that are looked up together."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from stratagem.errors import PeerUnavailableError
from stratagem.measuring import measures
from stratagem.rpc.codec import FrameKind
from stratagem.rpc.lane import Lane, Pieces
from stratagem.worker.push.layout import Numbers, RowPlacement
from stratagem.worker.push.ps_client import RETRY_S, PsClient
from stratagem.worker.push.row_frames import RowsThere, frames_of, numbers_of, rows_in
from stratagem.worker.push.row_guesses import Companion, RowGuesses, Tensors
from stratagem.worker.runtime import WorkerRuntime

MAX_BYTES = 32 << 20
"""Of rows that are asked for, or assigned, at once."""
MAX_AGE_S = 1.0
"""Rows that came with those of another table are used within this time, or asked for again."""
_WANTED_ROWS = int(FrameKind.WANTED_ROWS)
Places = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class TableLink:
    """What connects a table to its parameter servers."""

    name: str
    """Of the variable, in the job."""
    runtime: WorkerRuntime
    placement: RowPlacement
    group: int
    on_backward: Callable[[], object]
    """Called whenever a gradient was accumulated."""
    recover: Callable[[PsClient], None]
    """Connects anew to a ps whose lane has broken."""
    reads: RowReads
    """Of all tables of the job."""


class Table(Protocol):
    """Of a table, what reading it takes."""

    num_rows: int
    width: int
    dtype: torch.dtype
    rows_at_once: int

    @property
    def link(self) -> TableLink: ...


class Occurrences(NamedTuple):
    """Where rows occur in a batch. A row that does not may be said to occur anywhere: only the padding row is one, and
    nobody asks for its gradient."""

    place: Places
    """The row of each occurrence."""
    one: Places
    """An occurrence of each row."""
    others: Places
    """All that are left."""

    @classmethod
    def of(cls, place: Places, num_rows: int) -> Occurrences:
        """Those of rows that somebody else has numbered."""
        one = np.zeros(num_rows, np.int64)
        every = np.arange(len(place))
        one[place] = every
        return cls(place, one, (one[place] != every).nonzero()[0])


def found_in(ids: Places, num_rows: int) -> tuple[Places, Occurrences]:
    """The numbers in ``ids``, from 0 to ``num_rows - 1``, ascending, each once, and where they occur: as
    ``numpy.unique``, which throws away what backward has to find again."""
    bits = len(ids).bit_length()
    if num_rows <= 1 << (63 - bits):  # a number and its place are one word, which is sorted in half the time
        words = ids << bits | np.arange(len(ids))
        words.sort()
        ascending, order = words >> bits, words & ((1 << bits) - 1)
    else:
        order = ids.argsort(kind="stable")
        ascending = ids.take(order)
    is_first = np.ones(len(ids), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
    place = np.empty(len(ids), np.int64)
    place[order] = is_first.cumsum() - 1
    first = is_first.nonzero()[0]
    others = order[~is_first] if len(first) < len(ids) else order[:0]
    return ascending.take(first), Occurrences(place, order.take(first), others)


class Lookup(NamedTuple):
    """The rows of a table that some ids name, each once."""

    ids: Places
    numbers: Numbers
    found: Occurrences
    rows: torch.Tensor
    """``(len(numbers), width)``, on the CPU, as soon as they were read."""

    @classmethod
    def of(cls, table: Table, ids: Places) -> Lookup:
        numbers, found = found_in(ids, table.num_rows)
        return cls(ids, numbers, found, torch.empty(len(numbers), table.width, dtype=table.dtype, device="cpu"))


class _Wanted(NamedTuple):
    table: Table
    numbers: Numbers
    rows: torch.Tensor
    """Where they go."""


def array_of(ids: torch.Tensor) -> Places:
    """Ids of any integer dtype and device, flat."""
    return ids.detach().cpu().reshape(-1).numpy().astype(np.int64, copy=False)


def are_within(ids: Places, num_rows: int) -> bool:
    """Whether a table of so many rows has them all."""
    return not len(ids) or bool(ids.view(np.uint64).max() < num_rows)  # where negative ones are large


class RowsAhead:
    """Rows that a request of this worker's asks for, together with another one that it sends."""

    def __init__(self, guessed: Sequence[tuple[Companion[Table], Lookup]]) -> None:
        self.guessed = guessed
        self._request: _Request | None = _Request(_wanted_by(guessed))

    def send(self) -> None:
        """Whoever cannot be reached is asked again when its rows are wanted."""
        assert self._request is not None
        try:
            self._request.send()
        except PeerUnavailableError:
            self._request = None

    def receive(self) -> bool:
        """Behind the reply to the other one. False: they did not come, or not from a ps that is here now."""
        request, self._request = self._request, None
        try:
            if request is not None and request.is_current:
                request.receive()
                return True
        except PeerUnavailableError:
            pass
        return False


class RowReads:
    """Reads rows of the tables of a job. The first lookup of a batch asks for the rows of all tables whose ids lie as
    in the batches before: one round trip, not one for each. Where the ids are those of a distributed dataset's batch,
    they come with the weights of the update before: no round trip at all. A guess is used only for the very ids that it
    was made for, and not after this worker has sent anything to a ps, or a while later."""

    def __init__(self, turn: threading.RLock) -> None:
        self.turn = turn
        """Of the thread that sends something to ps, until the answers are here: a script may read tables in one while
        it trains in another, and what goes and comes over a lane is for one at a time."""
        self.guesses = RowGuesses[Table]()
        self._following: Tensors | None = None
        self._ready: Sequence[tuple[Companion[Table], Lookup]] = ()
        """What came with it, and was not asked for yet."""
        self._ready_until = 0.0

    def lookup(self, table: Table, ids: torch.Tensor, array: Places) -> Lookup:
        """Reads the rows of ``ids``, which ``array`` has as numbers. PeerUnavailableError: a ps did not come back in
        time."""
        with self.turn:
            known = self.guesses.note(table, ids)
            for position, (companion, ready) in enumerate(self._ready):
                if companion.table is table and np.array_equal(ready.ids, array):
                    if time.monotonic() > self._ready_until:
                        break
                    self._ready = [*self._ready[:position], *self._ready[position + 1 :]]
                    return ready
            if known is not None:
                self._drop()
            wanted = Lookup.of(table, array)
            guessed = self._lookups(self.guesses.ids_of(known), wanted.rows.nbytes) if known else ()
            self.read(table, wanted.numbers, wanted.rows, _wanted_by(guessed))
            if guessed:
                self._keep(guessed)
            return wanted

    def read(self, table: Table, numbers: Numbers, rows: torch.Tensor, more: Sequence[_Wanted] = ()) -> None:
        """Reads some rows as they are on the ps now, ``(len(numbers), width)``, on the CPU, with those of other tables.
        ``numbers``: ascending, each once. PeerUnavailableError: a ps did not come back in time."""
        at_once = table.rows_at_once
        with self.turn, table.link.runtime.meter.exposed(f"rows of {table.link.name}", phase=measures.ROWS_WAIT):
            if len(numbers) <= at_once:
                _read([_Wanted(table, numbers, rows), *more])
            else:
                for start in range(0, len(numbers), at_once):
                    part = slice(start, start + at_once)
                    _read([_Wanted(table, numbers[part], rows[part])])

    def begin(self, batch: Tensors | None = None, following: Tensors | None = None) -> None:
        """The script gets a batch of a distributed dataset, with these tensors, or (None) has done with the last one.
        ``following``: of the batch after it, whose rows may be read ahead; none while it is not here."""
        with self.turn:
            self.guesses.begin(batch)
            self._following = following

    def within(self, arguments: Tensors | None) -> None:
        """A step begins, whose arguments have these tensors; None: it is over."""
        with self.turn:
            self.guesses.within(arguments)

    def ahead(self) -> RowsAhead | None:
        """What the batch after this one will look up."""
        guessed = self._lookups(self.guesses.following(self._following), 0) if self._following is not None else ()
        return RowsAhead(guessed) if guessed else None

    def take(self, ahead: RowsAhead) -> None:
        """Receives what was sent for."""
        if ahead.receive():
            self._keep(ahead.guessed)

    def clear(self) -> None:
        """Rows may change: what was read and not asked for is as good as wasted."""
        self.guesses.clear()
        self._drop()

    def _drop(self) -> None:
        for companion, _ in self._ready:
            companion.num_wasted += 1
        self._ready = ()

    def _keep(self, guessed: Sequence[tuple[Companion[Table], Lookup]]) -> None:
        self._ready, self._ready_until = guessed, time.monotonic() + MAX_AGE_S

    def _lookups(
        self, guesses: Iterable[tuple[Companion[Table], torch.Tensor]], num_bytes: int
    ) -> Sequence[tuple[Companion[Table], Lookup]]:
        found: list[tuple[Companion[Table], Lookup]] = []
        with torch.inference_mode(False):  # whose rows get no gradient outside of that mode
            for companion, ids in guesses:
                array = array_of(ids).copy()
                if not are_within(array, companion.table.num_rows):
                    continue
                lookup = Lookup.of(companion.table, array)
                num_bytes += lookup.rows.nbytes
                if num_bytes > MAX_BYTES:
                    break
                found.append((companion, lookup))
        return found


def _wanted_by(guessed: Sequence[tuple[Companion[Table], Lookup]]) -> list[_Wanted]:
    return [_Wanted(companion.table, each.numbers, each.rows) for companion, each in guessed]


def _read(wanted: Sequence[_Wanted]) -> None:
    link = wanted[0].table.link
    give_up_at: float | None = None
    for attempt in itertools.count():
        request = _Request(wanted)
        try:
            with contextlib.ExitStack() as corked:
                request.send(lambda lane: corked.enter_context(lane.corked()))
            request.receive()
            return
        except PeerUnavailableError:
            give_up_at = give_up_at or time.monotonic() + link.runtime.config.peer_timeout_s
            if (client := request.client) is None or time.monotonic() > give_up_at:
                raise
            link.recover(client)
            if attempt:  # it is there, and refuses
                client.session.wait_stopped(RETRY_S)


class _Request:
    """Rows that are asked for once. PeerUnavailableError of either method: :attr:`client` is gone."""

    def __init__(self, wanted: Sequence[_Wanted]) -> None:
        self._wanted = wanted
        self.client: PsClient | None = None
        """Whom this has to do with now."""
        self._transfers: dict[PsClient, tuple[Lane, int]] = {}
        self._asked: list[tuple[PsClient, Sequence[RowsThere]]] = []

    @property
    def is_current(self) -> bool:
        """Whether all that were asked are still connected as they were."""
        return all(client.is_connected and client.lane is lane for client, (lane, _) in self._transfers.items())

    def send(self, begin: Callable[[Lane], object] = lambda _: None) -> None:
        """``begin`` gets each lane before its first frame."""
        link = self._wanted[0].table.link  # another one, when there is another number of ps
        frame_bytes = link.runtime.config.frame_bytes
        for (ps, group), parts in _by_place(self._wanted, frame_bytes).items():
            client = self.client = link.runtime.clients[ps]
            if client not in self._transfers:
                self._transfers[client] = client.lane, client.new_transfer()
                begin(client.lane)
            lane, transfer = self._transfers[client]
            num_rows = 0
            for some in frames_of(parts, rows_in(frame_bytes, parts[0].rows)):
                numbers = numbers_of(some)
                lane.send(_WANTED_ROWS, transfer, group, num_rows, held([numbers]), len(numbers))
                num_rows += len(numbers)
                self._asked.append((client, some))

    def receive(self) -> None:
        deadline = time.monotonic() + self._wanted[0].table.link.runtime.config.start_timeout_s
        for client, parts in self._asked:
            self.client = client
            _receive(*self._transfers[client], deadline, parts)
        for lane, transfer in self._transfers.values():
            lane.forget(transfer)


def _by_place(wanted: Sequence[_Wanted], frame_bytes: int) -> dict[tuple[int, int], list[RowsThere]]:
    """By ps and group."""
    found: dict[tuple[int, int], list[RowsThere]] = {}
    for table, numbers, rows in wanted:
        link = table.link
        for ps, start, stop, local in link.placement.cut(numbers, rows_in(frame_bytes, rows)):
            found.setdefault((ps, link.group), []).append(RowsThere(local, rows[start:stop]))
    return found


def _receive(lane: Lane, transfer: int, deadline: float, parts: Sequence[RowsThere]) -> None:
    """One frame, into the rows it is for."""
    first = parts[0].rows
    target = first if len(parts) == 1 else first.new_empty(sum([len(part.local) for part in parts]), first.shape[1])
    frame = lane.receive(transfer, deadline, target.view(-1))
    rows = frame.tensor.view(target.shape)
    if len(parts) > 1:
        for part, some in zip(parts, rows.split([len(part.local) for part in parts]), strict=True):
            part.rows.copy_(some)
    elif rows.data_ptr() != target.data_ptr():
        target.copy_(rows)


def held(pieces: Sequence[torch.Tensor]) -> Pieces:
    """Pieces that are here, as a lane asks for them."""
    return lambda: pieces
