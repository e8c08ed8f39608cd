"""Which worker goes through which dataset, and where: in whose steps at staleness 0 it takes part. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Container

from stratagem.cluster.task import Incarnation

Key = tuple[int, int]
"""(dataset, epoch)."""


class WorkerLoops:
    """The loops of all workers. ``is_open``: whether units of an epoch are left."""

    def __init__(self, is_open: Callable[[Key], bool]) -> None:
        self._is_open = is_open
        self._asked: dict[Incarnation, dict[int, int]] = {}
        """Of each dataset that it asked for the last epoch; the last of them is where it is."""
        self._left: dict[Incarnation, dict[int, int]] = {}
        """Of each dataset the last epoch that it left early."""
        self._order: dict[Key, int] = {}
        """The place of each epoch among all, as somebody asked for it first: all workers run the same script."""
        self._passes: list[Key] = []
        """The same, in order."""

    def asked(self, incarnation: Incarnation, dataset: int, epoch: int) -> None:
        """It goes through this epoch."""
        if self.has_left(incarnation, dataset, epoch):
            self._left[incarnation][dataset] = epoch - 1
        self._note((dataset, epoch))
        of_all = self._asked.setdefault(incarnation, {})
        of_all.pop(dataset, None)
        of_all[dataset] = epoch

    def left(self, incarnation: Incarnation, dataset: int, epoch: int) -> None:
        """It left this epoch early; of an earlier chief those are told in their order."""
        self._note((dataset, epoch))
        self._left.setdefault(incarnation, {})[dataset] = epoch

    def _note(self, key: Key) -> None:
        if key not in self._order:
            self._order[key] = len(self._passes)
            self._passes.append(key)

    def has_left(self, incarnation: Incarnation, dataset: int, epoch: int) -> bool:
        """Whether it left this epoch early, or is over with it and left a later one."""
        return self._left.get(incarnation, {}).get(dataset, -1) >= epoch

    def where(self, incarnation: Incarnation) -> Key | None:
        """What it asked for last; None: it has not asked since the chief started."""
        return next(reversed(self._asked.get(incarnation, {}).items()), None)

    def num_workers(self, dataset: int) -> int:
        """That have asked for it."""
        return sum(dataset in of_all for of_all in self._asked.values())

    def who_left(self, dataset: int, epoch: int) -> list[str]:
        """Tasks that left this epoch early, and run on."""
        return sorted(worker.task for worker in self._left if self.has_left(worker, dataset, epoch))

    def takes_part(self, worker: Incarnation, dataset: int, epoch: int, founders: Container[Incarnation]) -> bool:
        """A worker that was restarted takes part once it asks for the dataset: until then nobody waits for it."""
        if self.has_left(worker, dataset, epoch):
            return False
        return worker in founders or dataset in self._asked.get(worker, ())

    def is_before(self, worker: Incarnation, dataset: int, epoch: int) -> bool:
        """Whether it has yet to go through something, before this epoch, that others have left early. Of what they went
        through before the chief started, that which nobody left is known of the same dataset alone."""
        at = self.where(worker)
        first, stop = 0 if at is None else self._order[at], self._order.get((dataset, epoch), 0)
        keys = [(dataset, number) for number in range(self._asked.get(worker, {}).get(dataset, 0), epoch)]
        keys += self._passes[first:stop]
        return any(self._is_open(key) and not self.has_left(worker, *key) for key in keys)

    def is_elsewhere(self, worker: Incarnation, dataset: int, epoch: int) -> bool:
        """Whether it will not ask for this epoch, or not before it has gone through something else."""
        return self.has_left(worker, dataset, epoch) or self.is_before(worker, dataset, epoch)

    def forget(self, incarnation: Incarnation) -> None:
        """``incarnation`` is over."""
        self._asked.pop(incarnation, None)
        self._left.pop(incarnation, None)
