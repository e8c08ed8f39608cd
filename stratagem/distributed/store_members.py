"""The ranks of a process group, found in the store that ``torch.distributed`` gives."""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import Store

from stratagem.cluster.membership import Member, Membership
from stratagem.errors import ClusterTimeoutError, ConfigurationError, StratagemError
from stratagem.rpc.logs import shortened
from stratagem.rpc.security import Security

logger = logging.getLogger(__name__)

_TELL_S = 20.0
"""After so long a rank says for whom it waits: torch gives a ``new_group`` half an hour, whatever the others have."""
_LEAD_S = 20.0
"""So long a rank waits for rank 0's call before it looks at what rank 0 wants: until then it may be one of before."""
_WORD = re.compile(r"[\x20-\x7e]{0,1000}(\nworker:\d{1,9})+")
_CALL = re.compile(r"[0-9a-f]{16}/")
"""What ranks write; anything else in their place is not theirs."""


class Rendezvous:
    """Ranks that tell each other words through a store. A store may serve one group several times, also where some
    ranks of a time before never came, or came and died: every rank arrives under a new name, and rank 0 calls those
    names to keys of this time. ``timeout_s``: seconds for all of it."""

    def __init__(self, store: Store, rank: int, tasks: Sequence[str], timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._tasks = list(tasks)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._called: set[str] = set()
        self._read_by_all: list[str] = []
        """Keys of this rank that no rank reads any more once the next exchange is done."""
        name = secrets.token_hex(8)
        store.set(f"arrival/{rank}", "\n".join([name, *tasks]))
        self._is_calling = rank == 0
        self._prefix = self._answer(name) if rank else f"{name}/"

    def exchange(self, what: str, word: str) -> list[str]:
        """Every rank's word, in rank order. Raises ClusterTimeoutError: a rank does not come; names those missing;
        ConfigurationError: a rank wants a group of other ranks."""
        key = f"{self._prefix}{what}/{self._rank}"
        self._store.set(key, "\n".join([word, *self._tasks]))
        words = [self._word(rank, f"{self._prefix}{what}/{rank}", what) for rank in range(len(self._tasks))]
        self._is_calling = False
        self.forget()  # who has come to this exchange has read what was written for the one before
        self._read_by_all.append(key)
        return words

    def forget(self) -> None:
        """Deletes what this rank has written for exchanges that are over on every rank, if the store can. Arrivals
        stay: by them a rank that comes late, to another group of the same number, hears of that."""
        for key in self._read_by_all:
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(key)
        self._read_by_all.clear()

    def _answer(self, name: str) -> str:
        """Waits for rank 0, which says under which keys the ranks meet."""
        key = f"call of {name}/0"
        try:
            self._store.wait([key], datetime.timedelta(seconds=min(_LEAD_S, self._left_s())))
        except RuntimeError:
            if not self._missing("arrival", [0]):
                self._word(0, "arrival/0", "rank 0")  # it wants a group without this rank?
        return self._wait(key, "rank 0", [0], _CALL)

    def _call(self) -> None:
        """Rank 0's: a name may be one of before, so a rank that has got another is called again."""
        for rank in range(1, len(self._tasks)):
            key = f"arrival/{rank}"
            if self._store.check([key]) and (name := self._read(key, _WORD).split("\n")[0]) not in self._called:
                self._called.add(name)
                self._store.set(f"call of {name}/0", self._prefix)
                self._read_by_all.append(f"call of {name}/0")
        time.sleep(0.001 * len(self._tasks))

    def _word(self, rank: int, key: str, what: str) -> str:
        word, *tasks = self._wait(key, what, range(len(self._tasks))).split("\n")
        if tasks != self._tasks:
            raise ConfigurationError(
                f"{self._tasks[self._rank]} wants a group of {shortened(', '.join(self._tasks))}, and rank {rank} one "
                f"of {shortened(', '.join(tasks))}: WORLD_SIZE, and the ranks given to new_group, have to be the same "
                "on every rank, and groups made in the same order"
            )
        return word

    def _read(self, key: str, form: re.Pattern[str]) -> str:
        text = self._store.get(key).decode(errors="replace")
        if form.fullmatch(text) is None:
            raise ConfigurationError(
                f"{self._tasks[self._rank]} found {text[:80]!r} under {key!r} in the store, which no rank writes "
                "there: does another program use it? Give this job a store, a MASTER_PORT or a path of its own"
            )
        return text

    def _wait(self, key: str, what: str, ranks: Sequence[int], form: re.Pattern[str] = _WORD) -> str:
        """``ranks``: who has such a key, of this ``form``."""
        try:
            told_at = time.monotonic() + _TELL_S
            while not self._store.check([key]) and (left_s := self._left_s()) > 0.01:
                if self._is_calling:
                    self._call()
                else:
                    seconds = min(left_s, max(0.01, told_at - time.monotonic()))
                    with contextlib.suppress(RuntimeError):
                        self._store.wait([key], datetime.timedelta(seconds=seconds))
                if time.monotonic() >= told_at:
                    told_at = math.inf
                    whom = ", ".join(self._missing(key.rpartition("/")[0], ranks)) or "the store"
                    logger.warning("%s waits for %s (%s), at most %.0f s", self._tasks[self._rank], whom, what, left_s)
                    # Whoever took its place since makes another group at this point of the script.
                    self._word(self._rank, f"arrival/{self._rank}", what)
            self._store.wait([key], datetime.timedelta(seconds=self._left_s()))
            return self._read(key, form)
        except RuntimeError as error:  # DistStoreError is one
            if not (missing := self._missing(key.rpartition("/")[0], ranks)):
                raise ClusterTimeoutError(
                    f"{self._tasks[self._rank]} cannot read the store ({str(error).splitlines()[0]}), waiting for "
                    f"{what}: does the process that holds it (torchrun, or rank 0) still run?"
                ) from None
            raise ClusterTimeoutError(
                f"{self._tasks[self._rank]} did not find {', '.join(missing)} within {self._timeout_s:g} s, waiting "
                f"for {what}. Did every rank reach the same point in the script: init_process_group, new_group with "
                "the same ranks, or a strategy?"
            ) from None

    def _left_s(self) -> float:
        return max(0.01, self._deadline - time.monotonic())

    def _missing(self, prefix: str, ranks: Sequence[int]) -> list[str]:
        try:
            return [self._tasks[rank] for rank in ranks if not self._store.check([f"{prefix}/{rank}"])]
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
        return self.membership

    def wait_membership(self, accept: Callable[[Membership], bool], timeout_s: float) -> bool:
        """Does not wait: nothing ever changes."""
        return accept(self.membership)

    def raise_if_stopped(self) -> None:
        """Nobody stops a process group from outside."""

    def wait_stopped(self, timeout_s: float) -> StratagemError | None:
        time.sleep(timeout_s)
        return None
