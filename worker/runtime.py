"""A worker in a cluster: its session, its server, its connections. What a strategy holds while a script trains."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

from stratagem.checkpoint.ended import note_left, take_end
from stratagem.cluster.config import ChiefConfig, ServerConfig, WorkerConfig
from stratagem.cluster.exit_codes import EXIT_PREEMPTED
from stratagem.cluster.membership import Membership
from stratagem.cluster.sources import Layer, environment_layer, resolve
from stratagem.cluster.spec import ClusterSpec, split_address
from stratagem.cluster.task import TaskId
from stratagem.cluster.units import Lease
from stratagem.errors import ConfigurationError, FencedError, JobStoppedError, StratagemError
from stratagem.measuring import measures
from stratagem.measuring.flight import FLIGHT
from stratagem.measuring.process_use import ProcessUse
from stratagem.rpc.binding import advertised_address
from stratagem.rpc.host_id import own_host_id
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.observer import OBSERVER, observed
from stratagem.rpc.security import security_of
from stratagem.rpc.server import RunningServer, serve
from stratagem.rpc.session import SessionClient
from stratagem.worker.chief_client import IN_TIME, ChiefClient
from stratagem.worker.interrupts import preemption
from stratagem.worker.leases import LeaseClient
from stratagem.worker.push.ps_client import PsClient, Rerouted
from stratagem.worker.ring.ring_member import RingMember
from stratagem.worker.ring.ring_service import RingService
from stratagem.worker.servicer import SERVICE, WorkerServicer
from stratagem.worker.step_meter import StepMeter

logger = logging.getLogger(__name__)

_ENDED = f"this worker has ended: {IN_TIME}"
_JOINED = "STRATAGEM_JOINED"
"""Tells the programs that this process starts whose place it has: they inherit what says who it is, too."""
_newest: WorkerRuntime | None = None


def active_runtime() -> WorkerRuntime | None:
    """The runtime of this process, if a strategy has joined a cluster."""
    return _newest


def told_otherwise(cluster: ClusterSpec, membership: Membership) -> str:
    """How many workers a task was told of, where its chief was told of others and their number is not to change.

    No error: tasks of a job that is deployed anew come one after the other.
    """
    known = sum(TaskId.parse(member.task).type == "worker" for member in membership.members)
    if membership.wanted_workers or membership.min_workers or cluster.num_workers == known:
        return ""
    return (
        f"was told of another number of workers ({cluster.num_workers}) than its chief ({known}): replicas and input "
        "pipelines are counted by the former. Give every task the same cluster (TF_CONFIG, --cluster)"
    )


class ChiefProcess:
    """The chief of a cluster that names none, as a child of worker 0, at worker 0's address (docs/protocol.md 13).

    It ends when the job is done, when :meth:`wait` runs out of time, or when this process dies: its standard input is a
    pipe from here, and the end of that pipe ends the chief.
    """

    def __init__(self, config: ChiefConfig) -> None:
        python = (sys.executable, "-P", "-m", "stratagem.chief")
        command = [*python, "--config-json", config.model_dump_json(), "--until-eof"]
        self._config = config
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        logger.info("the cluster names no chief: started one at %s (pid %d)", config.bind, self._process.pid)

    def failure(self) -> ConfigurationError | None:
        """That it has ended, which it does not before the job; None: it runs."""
        if (code := self._process.poll()) is None:
            return None
        return ConfigurationError(f"the chief that this worker started ended with exit code {code}: see its words")

    def wait(self, exit_code: int) -> None:
        """Waits for the chief to end by itself: for as long as the other workers need it, or if this one has failed
        (``exit_code``) for a second; then ends it."""
        assert self._process.stdin is not None
        try:
            self._process.wait(None if exit_code == 0 else 1.0)
        except subprocess.TimeoutExpired:
            if exit_code == EXIT_PREEMPTED:
                self._process.terminate()
            self._process.stdin.close()  # it tells the others who has failed
            self._process.wait()
        finally:
            self._process.stdin.close()
            note_left(self._config.checkpoint_dir, self._config.task)  # what it noted as it left is for nobody


class WorkerRuntime:
    """Joins the cluster, waits until it is complete, and connects to every ps. Raises ConfigurationError: this process
    has joined as this task already; it would end its own session."""

    def __init__(self, config: WorkerConfig, cluster: ClusterSpec) -> None:
        global _newest
        if hasattr(multiprocessing.current_process(), "_inheriting"):  # as multiprocessing itself looks
            raise ConfigurationError(
                "a process that multiprocessing has spawned (of a DataLoader, say) goes through the script to have its "
                f'functions, and would join the cluster in the place of {config.task}: put if __name__ == "__main__": '
                "before what makes the strategy and trains"
            )
        if _newest is not None and _newest.config.task == config.task and _newest.config.chief == config.chief:
            raise ConfigurationError(
                f"this process has joined the cluster as {config.task} already, with the strategy that it made first: "
                "make one strategy, and use that everywhere (inside its scope sg.get_strategy() returns it)"
            )
        holder, _, place = os.environ.get(_JOINED, "").partition(" ")
        if (
            place == f"{config.task} {config.chief}"
            and int(holder) != os.getpid()
            and os.path.exists(f"/proc/{holder}")
        ):
            raise ConfigurationError(
                f"the training script of {config.task} (process {holder}) has started this one, which would take its "
                "place in the cluster: start it with `stratagem run`, for a job of its own, or to train alone without "
                "TF_CONFIG and RANK in its environment"
            )
        self.config: WorkerConfig = config
        self.cluster = cluster
        self.task = TaskId.parse(config.task)
        self.meter = StepMeter()
        self.bytes = BytesMeter()
        self._process = ProcessUse()
        FLIGHT.values, FLIGHT.num_steps = self.meter.values, lambda: self.meter.steps
        self.leases: weakref.WeakValueDictionary[int, LeaseClient] = weakref.WeakValueDictionary()
        """By ordinal of the dataset: those that the script has, since one that nobody goes through holds nothing."""
        self.clients: list[PsClient] = []
        """One a ps; others stand in this list after :meth:`reroute`."""
        security = security_of(config)
        self._chief_process = self._spawn_chief()
        ring_service = RingService(
            split_address(config.bind)[0],
            lambda: self.session.membership,
            self.bytes,
            security,
            max_lanes_per_peer=config.max_lanes_per_peer,
            max_inbox_bytes=config.max_inbox_bytes,
        )
        self._server: RunningServer = serve(
            config,
            observed(SERVICE, WorkerServicer(ring_service)),
            services=[SERVICE.full_name, OBSERVER.full_name],
            security=security,
        )
        self.session = SessionClient(
            config.chief,
            config.task,
            advertised_address(config.advertise, self._server.address),
            progress=self.meter.progress,
            measures=self._measures,
            held=self._held,
            chief_timeout_s=config.peer_timeout_s,
            security=security,
        )
        self.session.waits_for = "the task chief:0" if cluster.chief else "worker:0 starts it"
        self.chief = ChiefClient(self.session, config.peer_timeout_s)
        self.ring = RingMember(ring_service, self.session, self.bytes, self.chief.take_in)
        """This worker's part in a ring, once a strategy forms one."""
        self.meter.peer = self.ring.waiting
        self.session.on_stop = _end
        self._ended = False
        self._assigns: bool | None = None
        _newest = self
        os.environ[_JOINED] = f"{os.getpid()} {config.task} {config.chief}"
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        config = self.config
        try:
            self.session.start(config.start_timeout_s, self._no_chief)
        except ConfigurationError as refused:  # it is not wanted any more, and was killed as it left
            raise take_end(config.checkpoint_dir, config.task) or refused from None
        note_left(config.checkpoint_dir, config.task)  # by a process before this one, which is needed again
        self.session.wait_ready(config.start_timeout_s)
        if bool(self.cluster.num_ps) != bool(self.session.membership.num_ps):
            raise ConfigurationError(
                f"{self.task} was told of {self.cluster.num_ps} parameter servers, but its chief of "
                f"{self.session.membership.num_ps}. Give every task the same cluster (TF_CONFIG, --cluster)"
            )
        while True:
            self.reroute()
            try:
                for client in self.clients:
                    client.connect()
                break
            except Rerouted:
                continue
        self._server.set_serving(True)
        logger.info("Cluster is ready: %d workers, %d ps", self.cluster.num_workers, len(self.clients))
        if difference := told_otherwise(self.cluster, self.session.membership):
            logger.warning("%s %s", self.task, difference)

    def _no_chief(self) -> StratagemError | None:
        """Why there will be none; None: one may come yet."""
        failure = None if self._chief_process is None else self._chief_process.failure()
        return failure or take_end(self.config.checkpoint_dir, self.config.task)

    def reroute(self) -> None:
        """The clients are those of the ps that there are now, and not connected."""
        for client in self.clients:
            client.close("there is another number of parameter servers")
        self.clients[:] = [
            PsClient(self.session, index, self.bytes, self.config, lambda: len(self.clients), self._report)
            for index in range(self.session.membership.num_ps)
        ]

    def is_lead(self) -> bool:
        """Whether this is the lowest live worker."""
        return self.session.membership.lead == self.config.task

    def gives_values(self) -> bool:
        """Whether a ps without values takes this worker's: the lead's; where that has finished, those of the lowest one
        that lives."""
        membership = self.session.membership
        lead = membership.member(membership.lead)
        if self.is_lead() or lead is None or lead.live:
            return self.is_lead()
        live = [TaskId.parse(each.task) for each in membership.members if each.live]
        return min((each.index for each in live if each.type == "worker"), default=-1) == self.task.index

    def may_assign(self) -> bool:
        """Whether states that this process loads go to the ps: those of the lead do, unless :meth:`assigning` says."""
        return self.is_lead() if self._assigns is None else self._assigns

    def is_loading(self) -> bool:
        """Whether all workers load, and none trains meanwhile: inside :meth:`assigning`."""
        return self._assigns is not None

    @contextlib.contextmanager
    def assigning(self, does: bool) -> Iterator[None]:
        """Inside, what is loaded goes to the ps, or changes this process's copy only, whoever becomes the lead."""
        self._assigns = does
        try:
            yield
        finally:
            self._assigns = None

    def dismissal(self) -> JobStoppedError | None:
        """Where the job is to go on with fewer workers, and without this one: how its script ends."""
        wanted = self.session.membership.wanted_workers
        if not 0 < wanted <= self.task.index:
            return None
        return JobStoppedError(
            f"the job continues with {wanted} worker{'s' * (wanted > 1)}, and without {self.task}", 0
        )

    def goodbye(self, exit_code: int, message: str = "", follows: bool = False) -> None:
        """Ends this worker's part of the job; ``follows``: another task had failed. Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        if exit_code == 0:
            self.ring.leave()
        for client in self.clients:
            client.close(_ENDED)
        self.ring.close(_ENDED)
        self.session.goodbye(exit_code, message, follows)
        self.close(exit_code)

    def close(self, exit_code: int = 1) -> None:
        global _newest
        self._ended = True
        for client in self.clients:
            client.close(_ENDED)
        self.ring.close(_ENDED)
        self.session.close()
        self._server.stop(0.2)
        if self._chief_process is not None:
            self._chief_process.wait(exit_code)
            self._chief_process = None
        if _newest is self:
            _newest = None
            os.environ.pop(_JOINED, None)

    def stop_reason(self) -> StratagemError | None:
        """Why the session ended, if it did by the chief's will; None when it did not or the job was simply done."""
        reason = self.session.stopped
        return None if isinstance(reason, JobStoppedError) and reason.exit_code == 0 else reason

    def _measures(self) -> dict[str, Any]:
        values = self.meter.values() | self.bytes.values() | self._process.values()
        return {"values": measures.bounded(values), "notes": {**self.bytes.notes, "host": own_host_id()}}

    def _held(self) -> list[Lease]:
        return [held for lease in self.leases.values() for held in lease.held()]

    def _report(self) -> None:
        for lease in self.leases.values():
            lease.report()

    def _spawn_chief(self) -> ChiefProcess | None:
        if self.cluster.chief or self.task != TaskId("worker", 0):
            return None
        place: dict[str, Any] = {
            "task": "chief:0",
            "bind": self.cluster.chief_address,
            "advertise": "",
            "chief": "",
            "num_workers": self.cluster.num_workers,
            "num_ps": self.cluster.num_ps,
        }
        shared = {name: getattr(self.config, name) for name in ServerConfig.model_fields}
        layers = [Layer(f"that of {self.task}", shared | place), environment_layer(ChiefConfig, os.environ)]
        return ChiefProcess(resolve(ChiefConfig, layers).config)


def _end(reason: StratagemError) -> None:
    """The chief was told to end, and so is this worker; or the others continue without it, and a new process in its
    place may take part again."""
    if isinstance(reason, FencedError):
        preemption.end_soon(str(reason))
    elif isinstance(reason, JobStoppedError) and reason.exit_code == EXIT_PREEMPTED:
        preemption.request()
