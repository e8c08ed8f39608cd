"""The processes of a run: carries out the supervisor's actions, and reports events to it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Sequence

from stratagem.chief.journal.journal import NAME, exit_code_of, replay
from stratagem.cluster.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from stratagem.cluster.task import TaskId
from stratagem.errors import ConfigurationError, StratagemError
from stratagem.launch.actions import Action, Finish, Kill, Renew, Say, Signal, Start, describe_exit, precedence_of
from stratagem.launch.chaos.events import STANDBY
from stratagem.launch.chaos.injector import ChaosInjector
from stratagem.launch.output import OutputRouter
from stratagem.launch.plan import Launch, RunFolders, most_processes
from stratagem.launch.preloaded import ForkServer
from stratagem.launch.processes import LineReader, OwnChild, Stream, TaskProcess, num_killed_for_memory
from stratagem.launch.signals import heard
from stratagem.launch.status import StatusPoller
from stratagem.launch.streams import LastingStream
from stratagem.launch.summary import read_report
from stratagem.launch.supervisor import Phase, Supervisor
from stratagem.rpc.security import Security
from stratagem.rpc.status_view import StatusView

TICK_S = 0.2
DRAIN_S = 1.0
FOLLOW_S = 5.0
"""Seconds that the end of who failed because of another may lie unread, for that one's to be read first."""
LAST_QUESTION_S = 0.5
_LISTENING = re.compile(r"\blistening on (\S+:[1-9]\d*)\b")
_UNSET = "127.0.0.1:0"

LaunchFor = Callable[[TaskId, str], Launch]
"""How to start a task, given the chief's address (port 0 before it is known)."""


@dataclasses.dataclass(eq=False, repr=False)
class LocalCluster:
    """Runs the loop until the supervisor says that the job is over."""

    supervisor: Supervisor
    launch_for: LaunchFor
    output: OutputRouter
    on_status: Callable[[StatusView, float], None]
    signals_fd: int
    """Where signals come, as :func:`~stratagem.launch.signals.signal_pipe` gives it."""
    security: Security
    folders: RunFolders
    preload: bool
    """Whether a process that has loaded torch forks into the tasks of a cluster."""
    chaos: ChaosInjector | None
    streams: Sequence[LastingStream]
    """What the output goes to."""

    def __post_init__(self) -> None:
        self.chief_address = _UNSET
        self.chief = TaskId("chief", 0)
        """The process that serves as chief, or did last."""
        self.takeovers = 0
        """By one that stood by."""
        self.lived_s: dict[TaskId, float] = {}
        """Of each task, how long its last process ran."""
        self.failure_tail: list[str] = []
        self._processes: dict[TaskId, TaskProcess] = {}
        self._ended_at: dict[TaskId, float] = {}
        self._seen_off: set[TaskId] = set()
        self._said: set[str] = set()
        self._poller: StatusPoller | None = None
        self._exit_code: int | None = None
        self._num_killed_for_memory = num_killed_for_memory()
        self._tick_s = TICK_S
        self._fork_server: ForkServer | None = None
        self._waits_for_fork_server: TaskId | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.signals_fd, selectors.EVENT_READ)

    @property
    def status(self) -> StatusView | None:
        return self._poller.latest if self._poller is not None else None

    def run(self) -> int:
        """Starts the job and stays until every process has ended; returns the exit code."""
        try:
            self._do(self.supervisor.begin(time.monotonic()))
            while self._exit_code is None:
                self._wait()
                self._look(time.monotonic())
            return self._exit_code
        finally:
            self._clear()

    def _wait(self) -> None:
        for key, _ in self._selector.select(self._tick_s):
            if key.fd == self.signals_fd:
                for signum in heard(self.signals_fd):
                    self._do(self.supervisor.interrupted(signum, time.monotonic()))
            elif self._fork_server is not None and key.fd == self._fork_server.fd:
                self._hear_fork_server(self._fork_server)
            else:
                task, stream, reader = key.data
                self._read(task, stream, reader)

    def _look(self, now: float) -> None:
        for task in self._ended(now):
            self._exited(task, now)
        if any(isinstance(stream.error, BrokenPipeError) for stream in self.streams):  # what SIGPIPE does, in order
            self._do(self.supervisor.interrupted(signal.SIGHUP, now))
        self._do(self.supervisor.ticked(now))
        if self._poller is not None and self._poller.step(now):
            self.supervisor.answered(now)
            self._new_status(now)
        if self.chaos is not None and self.supervisor.phase is Phase.RUNNING:
            self._tick_s = min(TICK_S, self.chaos.tick(now, self.status, self._by_role()))
        elif self.chaos is not None:
            self.chaos.let_go(self._by_role())

    def _by_role(self) -> dict[TaskId, TaskProcess]:
        """The processes; the one that serves as chief is chief:0."""
        roles = {self.chief: TaskId("chief", 0), TaskId("chief", 1 - self.chief.index): STANDBY}
        return {roles.get(task, task): process for task, process in self._processes.items()}

    def _read(self, task: TaskId, stream: Stream, reader: LineReader) -> None:
        for line in reader.read():
            self.output.line(task, stream, line)
            if task.type == "chief" and (found := _LISTENING.search(line)):
                self._chief_listens(task, found.group(1))
        if reader.at_end and reader.fd in self._selector.get_map():
            self._selector.unregister(reader.fd)

    def _chief_listens(self, task: TaskId, address: str) -> None:
        if self._poller is None:
            self._poller = StatusPoller(address, security=self.security)
        elif address != self.chief_address:
            self._poller.move(address)
        if task != self.chief:
            self.takeovers += 1
            self.output.say(f"{task} is the chief now")
        self.chief, self.chief_address = task, address
        if self.chaos is not None:
            self.chaos.chief_listens(address)
        can_start = self._fork_server is None or not self._fork_server.is_loading
        if not can_start:
            self._waits_for_fork_server = task
        self._do(self.supervisor.listening(task, can_start=can_start))

    def _hear_fork_server(self, server: ForkServer) -> None:
        server.receive()
        if server.is_lost:
            self._selector.unregister(server.fd)
        if not server.is_loading and self._waits_for_fork_server is not None:
            task, self._waits_for_fork_server = self._waits_for_fork_server, None
            self._do(self.supervisor.listening(task))

    def _ended(self, now: float) -> list[TaskId]:
        """Tasks whose process has ended and whose last lines are here; workers first, servers lose them by it, and
        last who failed because of another: while a worker runs, or its lines are not here, that may be the one."""
        found = []
        for task, process in self._processes.items():
            if process.reap():
                since = self._ended_at.setdefault(task, now)
                if all(reader.at_end for reader in process.streams.values()) or now - since >= DRAIN_S:
                    found.append(task)
        followers = {task for task in found if self._follows(task)}
        open_ends = self._processes.keys() - set(found)
        if self.supervisor.phase is Phase.RUNNING and not open_ends.isdisjoint(self.supervisor.workers):
            found = [task for task in found if task not in followers or now - self._ended_at[task] >= FOLLOW_S]
        return sorted(found, key=lambda task: (task in followers, precedence_of(task.type), task.index))

    def _follows(self, task: TaskId) -> bool:
        """Whether a task may have failed because of another: the chief stops the job, with all, because of a worker."""
        code = self._processes[task].returncode
        if code is None or code <= 0 or code == EXIT_PREEMPTED:
            return False
        return task.type not in ("worker", "evaluator") or bool(read_report(self.folders.report(task)).get("follows"))

    def _exited(self, task: TaskId, now: float) -> None:
        process = self._processes.pop(task)
        self.lived_s[task] = now - process.started_at
        del self._ended_at[task]
        for reader in process.streams.values():
            if not reader.at_end:
                self._selector.unregister(reader.fd)
        process.close()
        self.output.ended(task)
        code = process.returncode
        assert code is not None
        if task.type == "worker" and self._poller is not None and self._poller.ask(LAST_QUESTION_S):
            self._new_status(now, gone=process)
            if code == EXIT_DONE and self._owes_goodbye(process):
                code = EXIT_FAILED
                self.output.say(f"{task} exited with code 0 in the middle of its script, which counts as a failure")
        failure_before, num_lost = self.supervisor.failure, len(self.supervisor.lost)
        was_renewing = self.supervisor.phase is Phase.RENEWING
        if self.folders.resume_mark.exists():
            self.supervisor.resumes = True
        chief = process if task == self.chief else self._processes.get(self.chief)
        if chief is not None and (chief.returncode == EXIT_FAILED or self._was_preempted(chief)):
            self.supervisor.broken()
        report = read_report(self.folders.report(task))
        # The chief may know of a step by the next batch only; and who stood still before its first is no broken script.
        if report.get("has_stepped") or report.get("was_fenced"):
            self.supervisor.stepped([task])
        if task == self.chief and code == EXIT_DONE:
            self._note_goodbyes(now)
        elif code == -signal.SIGKILL and task in self._seen_off:
            code = EXIT_DONE
            self.output.say(f"{task} was killed after its goodbye to the chief; its work was done")
        want_of_memory = []
        was_killed = code == -signal.SIGKILL and not process.was_told_to_die
        if was_killed and num_killed_for_memory() > self._num_killed_for_memory:
            self._num_killed_for_memory += 1  # several tasks may have been killed before the first is seen
            want_of_memory = [
                f"memory was used up when {task} was killed: the kernel killed for it (dmesg says whom). All tasks "
                "share what this machine or its control group has: give them more, or use several machines"
            ]
            self.output.say(want_of_memory[0])
        actions = self.supervisor.exited(task, code, now)
        ended = f"{task} ended ({describe_exit(code)})"
        restarts_left = self.supervisor.policy.max_restarts - self.supervisor.num_restarts
        if self.supervisor.phase is Phase.RENEWING and not was_renewing:
            self.output.say(f"{ended}; restarting the job, {restarts_left} restarts left")
        elif Start(task) in actions and not was_renewing:
            self.output.say(f"{ended}; restarting it, {restarts_left} restarts left")
        if len(self.supervisor.lost) > num_lost:
            workers_left = len(self.supervisor.workers) - num_lost - 1
            self.output.say(f"{ended}; the ring continues with {workers_left} workers")
        if self.supervisor.failure is not None and self.supervisor.failure is not failure_before:
            self.failure_tail = [*self.output.tail(self.supervisor.failure.task), *want_of_memory]
            self.output.say(f"{ended}: {self.supervisor.failure.reason}")
        self._do(actions)

    def _was_preempted(self, chief: TaskProcess) -> bool:
        """Whether the whole job was, by its chief: one that was told to end alone ends with 143, too."""
        with contextlib.suppress(ConfigurationError):
            return chief.returncode == EXIT_PREEMPTED == exit_code_of(str(self.folders.journal))
        return False

    def _note_goodbyes(self, now: float) -> None:
        """Who had said goodbye to a chief that has ended the job well, by its journal. A ring with ``min_workers`` has
        lost the other workers: the chief goes with the last loss, and no answer tells of that."""
        with contextlib.suppress(ConfigurationError):
            self._seen_off = set(map(TaskId.parse, replay(self.folders.journal / NAME).done))
            if self.supervisor.policy.min_workers:
                self.supervisor.away(
                    self.supervisor.running.intersection(self.supervisor.workers) - self._seen_off, now
                )

    def _owes_goodbye(self, process: TaskProcess) -> bool:
        """Whether its chief still counts on a worker, which says goodbye when its script is over, whatever the end."""
        assert self.status is not None
        known = [task for task in self.status.tasks if (task.task, task.pid) == (str(process.task), process.pid)]
        return not self.status.stop_reason and any(task.state in ("live", "lost") for task in known)

    def _new_status(self, now: float, gone: TaskProcess | None = None) -> None:
        assert self._poller is not None and self._poller.latest is not None
        status = self._poller.latest
        pids = {process.task: process.pid for process in [*self._processes.values(), *([gone] if gone else [])]}
        told = {TaskId.parse(state.task): state for state in status.tasks}
        ours = {task: state for task, state in told.items() if pids.get(task) == state.pid}
        if status.ready:
            self.supervisor.was_complete = True
        if status.stop_reason and not any(state.state == "done" for state in status.tasks):
            self.supervisor.broken()
        self.supervisor.stepped([task for task, state in ours.items() if state.step > 0])
        lost = [task for task, state in ours.items() if state.state == "lost" and task.type != "evaluator"]
        self.supervisor.away(lost, now)
        if status.lead and status.ready:  # before that, whoever joined first leads
            self.output.lead = TaskId.parse(status.lead)
        self._start_wanted(status)
        self.on_status(status, now)

    def _start_wanted(self, status: StatusView) -> None:
        """Starts the tasks that the chief wants, and that are not there."""
        ps = max(status.wanted_ps, status.num_ps) if status.wanted_ps else 0  # one is needed until others have its rows
        away = [each.task for each in status.tasks if each.state in ("lost", "done") and not status.stop_reason]
        absent = [task for task in map(TaskId.parse, away) if task.type == "ps"]  # a worker that is done has done all
        absent += [TaskId.parse(each.task) for each in status.tasks if each.state == "waiting" and each.pid]
        for kind, wanted in (("worker", status.wanted_workers), ("ps", ps)):
            there = self.supervisor.running | self.supervisor.exits.keys() - self.supervisor.dismissed
            most = most_processes() - sum(task.type in {"worker", "ps"} - {kind} for task in there)
            starting = self.supervisor.want(kind, min(wanted, most), absent) if wanted else []
            if starting:
                names = ", ".join(str(start.task) for start in starting)
                few = f", but this host takes at most {most}" if wanted > most else ""
                self.output.say(f"starting {names}: the target is {wanted}{few}")
            self._do(starting)

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(task):
                    try:
                        self._start(task)
                    except OSError as error:  # no memory, too many processes or open files; Python or a log is not ours
                        what = (
                            f": {error.filename}" if error.filename else "; `ulimit -a` shows the limits of this shell"
                        )
                        raise StratagemError(f"{task} cannot be started: {error.strerror}{what}") from None
                case Signal(task, signum):
                    if task.type == "chief":  # SIGTERM tells it to leave a job that goes on, or while it loads to end
                        signum = signal.SIGTERM if self._poller is None else signal.SIGINT
                    self._processes[task].send(signum)
                case Kill(task, reason):
                    if reason:
                        self.output.say(f"{task} {reason}")
                    self._processes[task].kill()
                case Say(line):
                    if line not in self._said:
                        self._said.add(line)
                        self.output.say(line)
                case Renew():
                    self._renew()
                case Finish(exit_code):
                    self._exit_code = exit_code

    def _renew(self) -> None:
        """The next chief is another one, at another address; the books of the last one are forgotten, as all workers
        begin anew at what they themselves have saved."""
        shutil.rmtree(self.folders.journal)
        self.folders.journal.mkdir()
        self.chief_address, self.chief = _UNSET, TaskId("chief", 0)
        if self._poller is not None:
            self._poller.close()
            self._poller = None

    def _start(self, task: TaskId) -> None:
        self.folders.report(task).unlink(missing_ok=True)  # of its life before
        launch = self.launch_for(task, self.chief_address)
        if task.type == "chief" and self.preload and self._fork_server is None:  # both load at the same time
            self._fork_server = ForkServer(launch.environ)
            self._selector.register(self._fork_server.fd, selectors.EVENT_READ)
        server = self._fork_server if task.type != "chief" else None  # which needs no torch
        process = TaskProcess(task, launch, server.start if server is not None else OwnChild)
        self._processes[task] = process
        for stream, reader in process.streams.items():
            self._selector.register(reader.fd, selectors.EVENT_READ, (task, stream, reader))

    def _clear(self) -> None:
        """Whatever happened above: no process and no descriptor is left."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
            process.close()
        if self._fork_server is not None:
            self._fork_server.close()
        if self._poller is not None:
            self._poller.close()
        self._selector.close()
