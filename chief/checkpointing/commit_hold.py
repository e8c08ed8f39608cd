"""Holds commits on every ps while a checkpoint or an evaluation needs one consistent version of everything.

The version is consistent because commits are held while every update is either on all of its ps or on none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping

from stratagem.chief.servers.servers import PsPool, Server, ServerDescription
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Update
from stratagem.errors import PeerUnavailableError, StratagemError

logger = logging.getLogger(__name__)

HOLD_S = 15.0
"""Seconds after which a ps lets commits through again if the chief died meanwhile; prolonged while it is needed."""
LONG_HOLD_S = 300.0
"""The same where commits that get through would be lost: longer than tasks wait for a chief."""
ADMIT_S = 2.0
"""Seconds to wait for updates that are under way to some ps."""
ATTEMPTS = 10
PAUSE_S = 0.1
"""Between attempts: what waits at the gate gets through."""


def torn_updates(held: Mapping[Incarnation, ServerDescription]) -> dict[Incarnation, list[Update]]:
    """Updates that are on some but not all of their ps, for each that may lack them; ``held``: with commits held."""
    torn: dict[Incarnation, list[Update]] = {}
    updates = {update: num for each in held.values() for update, num in each.open.items()}
    for update, num_servers in sorted(updates.items()):
        lacking = [incarnation for incarnation, each in held.items() if not each.has(update)]
        if len(held) - len(lacking) < num_servers:
            for incarnation in lacking:
                torn.setdefault(incarnation, []).append(update)
    return torn


class CommitHold:
    """One hold on the commits of all ps, shared by all who need it at the time."""

    def __init__(self, ps_pool: PsPool, *, chief_epoch: int, nobody_sends: Callable[[], bool]) -> None:
        self._ps_pool = ps_pool
        self._nobody_sends = nobody_sends
        self._chief_epoch = chief_epoch
        self._hold_s = HOLD_S
        self._lock = asyncio.Lock()
        self._num_tokens = 0
        self._num_inside = 0
        self.is_complete = False
        """Every update is on all of its ps, in the hold that is on."""
        self._prolonging: asyncio.Task[None] | None = None

    @property
    def token(self) -> int:
        """What names the hold to the ps."""
        return self._chief_epoch << 32 | self._num_tokens

    @contextlib.asynccontextmanager
    async def held(self, what: str, *, complete: bool = True, or_as_sent: bool = False) -> AsyncIterator[int]:
        """Inside, commits are held; gives the token. See :meth:`enter`."""
        token = await self.enter(what, complete=complete, or_as_sent=or_as_sent)
        try:
            yield token
        finally:
            await asyncio.shield(self.leave())  # whoever waits here for its turn may be cancelled

    async def enter(self, what: str, *, complete: bool = True, or_as_sent: bool = False) -> int:
        """Holds commits, unless they are; returns the token. Ends with :meth:`leave`. Whoever needs every update on all
        of its ps does not share the hold of somebody who does not.

        Args:
            complete: wait for updates that only some of their ps have; False when nobody is left to send them.
            or_as_sent: not when every worker waits for the chief, and one that is dead has sent them.

        Raises:
            PeerUnavailableError: a ps is away, updates under way did not arrive, or the hold is another one's that does
                without them.
        """
        async with self._lock:
            if not self._num_inside:
                self.is_complete = await self._begin(what, complete, or_as_sent) and complete
                self._prolonging = asyncio.create_task(self._prolong())
            elif complete and not (self.is_complete or (or_as_sent and self._nobody_sends())):
                raise PeerUnavailableError(
                    f"{what} needs every update on all of its ps, but commits are held as they came. It will be retried"
                )
            else:
                self.check_all(what)
            self._num_inside += 1
            return self.token

    async def leave(self) -> None:
        async with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                self._hold_s = HOLD_S
                self.close()
                await self._release(self._ps_pool.servers)

    async def outlive_chief(self) -> None:
        """Inside: from now on the hold ends when this chief, or the next one, says so, and not by itself before that.
        PeerUnavailableError: a ps has not heard it."""
        self._hold_s = LONG_HOLD_S
        servers, token = self._ps_pool.ready, self.token
        await asyncio.gather(*(server.hold_commits(token, LONG_HOLD_S) for server in servers))

    async def include(self, server: Server, *, is_older: bool = False) -> None:
        """A ps came, or came back: it joins a hold that is on before any worker may use it. One that is older than this
        chief may be in a hold of an earlier one, which ends."""
        async with self._lock:
            token = self.token
            if self._num_inside or is_older:
                await self._ps_pool.insist(server, lambda each: each.hold_commits(token, self._hold_s))
            if is_older and not self._num_inside:
                await self._ps_pool.insist(server, lambda each: each.release_commits(token))

    def check_all(self, what: str) -> list[Server]:
        """All ps of the cluster. PeerUnavailableError: one is away, or is being put back to a checkpoint."""
        servers = self._ps_pool.ready
        if len(servers) < self._ps_pool.num_ps:
            raise PeerUnavailableError(
                f"{what} needs all {self._ps_pool.num_ps} ps; {len(servers)} are here now. It "
                "will be retried once the others are back."
            )
        return servers

    async def _begin(self, what: str, complete: bool, or_as_sent: bool) -> bool:
        """Returns whether nothing is torn."""
        torn: dict[Incarnation, list[Update]] = {}
        for attempt in range(1, ATTEMPTS + 1):
            servers = self.check_all(what)
            self._num_tokens += 1
            is_held = False
            try:
                torn = await self._hold(servers, complete)
                is_held = not torn or (or_as_sent and self._nobody_sends())
            finally:
                if not is_held:
                    await self._release(servers)
            if is_held:
                return not torn
            logger.info("Attempt %d for %s: updates are still in flight to %s", attempt, what, _names(torn))
            await asyncio.sleep(PAUSE_S)
        raise PeerUnavailableError(
            f"no {what.removeprefix('a ').removeprefix('an ')} after {ATTEMPTS} attempts: expected every update on all "
            f"of its ps, but {_names(torn)} still lack some. A worker stopped in the middle of a step; see "
            "`stratagem status`."
        )

    async def _hold(self, servers: list[Server], complete: bool) -> dict[Incarnation, list[Update]]:
        """Holds commits; what is torn and could not be completed."""
        token = self.token
        units = await asyncio.gather(*(server.hold_commits(token, HOLD_S) for server in servers))
        if not complete:
            return {}
        held = {server.incarnation: each for server, each in zip(servers, units, strict=True)}
        torn = torn_updates(held)
        if not torn:
            return {}
        late = [server for server in servers if server.incarnation in torn]
        arrived = await asyncio.gather(*(s.admit_updates(token, torn[s.incarnation], ADMIT_S) for s in late))
        if all(arrived):
            return {}
        # A ps that takes no part in an update never completes it; only what is applied counts.
        again = await asyncio.gather(*(server.describe_units() for server in servers))
        return torn_updates({server.incarnation: each for server, each in zip(servers, again, strict=True)})

    async def _release(self, servers: list[Server]) -> None:
        token = self.token
        answers = await asyncio.gather(*(server.release_commits(token) for server in servers), return_exceptions=True)
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, StratagemError):
                logger.info("%s was not told to release commits; the hold expires: %s", server.incarnation.task, answer)
            elif isinstance(answer, BaseException):
                raise answer

    async def _prolong(self) -> None:
        while True:
            await asyncio.sleep(HOLD_S / 3)
            servers, token = self._ps_pool.ready, self.token
            held = (server.hold_commits(token, self._hold_s) for server in servers)
            await asyncio.gather(*held, return_exceptions=True)

    def close(self) -> None:
        """Ends the chief's part; holds end by themselves."""
        if self._prolonging is not None:
            self._prolonging.cancel()
            self._prolonging = None


def _names(torn: Mapping[Incarnation, list[Update]]) -> str:
    return ", ".join(incarnation.task for incarnation in sorted(torn))
