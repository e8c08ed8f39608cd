"""The checkpoint protocol: hold commits (:mod:`stratagem.chief.checkpointing.commit_hold`), save, commit, release."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from stratagem.checkpoint.draft import CheckpointDraft
from stratagem.chief.checkpointing import checkpoints
from stratagem.chief.checkpointing.checkpoints import ServersManifest
from stratagem.chief.checkpointing.commit_hold import torn_updates
from stratagem.chief.chief_state import ChiefPart, ChiefState
from stratagem.chief.leasing.positions import Positions, minus, plus
from stratagem.chief.servers.servers import Server, ServerDescription
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Unit, positions_of
from stratagem.errors import PeerUnavailableError
from stratagem.measuring import measures
from stratagem.measuring.flight import RunningTotals

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CommittedCheckpoint:
    path: str
    manifest: ServersManifest
    store_epochs: tuple[int, ...] = ()
    """Of each ps, if it was taken by this chief."""

    def lacks(self, described: Collection[ServerDescription]) -> bool:
        """Whether ps have anything that is not in it, or it is not there any more: set aside as damaged, say."""
        if not os.path.isdir(self.path):
            return True
        step, num_groups, num_updates, num_distinct = content_of(described)
        is_half = bool(self.manifest.unfinished)  # the rest of a batch need not be a step more
        counts = num_groups, num_updates, len(described), num_distinct
        return is_half or self.manifest.step != step or self.manifest.lacks(*counts)


class Saving(ChiefPart):
    """Takes checkpoints, one at a time. ``count_lost`` is called before one is written, with commits held."""

    def __init__(self, state: ChiefState, count_lost: Callable[[], Awaitable[None]]) -> None:
        super().__init__(state)
        self.lock = asyncio.Lock()
        """Held while a checkpoint is taken; whoever puts ps back to one takes it too."""
        self.writing = asyncio.Lock()
        """Held while ps write their shards: one that loses its memory meanwhile goes back to these."""
        self.totals = RunningTotals()
        """What checkpoints took."""
        self._count_lost = count_lost

    async def save(
        self,
        directory: str,
        *,
        automatic: bool,
        complete: bool = True,
        replaces: bool = False,
        leaves_out: bool = False,
    ) -> CommittedCheckpoint:
        """Takes a checkpoint.

        Args:
            automatic: the chief takes it by itself and removes it when enough newer ones are there.
            complete: wait for updates that only some of their ps have, and for values; False when nobody is left to
                send them. Without any update it takes all values in any case.
            replaces: an automatic one of the same step, which had other values.
            leaves_out: what no ps has taken of the checkpoint of another number of ps that they began from; that one
                is not removed then.

        Raises:
            CheckpointError: it cannot be written.
            PeerUnavailableError: a ps is away, or updates under way did not arrive.
        """
        async with self.lock:
            is_asked_for = (replaces or not automatic) and not self._lease_book.synchronous  # by a worker, which waits
            hold = self._commit_hold.held("a checkpoint", complete=complete, or_as_sent=is_asked_for)
            with self.totals.timed(measures.CHECKPOINT):
                async with hold as token, self.writing:
                    await self._described(complete, leaves_out)
                    await self._count_lost()  # of a ps that has been told what it holds
                    return await self._write(token, directory, automatic, complete, replaces, leaves_out)

    async def _described(self, complete: bool, leaves_out: bool) -> dict[Server, ServerDescription]:
        servers = self._commit_hold.check_all("a checkpoint")
        described = await asyncio.gather(*(server.describe_units() for server in servers))
        lacking = [s.incarnation.task for s, each in zip(servers, described, strict=True) if not each.complete]
        is_begun = content_of(described).step > 0  # else these are initial values, and not all: nothing to go on from
        if lacking and (complete or not is_begun):
            raise PeerUnavailableError(
                f"a checkpoint needs the values of {', '.join(lacking)}, which no worker has given"
            )
        if not leaves_out:
            check_taken(described)
        return dict(zip(servers, described, strict=True))

    async def _write(
        self, token: int, directory: str, automatic: bool, complete: bool, replaces: bool, leaves_out: bool
    ) -> CommittedCheckpoint:
        described = await self._described(complete, leaves_out)
        # All ps have closed what is accepted; of later units a ps may lack some. Of one whose first updates are lost
        # all lack these: they hear of that with its worker's next update.
        unfinished = unfinished_units(described.values(), self._lease_book.steps.per_unit)
        accepted = minus(self._lease_book.positions(), unfinished)
        logs = self._journal.history.metric_states.lasting_logs()
        beginning = asyncio.ensure_future(asyncio.to_thread(checkpoints.begin, directory))
        try:
            draft = await asyncio.shield(beginning)
        except asyncio.CancelledError:  # whoever asked has gone, and the thread goes on
            beginning.add_done_callback(_close_begun)
            raise
        try:
            saved = await asyncio.gather(
                *(server.save_shards(token, str(draft.path), draft.nonce) for server in described)
            )
            held = {server.incarnation: each for server, each in described.items()}
            content = content_of(described.values())
            manifest = ServersManifest(
                step=max(each.step for each in saved),
                chief_epoch=self._state.epoch,
                files=tuple(
                    dataclasses.replace(file, ps=server.incarnation.task)
                    for server, each in zip(described, saved, strict=True)
                    for file in each.files
                ),
                plans=dict(self._lease_book.plans),
                accepted=accepted,
                applied=applied_units(held, accepted),
                unfinished=unfinished,
                next_step=self._lease_book.steps.next_number,
                num_groups=content.num_groups,
                num_distinct=content.num_distinct,
                num_updates=content.num_updates,
                automatic=automatic,
                logs=logs,
            )
        except BaseException:
            await asyncio.shield(asyncio.to_thread(draft.close))  # else a second cancellation may come before it
            raise
        # It closes the draft itself, and goes on where whoever asked has gone meanwhile, before its thread began too.
        path = await asyncio.shield(asyncio.to_thread(checkpoints.commit, draft, manifest, replaces))
        self.totals.add(measures.CHECKPOINTS, 1)
        committed = CommittedCheckpoint(str(path), manifest, tuple(each.store_epoch for each in described.values()))
        self._note(committed)
        if leaves_out and (num_untaken := untaken([*described.values()])):
            logger.warning(
                "%s lacks %d elements of the checkpoint that the ps began from, which stays: no worker has prepared a "
                "model that has them",
                *(committed.path, num_untaken),
            )
        elif automatic:
            await asyncio.to_thread(checkpoints.prune, directory, self._config.keep_checkpoints)
        return committed

    def _note(self, committed: CommittedCheckpoint) -> None:
        folder, of_script, draft = committed.path.partition("/.draft-")
        place = f"part of what the script saves in {folder}" if of_script else committed.path
        shown = f"{place}: {draft.rpartition('/')[2]}" if of_script else place  # the script gives it its own name
        self._journal.write("checkpoint", path=shown)
        logger.info("Checkpoint of step %d: %s", committed.manifest.step, place)


def _close_begun(beginning: asyncio.Future[CheckpointDraft]) -> None:
    if not beginning.cancelled() and beginning.exception() is None:
        beginning.result().close()


class CheckpointContent(NamedTuple):
    step: int
    """Largest number of updates applied to any group."""
    num_groups: int
    """Shard groups of all ps."""
    num_updates: int
    """Of all of these together."""
    num_distinct: int
    """Shard groups with a number of their own."""


def content_of(described: Collection[ServerDescription]) -> CheckpointContent:
    """What a checkpoint of these would have."""
    groups = [group for each in described for group in each.groups]
    step = max((each.step for each in described), default=0)
    return CheckpointContent(step, len(groups), sum([each.num_updates for each in described]), len({*groups}))


def unfinished_units(described: Collection[ServerDescription], steps_per_unit: int) -> Positions:
    """Units that no ps has closed and that have fewer updates than others had."""
    ordinals: dict[Unit, set[int]] = {}
    for each in described:
        for update in each.open:
            for unit in update.units:
                ordinals.setdefault(unit, set()).add(update.ordinal)
    fewer = (unit for unit, known in ordinals.items() if len(known) < steps_per_unit)
    return positions_of(unit for unit in fewer if not any(each.has_closed(unit) for each in described))


def untaken(described: Sequence[ServerDescription]) -> int:
    """Elements of a checkpoint of another number of ps that are on no ps yet."""
    if not described or not all(each.origin_elements for each in described):
        return 0  # one of them has gone back to a checkpoint that was made since, which had all
    return max(0, max(each.origin_elements for each in described) - sum(each.taken_elements for each in described))


def check_taken(described: Sequence[ServerDescription]) -> None:
    """PeerUnavailableError: ps have not taken all of the checkpoint of another number of ps that they began from."""
    if num_untaken := untaken(described):
        raise PeerUnavailableError(f"{of_untaken(num_untaken)}. It is repeated")


def of_untaken(num_untaken: int) -> str:
    """Why there is no checkpoint then, and the way out."""
    return (
        f"a checkpoint needs all variables, and {num_untaken:,} elements of the one that the ps began from are on none "
        "of them yet: no worker has said which is to hold them. If no model that is prepared has them, only the "
        "checkpoint at the end of the script is taken, without them, and not before it has more updates than that one. "
        "A model that lacks a variable of that checkpoint better begins in a checkpoint directory of its own, with "
        "what it takes of sg.load_checkpoint"
    )


def applied_units(described: Mapping[Incarnation, ServerDescription], accepted: Positions) -> Positions:
    """Units with an update that nobody has reported as accepted, and none that only some of its ps have."""
    found = plus(*(each.applied() for each in described.values()))
    for unit in {unit for updates in torn_updates(described).values() for update in updates for unit in update.units}:
        found[unit.dataset, unit.epoch].discard(unit.index)
    return minus(found, accepted)
