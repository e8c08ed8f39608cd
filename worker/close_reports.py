"""Closed units on their way to the ps: they travel with the next commit, or alone at the end of an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stratagem.cluster.units import Unit
from stratagem.rpc.generated import common_pb2, ps_pb2
from stratagem.worker.ps_client import PsClient

MAX_WAITING = 64  # a ps that takes part in no update is told at the latest after so many


def unit_proto(unit: Unit) -> common_pb2.Unit:
    """A unit as it goes over the wire."""
    return common_pb2.Unit(dataset=unit.dataset, epoch=unit.epoch, index=unit.index)


class CloseReports:
    """What each ps has yet to hear. Repeating a close is harmless, so a report is dropped only when acknowledged."""

    def __init__(self, clients: Sequence[PsClient]) -> None:
        self._clients = clients
        self._waiting: dict[int, list[ps_pb2.UnitClose]] = {client.index: [] for client in clients}
        self._num_updates: dict[int, Counter[Unit]] = {client.index: Counter() for client in clients}

    def pushed(self, units: Sequence[Unit], servers: Sequence[int]) -> None:
        """These ps acknowledged an update of these units. A close says how many: a ps that went back to a checkpoint
        since knows by it that it lacks some."""
        for ps in servers:
            self._num_updates[ps].update(units)

    def add(self, closed: Sequence[Unit]) -> None:
        """These units are complete on this worker."""
        for ps, waiting in self._waiting.items():
            for unit in closed:
                waiting.append(ps_pb2.UnitClose(unit=unit_proto(unit), num_updates=self._num_updates[ps].pop(unit, 0)))

    def for_ps(self, ps: int) -> list[ps_pb2.UnitClose]:
        """What to tell one ps now."""
        return list(self._waiting[ps])

    def acknowledged(self, ps: int, num: int) -> None:
        """One ps has heard the first ``num``."""
        del self._waiting[ps][:num]

    def clear(self) -> None:
        """Nothing is left to tell (the job went back to a checkpoint)."""
        for waiting in self._waiting.values():
            waiting.clear()
        for counts in self._num_updates.values():
            counts.clear()

    def flush(self, at_least: int = 1) -> None:
        """Tells every ps that has ``at_least`` so many to hear."""
        for client in self._clients:
            closes = self.for_ps(client.index)
            if len(closes) >= at_least:
                client.call("CloseUnits", ps_pb2.CloseUnitsRequest(closes=closes))
                self.acknowledged(client.index, len(closes))
