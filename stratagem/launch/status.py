"""What the chief says about the job, as plain data: for `stratagem status`, the progress display and the supervisor."""

from __future__ import annotations

import dataclasses

import grpc

from stratagem.cluster.identity import CHIEF
from stratagem.rpc.asking import asking
from stratagem.rpc.channels import connect
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc, worker_pb2, worker_pb2_grpc
from stratagem.rpc.security import OPEN, Security


@dataclasses.dataclass(frozen=True)
class TaskState:
    """One task, as the chief sees it."""

    task: str
    state: str
    """"waiting", "live", "lost" or "done"."""
    address: str = ""
    incarnation: int = 0
    pid: int = 0
    step: int = 0
    """Completed steps of a worker; applied updates of a ps."""
    clock: int = 0
    examples: int = 0
    """Examples in completed steps of this process life."""
    epoch: int = 0
    loss: float | None = None
    step_s: float = 0.0
    exposed_s: float = 0.0
    """Mean seconds of a step, and the part of it that waited for communication."""
    waiting_on: str = ""
    waiting_s: float = 0.0
    store_epoch: int = 0
    bytes_held: int = 0
    units_held: int = 0
    skipped: int = 0
    """Updates skipped because of NaN or Inf."""
    heartbeat_age_s: float = 0.0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StatusView:
    """The whole job."""

    tasks: tuple[TaskState, ...] = ()
    chief_epoch: int = 0
    ready: bool = False
    lead: str = ""
    epoch: int = 0
    units_accepted: int = 0
    units_planned: int = 0
    """Units of the newest open epoch."""
    examples: int = 0
    """Examples in accepted units since the job started."""
    checkpoint: str = ""
    updates_lost: int = 0
    waiting_for: tuple[str, ...] = ()
    stop_reason: str = ""
    restored: str = ""
    """Path of the checkpoint that the job started from."""
    updates_undone: int = 0
    """Updates of newer checkpoints that were damaged: they are computed again."""

    @property
    def workers(self) -> tuple[TaskState, ...]:
        """The workers."""
        return tuple(task for task in self.tasks if task.task.startswith("worker:"))

    @property
    def exposed(self) -> float:
        """Part of the workers' step time that waited for communication, 0 to 1."""
        step_s = sum(worker.step_s for worker in self.workers)
        return sum(worker.exposed_s for worker in self.workers) / step_s if step_s > 0 else 0.0

    @property
    def loss(self) -> float | None:
        """Newest loss of the lead, else of the first worker that has one."""
        order = sorted(self.workers, key=lambda worker: worker.task != self.lead)
        return next((worker.loss for worker in order if worker.loss is not None), None)


def from_reply(reply: chief_pb2.GetStatusReply) -> StatusView:
    """The reply of ``Chief.GetStatus`` as plain data."""
    return StatusView(
        tasks=tuple(_task(status) for status in reply.tasks),
        chief_epoch=reply.chief_epoch,
        ready=reply.ready,
        lead=reply.lead,
        epoch=reply.epoch,
        units_accepted=reply.units_accepted,
        units_planned=reply.units_planned,
        examples=reply.examples_accepted,
        checkpoint=reply.checkpoint,
        updates_lost=reply.updates_lost,
        waiting_for=tuple(reply.waiting_for),
        stop_reason=reply.stop_reason,
        restored=reply.restored,
        updates_undone=reply.updates_undone,
    )


def _task(status: chief_pb2.TaskStatus) -> TaskState:
    progress = status.progress
    return TaskState(
        task=status.info.task,
        state=status.state,
        address=status.info.address,
        incarnation=status.info.incarnation,
        pid=status.pid,
        step=progress.step,
        clock=status.clock,
        examples=progress.examples,
        epoch=progress.epoch,
        loss=progress.loss if progress.has_loss else None,
        step_s=progress.step_s,
        exposed_s=progress.exposed_s,
        waiting_on=progress.waiting_on,
        waiting_s=progress.waiting_s,
        store_epoch=progress.store_epoch,
        bytes_held=progress.bytes_held,
        units_held=status.units_held,
        skipped=progress.skipped,
        heartbeat_age_s=status.heartbeat_age_s,
        metrics=dict(progress.metrics),
    )


def fetch_status(address: str, timeout_s: float, security: Security = OPEN) -> StatusView:
    """Asks the chief at ``address``.

    Raises:
        IdentityError: TLS does not come about, or the chief does not know us.
        PeerUnavailableError: it does not answer within ``timeout_s`` seconds.
    """
    with asking(address, CHIEF, security, f"the chief at {address}") as channel:
        stub = chief_pb2_grpc.ChiefStub(channel)
        return from_reply(stub.GetStatus(chief_pb2.GetStatusRequest(), timeout=timeout_s))


def fetch_stack(address: str, task: str, timeout_s: float, security: Security = OPEN) -> tuple[str, ...]:
    """The stacks of a worker's threads, one text per thread.

    Raises:
        PeerUnavailableError: it does not answer within ``timeout_s`` seconds.
    """
    channel = connect(address, task, security)
    try:
        stub = worker_pb2_grpc.WorkerStub(channel)
        return tuple(stub.GetStack(worker_pb2.GetStackRequest(), timeout=timeout_s).threads)
    except grpc.RpcError as error:
        raise error_from_rpc(error, f"{task} at {address}") from None
    finally:
        channel.close()
