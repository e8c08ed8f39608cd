"""Asks a chief and the tasks of its job what they do, once or repeatedly without blocking; also asks for the cluster,
for a task that knows only its chief."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import grpc

from stratagem.checkpoint.ended import take_end
from stratagem.cluster.config import EvaluatorConfig, WorkerConfig
from stratagem.cluster.identity import CHIEF
from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import TaskPlacement, placement_from_environment
from stratagem.errors import ClusterSpecError, ClusterTimeoutError, PeerUnavailableError
from stratagem.rpc.channels import asking, connect
from stratagem.rpc.chief_address import FILE_NAME, NOWHERE, ChiefAddress
from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc, observer_pb2, observer_pb2_grpc
from stratagem.rpc.security import OPEN, Security, security_of
from stratagem.rpc.session import LOOK_S, SILENCE_S
from stratagem.rpc.status_view import StatusView, from_reply

logger = logging.getLogger(__name__)
_Reply = TypeVar("_Reply")
ASK_S = 5.0
AGAIN_S = 0.5
INTERVAL_S = 0.5
TIMEOUT_S = 2.0


def chief_from_environment(named: str | None, otherwise: str = "") -> str:
    """The chief's address: the one that is named, else that of the environment, else ``otherwise``; a ClusterSpecError
    when nobody names it."""
    if named:
        ChiefAddress(named)
        return named
    if (placement := placement_from_environment(os.environ)) is not None:
        return placement.cluster.chief_address
    if found := os.environ.get("STRATAGEM_CHIEF") or otherwise:
        return found
    raise ClusterSpecError(
        'which job? Name its chief, host:port (--chief, STRATAGEM_CHIEF, sg.status_widget("host:port")), or its '
        "cluster (--cluster FILE, TF_CONFIG)"
    )


def fetch_status(address: str, timeout_s: float, security: Security = OPEN) -> StatusView:
    """Asks the chief at ``address``, which may be whatever ``--chief`` takes. IdentityError: TLS does not come about,
    or the chief does not know us. PeerUnavailableError: it does not answer within ``timeout_s`` seconds, and none that
    stands by has taken over."""
    request = chief_pb2.GetStatusRequest(measures=True)
    return from_reply(_ask_chief(address, security, lambda stub: stub.GetStatus(request, timeout=timeout_s)))


def _ask_chief(address: str, security: Security, ask: Callable[[chief_pb2_grpc.ChiefStub], _Reply]) -> _Reply:
    """Asks each that ``address`` may mean, until one answers."""
    candidates, failures = ChiefAddress(address).candidates, []
    if candidates == [NOWHERE] != [address]:
        raise PeerUnavailableError(
            f"{address} does not hold the address of a chief: expected {FILE_NAME} in a chief's --state-dir"
        )
    for each in candidates:
        try:
            with asking(each, CHIEF, security, f"the chief at {each}") as channel:
                return ask(chief_pb2_grpc.ChiefStub(channel))
        except PeerUnavailableError as error:
            failures.append(str(error))
    raise PeerUnavailableError("; ".join(failures))


def ask_to_scale(address: str, num_workers: int, num_ps: int, timeout_s: float, security: Security = OPEN) -> None:
    """Says to the chief how many workers and ps there are to be; 0: as many as there are. ConfigurationError: the job
    cannot have another number. PeerUnavailableError: no answer within ``timeout_s`` seconds."""
    request = chief_pb2.ScaleRequest(num_workers=num_workers, num_ps=num_ps)
    _ask_chief(address, security, lambda stub: stub.Scale(request, timeout=timeout_s))


def fetch_stack(address: str, task: str, timeout_s: float, security: Security = OPEN) -> tuple[str, ...]:
    """The stacks of the threads of a worker or ps, one text per thread, and its last collectives and commits.
    IdentityError: TLS does not come about. PeerUnavailableError: it does not answer within ``timeout_s`` seconds."""
    with asking(address, task, security, f"{task} at {address}") as channel:
        reply = observer_pb2_grpc.ObserverStub(channel).GetStack(observer_pb2.GetStackRequest(), timeout=timeout_s)
    flight = "\n".join(["last collectives and commits", *(f"  {line}" for line in reply.flight)])
    return (*reply.threads, *([flight] if reply.flight else []))


def ask_for_cluster(config: WorkerConfig | EvaluatorConfig) -> TaskPlacement:
    """The cluster that the chief at ``config.chief`` coordinates, and this task's place in it; the log says once that
    it waits. ClusterTimeoutError: it did not answer within ``start_timeout_s``. IdentityError: TLS does not come about,
    or the chief does not know us. JobStoppedError: the job is over for this task."""
    security = security_of(config)
    began = time.monotonic()
    deadline, quiet_until = began + config.start_timeout_s, began + SILENCE_S
    while True:
        try:
            status = fetch_status(config.chief, min(ASK_S, config.start_timeout_s), security)
        except PeerUnavailableError as error:
            is_long = time.monotonic() > began + LOOK_S
            if is_long and (end := take_end(config.checkpoint_dir, config.task)) is not None:
                raise end from None
            if time.monotonic() > deadline:
                raise ClusterTimeoutError(
                    f"{config.task} got no cluster from its chief within {config.start_timeout_s:.0f} s: {error}. "
                    "Start the chief first, or check the address in --chief or --cluster"
                ) from None
            if time.monotonic() > quiet_until:
                logger.info("Waiting for the chief: %s", error)
                quiet_until = deadline
            time.sleep(AGAIN_S)
        else:
            return placement_of(config, status)


def placement_of(config: WorkerConfig | EvaluatorConfig, status: StatusView) -> TaskPlacement:
    """The cluster of a status page; a worker that joins a running job may be beyond those it began with.

    The others stand in it to be counted: where they are, the chief tells when they join. They count as workers of this
    host (LOCAL_RANK, and so the GPU); a cluster over several hosts with several GPUs each is to be written down.
    """
    task = TaskId.parse(config.task)
    num_workers = sum(each.task.startswith("worker:") for each in status.tasks)
    somewhere = f"{config.bind.rpartition(':')[0]}:0"
    workers = [somewhere] * num_workers
    if task.type == "worker":
        workers += [somewhere] * (task.index + 1 - len(workers))
        workers[task.index] = config.bind
    ps = [somewhere] * status.num_ps
    chief = ChiefAddress(config.chief).current
    return TaskPlacement(ClusterSpec(chief=(chief,), worker=tuple(workers), ps=tuple(ps)), task)


class StatusPoller:
    """Newest status of a job; a chief that does not answer leaves the last one standing."""

    def __init__(self, address: str, security: Security = OPEN) -> None:
        self.latest: StatusView | None = None
        self._address, self._security = address, security
        self._connect()
        self._call: Future[chief_pb2.GetStatusReply] | None = None
        self._asked_at = float("-inf")

    def step(self, now: float) -> bool:
        """Takes an answer that has come, and asks again when it is time; whether there is a new status."""
        new = False
        if self._call is not None and self._call.done():
            call, self._call = self._call, None
            new = self._take(call.result)
        if self._call is None and now >= self._asked_at + INTERVAL_S:
            self._asked_at = now
            self._call = self._begin()
        return new

    def ask(self, timeout_s: float) -> bool:
        """Asks and waits at most ``timeout_s`` seconds; whether there is a new status."""
        return self._take(self._question(timeout_s))

    def _question(self, timeout_s: float) -> Callable[[], chief_pb2.GetStatusReply]:
        return partial(self._stub.GetStatus, chief_pb2.GetStatusRequest(measures=True), timeout=timeout_s)

    def _begin(self) -> Future[chief_pb2.GetStatusReply] | None:
        """None: this process gets no thread now. Its own, as gRPC's close() waits for ever where gRPC got none."""
        call: Future[chief_pb2.GetStatusReply] = Future()
        question = self._question(TIMEOUT_S)

        def ask() -> None:
            try:
                call.set_result(question())
            except Exception as error:
                call.set_exception(error)

        try:
            threading.Thread(target=ask, name="status", daemon=True).start()
        except RuntimeError:
            return None
        return call

    def _take(self, answer: Callable[[], chief_pb2.GetStatusReply]) -> bool:
        try:
            self.latest = from_reply(answer())
        except grpc.RpcError:
            if self._security.certificates() != self._certificates:  # a channel keeps the one it was made with
                self.move(self._address)
            return False
        return True

    def move(self, address: str) -> None:
        self._call = None  # may not have reached the channel yet, which tells it nothing of use then
        self._channel.close()
        self._address = address
        self._connect()

    def _connect(self) -> None:
        self._certificates = self._security.certificates()
        self._channel = connect(self._address, CHIEF, self._security)
        self._stub = chief_pb2_grpc.ChiefStub(self._channel)

    def close(self) -> None:
        self._channel.close()
