"""What a strategy whose replicas run in step does at the steps of its datasets."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from stratagem.data.placement import Listener, StepShare
from stratagem.errors import PeerUnavailableError, StratagemError
from stratagem.strategy.newcomers import Newcomers
from stratagem.strategy.step_shares import StepShares
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.step_meter import StepMeter

REPORT_S = 1.0
"""Seconds between two reports of finished steps."""
REPORT_SHARE = 0.1
"""Of the time a step listener spends at most with reports that are not answered."""


@dataclasses.dataclass(eq=False, repr=False)
class StepListener(Listener):
    """Tells the shares of each batch, counts steps, and numbers the collectives by them."""

    _shares: StepShares
    _meter: StepMeter
    _communicators: Sequence[Communicator]
    """Whose collectives belong to steps."""
    _placed: Callable[[Any], None] | None = None
    """Called with each batch, which is where the step will use it; None: nothing is left to do."""
    _newcomers: Newcomers | None = None
    """Lets them in between steps, or takes this one to the others; None: nobody comes."""
    _ordinal: int = 1
    """Of the dataset."""

    def __post_init__(self) -> None:
        self.report: Callable[[int, Sequence[int]], None] | None = None
        """Tells who keeps books of an epoch's finished steps; None: nobody does. Raises ``PeerUnavailableError`` where
        that cannot be had now, after a second or so."""
        self._epoch = 0
        self._finished: dict[int, list[int]] = {}
        """Steps of each epoch that nobody has been told of."""
        self._report_at = 0.0

    def arrive(self) -> None:
        if self._newcomers is not None:
            self._newcomers.arrive(self._ordinal)

    def between_steps(self) -> None:
        if self._newcomers is not None:
            self._newcomers.between_steps(self._ordinal)

    def start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._meter.epoch = epoch
        self._meter.start_clock()

    def begin(self, share: StepShare, batch: Any) -> None:
        for communicator in self._communicators:
            communicator.step += 1
        if self._placed is not None:
            self._placed(batch)
        self._shares.begin(share, batch)
        self._meter.got_data()

    def done(self, share: StepShare) -> None:
        self._meter.step_done(sum(share.num_examples))
        self._meter.wants_data()
        if self.report is not None:
            self._finished.setdefault(self._epoch, []).append(share.step)
            if time.monotonic() > self._report_at:
                self._tell(self.report)

    def end_epoch(self, complete: bool) -> None:
        self._meter.stop_clock()
        if complete:
            self._shares.end()
        if self.report is not None:
            self._tell(self.report)

    def _tell(self, report: Callable[[int, Sequence[int]], None]) -> None:
        """The chief keeps books; training goes on without it, and tells it later."""
        began = time.monotonic()
        for epoch, steps in list(self._finished.items()):
            try:
                report(epoch, steps)
            except PeerUnavailableError:
                break
            except StratagemError:
                pass  # it does not want them, or the job is over
            del self._finished[epoch]
        now = time.monotonic()
        self._report_at = now + max(REPORT_S, (now - began) / REPORT_SHARE)
