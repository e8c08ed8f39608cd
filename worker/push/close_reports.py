"""Sends closed units to the ps: with the next commit, or alone at the end of an epoch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

from stratagem.cluster.units import Unit
from stratagem.errors import PeerUnavailableError
from stratagem.worker.push.ps_client import PsClient
from stratagem.worker.push.wire import close_units

MAX_WAITING = 64  # a ps that takes part in no update is told at the latest after so many


@dataclasses.dataclass(eq=False, repr=False)
class CloseReports:
    """The closes that each ps has yet to receive. Repeating one is harmless, so only an acknowledged one is dropped."""

    _clients: Sequence[PsClient]
    _recover: Callable[[PsClient], None]
    """Connects to a ps that was lost, and waits for one that is away."""

    def __post_init__(self) -> None:
        self._waiting: dict[int, list[tuple[Unit, int]]] = {client.index: [] for client in self._clients}
        self._num_updates: dict[int, Counter[Unit]] = {client.index: Counter() for client in self._clients}

    def pushed(self, units: Sequence[Unit], servers: Sequence[int]) -> None:
        """These ps acknowledged an update of these units. A close says how many: a ps that went back to a checkpoint
        since knows by it that it lacks some."""
        for ps in servers:
            counts = self._num_updates[ps]
            for unit in units:
                counts[unit] += 1

    def rerouted(self) -> None:
        """There are other ps. Each has applied, and heard, what one of those before had. One that goes back to an older
        checkpoint lacks that, and must not hear what a ps without a part in it was still to hear: no update."""
        told = [dict(each) for each in self._waiting.values()]
        waiting = {unit: max(each[unit] for each in told) for unit in told[0] if all(unit in each for each in told)}
        counts: Counter[Unit] = Counter()
        for each in self._num_updates.values():
            counts |= each
        self._waiting = {client.index: list(waiting.items()) for client in self._clients}
        self._num_updates = {client.index: Counter(counts) for client in self._clients}

    def add(self, closed: Sequence[Unit]) -> None:
        """These units are complete on this worker."""
        if not closed:  # as in most calls
            return
        for ps, waiting in self._waiting.items():
            waiting += [(unit, self._num_updates[ps].pop(unit, 0)) for unit in closed]

    def for_ps(self, ps: int) -> list[tuple[Unit, int]]:
        """What to tell one ps now: units, and how many of their updates it acknowledged."""
        return self._waiting[ps].copy()

    def acknowledged(self, ps: int, num: int) -> None:
        """One ps has heard the first ``num``."""
        del self._waiting[ps][:num]

    def clear(self) -> None:
        """Nothing is left to tell (the job went back to a checkpoint)."""
        for waiting in self._waiting.values():
            waiting.clear()
        for counts in self._num_updates.values():
            counts.clear()

    def flush(self, at_least: int) -> None:
        """Tells every ps that has ``at_least`` so many to hear. Raises PeerUnavailableError: one is away; it hears of
        them later."""
        for client in self._clients:
            if len(self._waiting[client.index]) >= at_least:
                self._tell(client)

    def deliver(self) -> None:
        """Tells every ps all of it; a ps that is away is waited for. Raises PeerUnavailableError: it does not come back
        in time."""
        while late := [client for client in self._clients if self._waiting[client.index]]:
            try:
                self._tell(late[0])
            except PeerUnavailableError:
                self._recover(late[0])

    def _tell(self, client: PsClient) -> None:
        closes = self.for_ps(client.index)
        close_units(client, closes)
        self.acknowledged(client.index, len(closes))
