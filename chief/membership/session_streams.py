"""The session streams: joins and heartbeats in, membership and the end out; every change is journalled first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from stratagem.chief.change_event import ChangeEvent
from stratagem.chief.events import Event, Fenced, Goodbye, Heartbeat, Join, Membership, Request, Stop, Welcome
from stratagem.chief.journal.journal import Journal
from stratagem.chief.membership.session import (
    Action,
    Announce,
    Dismiss,
    Fence,
    Prepare,
    Release,
    Session,
    SessionState,
    StopJob,
)
from stratagem.chief.membership.sessions import Sessions
from stratagem.chief.monitoring.status import member_of
from stratagem.cluster.incarnation import Incarnation
from stratagem.cluster.spec import split_address
from stratagem.cluster.units import Lease
from stratagem.errors import LimitError, ProtocolError, StratagemError

logger = logging.getLogger(__name__)

MAX_UNREAD_EVENTS = 256
"""Events that may wait for a task; one that reads none of them loses its session."""
MAX_PROGRESS_BYTES = 64 << 10
"""What a task may say about its progress in a heartbeat."""
ANNOUNCE_S = 0.001
"""Seconds between two announcements of the membership, for each session."""
HEARTBEAT_S = 0.0015
"""Seconds between the heartbeats of all tasks together, at least, as far as the session timeout has time for it."""
MAX_NAMED = 10
"""Missing tasks that a line of the log names."""

Carry = Callable[[Prepare | Fence | Release | StopJob], None]
"""Carries out what goes beyond the streams."""
Resume = Callable[[Incarnation, tuple[Lease, ...]], None]
"""Told what a resumed worker holds, before anybody hears that it is back."""


class SessionStreams:
    """Couples the state machine of the sessions to the streams.

    Args:
        sessions: the state machine.
        journal: where incarnations and losses are written before anybody hears of them.
        changed: rung at every change.
        clock: seconds, monotonic.
        heartbeat_interval_s: what tasks are told, where they are not too many.
        session_timeout_s: what tasks are told.
        job_started: whether the job has trained before.
        carry: carries out the actions that concern ps and job.
        resume: takes the leases of a resumed worker into the books.
    """

    def __init__(
        self,
        sessions: Sessions,
        journal: Journal,
        changed: ChangeEvent,
        *,
        clock: Callable[[], float],
        heartbeat_interval_s: float,
        session_timeout_s: float,
        job_started: Callable[[], bool],
        carry: Carry,
        resume: Resume,
    ) -> None:
        self.progress: dict[str, bytes] = {}
        self.waiting_steps: dict[str, int] = {}
        """Of the workers that wait for the update of a step of the job: which step."""
        self._sessions = sessions
        self._journal = journal
        self._changed = changed
        self._clock = clock
        self._heartbeat_interval_s = heartbeat_interval_s
        self._session_timeout_s = session_timeout_s
        self._job_started = job_started
        self._carry = carry
        self._resume = resume
        self._outboxes: dict[int, asyncio.Queue[Event | None]] = {}
        self._newest_stream = 0
        self._last_missing: list[str] = []
        self._stop: Stop | None = None
        self._closed = False
        self._announcing: asyncio.TimerHandle | None = None
        self._announce_at = 0.0
        self._knocks: set[asyncio.Future[None]] = set()

    async def attend(self, requests: AsyncIterator[Request]) -> AsyncIterator[Event]:
        """One stream, from join to end.

        Raises:
            ProtocolError: a message that cannot be; the first one is no join.
            LimitError: too long a heartbeat.
            ConfigurationError: the cluster has no such task.
        """
        join = await anext(requests, None)
        if not isinstance(join, Join):
            raise ProtocolError(f"expected Join as the first message of a session, got {type(join).__name__}")
        self._newest_stream += 1
        stream = self._newest_stream
        outbox: asyncio.Queue[Event | None] = asyncio.Queue()
        session = self._join(join, stream, outbox)
        reader = asyncio.create_task(self._read(join.task, stream, requests, outbox))
        try:
            while (event := await outbox.get()) is not None:
                yield event
            if reader.done() and isinstance(error := reader.exception(), StratagemError):
                raise error  # what the task said cannot be
        finally:
            reader.cancel()
            self._outboxes.pop(stream, None)
            self.perform(self._sessions.stream_ended(str(session.task), stream, self._clock()))
            if not self._closed and session.open and not session.stream:
                knock = asyncio.ensure_future(self._knock(session.incarnation, session.address))
                self._knocks.add(knock)
                knock.add_done_callback(self._knocks.discard)

    async def _knock(self, incarnation: Incarnation, address: str) -> None:
        """A process that is gone has left its port: then nobody need wait for it to come back."""
        try:
            _, writer = await asyncio.open_connection(*split_address(address))
            writer.close()
        except ConnectionRefusedError:
            self.perform(self._sessions.nobody_there(incarnation, self._clock()))
        except (OSError, StratagemError):
            pass  # the network, or no address: the grace decides

    def _join(self, join: Join, stream: int, outbox: asyncio.Queue[Event | None]) -> Session:
        known = self._sessions.tasks.get(join.task)
        was_open = known is not None and known.open
        session, actions = self._sessions.join(
            join.task, join.address, join.pid, join.resume_incarnation, stream, self._clock()
        )
        if not join.resume_incarnation:
            self._journal.write("join", task=join.task, incarnation=session.number)
        outbox.put_nowait(
            Welcome(
                incarnation=session.number,
                chief_epoch=self._journal.history.chief_epoch,
                heartbeat_interval_s=self._interval_s(),
                session_timeout_s=self._session_timeout_s,
                job_started=self._job_started(),
            )
        )
        self._outboxes[stream] = outbox
        how = "resumed" if join.resume_incarnation else "joined"
        logger.info("%s %s at %s", session.incarnation, how, join.address or "-")
        if join.resume_incarnation and not was_open:  # else the book is right: this chief has written it
            self._resume(session.incarnation, join.held)
        self.perform(actions)
        if not any(isinstance(action, Announce) for action in actions):
            outbox.put_nowait(self.membership())
        if self._stop is not None:
            outbox.put_nowait(self._stop)
        return session

    def _interval_s(self) -> float:
        """Between heartbeats: longer where so many tasks send them that they would keep the chief busy."""
        shared_s = min(HEARTBEAT_S * len(self._sessions.required), self._session_timeout_s / 4)
        return max(self._heartbeat_interval_s, shared_s)

    async def _read(
        self, task: str, stream: int, requests: AsyncIterator[Request], outbox: asyncio.Queue[Event | None]
    ) -> None:
        try:
            async for request in requests:
                if isinstance(request, Heartbeat):
                    if len(request.progress) > MAX_PROGRESS_BYTES:
                        raise LimitError(
                            f"{task} says {len(request.progress):,} bytes about its progress, at most "
                            f"{MAX_PROGRESS_BYTES:,} are kept"
                        )
                    self._sessions.heartbeat(task, stream, self._clock())
                    self.progress[task] = request.progress or self.progress.get(task, b"")
                    self.waiting_steps[task] = request.waiting_step
                elif isinstance(request, Goodbye):
                    logger.info("%s said goodbye with exit code %d", task, request.exit_code)
                    self.perform(
                        self._sessions.goodbye(task, stream, request.exit_code, request.message, self._clock())
                    )
                    break
        finally:
            outbox.put_nowait(None)

    def tick(self) -> None:
        """Time passed."""
        self.perform(self._sessions.tick(self._clock()))
        missing = [] if self._sessions.ready else self._sessions.waiting_for
        if missing and missing != self._last_missing:
            more = f" and {len(missing) - MAX_NAMED} others" if len(missing) > MAX_NAMED else ""
            logger.info("Waiting for the cluster: %s%s", ", ".join(missing[:MAX_NAMED]), more)
        self._last_missing = missing

    def membership(self) -> Membership:
        """The cluster as it stands."""
        sessions = self._sessions
        members = tuple(member_of(session) for session in sessions.known)
        return Membership(sessions.ready, members, sessions.lead, sessions.routing_epoch)

    def broadcast(self, event: Event) -> None:
        """Tells every task."""
        if isinstance(event, Stop):
            self._stop = event
        for stream, outbox in [*self._outboxes.items()]:
            if outbox.qsize() < MAX_UNREAD_EVENTS:
                outbox.put_nowait(event)
            else:
                logger.warning("A task lets %d events lie unread; its session ends", outbox.qsize())
                del self._outboxes[stream]
                while not outbox.empty():
                    outbox.get_nowait()
                outbox.put_nowait(None)

    def close(self) -> None:
        """The job is over: what happens to the streams from now on means nothing."""
        self._closed = True

    def perform(self, actions: list[Action]) -> None:
        """Carries out what the state machine decided: first the journal, then the words, then the deeds."""
        if self._closed:
            return
        for action in actions:
            if isinstance(action, Dismiss) and action.reason:
                self._write_over(action.incarnation, done=False)
                logger.log(logging.INFO if self._sessions.stopping else logging.WARNING, "%s", action.reason)
        for session in self._sessions.tasks.values():
            history = self._journal.history
            if session.state is SessionState.DONE and history.live.get(str(session.task)) == session.number:
                self._write_over(session.incarnation, done=True)
        if self._sessions.ready and not self._journal.history.ready:
            self._journal.write("ready")
            logger.info("Cluster is ready")
        for action in actions:
            if isinstance(action, Dismiss):
                self._dismiss(action)
            elif not isinstance(action, Announce):
                self._carry(action)
        if any(isinstance(action, Announce) for action in actions) and self._announcing is None:
            loop = asyncio.get_running_loop()
            self._announcing = loop.call_at(max(loop.time(), self._announce_at), self._announce)
        if actions:
            self._changed.notify()

    def _announce(self) -> None:
        """Tells all how the cluster stands. Of many changes at once (a thousand tasks join) they hear together: each
        announcement names every task to every task."""
        self._announcing = None
        self._announce_at = asyncio.get_running_loop().time() + ANNOUNCE_S * len(self._outboxes)
        if not self._closed:
            self.broadcast(self.membership())

    def _write_over(self, incarnation: Incarnation, done: bool) -> None:
        self._journal.write("over", task=incarnation.task, incarnation=incarnation.number, done=done)

    def _dismiss(self, action: Dismiss) -> None:
        outbox = self._outboxes.pop(action.stream, None)
        if outbox is not None:
            if action.reason:
                outbox.put_nowait(Fenced(action.reason))
            outbox.put_nowait(None)
