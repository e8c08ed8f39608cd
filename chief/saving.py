"""The checkpoint protocol: hold, compare, admit, save, commit, release.

The cut is consistent because commits are held on every ps while an update is either on all of its ps or on none.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping

from stratagem.chief import checkpoints
from stratagem.chief.checkpoints import Manifest
from stratagem.chief.fleet import Fleet
from stratagem.chief.lending import Lending, Positions
from stratagem.chief.lives import Life
from stratagem.chief.servers import Description, Server
from stratagem.cluster.units import UnitBitmap, Update
from stratagem.errors import PeerUnavailableError, StratagemError

logger = logging.getLogger(__name__)

HOLD_S = 15.0
"""Seconds after which a ps lets commits through again if the chief died meanwhile; prolonged while shards are saved."""
ADMIT_S = 2.0
"""Seconds to wait for updates that are under way to some ps."""
ATTEMPTS = 10
PAUSE_S = 0.1
"""Between attempts: what waits at the gate gets through."""


@dataclasses.dataclass(frozen=True)
class Committed:
    """A committed checkpoint."""

    path: str
    step: int


def torn_updates(held: Mapping[Life, Description]) -> dict[Life, list[Update]]:
    """Updates that are on some but not all of their ps, for each ps that may lack them.

    Args:
        held: what each ps has applied, with commits held.
    """
    torn: dict[Life, list[Update]] = {}
    updates = {update: num for each in held.values() for update, num in each.open.items()}
    for update, num_servers in sorted(updates.items()):
        lacking = [life for life, each in held.items() if not each.has(update)]
        if len(held) - len(lacking) < num_servers:
            for life in lacking:
                torn.setdefault(life, []).append(update)
    return torn


class Saving:
    """Takes checkpoints, one at a time.

    Args:
        fleet: the ps.
        lending: the units.
        chief_epoch: process life of the chief.
        num_ps: ps of the cluster; a checkpoint needs all.
        keep: complete checkpoints to keep of those the chief takes by itself.
        committed: told of every committed checkpoint, before commits are released.
    """

    def __init__(
        self,
        fleet: Fleet,
        lending: Lending,
        *,
        chief_epoch: int,
        num_ps: int,
        keep: int,
        committed: Callable[[Committed], None],
    ) -> None:
        self.lock = asyncio.Lock()
        """Held while a checkpoint is taken; a restore takes it too."""
        self._fleet = fleet
        self._lending = lending
        self._chief_epoch = chief_epoch
        self._num_ps = num_ps
        self._keep = keep
        self._committed = committed
        self._token = 0

    async def save(self, directory: str, *, automatic: bool, complete: bool = True) -> Committed:
        """Takes a checkpoint.

        Args:
            directory: where it is committed.
            automatic: the chief takes it by itself and removes it when enough newer ones are there.
            complete: wait for updates that only some of their ps have; False when nobody is left to send them.

        Raises:
            CheckpointError: it cannot be written.
            PeerUnavailableError: a ps is away, or updates under way did not arrive.
        """
        async with self.lock:
            for attempt in range(1, ATTEMPTS + 1):
                servers = self._fleet.servers
                if len(servers) < self._num_ps:
                    raise PeerUnavailableError(
                        f"a checkpoint needs all {self._num_ps} ps; {len(servers)} are here now. "
                        "It is repeated once the others are back."
                    )
                self._token += 1
                token = self._chief_epoch << 32 | self._token
                try:
                    torn = await self._hold(servers, token, complete)
                    if not torn:
                        return await self._write(servers, token, directory, automatic)
                finally:
                    await self._release(servers, token)
                logger.info("Checkpoint attempt %d: updates are still under way to %s", attempt, _names(torn))
                await asyncio.sleep(PAUSE_S)
            raise PeerUnavailableError(
                f"no checkpoint after {ATTEMPTS} attempts: expected every update on all of its ps, but {_names(torn)} "
                "still lack some. A worker stopped in the middle of a step; look at `stratagem status`."
            )

    async def _hold(self, servers: list[Server], token: int, complete: bool) -> dict[Life, list[Update]]:
        """Holds commits; what is torn and could not be completed."""
        units = await asyncio.gather(*(server.hold_commits(token, HOLD_S) for server in servers))
        if not complete:
            return {}
        held = {server.life: each for server, each in zip(servers, units, strict=True)}
        torn = torn_updates(held)
        if not torn:
            return {}
        late = [server for server in servers if server.life in torn]
        arrived = await asyncio.gather(*(s.admit_updates(token, torn[s.life], ADMIT_S) for s in late))
        if all(arrived):
            return {}
        # A ps that takes no part in an update never completes it; only what is applied counts.
        again = await asyncio.gather(*(server.describe_units() for server in servers))
        return torn_updates({server.life: each for server, each in zip(servers, again, strict=True)})

    async def _write(self, servers: list[Server], token: int, directory: str, automatic: bool) -> Committed:
        described = await asyncio.gather(*(server.describe_units() for server in servers))
        step = max(each.step for each in described)
        draft = await asyncio.to_thread(checkpoints.begin, directory, step, self._chief_epoch)
        try:
            prolonging = asyncio.create_task(_prolong(servers, token))
            try:
                saved = await asyncio.gather(
                    *(server.save_shards(token, str(draft.path), draft.nonce) for server in servers)
                )
            finally:
                prolonging.cancel()
            # Whoever reported a unit by now had its updates applied before the shards were written.
            accepted = self._lending.positions()
            manifest = Manifest(
                step=max(each.step for each in saved),
                chief_epoch=self._chief_epoch,
                files={server.life.task: each.files for server, each in zip(servers, saved, strict=True)},
                plans=dict(self._lending.plans),
                accepted=accepted,
                applied=applied_units(described, accepted),
                next_step=self._lending.steps.next_number,
                automatic=automatic,
            )
            path = await asyncio.to_thread(checkpoints.commit, draft, manifest)
        except BaseException:
            await asyncio.to_thread(checkpoints.discard, draft)
            raise
        committed = Committed(str(path), manifest.step)
        self._committed(committed)
        if automatic:
            await asyncio.to_thread(checkpoints.prune, directory, self._keep)
        return committed

    async def _release(self, servers: list[Server], token: int) -> None:
        answers = await asyncio.gather(*(server.release_commits(token) for server in servers), return_exceptions=True)
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, StratagemError):
                logger.info("%s did not hear the release; its hold ends by itself: %s", server.life.task, answer)
            elif isinstance(answer, BaseException):
                raise answer


async def _prolong(servers: list[Server], token: int) -> None:
    while True:
        await asyncio.sleep(HOLD_S / 3)
        await asyncio.gather(*(server.hold_commits(token, HOLD_S) for server in servers), return_exceptions=True)


def applied_units(described: list[Description], accepted: Positions) -> Positions:
    """Units with an update on some ps that nobody has reported as accepted."""
    found: Positions = {}
    for each in described:
        for key, bitmap in each.applied().items():
            found[key] = found.get(key, UnitBitmap()) | bitmap
    rest = {key: bitmap - accepted.get(key, UnitBitmap()) for key, bitmap in found.items()}
    return {key: bitmap for key, bitmap in rest.items() if len(bitmap)}


def _names(torn: Mapping[Life, list[Update]]) -> str:
    return ", ".join(life.task for life in sorted(torn))
