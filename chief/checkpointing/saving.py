"""The checkpoint protocol: hold commits (:mod:`stratagem.chief.checkpointing.commit_hold`), save, commit, release."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from stratagem.chief.checkpointing import checkpoints
from stratagem.chief.checkpointing.checkpoints import ServersManifest
from stratagem.chief.checkpointing.commit_hold import CommitHold
from stratagem.chief.leasing.lease_book import LeaseBook, Positions
from stratagem.chief.servers.servers import Server, ServerDescription
from stratagem.cluster.units import UnitBitmap


@dataclasses.dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed checkpoint."""

    path: str
    step: int


class Saving:
    """Takes checkpoints, one at a time.

    Args:
        lease_book: the units.
        chief_epoch: process of the chief.
        commit_hold: holds commits.
        keep: complete checkpoints to keep of those the chief takes by itself.
        committed: told of every committed checkpoint, before commits are released.
    """

    def __init__(
        self,
        lease_book: LeaseBook,
        *,
        chief_epoch: int,
        commit_hold: CommitHold,
        keep: int,
        committed: Callable[[CommittedCheckpoint], None],
    ) -> None:
        self.lock = asyncio.Lock()
        """Held while a checkpoint is taken; a restore takes it too."""
        self._lease_book = lease_book
        self._chief_epoch = chief_epoch
        self._commit_hold = commit_hold
        self._keep = keep
        self._committed = committed

    async def save(self, directory: str, *, automatic: bool, complete: bool = True) -> CommittedCheckpoint:
        """Takes a checkpoint.

        Args:
            directory: where it is committed.
            automatic: the chief takes it by itself and removes it when enough newer ones are there.
            complete: wait for updates that only some of their ps have; False when nobody is left to send them.

        Raises:
            CheckpointError: it cannot be written.
            PeerUnavailableError: a ps is away, or updates under way did not arrive.
        """
        async with self.lock, self._commit_hold.held("a checkpoint", complete=complete) as token:
            return await self._write(self._commit_hold.check_all("a checkpoint"), token, directory, automatic)

    async def _write(self, servers: list[Server], token: int, directory: str, automatic: bool) -> CommittedCheckpoint:
        described = await asyncio.gather(*(server.describe_units() for server in servers))
        draft = await asyncio.to_thread(checkpoints.begin, directory)
        try:
            saved = await asyncio.gather(
                *(server.save_shards(token, str(draft.path), draft.nonce) for server in servers)
            )
            # Whoever reported a unit by now had its updates applied before the shards were written.
            accepted = self._lease_book.positions()
            manifest = ServersManifest(
                step=max(each.step for each in saved),
                chief_epoch=self._chief_epoch,
                files=tuple(
                    dataclasses.replace(file, ps=server.incarnation.task)
                    for server, each in zip(servers, saved, strict=True)
                    for file in each.files
                ),
                plans=dict(self._lease_book.plans),
                accepted=accepted,
                applied=applied_units(described, accepted),
                next_step=self._lease_book.steps.next_number,
                automatic=automatic,
            )
            path = await asyncio.to_thread(checkpoints.commit, draft, manifest)
        except BaseException:
            await asyncio.to_thread(draft.close)
            raise
        committed = CommittedCheckpoint(str(path), manifest.step)
        self._committed(committed)
        if automatic:
            await asyncio.to_thread(checkpoints.prune, directory, self._keep)
        return committed


def applied_units(described: list[ServerDescription], accepted: Positions) -> Positions:
    """Units with an update on some ps that nobody has reported as accepted."""
    found: Positions = {}
    for each in described:
        for key, bitmap in each.applied().items():
            found[key] = found.get(key, UnitBitmap()) | bitmap
    rest = {key: bitmap - accepted.get(key, UnitBitmap()) for key, bitmap in found.items()}
    return {key: bitmap for key, bitmap in rest.items() if len(bitmap)}
