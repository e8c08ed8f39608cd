"""The ranks of a process group, found in the store that ``torch.distributed`` gives."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import Store

from stratagem.cluster.membership import Member, Membership
from stratagem.errors import ClusterTimeoutError, ConfigurationError, StratagemError
from stratagem.rpc.security import Security


class Rendezvous:
    """Ranks that tell each other words through a store. A store may serve one group several times, one after the other:
    each has keys of its own. ``timeout_s``: seconds for all of it."""

    def __init__(self, store: Store, rank: int, tasks: Sequence[str], timeout_s: float) -> None:
        formation = (store.add("arrivals", 1) - 1) // len(tasks)
        self._store = store
        self._prefix = f"{formation}/"
        self._rank = rank
        self._tasks = list(tasks)
        self._deadline = time.monotonic() + timeout_s

    def exchange(self, what: str, word: str) -> list[str]:
        """Every rank's word, in rank order.

        Raises:
            ClusterTimeoutError: a rank does not come; names those missing.
            ConfigurationError: a rank wants a group of other ranks.
        """
        self._store.set(f"{self._prefix}{what}/{self._rank}", "\n".join([word, *self._tasks]))
        return [self._word(rank, what) for rank in range(len(self._tasks))]

    def _word(self, rank: int, what: str) -> str:
        word, *tasks = self._wait(f"{self._prefix}{what}/{rank}", what).split("\n")
        if tasks != self._tasks:
            raise ConfigurationError(
                f"{self._tasks[self._rank]} wants a group of {', '.join(self._tasks)}, and rank {rank} one of "
                f"{', '.join(tasks)}: WORLD_SIZE, and the ranks given to new_group, have to be the same on every rank"
            )
        return word

    def _wait(self, key: str, what: str) -> str:
        left = datetime.timedelta(seconds=max(0.01, self._deadline - time.monotonic()))
        try:
            self._store.wait([key], left)
            return self._store.get(key).decode()
        except RuntimeError as error:  # DistStoreError is one
            prefix = key.rpartition("/")[0]
            raise ClusterTimeoutError(
                f"{self._tasks[self._rank]} did not find {', '.join(self._missing(prefix)) or 'the store'} in time "
                f"(waiting for {what}): {str(error).splitlines()[0]}. Did every rank come to the same "
                "place of the script: init_process_group, new_group with the same ranks, or a strategy?"
            ) from None

    def _missing(self, prefix: str) -> list[str]:
        try:
            return [task for rank, task in enumerate(self._tasks) if not self._store.check([f"{prefix}/{rank}"])]
        except RuntimeError:
            return []


class StoreMembers:
    """Implements :class:`stratagem.worker.ring.members.MembershipSource`. Who has come once is a member to the end:
    that a rank is lost is seen at its lanes."""

    def __init__(self, rank: int, tasks: Sequence[str], security: Security) -> None:
        self.task = tasks[rank]
        self.incarnation = 1
        self.membership = Membership()
        """Empty at first: who calls before this rank has met the others is told to ask again."""
        self.security = security
        self._tasks = tasks
        self._ended = threading.Event()

    def met(self, addresses: Sequence[str]) -> None:
        """Everybody has come, and serves at these addresses, in rank order."""
        self.membership = Membership(
            ready=True,
            lead=self._tasks[0],
            members=tuple(Member(task, address, 1, True) for task, address in zip(self._tasks, addresses, strict=True)),
        )

    def on_membership(self, callback: Callable[[Membership], None]) -> None:
        """Nothing ever changes."""

    def wait_ready(self, timeout_s: float) -> Membership:
        """Everybody is there."""
        return self.membership

    def wait_membership(self, accept: Callable[[Membership], bool], timeout_s: float) -> bool:
        """Does not wait: nothing ever changes."""
        return accept(self.membership)

    def raise_if_stopped(self) -> None:
        """Nobody stops a process group from outside."""

    def wait_stopped(self, timeout_s: float | None) -> StratagemError | None:
        """Waits."""
        self._ended.wait(timeout_s)
        return None
