"""Who is in the cluster: questions about the sessions as they are."""

from __future__ import annotations

from stratagem.chief.journal.history import JobHistory
from stratagem.chief.membership.session import Session, SessionState, StopJob
from stratagem.cluster.config import ChiefConfig
from stratagem.cluster.task import Incarnation, TaskId
from stratagem.errors import ConfigurationError, FencedError

MAX_PS = 1024


class Roster:
    """The sessions of all tasks that may be in the cluster. ``Sessions`` changes them."""

    def __init__(self, config: ChiefConfig, history: JobHistory) -> None:
        num_workers, num_ps, min_workers = config.num_workers, history.num_ps, config.min_workers
        names = [TaskId("worker", i) for i in range(num_workers)] + [TaskId("ps", i) for i in range(num_ps)]
        self.required = [str(task) for task in names]
        """Tasks that the cluster waits for."""
        # An evaluator may join every job (TensorFlow's TF_CONFIG names it to itself alone); nobody waits for it.
        self.tasks = {str(task): Session(task) for task in (*names, TaskId("evaluator", 0))}
        """By name: workers, ps and the evaluator, each by index."""
        for task, each in self.tasks.items():
            each.served = history.prepared.get(task, 0)
        came = [TaskId.parse(task) for task in history.live]  # more than are wanted by now, perhaps
        # Without parameter servers or a min_workers, a ring is made of num_workers.
        most = config.max_workers if num_ps or min_workers else 0
        self._max_workers = max(most, *(task.index + 1 for task in came if task.type == "worker"), 0)
        self.wanted_workers = 0
        """Workers that there are to be; 0: nobody has said."""
        self.num_ps, self.routing_epoch = num_ps, history.num_routings
        """Parameter servers among which the variables are shared out, and how often their number has changed."""
        if min_workers and (num_ps or min_workers > num_workers):
            raise ConfigurationError(
                f"min_workers says with how many of its {num_workers} workers a ring goes on: expected at most as "
                f"many, and no ps, got min_workers {min_workers} and {num_ps} ps"
            )
        self.min_workers = min_workers
        """Workers of a ring with which the others go on; 0: with none missing."""
        self.stopping: StopJob | None = None
        """How the job ends; None: it goes on."""
        self.pending_fences: dict[Incarnation, set[Incarnation]] = {}
        """By fenced incarnation: the ps that have not refused it yet."""

    def _session(self, task: str) -> Session | None:
        """The session of a task; one beyond those that the cluster waits for gets one when it first comes."""
        limits = {"worker": self._max_workers, "ps": MAX_PS if self.num_ps else 0}
        if task in self.tasks or (kind := task.partition(":")[0]) not in limits:
            return self.tasks.get(task)
        newcomer = TaskId.parse(task)
        if newcomer.index >= limits[kind]:
            return None
        order = {kind: number for number, kind in enumerate(("worker", "ps", "evaluator"))}
        tasks = {**self.tasks, task: Session(newcomer)}.values()
        ordered = sorted(tasks, key=lambda session: (order[session.task.type], session.task.index))
        self.tasks = {str(session.task): session for session in ordered}
        return self.tasks[task]

    @property
    def known(self) -> list[Session]:
        """Every task that belongs to the job: an evaluator that never came is none."""
        return [s for name, s in self.tasks.items() if name in self.required or s.state is not SessionState.WAITING]

    def live(self, task_type: str) -> list[Incarnation]:
        """Live tasks of a type, by index."""
        of_type = (s for s in self.tasks.values() if s.task.type == task_type and self.serves(s))
        return [s.incarnation for s in of_type if s.state is SessionState.LIVE]

    def serves(self, session: Session) -> bool:
        """Whether this is no ps beyond those among which the variables are shared out."""
        return session.task.type != "ps" or session.task.index < self.num_ps

    def is_dismissed(self, session: Session) -> bool:
        """Whether this is a worker beyond those that there are to be."""
        return session.task.type == "worker" and 0 < self.wanted_workers <= session.task.index

    def is_wanted_again(self, session: Session) -> bool:
        """Whether this is a worker that has ended since it was not wanted, and is by now."""
        return session.state is SessionState.DONE and session.left and not self.is_dismissed(session)

    @property
    def ps(self) -> list[Session]:
        """Those that serve, by index."""
        return [s for s in self.tasks.values() if s.task.type == "ps" and self.serves(s)]

    @property
    def servers(self) -> list[Incarnation]:
        """ps with an open session, announced or not."""
        return [s.incarnation for s in self.ps if s.open]

    @property
    def waiting_for(self) -> list[str]:
        """Tasks that the cluster cannot start without and that are not there; when all are, the ps not prepared yet."""
        here = (SessionState.LIVE, SessionState.DONE)
        missing = [task for task in self.required if self.tasks[task].state not in here]
        return [task for task in missing if not self.tasks[task].open] or missing

    @property
    def never_came(self) -> bool:
        """Whether a task that the cluster cannot start without has not joined since this chief started."""
        return any(self.tasks[task].state is SessionState.WAITING for task in self.required)

    @property
    def absent_servers(self) -> list[str]:
        """ps that were in the cluster and are away without a goodbye, or are back and not prepared."""
        away = (SessionState.LOST, SessionState.JOINED)
        return [str(s.task) for s in self.ps if s.state in away or (s.open and not s.stream)]

    @property
    def evaluator_is_back_soon(self) -> bool:
        """Whether the evaluator broke off without a word: who is started again has the last checkpoint to do."""
        session = self.tasks["evaluator:0"]
        return session.state is SessionState.LOST and bool(session.broken_at)

    @property
    def unfinished(self) -> list[str]:
        """Away without a goodbye: workers, whose work the others have done, and ps that waited to be taken in."""
        lost = [session for session in self.tasks.values() if session.state is SessionState.LOST]
        return [str(each.task) for each in lost if each.task.type == "worker" or not self.serves(each)]

    def is_live(self, incarnation: Incarnation) -> bool:
        """Whether this incarnation is, and is known to all."""
        session = self.tasks.get(incarnation.task)
        return session is not None and session.incarnation == incarnation and session.state is SessionState.LIVE

    def is_away(self, incarnation: Incarnation) -> bool:
        """Whether its connection has broken off, and it may still come back."""
        session = self.tasks[incarnation.task]
        return session.incarnation == incarnation and session.open and not session.stream

    @property
    def anybody_waits(self) -> bool:
        """Whether a task takes part. Scripts of ``torch.distributed`` never do, and others not at once."""
        return any(session.open for session in self.tasks.values())

    @property
    def all_known(self) -> bool:
        """Nobody is awaited any more, and every ps that is here has been prepared (after a restart of the chief)."""
        is_awaited = any(s.state is SessionState.AWAITED for s in self.tasks.values())
        return not is_awaited and not any(s.state is SessionState.JOINED for s in self.ps)

    @property
    def lead(self) -> str:
        """The lowest worker that lives or has finished its script; empty when there is none.

        One that has finished has done what only the lead may do (the export, say): nobody does it again after it. Who
        was taken in by a ring comes after those that were there before, so that nobody takes its place in a step.
        """
        here = (SessionState.LIVE, SessionState.DONE)
        able = [s for s in self.tasks.values() if s.task.type == "worker" and s.state in here and not s.joining]
        return str(min(able, key=lambda s: (s.taken_in, s.task.index)).task) if able else ""

    @property
    def generation(self) -> int:
        """Of a ring that goes on without workers that are lost, and takes others in: grows with each, whatever chief
        counts; else 0.

        Incarnations only grow; each joins, is taken in and is lost at most once, in this order: no summand shrinks.
        """
        workers = (s for s in self.tasks.values() if s.task.type == "worker")
        told = (2 * s.number + (1 if s.state is SessionState.LOST else -s.joining) for s in workers)
        return sum(told) if self.min_workers else 0

    @property
    def _goes_on(self) -> bool:
        """Whether a ring does without the workers that are lost."""
        here = (SessionState.LIVE, SessionState.AWAITED, SessionState.DONE)
        return 0 < self.min_workers <= sum(s.state in here and not s.joining for s in self._workers)

    @property
    def work_is_done(self) -> bool:
        """Nobody trains any more: what a ps lacks from now on is computed by no worker again."""
        return self.stopping is not None and self.stopping.exit_code == 0

    @property
    def newcomers(self) -> list[Session]:
        """ps that wait to serve; not those that did, and have not ended yet."""
        here = [s for s in self.tasks.values() if s.task.type == "ps" and s.open and s.stream]
        return [s for s in here if not self.serves(s) and not s.leaving and s.served != s.number]

    @property
    def leaving(self) -> list[Session]:
        """ps that were told to end, and have not yet."""
        return [s for s in self.tasks.values() if s.task.type == "ps" and s.open and s.leaving]

    @property
    def _workers(self) -> list[Session]:
        return [s for s in self.known if s.task.type == "worker" and not s.given_up]

    def was_added(self, task: str) -> bool:
        """Whether this is a worker beyond those that the cluster started with, or a ps that waits to be taken in."""
        return task not in self.required and self.tasks[task].task.type in ("worker", "ps")

    def check(self, incarnation: Incarnation) -> None:
        """Whether ``incarnation`` may speak. FencedError: it is over, or unknown."""
        session = self.tasks.get(incarnation.task)
        if (
            session is None
            or session.number != incarnation.number
            or not (session.open or session.state is SessionState.AWAITED)
        ):
            newest = "unknown" if session is None else f"incarnation {session.number}, {session.state.value}"
            units = "its units go to others; " if incarnation.task.startswith("worker:") else ""
            raise FencedError(
                f"{incarnation} is not a live member of the cluster (the chief has: {newest}); {units}"
                "end the process and restart it to rejoin."
            )
