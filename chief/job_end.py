"""How a job ends: the last checkpoint, the message to all tasks, and the wait for late ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from stratagem.checkpoint.ended import write_end
from stratagem.chief.checkpointing import checkpoints
from stratagem.chief.chief_state import ChiefPart, ChiefState
from stratagem.chief.maintenance import Maintenance
from stratagem.chief.membership.session import StopJob
from stratagem.chief.membership.session_streams import SessionStreams
from stratagem.cluster.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_NO_RETRY, EXIT_PREEMPTED
from stratagem.errors import PeerUnavailableError, StratagemError

logger = logging.getLogger(__name__)

LEAVE_S = 15.0
"""For the checkpoint of a chief that leaves: less than a supervisor waits before it kills."""
RETRY_S = 0.1
"""Between two attempts at the last checkpoint."""
LATE_S = 20.0
"""For tasks that have not joined yet, or a ps or evaluator that was lost, when the job is over already."""
RETURN_S = 3.0
"""From the start of a chief that goes on: for tasks that have not heard that the last one heard their goodbye."""


class JobEnd(ChiefPart):
    """The end of a job, or of its chief alone."""

    def __init__(self, state: ChiefState, streams: SessionStreams, maintenance: Maintenance) -> None:
        super().__init__(state)
        self._streams = streams
        self._maintenance = maintenance
        self._returned_by = 0.0 if state.is_new else self._clock() + RETURN_S

    async def save_to_leave(self, reason: str) -> None:
        """Before the chief leaves and the job stays: perhaps all are told to end, and then the ps lose their memory."""
        deadline = self._clock() + LEAVE_S
        logger.warning("%s: it saves and exits; the job continues with the chief that replaces it", reason)
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._maintenance.save_last()
        except (StratagemError, TimeoutError) as error:
            why = str(error) or f"it was not written within {LEAVE_S:g} s"  # a TimeoutError says nothing
            logger.warning("No checkpoint before the chief exits: %s", why)
        await self._until(lambda: not self._sessions.leaving, deadline)  # ps of the same node, say

    async def see_off(self, stop: StopJob) -> int:
        """Takes the last checkpoint, tells all tasks, and waits until they have gone; returns the chief's exit code:
        that of the job; where what was done is not on the disk, on which it was to stay, 1, then 42 of the next one."""
        log = logger.info if stop.exit_code == 0 else logger.error
        log("The job ends with exit code %d: %s", stop.exit_code, stop.reason)
        # Scripts may end before every task of their cluster has started, and a ps may have died a moment ago: who comes
        # late is to hear of the end, and a ps that is back in time is part of the last checkpoint.
        sessions, is_good = self._sessions, stop.exit_code == 0
        unsaved, goes_on = self._journal.history.unsaved, self._journal.history.ending
        if not goes_on:  # else an earlier incarnation of the chief has come that far
            if stop.exit_code in (EXIT_DONE, EXIT_PREEMPTED):
                unsaved = await self._save_last(is_good)
            self._say_end(stop, [task for task in sessions.required if task.startswith("ps:")] + sessions.unfinished)
        # A chief that dies before it has told all, and ended, goes on with that; else the next one begins another job.
        kind = "ending" if is_good else "stopped"
        self._journal.write(kind, reason=stop.reason, unsaved=unsaved, exit_code=stop.exit_code)
        self._streams.broadcast(stop)

        deadline = self._clock() + (LATE_S if is_good else 0.0)

        def all_gone() -> bool:
            is_late = sessions.never_came or sessions.evaluator_is_back_soon
            is_late |= bool(sessions.absent_servers) and not goes_on  # this chief has awaited them before
            return not sessions.anybody_waits and not (is_good and is_late)

        await self._until(all_gone, max(deadline, self._clock() + self._config.session_timeout_s))
        await self._until(lambda: False, self._returned_by)
        self._say_end(stop, sessions.absent_servers + sessions.unfinished)
        if not (stop.exit_code in (EXIT_DONE, EXIT_PREEMPTED) and unsaved and self._config.checkpoints_stay):
            return stop.exit_code
        what = "work is done" if is_good else "job was shut down"
        state_dir = self._config.state_dir
        how = f" with another journal than that in {state_dir}" if is_good and state_dir else ""
        newest = next(iter(checkpoints.newest(self._config.checkpoint_dir) or ["none"]))
        words = "The %s but not saved: no last checkpoint (%s); the newest is %s. A job that is started%s resumes "
        logger.error(words + "from that", what, unsaved, newest, how)
        return EXIT_NO_RETRY if goes_on else EXIT_FAILED  # another restart would only say the same again

    async def _save_last(self, is_done: bool) -> str:
        """Of a job that ``is_done``, waits for a ps that is away as long as while it ran: without it, what the others
        hold is not saved. Returns why it is not."""
        deadline = self._clock() + (self._config.worker_timeout_s if is_done else 0.0)
        while True:
            await self._until(lambda: not self._sessions.absent_servers, deadline)
            try:
                await self._maintenance.save_last(is_done)
                return ""
            except StratagemError as error:
                is_away = isinstance(error, PeerUnavailableError)  # a ps, or only the connection to it
                if not (is_away or self._sessions.absent_servers) or self._clock() >= deadline:
                    logger.error("No last checkpoint: %s", error)
                    return str(error)
                await asyncio.sleep(RETRY_S)

    async def _until(self, condition: Callable[[], bool], deadline: float) -> None:
        """Waits for it, on the clock of the job."""
        while not condition() and (left_s := deadline - self._clock()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):  # not wait_for, which forgets (3.11) that it was cancelled
                    await self._changed.wait()

    def _say_end(self, stop: StopJob, missing: Sequence[str]) -> None:
        """For the tasks that have not said goodbye: those that start again find no chief any more."""
        if stop.exit_code == 0 and self._config.checkpoint_dir:
            try:
                write_end(self._config.checkpoint_dir, stop.reason, missing)
            except OSError as error:
                logger.warning("The end of the job is not in %s: %s", self._config.checkpoint_dir, error)
