"""Closed units on their way to the ps: they travel with the next commit, or alone at the end of an epoch."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.rpc.generated import common_pb2, ps_pb2
from stratagem.worker.ps_client import PsClient
from stratagem.worker.unit_tracker import ClosedUnit

MAX_WAITING = 64  # a ps that takes part in no update is told at the latest after so many


class CloseReports:
    """What each ps has yet to hear. Repeating a close is harmless, so a report is dropped only when acknowledged."""

    def __init__(self, clients: Sequence[PsClient]) -> None:
        self._clients = clients
        self._waiting: dict[int, list[ClosedUnit]] = {client.index: [] for client in clients}

    def add(self, closed: Sequence[ClosedUnit]) -> None:
        """These units are complete on this worker."""
        for waiting in self._waiting.values():
            waiting.extend(closed)

    def for_ps(self, ps: int) -> list[ps_pb2.UnitClose]:
        """What to tell one ps now."""
        return [
            ps_pb2.UnitClose(
                unit=common_pb2.Unit(dataset=close.unit.dataset, epoch=close.unit.epoch, index=close.unit.index),
                num_updates=close.num_updates,
            )
            for close in self._waiting[ps]
        ]

    def acknowledged(self, ps: int, num: int) -> None:
        """One ps has heard the first ``num``."""
        del self._waiting[ps][:num]

    def clear(self) -> None:
        """Nothing is left to tell (the job went back to a checkpoint)."""
        for waiting in self._waiting.values():
            waiting.clear()

    def flush(self, at_least: int = 1) -> None:
        """Tells every ps that has ``at_least`` so many to hear."""
        for client in self._clients:
            closes = self.for_ps(client.index)
            if len(closes) >= at_least:
                client.call("CloseUnits", ps_pb2.CloseUnitsRequest(closes=closes))
                self.acknowledged(client.index, len(closes))
