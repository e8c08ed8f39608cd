"""Who is in the cluster: joins, heartbeats, losses, fences, readiness, the end of the job. Pure: ``now`` is passed in.

Events go in through the methods, actions come out as their return value; the owner carries them out. A task is

    waiting -> joined (ps only: being prepared) -> live -> done (said goodbye with 0)
                                                    |----> lost -> joined / live with a new incarnation
    awaited (it was live when the chief died; it may resume) -> joined / live / lost

An incarnation that is over is *fenced*: every ps with an open session must acknowledge that it refuses it, or be lost
itself, before the units of that incarnation go to another worker. A ps learns all earlier fences while it is
``joined``, before any worker learns its address.
"""

from __future__ import annotations

from collections.abc import Collection

from stratagem.chief.journal.history import JobHistory
from stratagem.chief.membership.roster import Roster
from stratagem.chief.membership.session import (
    Action,
    Announce,
    Dismiss,
    Fence,
    Heartbeats,
    Prepare,
    Release,
    Session,
    SessionState,
    StopJob,
)
from stratagem.cluster.config import ChiefConfig
from stratagem.cluster.exit_codes import EXIT_FAILED, EXIT_PREEMPTED, HOPELESS
from stratagem.cluster.task import Incarnation
from stratagem.errors import ConfigurationError

AWAITED_TIMEOUTS = 3
"""Session timeouts for which a chief that was started again awaits each task: it may be at another address now."""


class Sessions(Roster):
    """Membership of the cluster. ``config``: how many tasks there are to be, and how long one may be silent or away.
    ``history``: how an earlier chief left them. Those that were live then are awaited; of a ps, what a process holds
    that is newer than the one that had been brought up to date says nothing. Raises ConfigurationError: ``min_workers``
    is for a ring, and at most as many as it has."""

    def __init__(self, config: ChiefConfig, history: JobHistory, now: float) -> None:
        super().__init__(config, history)
        self.ready = history.ready
        self.first_failure = ""
        self.fenced = dict(history.fenced)
        self._config = config
        self._newest_incarnation = history.newest_incarnation
        self._start_deadline = now + config.start_timeout_s
        self._starts_cold = history.ready and not history.live
        if history.wanted_workers:
            self.want_workers(history.wanted_workers)
        for task, incarnation in {**history.live, **history.done}.items():
            if (session := self._session(task)) is not None:
                session.state = SessionState.DONE if task in history.done else SessionState.AWAITED
                session.number, session.heard_at, session.lost_at = incarnation, now, now
                session.joining = history.joining.get(task) == incarnation
                session.taken_in = incarnation if history.taken_in.get(task) == incarnation else 0
        beyond = [task for task in self.fenced if self.min_workers and self._session(task)]  # a generation counts them
        for task, session in self.tasks.items():
            session.pid = history.pids.get(task, 0)  # whose process may run, out of reach, until its launcher ends it
            if self.ready and session.state is SessionState.WAITING and task in (*self.required, *beyond):
                session.state, session.number = SessionState.LOST, self.fenced.get(task, 0)
                session.heard_at = session.lost_at = now

    # What happens

    def join(
        self, task: str, address: str, pid: int, resume_incarnation: int, stream: int, now: float
    ) -> tuple[Session, list[Action]]:
        """A task opened a session. Gives its session, with the incarnation it has from now on, and what follows.
        ConfigurationError: the cluster has no such task; or it runs, and who comes only says goodbye (no address).
        FencedError: the incarnation it wants to resume is over."""
        session = self._session(task)
        if session is not None and self.is_dismissed(session) and not resume_incarnation:
            raise ConfigurationError(
                f"{task} is not wanted: the job continues with {self.wanted_workers} workers, until "
                f"`stratagem scale --workers {session.task.index + 1}` requests it"
            )
        if session is None:
            known = ", ".join(self.tasks)
            fixed = "" if "ps:0" in self.tasks else ". A ring is as large as it started"
            fixed += " or as max_workers says" if self.min_workers else ": it admits no further worker" if fixed else ""
            raise ConfigurationError(f"{task!r} is not a task of this cluster; expected one of {known}{fixed}")
        incarnation = Incarnation(task, resume_incarnation)
        actions: list[Action] = []
        if resume_incarnation:
            self.check(incarnation)
            if session.stream:
                actions.append(Dismiss(incarnation, session.stream, ""))
            was_open = session.open
        else:
            if not address and session.task.type == "worker" and session.open and session.stream:
                raise ConfigurationError(  # of a script that never took part, such as a second one by mistake
                    f"{task} is already running, in process {session.pid} at {session.address}"
                )
            if session.open or session.state is SessionState.AWAITED:
                its = f"process {pid}" + f" at {address}" * bool(address)
                actions += self._lose(session, now, f"a new process joined in its place ({its})")
            self._newest_incarnation += 1
            session.number, session.resumed, was_open = self._newest_incarnation, False, False
            session.heartbeats = Heartbeats(self._config.heartbeat_interval_s)
            session.copies, session.leaving, session.bytes_held, session.left = (0, 0), False, 0, False
            session.joining = bool(self.min_workers) and self.ready and session.task.type == "worker"
            session.waits, session.taken_in = False, 0
        if now > self._start_deadline and not self.anybody_waits:  # the first that is there
            self._start_deadline = now + self._config.start_timeout_s
        session.address, session.pid, session.stream, session.heard_at = address, pid, stream, now
        session.given_up = False
        if not was_open:
            is_prepared = session.task.type != "ps" or session.served == session.number
            session.resumed = bool(resume_incarnation) and is_prepared
            session.state = SessionState.JOINED if session.task.type == "ps" else SessionState.LIVE
        is_to_serve = session.state is SessionState.JOINED and not was_open and self.serves(session)
        # The others hear of it at once: a ps whose copy its last process had waits for no other one then.
        actions += [Announce(), Prepare(session.incarnation)] if is_to_serve else self._changed()
        return session, actions

    def want_workers(self, num_workers: int) -> list[Action]:
        """There are to be so many workers: further ones may come, those with a higher index are to end."""
        self.wanted_workers = num_workers
        self._max_workers = max(self._max_workers, num_workers)
        self.required = [task for task in self.required if not self.is_dismissed(self.tasks[task])]
        return [Announce()]

    def let_go(self, session: Session, now: float) -> list[Action]:
        """What a ps holds that was told to end is in a checkpoint, or is nothing: it may."""
        return self._lose(session, now, "it was shut down, and has handed over what it held")

    def route(self, num_ps: int) -> list[Action]:
        """From now on so many ps serve, each after it has been prepared anew; those beyond them are to end."""
        before = self.servers
        self.num_ps, self.routing_epoch = num_ps, self.routing_epoch + 1
        workers = [task for task in self.required if task.startswith("worker:")]
        self.required = [*workers, *(f"ps:{index}" for index in range(num_ps))]
        actions: list[Action] = []
        for server in set(before).difference(self.servers):  # what it holds is nobody's any more
            for incarnation in list(self.pending_fences):
                actions += self.fence_acknowledged(incarnation, server)
        for session in self.ps:
            if session.open:
                session.state, session.resumed, session.served = SessionState.JOINED, False, 0
                actions.append(Prepare(session.incarnation))
        return [*actions, Announce()]

    def take_in(self, caller: Incarnation, newcomers: Collection[Incarnation]) -> list[Incarnation]:
        """Newcomers of a ring become ranks; without any the caller is one, and can be taken in from now on. Returns
        those that have become ranks: who has died meanwhile has not."""
        if not newcomers:
            self.tasks[caller.task].waits = self.tasks[caller.task].joining
            return []
        taken = [one for one in newcomers if self.is_live(one) and self.tasks[one.task].waits]
        for one in taken:
            session = self.tasks[one.task]
            session.joining, session.waits, session.taken_in = False, False, one.number
        return taken

    def prepared(self, incarnation: Incarnation) -> list[Action]:
        """A ps knows all fences and has what it needs: workers may use it."""
        session = self.tasks[incarnation.task]
        if session.incarnation != incarnation or session.state is not SessionState.JOINED:
            return []
        session.state, session.served = SessionState.LIVE, session.number
        return self._changed()

    def heartbeat(
        self,
        task: str,
        stream: int,
        now: float,
        copies: tuple[int, int] = (0, 0),
        leaving: bool = False,
        bytes_held: int = 0,
    ) -> list[Action]:
        """A task is alive; a ps also says which copies are to be dropped, and are, whether it was told to end, and how
        much it holds."""
        session = self.tasks[task]
        if session.stream != stream or not session.open:
            return []
        session.heartbeats.add(now - session.heard_at)
        session.heard_at, session.bytes_held = now, bytes_held
        before, session.copies, session.leaving = (session.copies, session.leaving), copies, leaving
        return [Announce()] if (copies, leaving) != before else []

    def goodbye(
        self, task: str, stream: int, exit_code: int, message: str, now: float, follows: bool = False
    ) -> list[Action]:
        """A task ends by its own will; ``follows``: it failed because another one had."""
        session = self.tasks[task]
        if session.stream != stream or not session.open:
            return []
        if exit_code == 0 and (session.task.type != "ps" or self.stopping is not None or not self.serves(session)):
            session.state = SessionState.DONE
            session.left = self.stopping is None and (follows or self.is_dismissed(session))
            return [*self._fence(session), *self._changed(), *self._end_of_work()]
        why = f"it ended with exit code {exit_code}" + (f": {message}" if message else "")
        # The job goes on without it; a newcomer to a ring may see only as one of its ranks that it has something else.
        was_added = self.was_added(task) or session.joining or session.taken_in > 0
        if exit_code and self.stopping is None and not (self.first_failure or was_added or follows):
            self.first_failure = f"{task}: {message or why}"
        actions = self._lose(session, now, why, exit_code)
        if exit_code in HOPELESS and not was_added:
            actions += self.stop(exit_code, f"{task} failed, and a restart would not help: {message or why}")
        return actions

    def finished(self, incarnation: Incarnation) -> list[Action]:
        """The script of a worker has ended well, though the worker is lost; none, if it is not: nobody starts it again.

        What it held has gone to others. A ring with ``min_workers`` does without it: its generation must not shrink.
        """
        session = self.tasks.get(incarnation.task)
        is_lost = session is not None and session.incarnation == incarnation and session.state is SessionState.LOST
        if session is None or not is_lost or session.task.type != "worker" or self.min_workers:
            return []
        session.state = SessionState.DONE
        return [*self._changed(), *self._end_of_work()]

    def stream_ended(self, task: str, stream: int, now: float) -> list[Action]:
        """The stream of a session is gone: the connection may be, or the process."""
        session = self.tasks[task]
        if session.stream != stream or not session.open:
            return []
        session.stream, session.broken_at = 0, now
        if self._config.session_grace_s and (self.stopping is None or session.task.type == "ps"):
            return []  # the last checkpoint needs what a ps has in memory
        return self._lose(session, now, "its connection broke without a goodbye")

    def nobody_there(self, incarnation: Incarnation, now: float) -> list[Action]:
        """Its address refuses connections: the process is gone, unless the session has come back meanwhile."""
        if not self.is_away(incarnation):
            return []
        session = self.tasks[incarnation.task]
        return self._lose(session, now, "its connection broke without a goodbye, and nothing listens at its address")

    def excuse(self, seconds: float, now: float) -> None:
        """The chief was away for that long: it is nobody's silence. No event was after ``now``."""
        for session in self.tasks.values():
            session.heard_at = min(session.heard_at + seconds, now)
            session.broken_at = session.broken_at and min(session.broken_at + seconds, now)
            session.lost_at = min(session.lost_at + seconds, now)

    def tick(self, now: float) -> list[Action]:
        config = self._config
        actions = self._lose_silent(now)
        if self.stopping is not None:
            return actions
        if not self.ready and now > self._start_deadline and self.anybody_waits:
            missing = ", ".join(self.waiting_for)
            actions += self.stop(
                1,
                f"the cluster did not come up within {config.start_timeout_s:.0f} s (start_timeout_s); still missing: "
                f"{missing}",
            )
        is_start = self._starts_cold and now <= self._start_deadline  # all had left: they come as to a new job
        away_too_long = {
            task: session
            for task, session in self.tasks.items()
            if session.state is SessionState.LOST and now - session.lost_at > config.worker_timeout_s
        }
        # The first that was lost may have cost the others.
        for task in sorted(away_too_long, key=lambda each: self.tasks[each].lost_at):
            if self.ready and not is_start and task in self.required and not self._goes_on:
                actions += self._give_up(away_too_long[task], now)
        for task, session in away_too_long.items():
            if not session.given_up and self.was_added(task):
                session.given_up = True
                actions += self._end_of_work()
        if self.ready and self.all_known:  # a chief that restarts after the last goodbye, or loss, hears none any more
            actions += self._end_of_ring() or self._end_of_work()
        return actions

    # Rules

    def _lose_silent(self, now: float) -> list[Action]:
        config = self._config
        actions: list[Action] = []
        for session in self.tasks.values():
            silent_s = now - session.heard_at
            is_awaited = session.state is SessionState.AWAITED
            patience_s, grace_s = map(session.heartbeats.patience_s, (config.session_timeout_s, config.session_grace_s))
            if is_awaited:
                patience_s = config.session_timeout_s * AWAITED_TIMEOUTS
            if (session.open or is_awaited) and silent_s > patience_s:
                actions += self._lose(session, now, f"it was silent for {silent_s:.1f} s")
            elif session.open and not session.stream and (broken_s := now - session.broken_at) > grace_s:
                why = f"its connection broke without a goodbye {broken_s:.1f} s ago and it did not reconnect"
                actions += self._lose(session, now, why)
        return actions

    def _give_up(self, session: Session, now: float) -> list[Action]:
        others = [s for s in self._workers if s is not session]
        if session.task.type == "worker" and others and all(s.state is SessionState.DONE for s in others):
            return self.stop(0, f"every worker but {session.task} has finished the work")
        how_long = f"{now - session.lost_at:.0f} s ago"
        way_out = "worker_timeout_s; one that takes longer to start needs a larger STRATAGEM_WORKER_TIMEOUT_S"
        reason = f"{session.task} was lost {how_long} and did not return ({way_out})"
        return self.stop(1, reason + (self.first_failure_words or (session.lost_why and f"; {session.lost_why}")))

    @property
    def first_failure_words(self) -> str:
        return f"; first failure: {self.first_failure}" if self.first_failure else ""

    def _end_of_work(self) -> list[Action]:
        workers = [s for s in self._workers if not ((self.min_workers and s.state is SessionState.LOST) or s.joining)]
        if workers and all(s.state is SessionState.DONE for s in workers):
            return self.stop(0, "every worker has finished")
        return []

    def stop(self, exit_code: int, reason: str) -> list[Action]:
        """Ends the job; the first reason counts."""
        if self.stopping is not None:
            return []
        self.stopping = StopJob(exit_code, reason)
        return [self.stopping]

    def _changed(self) -> list[Action]:
        if not self.ready and not self.waiting_for:
            self.ready = True
        return [Announce()]

    def _lose(self, session: Session, now: float, why: str, exit_code: int = EXIT_FAILED) -> list[Action]:
        session.state, session.lost_at, session.lost_why = SessionState.LOST, now, why
        session.given_up = self.is_dismissed(session)
        reason = f"{session.incarnation} is lost: {why}"
        actions: list[Action] = [Dismiss(session.incarnation, session.stream, reason)]
        if session.task.type == "ps":
            for incarnation in list(self.pending_fences):
                actions += self.fence_acknowledged(incarnation, session.incarnation)
        return [*actions, *self._fence(session), *self._changed(), *self._end_of_ring(exit_code)]

    def _end_of_ring(self, exit_code: int = EXIT_FAILED) -> list[Action]:
        """Who is started again comes as a newcomer, and a ring that has too few ranks can take in none. A ring that was
        told to end, by the ``exit_code`` of its last rank, has not failed."""
        if not (self.ready and self.min_workers) or self._goes_on:
            return []
        if exit_code == EXIT_PREEMPTED:
            code, why = EXIT_PREEMPTED, "its workers were told to end"
        else:
            code, why = EXIT_FAILED, f"fewer than --min-workers {self.min_workers} are left; start the job again"
        return self._end_of_work() or self.stop(code, why + self.first_failure_words)

    def _fence(self, session: Session) -> list[Action]:
        """Only workers change what a ps holds, so only workers are fenced."""
        if session.task.type != "worker" or self.stopping is not None:
            return []
        incarnation = session.incarnation
        self.fenced[incarnation.task] = max(self.fenced.get(incarnation.task, 0), incarnation.number)
        self.pending_fences[incarnation] = set(self.servers)
        if not self.pending_fences[incarnation]:
            del self.pending_fences[incarnation]
            return [Release(incarnation)]
        return [Fence(incarnation, tuple(sorted(self.pending_fences[incarnation])))]

    def fence_acknowledged(self, incarnation: Incarnation, server: Incarnation) -> list[Action]:
        """A ps refuses ``incarnation`` from now on, or is lost itself."""
        servers = self.pending_fences.get(incarnation)
        if servers is None:
            return []
        servers.discard(server)
        if servers:
            return []
        del self.pending_fences[incarnation]
        return [Release(incarnation)]
