"""Reading rows of tables: what a lookup asks parameter servers for, and tables that are looked up together."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from stratagem.errors import PeerUnavailableError
from stratagem.measuring import measures
from stratagem.rpc.codec import FrameKind
from stratagem.rpc.lane import Pieces
from stratagem.worker.push.layout import Numbers, RowPlacement
from stratagem.worker.push.ps_client import RETRY_S, PsClient
from stratagem.worker.push.row_frames import RowsThere, frames_of, numbers_of, rows_in
from stratagem.worker.push.row_guesses import Companion, RowGuesses
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
    on_backward: Callable[[], None]
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


class RowReads:
    """Reads rows of the tables of a job. The first lookup of a batch asks for the rows of all tables whose ids lie as
    in the batches before: one round trip, not one for each. A guess is used only for the very ids that it was made for,
    and not after this worker has sent anything to a ps, or a while later."""

    def __init__(self, turn: threading.RLock) -> None:
        self.turn = turn
        """Of the thread that sends something to ps, until the answers are here: a script may read tables in one while
        it trains in another, and what goes and comes over a lane is for one at a time."""
        self.guesses = RowGuesses[Table]()
        self._ready: list[tuple[Companion[Table], Lookup]] = []
        """What came with it, and was not asked for yet."""
        self._ready_until = 0.0

    def lookup(self, table: Table, ids: torch.Tensor, array: Places) -> Lookup:
        """Reads the rows of ``ids``, which ``array`` has as numbers. PeerUnavailableError: a ps did not come back in
        time."""
        with self.turn:
            known = self.guesses.note(table, ids)
            if known is not None:
                self._drop()
            for position, (companion, ready) in enumerate(self._ready):
                if companion.table is table and np.array_equal(ready.ids, array):
                    if time.monotonic() > self._ready_until:
                        break
                    del self._ready[position]
                    return ready
            wanted = Lookup.of(table, array)
            guessed: list[tuple[Companion[Table], Lookup]] = []
            if known:
                with torch.inference_mode(False):  # whose rows get no gradient outside of that mode
                    guessed += self._lookups(known, wanted.rows.nbytes)
            more = [_Wanted(companion.table, each.numbers, each.rows) for companion, each in guessed]
            self.read(table, wanted.numbers, wanted.rows, more)
            if more:
                self._ready, self._ready_until = guessed, time.monotonic() + MAX_AGE_S
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

    def within(self, arguments: Callable[[], Sequence[torch.Tensor]] | None) -> None:
        """A step begins, whose arguments have these tensors; None: it is over."""
        with self.turn:
            self.guesses.within(arguments)
            self._drop()

    def clear(self) -> None:
        """Rows may change: what was read and not asked for is as good as wasted."""
        self.guesses.clear()
        self._drop()

    def _drop(self) -> None:
        for companion, _ in self._ready:
            companion.num_wasted += 1
        self._ready.clear()

    def _lookups(
        self, known: Collection[Companion[Table]], num_bytes: int
    ) -> Iterator[tuple[Companion[Table], Lookup]]:
        for companion, ids in self.guesses.ids_of(known):
            array = array_of(ids).copy()
            if not are_within(array, companion.table.num_rows):
                continue
            lookup = Lookup.of(companion.table, array)
            num_bytes += lookup.rows.nbytes
            if num_bytes > MAX_BYTES:
                return
            yield companion, lookup


def _read(wanted: Sequence[_Wanted]) -> None:
    give_up_at: float | None = None
    for attempt in itertools.count():
        client: PsClient | None = None
        transfers: dict[PsClient, int] = {}
        asked: list[tuple[PsClient, Sequence[RowsThere]]] = []
        link = wanted[0].table.link  # another one, when there is another number of ps
        config = link.runtime.config
        try:
            with contextlib.ExitStack() as corked:
                for (ps, group), parts in _by_place(wanted, config.frame_bytes).items():
                    client = link.runtime.clients[ps]
                    if client not in transfers:
                        transfers[client] = client.new_transfer()
                        corked.enter_context(client.lane.corked())
                    num_rows = 0
                    for some in frames_of(parts, rows_in(config.frame_bytes, parts[0].rows)):
                        numbers = numbers_of(some)
                        client.lane.send(
                            _WANTED_ROWS, transfers[client], group, num_rows, held([numbers]), len(numbers)
                        )
                        num_rows += len(numbers)
                        asked.append((client, some))
            deadline = time.monotonic() + config.start_timeout_s
            for client, parts_asked in asked:
                _receive(client, transfers[client], deadline, parts_asked)
            for client, transfer in transfers.items():
                client.lane.forget(transfer)
            return
        except PeerUnavailableError:
            give_up_at = give_up_at or time.monotonic() + config.peer_timeout_s
            if client is None or time.monotonic() > give_up_at:
                raise
            link.recover(client)
            if attempt:  # it is there, and refuses
                client.session.wait_stopped(RETRY_S)


def _by_place(wanted: Sequence[_Wanted], frame_bytes: int) -> dict[tuple[int, int], list[RowsThere]]:
    """By ps and group."""
    found: dict[tuple[int, int], list[RowsThere]] = {}
    for table, numbers, rows in wanted:
        link = table.link
        for ps, start, stop, local in link.placement.cut(numbers, rows_in(frame_bytes, rows)):
            found.setdefault((ps, link.group), []).append(RowsThere(local, rows[start:stop]))
    return found


def _receive(client: PsClient, transfer: int, deadline: float, parts: Sequence[RowsThere]) -> None:
    """One frame, into the rows it is for."""
    first = parts[0].rows
    target = first if len(parts) == 1 else first.new_empty(sum([len(part.local) for part in parts]), first.shape[1])
    frame = client.lane.receive(transfer, deadline, target.view(-1))
    rows = frame.tensor.view(target.shape)
    if len(parts) > 1:
        for part, some in zip(parts, rows.split([len(part.local) for part in parts]), strict=True):
            part.rows.copy_(some)
    elif rows.data_ptr() != target.data_ptr():
        target.copy_(rows)


def held(pieces: Sequence[torch.Tensor]) -> Pieces:
    """Pieces that are here, as a lane asks for them."""
    return lambda: pieces
