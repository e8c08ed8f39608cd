"""Who is in the cluster: joins, heartbeats, losses, fences, readiness, the end of the job. Pure: ``now`` is passed in.

Events go in through the methods, actions come out as their return value; the owner carries them out. A task is

    waiting -> joined (ps only: being prepared) -> live -> done (said goodbye with 0)
                                                    |----> lost -> joined / live with a new incarnation
    awaited (it was live when the chief died; it may resume) -> joined / live / lost

An incarnation that is over is *fenced*: every ps with an open session has to acknowledge that it refuses it, or be
lost itself, before the units of that incarnation go to anybody else. A ps learns all earlier fences while it is
``joined``, before any worker hears of its address.
"""

from __future__ import annotations

from collections.abc import Mapping

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
from stratagem.cluster.incarnation import Incarnation
from stratagem.cluster.task import TaskId
from stratagem.errors import ConfigurationError, FencedError

AWAITED_TIMEOUTS = 3
"""Session timeouts for which a chief that was started again awaits each task: it may be at another address now."""
HOPELESS = (2, 42)
"""Exit codes after which a restart of the task helps nobody."""


class Sessions:
    """Membership of the cluster.

    Args:
        num_workers: workers that the cluster waits for.
        max_workers: workers that it takes; those beyond num_workers may come at any time, or never. Without parameter
            servers none may: a ring is made of num_workers.
        num_ps: parameter servers that the cluster waits for.
        session_timeout_s: seconds of silence after which a session is lost.
        session_grace_s: seconds in which a session whose connection broke off may come back as if nothing had been.
        worker_timeout_s: seconds a lost worker or ps may stay away before the job stops.
        start_timeout_s: seconds for the whole cluster to come up.
        now: seconds on a monotonic clock.
        newest_incarnation: the last one issued, by earlier lives of the chief.
        awaited: incarnations that were live when an earlier chief died.
        done: tasks that had said goodbye.
        fenced: newest incarnation to refuse, of each task.
        ready: whether the cluster had been complete.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        max_workers: int = 0,
        num_ps: int,
        session_timeout_s: float,
        session_grace_s: float = 0.0,
        worker_timeout_s: float,
        start_timeout_s: float,
        now: float,
        newest_incarnation: int = 0,
        awaited: Mapping[str, int] | None = None,
        done: Mapping[str, int] | None = None,
        fenced: Mapping[str, int] | None = None,
        ready: bool = False,
    ) -> None:
        names = [TaskId("worker", i) for i in range(num_workers)] + [TaskId("ps", i) for i in range(num_ps)]
        self.required = [str(task) for task in names]
        # An evaluator may join every job (TensorFlow's TF_CONFIG names it to itself alone); nobody waits for it.
        self.tasks = {str(task): Session(task) for task in (*names, TaskId("evaluator", 0))}
        self._max_workers = max_workers if num_ps else 0
        self.ready = ready
        self.founders: frozenset[Incarnation] = frozenset()
        self.stopping: StopJob | None = None
        self.first_failure = ""
        self.fenced = dict(fenced or {})
        self._newest_incarnation = newest_incarnation
        self._session_timeout_s = session_timeout_s
        self._session_grace_s = session_grace_s
        self._worker_timeout_s = worker_timeout_s
        self._start_deadline = now + start_timeout_s
        self._start_timeout_s = start_timeout_s
        self._pending: dict[Incarnation, set[Incarnation]] = {}
        for task, incarnation in {**(awaited or {}), **(done or {})}.items():
            if (session := self._session(task)) is not None:
                session.state = SessionState.DONE if task in (done or {}) else SessionState.AWAITED
                session.number, session.heard_at, session.lost_at = incarnation, now, now
        for task, session in self.tasks.items():
            if ready and session.state is SessionState.WAITING and task in self.required:
                session.state, session.lost_at, session.number = SessionState.LOST, now, self.fenced.get(task, 0)

    def _session(self, task: str) -> Session | None:
        """The session of a task; a worker beyond those that the cluster waits for gets one when it first comes."""
        if task in self.tasks or not task.startswith("worker:"):
            return self.tasks.get(task)
        newcomer = TaskId.parse(task)
        if newcomer.index >= self._max_workers:
            return None
        order = {kind: number for number, kind in enumerate(("worker", "ps", "evaluator"))}
        tasks = {**self.tasks, task: Session(newcomer)}.values()
        ordered = sorted(tasks, key=lambda session: (order[session.task.type], session.task.index))
        self.tasks = {str(session.task): session for session in ordered}
        return self.tasks[task]

    # What is

    @property
    def known(self) -> list[Session]:
        """Every task that belongs to the job: an evaluator that never came is none."""
        return [s for name, s in self.tasks.items() if name in self.required or s.state is not SessionState.WAITING]

    def live(self, task_type: str) -> list[Session]:
        """Live tasks of a type, by index."""
        return [s for s in self.tasks.values() if s.task.type == task_type and s.state is SessionState.LIVE]

    @property
    def servers(self) -> list[Incarnation]:
        """ps with an open session, announced or not."""
        return [s.incarnation for s in self.tasks.values() if s.task.type == "ps" and s.open]

    @property
    def waiting_for(self) -> list[str]:
        """Tasks that the cluster cannot start without and that are not there; when all are, the ps not prepared yet."""
        missing = [
            task for task in self.required if self.tasks[task].state not in (SessionState.LIVE, SessionState.DONE)
        ]
        return [task for task in missing if not self.tasks[task].open] or missing

    @property
    def never_came(self) -> bool:
        """Whether a task that the cluster cannot start without has not joined in this life of the chief."""
        return any(self.tasks[task].state is SessionState.WAITING for task in self.required)

    @property
    def absent_servers(self) -> list[str]:
        """ps that were in the cluster and are away without a goodbye, or are back and not prepared."""
        servers = [s for s in self.tasks.values() if s.task.type == "ps"]
        away = (SessionState.LOST, SessionState.JOINED)
        return [str(s.task) for s in servers if s.state in away or (s.open and not s.stream)]

    @property
    def unfinished(self) -> list[str]:
        """Workers that are away and have not finished: the others have done their work."""
        lost = [session for session in self.tasks.values() if session.state is SessionState.LOST]
        return [str(session.task) for session in lost if session.task.type == "worker"]

    def is_live(self, incarnation: Incarnation) -> bool:
        """Whether this life is, and is known to all."""
        session = self.tasks.get(incarnation.task)
        return session is not None and session.incarnation == incarnation and session.state is SessionState.LIVE

    @property
    def all_known(self) -> bool:
        """Nobody is awaited any more, and every ps that is here has been prepared (after a restart of the chief)."""
        return not any(
            s.state is SessionState.AWAITED or (s.task.type == "ps" and s.state is SessionState.JOINED)
            for s in self.tasks.values()
        )

    @property
    def lead(self) -> str:
        """The lowest worker that lives or has finished its script; empty when there is none.

        One that has finished has done what only the lead may do (the export, say): nobody does it again after it.
        """
        here = (SessionState.LIVE, SessionState.DONE)
        return next((str(s.task) for s in self.tasks.values() if s.task.type == "worker" and s.state in here), "")

    @property
    def routing_epoch(self) -> int:
        """Grows whenever a ps is announced with a new incarnation: incarnations only grow."""
        return max((s.number for s in self.live("ps")), default=0)

    @property
    def deserted(self) -> bool:
        """No session is open."""
        return not any(s.open for s in self.tasks.values())

    @property
    def pending_fences(self) -> frozenset[Incarnation]:
        """Lives that some ps has not refused yet."""
        return frozenset(self._pending)

    def was_added(self, task: str) -> bool:
        """Whether this is a worker beyond those that the cluster started with."""
        return task not in self.required and self.tasks[task].task.type == "worker"

    def check(self, incarnation: Incarnation) -> None:
        """Whether ``incarnation`` may speak.

        Raises:
            FencedError: it is over, or unknown.
        """
        session = self.tasks.get(incarnation.task)
        if (
            session is None
            or session.number != incarnation.number
            or not (session.open or session.state is SessionState.AWAITED)
        ):
            newest = "unknown" if session is None else f"incarnation {session.number}, {session.state.value}"
            raise FencedError(
                f"{incarnation} is not a live member of the cluster (the chief has: {newest}). Its units go to others; "
                "end the process and start it again to rejoin."
            )

    # What happens

    def join(
        self, task: str, address: str, pid: int, resume_incarnation: int, stream: int, now: float
    ) -> tuple[Session, list[Action]]:
        """A task opened a session.

        Returns:
            Its session, with the incarnation it has from now on, and what follows.

        Raises:
            ConfigurationError: the cluster has no such task.
            FencedError: the incarnation it wants to resume is over.
        """
        session = self._session(task)
        if session is None:
            known = ", ".join(self.tasks)
            fixed = "" if "ps:0" in self.tasks else ". A ring is as large as it started: no worker is added to it"
            raise ConfigurationError(f"{task!r} is not a task of this cluster; expected one of {known}{fixed}")
        incarnation = Incarnation(task, resume_incarnation)
        actions: list[Action] = []
        if resume_incarnation:
            self.check(incarnation)
            if session.stream:
                actions.append(Dismiss(incarnation, session.stream, ""))
            was_open = session.open
        else:
            if session.open or session.state is SessionState.AWAITED:
                actions += self._lose(session, now, "a new process joined in its place")
            self._newest_incarnation += 1
            session.number, session.resumed, was_open = self._newest_incarnation, False, False
        session.address, session.pid, session.stream, session.heard_at = address, pid, stream, now
        session.given_up = False
        if not was_open:
            session.resumed = bool(resume_incarnation)
            session.state = SessionState.JOINED if session.task.type == "ps" else SessionState.LIVE
        actions += (
            [Prepare(session.incarnation)] if session.state is SessionState.JOINED and not was_open else self._changed()
        )
        return session, actions

    def prepared(self, incarnation: Incarnation) -> list[Action]:
        """A ps knows all fences and has what it needs: workers may use it."""
        session = self.tasks[incarnation.task]
        if session.incarnation != incarnation or session.state is not SessionState.JOINED:
            return []
        session.state = SessionState.LIVE
        return self._changed()

    def heartbeat(self, task: str, stream: int, now: float) -> None:
        """A task is alive."""
        session = self.tasks[task]
        if session.stream == stream and session.open:
            session.heard_at = now

    def goodbye(self, task: str, stream: int, exit_code: int, message: str, now: float) -> list[Action]:
        """A task ends by its own will."""
        session = self.tasks[task]
        if session.stream != stream or not session.open:
            return []
        if exit_code == 0 and (session.task.type != "ps" or self.stopping is not None):
            session.state = SessionState.DONE
            return [*self._fence(session), *self._changed(), *self._end_of_work()]
        why = f"it ended with exit code {exit_code}" + (f": {message}" if message else "")
        was_added = self.was_added(task)  # the job goes on without it
        if exit_code and self.stopping is None and not self.first_failure and not was_added:
            self.first_failure = f"{task}: {message or why}"
        actions = self._lose(session, now, why)
        if exit_code in HOPELESS and not was_added:
            actions += self._stop(1, f"{task} failed and a restart would not help: {message or why}")
        return actions

    def stream_ended(self, task: str, stream: int, now: float) -> list[Action]:
        """The stream of a session is gone: the connection may be, or the process."""
        session = self.tasks[task]
        if session.stream != stream or not session.open:
            return []
        session.stream, session.broken_at = 0, now
        if self._session_grace_s and self.stopping is None:
            return []
        return self._lose(session, now, "its session broke off without a goodbye")

    def nobody_there(self, incarnation: Incarnation, now: float) -> list[Action]:
        """Its address refuses connections: the process is gone, unless the session has come back meanwhile."""
        session = self.tasks[incarnation.task]
        if session.incarnation != incarnation or session.stream or not session.open:
            return []
        return self._lose(session, now, "its session broke off without a goodbye, and nothing listens at its address")

    def fence_acknowledged(self, incarnation: Incarnation, server: Incarnation) -> list[Action]:
        """A ps refuses ``incarnation`` from now on."""
        return self._acknowledge(incarnation, server)

    def tick(self, now: float) -> list[Action]:
        """Time passed."""
        actions: list[Action] = []
        for session in self.tasks.values():
            silent_s = now - session.heard_at
            is_awaited = session.state is SessionState.AWAITED
            patience_s = self._session_timeout_s * (AWAITED_TIMEOUTS if is_awaited else 1)
            if (session.open or is_awaited) and silent_s > patience_s:
                actions += self._lose(session, now, f"nothing was heard from it for {silent_s:.1f} s")
            elif session.open and not session.stream and (broken_s := now - session.broken_at) > self._session_grace_s:
                why = f"its session broke off without a goodbye {broken_s:.1f} s ago and did not come back"
                actions += self._lose(session, now, why)
        if self.stopping is not None:
            return actions
        if not self.ready and now > self._start_deadline:
            missing = ", ".join(self.waiting_for)
            actions += self._stop(
                1, f"the cluster did not come up within {self._start_timeout_s:.0f} s; still missing: {missing}"
            )
        for task in self.required:
            session = self.tasks[task]
            if self.ready and session.state is SessionState.LOST and now - session.lost_at > self._worker_timeout_s:
                actions += self._give_up(session, now)
        for task, session in self.tasks.items():
            away = session.state is SessionState.LOST and now - session.lost_at > self._worker_timeout_s
            if away and not session.given_up and self.was_added(task):
                session.given_up = True
                actions += self._end_of_work()
        if self.ready and self.all_known:  # a chief that restarts after the last goodbye hears none any more
            actions += self._end_of_work()
        return actions

    def stop(self, exit_code: int, reason: str) -> list[Action]:
        """Ends the job."""
        return self._stop(exit_code, reason)

    # Rules

    @property
    def _workers(self) -> list[Session]:
        return [s for s in self.tasks.values() if s.task.type == "worker" and not s.given_up]

    def _give_up(self, session: Session, now: float) -> list[Action]:
        others = [s for s in self._workers if s is not session]
        if session.task.type == "worker" and others and all(s.state is SessionState.DONE for s in others):
            return self._stop(0, f"every worker but {session.task} has finished the work")
        why = f"; first failure: {self.first_failure}" if self.first_failure else ""
        return self._stop(1, f"{session.task} was lost {now - session.lost_at:.0f} s ago and did not come back{why}")

    def _end_of_work(self) -> list[Action]:
        if all(s.state is SessionState.DONE for s in self._workers):
            return self._stop(0, "every worker has finished")
        return []

    def _stop(self, exit_code: int, reason: str) -> list[Action]:
        if self.stopping is not None:
            return []
        self.stopping = StopJob(exit_code, reason)
        return [self.stopping]

    def _changed(self) -> list[Action]:
        if not self.ready and not self.waiting_for:
            self.ready = True
            self.founders = frozenset(s.incarnation for s in self.live("worker"))
        return [Announce()]

    def _lose(self, session: Session, now: float, why: str) -> list[Action]:
        session.state, session.lost_at = SessionState.LOST, now
        reason = f"{session.incarnation} is lost: {why}"
        actions: list[Action] = [Dismiss(session.incarnation, session.stream, reason)]
        if session.task.type == "ps":
            for incarnation in list(self._pending):
                actions += self._acknowledge(incarnation, session.incarnation)
        return [*actions, *self._fence(session), *self._changed()]

    def _fence(self, session: Session) -> list[Action]:
        """Only workers change what a ps holds, so only workers are fenced."""
        if session.task.type != "worker" or self.stopping is not None:
            return []
        incarnation = session.incarnation
        self.fenced[incarnation.task] = max(self.fenced.get(incarnation.task, 0), incarnation.number)
        self._pending[incarnation] = set(self.servers)
        if not self._pending[incarnation]:
            del self._pending[incarnation]
            return [Release(incarnation)]
        return [Fence(incarnation, tuple(sorted(self._pending[incarnation])))]

    def _acknowledge(self, incarnation: Incarnation, server: Incarnation) -> list[Action]:
        servers = self._pending.get(incarnation)
        if servers is None:
            return []
        servers.discard(server)
        if servers:
            return []
        del self._pending[incarnation]
        return [Release(incarnation)]
