"""Ranks that are threads, of which one dies at a chosen moment; the others form their next group and go on."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from stratagem.errors import CollectiveError
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.group import Group, Tag
from stratagem.worker.ring.healing import Healing
from tests.unit.ring.thread_group import TIMEOUT_S, Meeting, ThreadGroup

T = TypeVar("T")


class Died(BaseException):
    """The thread of a rank ends, as a process does that is killed."""


@dataclasses.dataclass
class Fate:
    """What happens to a rank, in which collective of the groups it is in, one after the other."""

    dies_at: int = 0
    late: bool = False
    """It dies when the others may have its part; else before it gives it."""
    misses_at: int = 0
    """The collective whose end does not reach this rank, though others have it."""
    count: int = 0


class MortalGroup(ThreadGroup):
    """A group in which a rank may die.

    Args:
        fate: of this rank.
        name: of this rank.
        survivors: whom it tells.
    """

    def __init__(self, meeting: Meeting, rank: int, fate: Fate, name: str, survivors: Survivors) -> None:
        super().__init__(meeting, rank)
        self._fate, self._name, self._survivors = fate, name, survivors

    def _exchange(self, kind: str, tag: Tag, mine: Sequence[torch.Tensor], compute: Callable[..., T]) -> T:
        fate = self._fate
        fate.count += 1
        if 0 < fate.dies_at <= fate.count - fate.late:
            self._die()
        result = super()._exchange(kind, tag, mine, compute)
        if fate.count == fate.dies_at:
            self._die()
        if fate.count == fate.misses_at:
            self.close("the end of the collective was lost")
            self._error = CollectiveError("the end of the collective was lost")
            raise self._error
        return result

    def _die(self) -> None:
        self._survivors.died(self._name)
        self.close(f"{self._name} died")
        raise Died


class Survivors:
    """Who is left, and where they meet.

    Args:
        fates: of all ranks.
        num_newcomers: the last ones of them, whom the others take in when the first of those asks for it.
    """

    def __init__(self, fates: Sequence[Fate], num_newcomers: int = 0) -> None:
        self.fates = {f"worker:{rank}": fate for rank, fate in enumerate(fates)}
        self.names = tuple(self.fates)
        self.founders = self.names[: len(fates) - num_newcomers]
        self._members = set(self.founders)
        self._changed = threading.Condition()
        self._alive = dict.fromkeys(self.names, True)
        self._waiting: set[str] = set()
        self._formed: dict[str, tuple[Group, tuple[str, ...]]] = {}

    def died(self, name: str) -> None:
        with self._changed:
            self._alive[name] = False
            self._form()

    def heal(self, name: str, broken: CollectiveError | None) -> tuple[Group, tuple[str, ...]]:
        """The group of those who are alive, once all of them ask."""
        with self._changed:
            if not self._alive[name]:
                raise Died
            self._waiting.add(name)
            if broken is None and name in self.founders:
                self._members.update(self.names)
            self._form()
            if not self._changed.wait_for(lambda: name in self._formed, TIMEOUT_S):
                raise broken or CollectiveError("not all came")
            return self._formed.pop(name)

    def group(self, names: Sequence[str]) -> dict[str, Group]:
        """A group of these ranks."""
        meeting = Meeting(len(names))
        return {name: MortalGroup(meeting, rank, self.fates[name], name, self) for rank, name in enumerate(names)}

    def _form(self) -> None:
        alive = tuple(name for name in self.names if self._alive[name] and name in self._members)
        if alive and self._waiting.issuperset(alive):
            self._formed.update((name, (group, alive)) for name, group in self.group(alive).items())
            self._waiting.clear()
            self._changed.notify_all()


def run_mortal(size: int, work: Callable[[Communicator], T], num_newcomers: int = 0, **fates: Fate) -> list[T]:
    """What ``work`` returned on the ranks that were left, in their order.

    Args:
        num_newcomers: so many of the last ranks begin alone.
        fates: by ``rank0``, ``rank1``, … of those to whom something happens. Who is to die has died.
    """
    every = [fates.get(f"rank{rank}", Fate()) for rank in range(size)]
    survivors = Survivors(every, num_newcomers)
    groups = survivors.group(survivors.founders)
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    finished = threading.Barrier(size)

    def run(rank: int) -> None:
        name = survivors.names[rank]
        is_new = name not in groups
        members = (name,) if is_new else survivors.founders
        healing = Healing(name, members, lambda error: survivors.heal(name, error), is_new)
        group = survivors.group([name])[name] if is_new else groups[name]
        communicator = Communicator(group, lambda error, position: error, healing)
        try:
            results[rank] = work(communicator)
        except Died:
            pass
        except BaseException as error:
            errors.append(error)
        finally:
            finished.wait(2 * TIMEOUT_S)
            communicator.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    assert sorted(results) == [rank for rank, fate in enumerate(every) if not fate.dies_at], "who was to die did not"
    return [results[rank] for rank in sorted(results)]
