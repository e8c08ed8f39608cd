"""What the chief does on its own at every tick: open the books, watch for initial values, take checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from stratagem.chief.checkpointing import checkpoints
from stratagem.chief.checkpointing.saving import (
    CommittedCheckpoint,
    Saving,
    check_taken,
    content_of,
    of_untaken,
    untaken,
)
from stratagem.chief.chief_state import ChiefPart, ChiefState, Note, Work
from stratagem.chief.recovery import Recovery
from stratagem.chief.servers.servers import ServerDescription, read_patiently
from stratagem.cluster.task import Incarnation
from stratagem.errors import CheckpointError, ForbiddenError, PeerUnavailableError, StaleStoreError, StratagemError

logger = logging.getLogger(__name__)

RETRY_S = 0.25
"""Between two looks whether all ps are back for the first checkpoint."""


class Maintenance(ChiefPart):
    """The chief's own initiative. It begins when ``recovery`` is complete."""

    def __init__(self, state: ChiefState, recovery: Recovery, saving: Saving) -> None:
        super().__init__(state)
        self._recovery = recovery
        self.saving = saving
        self._busy = False
        self._first = asyncio.Lock()
        self.newest: CommittedCheckpoint | None = None
        """None: the first one since this chief started is not taken yet."""
        self._is_blank = False
        """All ps are here, and initial values are yet to come."""
        self._is_trained = False
        """All ps are here, and updates are on them: their units, leased again, may be what a checkpoint waits for."""
        self._num_groups: int | None = None
        """Shard groups with values, of all ps together; None: one was away when they were last looked at."""
        self._lacking: list[str] = []
        """ps without values where others have theirs: they came back, and a worker that attaches gives them those."""
        self._next_save_at: float | None = None
        self._delay = "", False
        """Why no checkpoint could be taken, as the log says, and whether updates may be lost; empty: one was taken."""

    def tick(self) -> None:
        """Starts what is due, one thing at a time."""
        if self._busy or self._sessions.stopping is not None or not self._sessions.ready:
            return
        if not self._state.is_open:
            if self._sessions.all_known and not self._sessions.pending_fences:
                self._start(self._recovery.open_books)
        elif not self._journal.history.initialized:
            self._start(self._watch)
        elif self._config.checkpoint_dir and self.newest is None:
            self._start(self._save_first)
        elif self._journal.history.is_rerouted:
            self._start(self._watch)
        elif self._next_save_at is not None and self._clock() >= self._next_save_at:
            self._start(self._save)
        elif any(
            ps.open and ps.bytes_held and str(ps.task) not in self._journal.history.initialized
            for ps in self._sessions.ps
        ):
            self._start(self._watch)  # one that held nothing has something now, of a model that was prepared since

    async def first_checkpoint(self, caller: Incarnation, num_groups: int, note: Note) -> None:
        """Waits for the initial checkpoint, if there is to be one: no update can be lost before there is one. It has
        all of the shard groups that the caller has prepared: ``num_groups``, counted on each ps. For what is prepared
        later there is another one. StaleStoreError: a ps has no values, or not all, which the caller may give it."""
        while self._config.checkpoint_dir and not (self.newest is not None and self._lease_book.has_leased):
            await self._watch()
            # One that is under way may wait for what a ps without values lacks, and that for the caller.
            waits = bool(self._lacking) and self._first.locked()
            if self._journal.history.initialized and not (self._is_trained or waits):
                await asyncio.shield(self._save_first())  # the caller may give up and ask again
            await self._admit(caller)
            # None between the initial values and the first checkpoint, unless some were before, nor while a ps is away
            # or without values: what it holds may be initial values.
            is_whole = self._has_first and self._num_groups is not None and self._num_groups >= num_groups
            if is_whole or (self._is_blank and not num_groups):
                return
            if self._is_trained:
                break
            await asyncio.sleep(RETRY_S)
            self._check_attached(num_groups)
        # A ps that goes back to one without it would take it, with its updates, from a worker, and these come again.
        while self._lacks_prepared(num_groups):
            await self._watch()
            self._check_attached(num_groups)
            note("a checkpoint of what it has prepared", ())  # so it sends nothing meanwhile that this could wait for
            if not await asyncio.shield(self._save_prepared(num_groups)):
                break
            await self._admit(caller)
        if self._num_groups is None or self._num_groups < num_groups or self._lacking:
            await self._watch()  # as by heartbeats, and before any update of what was prepared since
            try:
                check_taken([*await self._described()])
            except PeerUnavailableError as error:  # all may be trained, and then not be saved
                self._tell_delay("No checkpoint", error, True)

    def _check_attached(self, num_groups: int) -> None:
        """StaleStoreError: not all ps have values of what a worker has prepared, which it may give."""
        if self._lacking:
            raise StaleStoreError(f"{', '.join(self._lacking)} restarted without values; attach to it again")
        if self._num_groups is not None and self._num_groups < num_groups:
            raise StaleStoreError("a ps restarted from a state before a model was prepared; attach to all again")

    def _lacks_prepared(self, num_groups: int) -> bool:
        """The last checkpoint lacks what a worker has prepared since."""
        newest = (self.newest or self._found()) if self._config.checkpoint_dir else None
        return newest is not None and newest.manifest.lacks(num_groups, 0, self._ps_pool.num_ps)

    async def _save_prepared(self, num_groups: int) -> bool:
        """A checkpoint of that too, unless there is one by now. Returns False where none can be written."""
        async with self._first:
            try:
                if self._lacks_prepared(num_groups):
                    await self.save(replaces=True)  # a worker waits for it
            except PeerUnavailableError as error:
                self._tell_delay("The checkpoint of what was prepared has to wait", error, False)
                await asyncio.sleep(RETRY_S)
            except StratagemError as error:
                self._tell_delay("No checkpoint", error, True)
                return False
        return True

    @property
    def _has_first(self) -> bool:
        """There is a checkpoint of everything that the ps had when last looked at. One that a script asked for
        is never replaced, though it may have prepared another model since."""
        if self.newest is None:
            return False
        manifest, num_groups = self.newest.manifest, self._num_groups or 0
        return not manifest.automatic or not manifest.lacks(num_groups, 0, self._ps_pool.num_ps)

    async def save_last(self, is_done: bool = False) -> None:
        """The checkpoint at the end, if there is anything that the last one lacks. ``is_done``: no worker will prepare
        anything more. StratagemError: it cannot be taken."""
        if not self._config.checkpoint_dir or not self._journal.history.initialized:
            return
        async with self._first:  # else one that waits meanwhile finds another of its step in its way
            self._commit_hold.check_all("the last checkpoint")  # one that is being put back looks as if it had nothing
            newest, described = self.newest or self._found(), [*await self._described()]
            if newest is None or newest.lacks(described):
                # One without what no model has is to be the newest one. Nobody is waited for to prepare it.
                # Of a ps that came back when all had gone nobody says what it is to hold, though a model may have that.
                is_newest = newest is not None and content_of(described).step > newest.manifest.step
                leaves_out = is_done and is_newest and all(each.complete for each in described)
                if is_done and not leaves_out and untaken(described):
                    raise CheckpointError(of_untaken(untaken(described)))
                # The workers end too, perhaps in mid-commit. What only some ps have is completed when the job goes on.
                await self.save(complete=False, leaves_out=leaves_out)
        if is_done and self._journal.history.undone:
            raise CheckpointError(self._journal.history.undone)

    async def save_loaded(self) -> CommittedCheckpoint | None:
        """What a worker has just loaded: a ps that is lost would come back with what was there before. None: there
        cannot be a checkpoint yet, or none is kept. PeerUnavailableError: a ps is away. StaleStoreError: a ps was, or
        has no values, which the caller may give it: it is to load again."""
        if not self._config.checkpoint_dir or untaken([*await self._described()]):
            return None  # of what ps began from, the rest is prepared after this, and then there is a checkpoint
        await self._watch()
        if not self._journal.history.initialized:  # else a ps that is lost would not be put back to it
            raise StaleStoreError(f"a checkpoint needs the values of all ps, not of {self._lacking}")
        try:
            return await self.save(replaces=True)
        except PeerUnavailableError as error:
            raise StaleStoreError(str(error)) from None
        except CheckpointError as error:
            logger.warning("What was loaded is not in a checkpoint until the next one: %s", error)
            return None

    def _start(self, work: Work) -> None:
        self._busy = True

        async def run() -> None:
            try:
                await work()
            finally:
                self._busy = False

        self._spawn(run)

    async def _described(self) -> Collection[ServerDescription]:
        return (await self._ps_pool.describe_all()).values()

    async def _watch(self) -> None:
        """Looks what the ps hold, and notes when all know what they are to hold and have values of that."""
        ready, described, history = self._ps_pool.ready, await self._ps_pool.describe(), self._journal.history
        is_same = self._ps_pool.ready == ready  # else what is described may be from before the number of ps changed
        is_all_here = is_same and len(described) == len(ready) == self._ps_pool.num_ps
        holding = sorted(one.task for one, each in described.items() if each.holds_rows)
        lacking = sorted(one.task for one, each in described.items() if not each.complete)
        if holding and not (history.has_begun or history.initialized):
            self._journal.write("begun")  # units wait until all have values and a checkpoint, whoever is chief then
        has_begun = history.has_begun or bool(history.initialized)
        self._is_blank = is_all_here and not has_begun
        self._lacking = lacking if has_begun else []
        is_complete = is_all_here and has_begun and not lacking
        content = content_of(described.values())
        self._num_groups = content.num_groups if is_all_here else None
        # Where one with updates lacks values, whoever prepared another model has died, and units go on up to there.
        is_usable = is_all_here and has_begun and all(each.complete or each.num_updates for each in described.values())
        self._is_trained = is_usable and content.step > 0
        is_news = not history.initialized or {*holding}.difference(history.initialized)
        if is_complete and (history.is_rerouted or is_news):
            # Those that the journal names stay: it takes all for such after a change of their number, and there is a
            # checkpoint to put each back to; a worker may be at its ``prepare``, and tell them more.
            self._journal.write("initialized", tasks=sorted({*history.initialized, *holding}))
            await self._recovery.ps_return.lost_after_restarts(self._lease_book.positions())
            self._changed.notify()

    async def _save_first(self) -> None:
        """The initial checkpoint: from then on a lost ps has something to come back from."""
        async with self._first:
            if self._has_first:
                return
            newest, is_trained = None, False
            try:
                newest = await read_patiently(lambda: asyncio.to_thread(self._found, checkpoints.ServersManifest.find))
                described = await self._described()
                is_trained = content_of(described).step > (newest.manifest.step if newest is not None else 0)
                if newest is not None:
                    is_kept = not newest.manifest.automatic and newest.manifest.step == content_of(described).step
                    if is_kept or not newest.lacks(described):
                        return self._saved(newest)
                check_taken([*described])  # once they have all of it, that may be what is there already
                await read_patiently(self.save)
            except (CheckpointError, ForbiddenError) as error:  # as it is, a ps was not started for the folder
                if newest is None or not (is_trained or self._lease_book.has_leased):
                    self._stop(2, str(error))
                else:  # a chief that was restarted: without that, training would have gone on too
                    self._tell_delay("No checkpoint", error, True)
                    self.newest = newest
                    self._clock_next()
            except StratagemError as error:
                which = "The first" if newest is None else "A"
                self._tell_delay(f"{which} checkpoint has to wait", error, is_trained)

    def _found(self, read: checkpoints.Read = checkpoints.ServersManifest.read) -> CommittedCheckpoint | None:
        """The newest that is there, of an earlier chief or job perhaps."""
        found = checkpoints.newest(self._config.checkpoint_dir, read)
        return None if found is None else CommittedCheckpoint(str(found[0]), found[1])

    async def _save(self) -> None:
        try:
            if self.newest is None or self.newest.lacks(await self._described()):
                await self.save()
        except StratagemError as error:
            self._tell_delay("No checkpoint", error, True)
            self._clock_next()
        else:
            self._saved(self.newest)

    def _tell_delay(self, what: str, error: StratagemError, is_trained: bool) -> None:
        """Once, until there is another reason or a checkpoint. ``is_trained``: updates may be lost meanwhile."""
        if self._delay != (delay := (str(error), is_trained)):
            self._delay = delay
            logger.log(logging.WARNING if is_trained else logging.INFO, "%s: %s", what, error)

    async def save(
        self, *, complete: bool = True, replaces: bool = False, leaves_out: bool = False
    ) -> CommittedCheckpoint:
        """Takes an automatic checkpoint; see :meth:`Saving.save`."""
        saved = await self.saving.save(
            self._config.checkpoint_dir, automatic=True, complete=complete, replaces=replaces, leaves_out=leaves_out
        )
        self._saved(saved)
        return saved

    def _saved(self, newest: CommittedCheckpoint | None) -> None:
        """There is a checkpoint of now."""
        self.newest, self._delay = newest, ("", False)
        self._clock_next()

    def _clock_next(self) -> None:
        every_s = self._config.checkpoint_every_s
        self._next_save_at = self._clock() + every_s if every_s else None
