"""What a strategy whose replicas run in step does at the steps of its datasets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from stratagem.data.placement import Listener, StepShare
from stratagem.errors import StratagemError
from stratagem.strategy.step_shares import StepShares
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.step_meter import StepMeter

REPORT_S = 1.0
"""Seconds between two reports of finished steps."""


class StepListener(Listener):
    """Tells the shares of each batch, counts steps, and numbers the collectives by them.

    Args:
        shares: told of each batch.
        meter: counts steps and examples.
        communicators: whose collectives belong to steps.
        placed: called with each batch, which is where the step will use it; None: nothing is left to do.
    """

    def __init__(
        self,
        shares: StepShares,
        meter: StepMeter,
        communicators: Sequence[Communicator],
        placed: Callable[[Any], None] | None = None,
    ) -> None:
        self._placed = placed
        self.report: Callable[[int, Sequence[int]], None] | None = None
        """Tells who keeps books of an epoch's finished steps; None: nobody does."""
        self._shares = shares
        self._meter = meter
        self._communicators = communicators
        self._epoch = 0
        self._finished: list[int] = []
        self._reported_at = 0.0

    def start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._meter.epoch = epoch
        self._meter.start_clock()

    def begin(self, share: StepShare, batch: Any) -> None:
        if self._placed is not None:
            self._placed(batch)
        self._shares.begin(share, batch)
        for communicator in self._communicators:
            communicator.step += 1

    def done(self, share: StepShare) -> None:
        self._meter.step_done(sum(share.num_examples))
        self._finished.append(share.step)
        if time.monotonic() - self._reported_at > REPORT_S:
            self._tell()

    def end_epoch(self, complete: bool) -> None:
        if complete:
            self._shares.end()
        self._tell()

    def _tell(self) -> None:
        if self.report is not None and self._finished:
            with contextlib.suppress(StratagemError):  # the chief keeps books; training goes on without them
                self.report(self._epoch, self._finished)
        self._finished = []
        self._reported_at = time.monotonic()
