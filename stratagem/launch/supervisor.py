"""Which task to start, signal, kill or restart, and when the job is over. A state machine: events in, actions out.

Rules: a task that dies is restarted, at most ``max_restarts`` times in all. A ring does not readmit a worker: when one
dies, the whole job restarts if its script resumes (one restart), else it has failed. With ``min_workers`` the ring
continues without the dead worker; that one restarts and joins the others if a restart is left. Exit codes 2 and 42
are never retried; exit code 1 only if the task had made a step in that life (else it is broken), and for a script alone
only if it resumes. When the workers are done, an evaluator may take any time for the last checkpoint; ps and chief as
long as the chief answers, which may be writing it, and ``shutdown_timeout_s`` more. The first failure ends the job; an
evaluator's is reported at the end. Of two chiefs the job needs one. A ps is signalled only after the chief has ended,
so the chief can take a last checkpoint and stop it; the chief of a ring after its workers, which may be saving.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections import Counter
from collections.abc import Collection, Iterable

from stratagem.cluster.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, HOPELESS
from stratagem.cluster.task import TaskId
from stratagem.launch.actions import Action, Failure, Finish, Kill, Renew, Say, Signal, Start

LATE_S = 3.0
"""What a worker that was started again may take to end, once the chief has: with goodbye said, it is about to."""
AWAY_S, PS_AWAY_S = 10.0, 30.0
"""What a task that the chief has lost may take to hear of it, and to end; a ps of which nobody has a copy."""


@dataclasses.dataclass(frozen=True)
class Policy:
    max_restarts: int = 3
    restart_workers: bool = True
    """False: a ring, which takes no worker back without a min_workers."""
    min_workers: int = 0
    """Workers with which a ring goes on, once it was complete, while others are away; 0: with all only."""
    has_copies: bool = False  # of what a ps holds
    shutdown_timeout_s: float = 25.0
    failure_timeout_s: float = 5.0
    """Seconds that the others get to end after a failure."""
    start_timeout_s: float = 120.0
    """Seconds that the chief gets to say where it listens."""


class Phase(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    """The workers are done; evaluator, ps and chief end by themselves."""
    ENDING = "ending"
    """Failed or interrupted: everyone has been told to end."""
    RENEWING = "renewing"
    """A ring is broken: when everyone has ended, the whole job is started again."""
    KILLING = "killing"
    OVER = "over"


class Supervisor:
    """The life of one local job: ``workers`` run the script; ``servers`` are chief (first), a second one, and ps."""

    def __init__(self, workers: Collection[TaskId], servers: Collection[TaskId] = (), policy: Policy | None = None):
        self.policy = policy or Policy()
        self.workers = tuple(workers)
        self.servers = tuple(servers)
        self.phase = Phase.STARTING
        self.life = 1
        """Grows when the whole job, or a script alone, begins anew; what the job counts is of one life."""
        self.restarts: Counter[TaskId] = Counter()
        self.exits: dict[TaskId, list[int]] = {task: [] for task in (*self.servers, *self.workers)}
        self.failure: Failure | None = None
        self.running: set[TaskId] = set()
        self.lost: set[TaskId] = set()
        """Workers of a ring that goes on without them."""
        self._away: dict[TaskId, float] = {}
        """Tasks that the chief calls lost, and whose process runs, stopped or in a long step: since when."""
        self._done: set[TaskId] = set()
        self.dismissed: set[TaskId] = set()
        """Tasks that are not wanted any more: they end by themselves, and however they do, it is no failure."""
        self._added: set[TaskId] = set()
        """Those that were started because more were wanted."""
        self.was_complete = False
        """Whether every task had joined the cluster in this life."""
        self._stepped: set[TaskId] = set()
        self.resumes = False
        """Whether the script goes on where it was when the whole job is started again."""
        self._is_broken = False
        """A ring with ``min_workers``, that the chief has ended: no worker is left that others could join."""
        self._interrupted_by = 0
        self._ending_signal: int = signal.SIGTERM
        self._chief_comes_last = False
        self._deadline: float | None = None
        self._late_at: float | None = None
        """When a worker that was started again too late is ended."""

    @property
    def num_restarts(self) -> int:
        return self.restarts.total()

    def begin(self, now: float) -> list[Action]:
        """Start the chief, or the lone worker."""
        if self.servers:
            self._deadline = now + self.policy.start_timeout_s
            return [self._start(self.servers[0])]
        self.phase = Phase.RUNNING
        return [self._start(task) for task in self.workers]

    def listening(self, task: TaskId, *, can_start: bool = True) -> list[Action]:
        """A task said where it listens; when it is the chief for the first time, everyone else can start, or will."""
        if self.phase is not Phase.STARTING or task != self.servers[0]:
            return []
        self._deadline = None  # which was for the chief
        if not can_start:
            return []
        self.phase = Phase.RUNNING
        return [self._start(other) for other in (*self.servers[1:], *self.workers)]

    def broken(self) -> None:
        """The chief has ended the job before its workers were done."""
        self._is_broken = self.was_complete and self.policy.min_workers > 0

    def stepped(self, tasks: Collection[TaskId]) -> None:
        """These tasks have completed a step in their present life."""
        self._stepped |= self.running & set(tasks)

    def want(self, kind: str, number: int, absent: Collection[TaskId] = ()) -> list[Start]:
        """The chief wants so many tasks of a kind while training runs, and says which of them are not there: starts
        those that are lacking. One that ended because it was not wanted may be wanted again before anybody has asked
        here, or while it ended."""
        if self.phase is not Phase.RUNNING:
            return []
        wanted = [TaskId(kind, index) for index in range(number)]
        may_start = self.dismissed.union(absent) & self._done
        starting = [task for task in wanted if task not in self.exits or task in may_start]
        gone = {task for task in self.exits if task.type == kind and task.index >= number}
        self.dismissed = self.dismissed.difference(wanted) | gone
        self._done.difference_update(starting)
        self._added.update(starting)
        new = tuple(task for task in starting if task not in self.exits)
        self.exits |= {task: [] for task in new}
        if kind == "worker":
            self.workers += new
        else:
            self.servers += new
        return [self._start(task) for task in starting]

    def exited(self, task: TaskId, code: int, now: float) -> list[Action]:
        """The process of a task has ended with ``code`` (negative: a signal)."""
        self.running.discard(task)
        self.exits[task].append(code)
        actions: list[Action] = []
        if self.phase is Phase.RENEWING and not self._is_hopeless(task, code):
            return self._renew(task, now)
        if code == EXIT_DONE and self.phase is Phase.STARTING:
            actions = self._fail(Failure(task, EXIT_FAILED, "it ended before the job had started"), now)
        elif code == EXIT_DONE or task in self.dismissed or self._had_finished(task, code):
            self._done.add(task)
            actions = self._end_late(now)
        elif self._goes_on_without(task, code):
            if self._may_come_back(task, code):
                self.restarts[task] += 1
                return [self._start(task)]
            self.lost.add(task)
        elif self._has_successor(task, code):
            pass
        elif self.phase in (Phase.STARTING, Phase.RUNNING, Phase.RENEWING):
            reason = self._why_not_again(task, code)
            if reason is None:
                self.restarts[task] += 1
                if self._is_in_ring(task) or self._is_broken:  # this life of the job ends with it
                    self.phase, self._deadline = Phase.RENEWING, now + self.policy.shutdown_timeout_s
                    return [*(self._signal_all() if task.type == "chief" else []), *self._renew(task, now)]
                self.life += not self.servers
                return [self._start(task)]
            if task.type == "evaluator" and self.phase is Phase.RUNNING and code not in HOPELESS:
                self.failure = self.failure or Failure(task, code, "training continues without it")
            else:
                actions = self._fail(Failure(task, code, reason), now)
        elif self.phase is Phase.DRAINING and task.type != "worker" and not self._why_not_again(task, code):
            self.restarts[task] += 1  # the last checkpoint needs a ps, and the chief
            return [self._start(task)]
        elif self.phase is Phase.DRAINING and self.failure is None:
            self.failure = Failure(task, code, "it failed after the workers were done")
        if self.phase is Phase.ENDING and task.type == "chief" and not actions and not self._chief_runs:
            actions = [Signal(left, self._ending_signal) for left in self._in_order() if left.type == "ps"]
        elif self.phase is Phase.ENDING and self._chief_comes_last and not self._workers_run:
            self._chief_comes_last = False
            actions = [Signal(left, self._ending_signal) for left in self._in_order() if left.type == "chief"]
        return actions + self._next(now)

    def interrupted(self, signum: int, now: float) -> list[Action]:
        """The launcher itself got SIGINT or SIGTERM: the first is forwarded, the second kills, as SIGQUIT does at once.
        SIGHUP is a SIGTERM that never kills: of a terminal that closes both its shell and the system tell, and writing
        to it fails."""
        if self._interrupted_by or self.phase is Phase.KILLING:
            return [] if signum == signal.SIGHUP else self._kill()
        self._interrupted_by = signum = signal.SIGTERM if signum == signal.SIGHUP else signum
        if signum == signal.SIGQUIT:
            return self._kill()
        deadline = now + self.policy.shutdown_timeout_s
        if self.phase is Phase.ENDING and self._deadline is not None:
            deadline = min(deadline, self._deadline)
        self.phase, self._deadline, self._ending_signal = Phase.ENDING, deadline, signum
        self._chief_comes_last = not self.policy.restart_workers and self._workers_run
        return self._signal_all() + self._next(now)

    def away(self, tasks: Iterable[TaskId], now: float) -> None:
        """The chief calls these workers and ps lost, and their processes run. None of them takes part any more."""
        self._away = {task: self._away.get(task, now) for task in tasks}
        self.stepped([task for task in self._away if task.type == "ps"])  # it joined, and ends for having stood still

    def answered(self, now: float) -> None:
        """The chief is at work: on the last checkpoint, once the workers are done."""
        if self.phase is Phase.DRAINING:
            self._deadline = now + self.policy.shutdown_timeout_s

    def ticked(self, now: float) -> list[Action]:
        if self._late_at is not None and now >= self._late_at:
            self._late_at = None
            return [Kill(task) for task in self._late()]
        for task, since in self._away.items():
            away_s = PS_AWAY_S if task.type == "ps" and not self.policy.has_copies else AWAY_S
            if now >= since + away_s and self._is_to_begin_anew(task):
                del self._away[task]
                return [Kill(task, "is lost, and its process has not ended: killing and restarting it")]
        return [] if self._deadline is None or now < self._deadline else self._too_late(now)

    def _too_late(self, now: float) -> list[Action]:
        if self.phase is Phase.STARTING:
            reason = f"it did not report its address within {self.policy.start_timeout_s:.0f} s"
            return self._fail(Failure(self.servers[0], EXIT_FAILED, reason), now)
        if self.phase is Phase.DRAINING and (late := [task for task in self._in_order() if task.type == "evaluator"]):
            self._deadline = now + self.policy.shutdown_timeout_s
            return [Say(f"{task} is still running; waiting for it, Ctrl-C ends it") for task in late]
        only_chiefs = self._chief_is_done and all(task.type == "chief" for task in self.running)
        if self.phase is Phase.RENEWING or (self.phase is Phase.DRAINING and only_chiefs):
            self._deadline = None  # a chief came to stand by when there was nobody any more to stand by for
            return [Kill(task) for task in self._in_order()]
        if self.phase is Phase.DRAINING:
            left = ", ".join(str(task) for task in self._in_order())
            reason = f"still running {self.policy.shutdown_timeout_s:.0f} s after the workers were done: {left}"
            return self._fail(Failure(self._in_order()[0], EXIT_FAILED, reason), now)
        return self._kill()

    def _is_to_begin_anew(self, task: TaskId) -> bool:
        """Whether a process that is lost has not ended by itself, and may be started again: before the chief gives the
        job up for it."""
        phases = (Phase.RUNNING, Phase.DRAINING) if task.type == "ps" else (Phase.RUNNING,)
        if self.phase not in phases or task not in self.running:
            return False
        if self._is_in_ring(task):
            return self._goes_on_without(task, -signal.SIGKILL) and self._may_come_back(task, -signal.SIGKILL)
        return self._why_not_again(task, -signal.SIGKILL) is None

    def _start(self, task: TaskId) -> Start:
        self.running.add(task)
        self._stepped.discard(task)
        self._away.pop(task, None)  # that was the one before
        return Start(task)

    def _why_not_again(self, task: TaskId, code: int) -> str | None:
        if self._is_hopeless(task, code):
            return f"exit code {code} is never retried"
        if task.type == "chief" and (not self.resumes if self._is_broken else code == EXIT_FAILED):
            return "the chief stopped the job"
        if self._chief_is_done:
            return "the chief had already ended the job"
        is_first = code == EXIT_FAILED and task not in self._stepped and not self._is_broken
        if is_first and not self._may_lack_batches(task):
            return "it failed before its first step"
        if code == EXIT_FAILED and not self.servers and not self.resumes:
            return "its script would start from scratch, as it restores nothing (sg.callbacks.BackupAndRestore does)"
        if self._is_in_ring(task) and not self.resumes:
            if self.policy.min_workers and not self.was_complete:
                return "--min-workers is for a ring that has formed; torch.distributed forms none; start the job again"
            if self.policy.min_workers:
                return f"fewer than --min-workers {self.policy.min_workers} are left; start the job again"
            lost = "a ring without --min-workers, or torch.distributed, cannot lose a worker; start the job again"
            return f"{lost} (sg.PreemptionCheckpointHandler with the CheckpointManager, or BackupAndRestore, does)"
        if self._is_in_ring(task) and self._done.intersection(self.workers):
            return "other workers of the ring have finished their script"
        if self.num_restarts >= self.policy.max_restarts:
            return f"no restarts are left (--max-restarts {self.policy.max_restarts})"
        return None

    def _may_lack_batches(self, task: TaskId) -> bool:
        """Whether a worker beside ps came when others may have taken all batches: its script has no loss to print."""
        came_later = task.type == "worker" and bool(self.restarts[task] or task in self._added)
        return came_later and self.policy.restart_workers and any(one.type == "worker" for one in self._stepped)

    def _had_finished(self, task: TaskId, code: int) -> bool:
        """Whether a worker was killed on its way out: a chief ends a job with 0 when every worker has said goodbye, or
        is lost and the others have done the work; or who came too late to be taken in."""
        may_be = task.type == "worker" or task in self._added
        is_away = task in self._away and not self.policy.min_workers
        return self._chief_is_done and (is_away or (code == -signal.SIGKILL and may_be))

    def _end_late(self, now: float) -> list[Action]:
        """Ends who was started, perhaps again, when the job was as good as over. A chief would begin another job; a
        worker would wait for a chief that has ended, unless it has said goodbye to that and is about to end by itself,
        and so would a ps that was added."""
        if not self._chief_is_done:
            return []
        late = self._late()
        self._late_at = now + LATE_S if any(task.type != "chief" for task in late) else None
        return [Kill(task) for task in late if task.type == "chief"]

    def _late(self) -> list[TaskId]:
        again = {task for task in self.restarts if task.type in ("chief", "worker")}  # others hear of it as they join
        late = self.running.intersection(((again | self._added) - self._stepped) | self._away.keys())
        return [task for task in self._in_order() if task in late]

    def _has_successor(self, task: TaskId, code: int) -> bool:
        """Whether a chief is lost, and not started again as another will do: at the end, or with no restart left."""
        is_lost = task.type == "chief" and code not in (EXIT_FAILED, *HOPELESS)
        is_last = self.phase is Phase.DRAINING or self.num_restarts >= self.policy.max_restarts
        return is_lost and (self._chief_is_done or (is_last and self._chief_runs))

    def _is_hopeless(self, task: TaskId, code: int) -> bool:
        """Whether the job ends; not by a worker that came to a ring later, and could not join: the others go on."""
        came_later = self._is_in_ring(task) and self.policy.min_workers and self.restarts[task]
        return code in HOPELESS and not came_later

    def _goes_on_without(self, task: TaskId, code: int) -> bool:
        if self._is_broken or not (self._is_in_ring(task) and self.policy.min_workers and self.was_complete):
            return False
        num_left = len(set(self.workers) - self.lost - {task})
        saves_with_all = code == EXIT_PREEMPTED and self.resumes  # else it was told to end, and ended alone
        is_over = self._is_hopeless(task, code) or saves_with_all or self.phase is not Phase.RUNNING
        return not is_over and num_left >= self.policy.min_workers

    def _may_come_back(self, task: TaskId, code: int) -> bool:
        is_broken = code in HOPELESS or (code == EXIT_FAILED and task not in self._stepped)
        is_ending = bool(self._done.intersection(self.workers))
        return not (is_broken or is_ending) and self.num_restarts < self.policy.max_restarts

    def _is_in_ring(self, task: TaskId) -> bool:
        return task.type == "worker" and not self.policy.restart_workers

    @property
    def _chief_is_done(self) -> bool:
        return any(task.type == "chief" for task in self._done)

    @property
    def _chief_runs(self) -> bool:
        return any(task.type == "chief" for task in self.running)

    @property
    def _workers_run(self) -> bool:
        return not self.running.isdisjoint(self.workers)

    def _renew(self, gone: TaskId, now: float) -> list[Action]:
        """Lets the workers end by themselves, they may be saving; then the chief; then the job begins anew."""
        if self._workers_run or (self.running and gone.type != "worker"):
            return []
        if self.running:
            self._deadline = now + min(self.policy.failure_timeout_s, self.policy.shutdown_timeout_s)
            return self._signal_all()
        self.phase, self.was_complete, self._is_broken = Phase.STARTING, False, False
        self.life += 1
        for tasks in (self._done, self.lost, self._stepped):
            tasks.clear()
        return [Renew(), *self.begin(now)]

    def _fail(self, failure: Failure, now: float) -> list[Action]:
        if self.failure is None or self.failure.task.type == "evaluator":  # which has ended no job
            self.failure = failure
        self.phase = Phase.ENDING
        self._deadline = now + min(self.policy.failure_timeout_s, self.policy.shutdown_timeout_s)
        return self._signal_all()

    def _signal_all(self) -> list[Action]:
        """Tells everyone to end, but those whose time comes later."""
        waits = {"ps": self._chief_runs, "chief": self._chief_comes_last}
        return [Signal(task, self._ending_signal) for task in self._in_order() if not waits.get(task.type)]

    def _kill(self) -> list[Action]:
        self.phase, self._deadline = Phase.KILLING, None
        return [Kill(task) for task in self._in_order()]

    def _next(self, now: float) -> list[Action]:
        if self.phase is Phase.RUNNING and self._done.issuperset(set(self.workers) - self.lost):
            self.phase, self._deadline = Phase.DRAINING, now + self.policy.shutdown_timeout_s
        if self.running or self.phase not in (Phase.DRAINING, Phase.ENDING, Phase.KILLING):
            return []
        self.phase, self._deadline = Phase.OVER, None
        return [Finish(self._exit_code())]

    def _exit_code(self) -> int:
        if self._interrupted_by:  # unless the chief could not take the last checkpoint; it takes none of a ring
            last = [codes[-1:] for task, codes in self.exits.items() if task.type == "chief"]
            return EXIT_FAILED if [EXIT_FAILED] in last and not self.policy.min_workers else 128 + self._interrupted_by
        if self.failure is None:
            return EXIT_DONE
        return self.failure.code if self.failure.code > 0 else EXIT_FAILED

    def _in_order(self) -> list[TaskId]:
        """Running tasks, workers first: who loses a server first would report that instead of the real reason."""
        others = sorted(self.servers, key=lambda task: task.type == "chief")
        return [task for task in (*self.workers, *others) if task in self.running]
