"""This process's place among the readers of one dataset, and who learns of what it hands out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from stratagem.cluster.units import Plan
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.healing import Healing


@dataclasses.dataclass(frozen=True)
class InputPlacement:
    """This worker and its replicas. Every worker has equally many local replicas."""

    devices: tuple[torch.device, ...]
    """One for each local replica."""
    num_workers: int = 1
    worker: int = 0
    """This one, 0 … num_workers-1."""
    communicator: Communicator | None = None
    """Between the workers, this one's rank being ``worker``; None where there is one worker. It is used from the thread
    that iterates."""
    seed: Callable[[Plan | None], int] = lambda plan: 0
    """Called once for each dataset: seed of its order, the same on every worker. It is told the plan of a DataLoader
    whose order follows from a plan, else None."""

    @property
    def num_local_replicas(self) -> int:
        return len(self.devices)

    @property
    def num_replicas(self) -> int:
        """Replicas of all workers."""
        return self.num_workers * len(self.devices)

    @property
    def healing(self) -> Healing | None:
        """The books of a ring that goes on without lost workers; None: this one does not."""
        return None if self.communicator is None else self.communicator.healing


@dataclasses.dataclass(frozen=True)
class StepShare:
    """This worker's part of one step."""

    epoch: int
    step: int
    """Within the epoch, from 0; with a plan and the policy DATA it is the number of the global batch."""
    num_examples: tuple[int, ...]
    """Of each local replica."""
    batch_examples: int
    """Of all replicas of all workers; at least 1."""

    @property
    def weights(self) -> tuple[float, ...]:
        """Of each local replica's gradient in a mean over the global batch."""
        return tuple(count / self.batch_examples for count in self.num_examples)


class Listener:
    """Hears, in the thread that iterates, of each step just before the script gets it and once the script is done.

    This one does nothing about it.
    """

    def arrive(self) -> None:
        """The script asks where the dataset stands, or for its first batch: a newcomer joins the others."""

    def between_steps(self, is_last: bool) -> None:
        """A step is over, the next one not cut yet: the others may take newcomers in. ``is_last``: there is no next one
        in this pass, of several steps."""

    def start_epoch(self, epoch: int) -> None:
        """A pass over the dataset begins."""

    def begin(self, share: StepShare, batch: Any) -> None:
        """The script is about to get ``batch``."""

    def done(self, share: StepShare) -> None:
        """The script asked for the batch after it."""

    def end_epoch(self, complete: bool) -> None:
        """The pass is over; not ``complete``: the script left its loop, or there was an error."""


@dataclasses.dataclass(eq=False, repr=False)
class StepCounter(Listener):
    """Numbers the collectives by the steps of a dataset, where nobody else does: by them a ring that heals knows where
    each worker stands."""

    _communicator: Communicator
    """Of the workers that go through the dataset."""

    def begin(self, share: StepShare, batch: Any) -> None:
        if self._communicator.healing is not None:
            self._communicator.step += 1
