"""The session streams: joins and heartbeats in, membership and the end out; every change is journalled first."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence

from stratagem.chief.chief_state import ChiefPart, ChiefState
from stratagem.chief.events import Event, Fenced, Goodbye, Heartbeat, Join, Request, Welcome
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
from stratagem.chief.monitoring.recent import JobLog, Recent
from stratagem.chief.recovery import Recovery
from stratagem.cluster.membership import Membership
from stratagem.cluster.spec import split_address
from stratagem.cluster.task import Incarnation
from stratagem.errors import ConfigurationError, LimitError, PeerUnavailableError, ProtocolError, StratagemError
from stratagem.rpc.binding import is_loopback
from stratagem.rpc.versions import own_version

logger = logging.getLogger(__name__)

MAX_UNREAD_EVENTS = 256
"""Events that may wait for a task; one that reads none of them loses its session."""
MAX_PROGRESS_BYTES = 64 << 10
"""What a task may say about its progress in a heartbeat."""
TICK_S = 1.0
"""Looks at the time are never further apart, unless the process was stopped or its machine stood still."""
ANNOUNCE_S = 0.001
"""Seconds between two announcements of the membership, for each session."""
HEARTBEAT_S = 0.0015
"""Seconds between the heartbeats of all tasks together, at least, as far as the session timeout has time for it."""
PROBE_S = 0.1
"""Seconds between two looks whether a task whose connection broke off is still there."""
MAX_NAMED = 10
"""Missing tasks that a line of the log names."""

Carry = Callable[[Prepare | Fence | Release | StopJob], None]


class SessionStreams(ChiefPart):
    """Couples the state machine of the sessions to the streams. ``state``: of the job: its journal has incarnations and
    losses before any task hears of them; ``carry``: carries out the actions that concern ps and job; ``recovery``:
    enters what a resumed worker holds into the books, before any task hears that it is back."""

    def __init__(self, state: ChiefState, recovery: Recovery, *, carry: Carry) -> None:
        super().__init__(state)
        self.progress: dict[str, bytes] = {}
        self.waiting_steps: dict[str, int] = {}
        """Of the workers that wait for the update of a step of the job: which step."""
        self._has_stepped = False
        self.recent = Recent()
        self.log: JobLog | None = None
        """Takes lines of the tasks' logs, where somebody shows them."""
        self._ticked_at = self._clock()
        self._carry = carry
        self._recovery = recovery
        self._outboxes: dict[int, asyncio.Queue[Event | None]] = {}
        self._newest_stream = 0
        self._torch_versions: dict[str, str] = {}
        self._last_missing: list[str] = []
        self._told: StopJob | None = None
        self._closed = False
        self._announcing: asyncio.TimerHandle | None = None
        self._announce_at = 0.0
        self._probes: set[asyncio.Future[None]] = set()

    async def attend(self, requests: AsyncIterator[Request]) -> AsyncIterator[Event]:
        """One stream, from join to end. ProtocolError: a message that cannot be; the first one is no join. LimitError:
        too long a heartbeat. ConfigurationError: the cluster has no such task."""
        join = await anext(requests, None)
        if not isinstance(join, Join):
            raise ProtocolError(f"expected Join as the first message of a session, got {type(join).__name__}")
        self._check_here()
        if join.finished and (actions := self._sessions.finished(Incarnation(join.task, join.resume_incarnation))):
            logger.info("%s, which was lost, has finished", join.task)
            self.perform(actions)
            return
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
                probe = asyncio.ensure_future(self._probe(session.incarnation, session.address))
                self._probes.add(probe)
                probe.add_done_callback(self._probes.discard)

    def _check_here(self) -> None:
        """What a chief hears that has left is in no journal."""
        if self._closed and self._told is None:
            raise PeerUnavailableError("this chief has exited; tell the next one")

    async def _probe(self, incarnation: Incarnation, address: str) -> None:
        """A process that is gone has left its port: then nobody need wait for it to come back.

        One that is being killed may lose its session before its port. Two refusals in a row count: what resets
        connections on the way resets one to a port at which somebody listens, too.
        """
        was_refused = False
        while not self._closed and self._sessions.is_away(incarnation):
            try:
                host, port = split_address(address)
                if is_loopback(host) and not is_loopback(split_address(self._config.bind)[0]):
                    return  # it may be of the task's machine, and not of this one: the grace decides
                _, writer = await asyncio.open_connection(host, port)
                writer.close()
                was_refused = False
            except (OSError, StratagemError) as error:
                # Of a name with several addresses asyncio tells what each said in one text.
                said = set(re.findall(r"\[Errno (\d+)\]", str(error)))
                if not isinstance(error, ConnectionRefusedError) and said != {str(errno.ECONNREFUSED)}:
                    return  # the network, or no address: the grace decides
                if was_refused:
                    self.perform(self._sessions.nobody_there(incarnation, self._clock()))
                was_refused = True
            await asyncio.sleep(PROBE_S)

    def _join(self, join: Join, stream: int, outbox: asyncio.Queue[Event | None]) -> Session:
        self._check_versions(join)
        known = self._sessions.tasks.get(join.task)
        was_open = known is not None and known.open
        resumed = join.resume_incarnation
        if known is not None and was_open and known.address == join.address and join.store_epoch:
            resumed = known.number  # a ps with values: its connection broke before it had heard which one it is
        session, actions = self._sessions.join(join.task, join.address, join.pid, resumed, stream, self._clock())
        if not resumed:
            self.recent.forget(join.task)
            self.progress.pop(join.task, None)  # of the process before it
            self.waiting_steps.pop(join.task, None)
            late = {"joining": True} if session.joining else {}
            self._journal.write("join", task=join.task, incarnation=session.number, pid=join.pid, **late)
        # So many tasks may send heartbeats that they would keep the chief busy.
        shared_s = min(HEARTBEAT_S * len(self._sessions.required), self._config.session_timeout_s / 4)
        outbox.put_nowait(
            Welcome(
                incarnation=session.number,
                heartbeat_interval_s=max(self._config.heartbeat_interval_s, shared_s),
                job_started=self._has_stepped or bool(self._journal.history.num_units),
                ps_replicas=self._config.ps_replicas,
                wants_log=self.log is not None,
            )
        )
        self._outboxes[stream] = outbox
        how = "resumed" if resumed else "joined"
        logger.info("%s %s at %s", session.incarnation, how, join.address or "-")
        if resumed and not was_open:  # else the book is right: this chief has written it
            self._recovery.resume(session.incarnation, join.held)
        self.perform(actions)
        if not any(isinstance(action, Announce) for action in actions):
            outbox.put_nowait(self.membership())
        if self._told is not None:
            outbox.put_nowait(self._told)
        return session

    def _check_versions(self, join: Join) -> None:
        own = own_version()
        if join.stratagem_version and join.stratagem_version.split(".")[:2] != own.split(".")[:2]:
            raise ConfigurationError(
                f"{join.task} runs stratagem {join.stratagem_version} and its chief {own}: install the same version on "
                "every machine (the first two numbers must agree)"
            )
        self._torch_versions.pop(join.task, None)
        for task, version in self._torch_versions.items():
            if join.torch_version and version != join.torch_version:
                words = "%s has torch %s and %s torch %s: their results may differ, install the same on every machine"
                logger.warning(words, join.task, join.torch_version, task, version)
                break
        if join.torch_version:
            self._torch_versions[join.task] = join.torch_version

    async def _read(
        self, task: str, stream: int, requests: AsyncIterator[Request], outbox: asyncio.Queue[Event | None]
    ) -> None:
        try:
            async for request in requests:
                self._check_here()
                if self._sessions.tasks[task].stream != stream:
                    break  # another one carries the session
                if isinstance(request, Heartbeat):
                    num_bytes = len(request.progress) + len(request.measures)
                    if num_bytes > MAX_PROGRESS_BYTES:
                        raise LimitError(
                            f"{task} says {num_bytes:,} bytes about its progress, at most "
                            f"{MAX_PROGRESS_BYTES:,} are kept"
                        )
                    said = request.copies, request.leaving, request.bytes_held
                    if actions := self._sessions.heartbeat(task, stream, self._clock(), *said):
                        self.perform(actions)
                    self.progress[task] = request.progress or self.progress.get(task, b"")
                    self.waiting_steps[task] = request.waiting_step
                    self._has_stepped |= request.step > 0
                    if request.measures:
                        self.recent.add(task, request.measures, self._clock())
                    if request.lines and self.log is not None:
                        self.log.add(task, request.lines)
                elif isinstance(request, Goodbye):
                    logger.info("%s said goodbye with exit code %d", task, request.exit_code)
                    how = request.exit_code, request.message, self._clock(), request.follows
                    self.perform(self._sessions.goodbye(task, stream, *how))
                    break
        finally:
            outbox.put_nowait(None)

    def tick(self) -> None:
        now = self._clock()
        if (asleep_s := now - self._ticked_at - TICK_S) > 0:
            logger.warning("This chief was suspended for %.1f s and heard from no task meanwhile", asleep_s + TICK_S)
            self._sessions.excuse(asleep_s, now)
        self._ticked_at = now
        self.perform(self._sessions.tick(now))
        missing = [] if self._sessions.ready else self._sessions.waiting_for
        if missing and missing != self._last_missing:
            more = f" and {len(missing) - MAX_NAMED} others" if len(missing) > MAX_NAMED else ""
            logger.info("Waiting for the cluster: %s%s", ", ".join(missing[:MAX_NAMED]), more)
        self._last_missing = missing

    def membership(self) -> Membership:
        sessions = self._sessions
        members = tuple(session.member for session in sessions.known if sessions.serves(session))
        return Membership(
            sessions.ready,
            members,
            sessions.lead,
            sessions.routing_epoch,
            sessions.min_workers,
            sessions.generation,
            sessions.wanted_workers,
            sessions.num_ps,
            self._config.num_workers,
        )

    async def take_in(self, caller: Incarnation, newcomers: Sequence[Incarnation]) -> None:
        """Newcomers of a ring become ranks of it; without any the caller is one, and can be taken in."""
        await self._admit(caller)
        for one in self._sessions.take_in(caller, newcomers):
            self._journal.write("taken_in", task=one.task, incarnation=one.number)
            logger.info("%s is admitted to the ring", one)
        self.perform([Announce()])

    def broadcast(self, event: Event) -> None:
        if isinstance(event, StopJob):
            self._told = event
        for stream, outbox in [*self._outboxes.items()]:
            if outbox.qsize() < MAX_UNREAD_EVENTS:
                outbox.put_nowait(event)
            else:
                logger.warning("A task left %d events unread; its session ends", outbox.qsize())
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
            if session.state is SessionState.DONE and history.done.get(str(session.task)) != session.number:
                self._write_over(session.incarnation, done=True)
        if self._sessions.ready and not self._journal.history.ready:
            self._journal.write("ready")
            logger.info("Cluster is ready")
        for action in actions:
            if isinstance(action, Dismiss):
                if (outbox := self._outboxes.pop(action.stream, None)) is not None:
                    if action.reason:
                        outbox.put_nowait(Fenced(action.reason))
                    outbox.put_nowait(None)
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
