"""Protobuf messages to the chief's own words and back. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stratagem.chief import events
from stratagem.chief.counting.metric_states import Logs, MetricState, Page
from stratagem.chief.leasing.evaluations import plan_of
from stratagem.chief.leasing.lease_book import Leases
from stratagem.chief.leasing.lending import EvaluationPass, LeaseRequest, TrainingPass
from stratagem.chief.monitoring.progress import TaskProgress
from stratagem.chief.monitoring.status import JobStatus
from stratagem.chief.servers.servers import ServerDescription
from stratagem.cluster.incarnation import Incarnation
from stratagem.cluster.topic import Topic
from stratagem.cluster.units import Plan, Unit, UnitBitmap, Update
from stratagem.errors import LimitError, ProtocolError
from stratagem.rpc.generated import chief_pb2, common_pb2, ps_pb2
from stratagem.rpc.units import lease_from_proto, lease_to_proto, unit_from_proto, unit_to_proto

MAX_UNITS = 1 << 26
"""In an epoch: every ps keeps a bit for each."""
MAX_WANT = 1024
"""Units that one answer leases; who wants more asks again."""


def life_from_proto(sender: common_pb2.Sender) -> Incarnation:
    """The caller."""
    return Incarnation(sender.task, sender.incarnation)


def update_to_proto(update: Update) -> common_pb2.Update:
    """An update."""
    return common_pb2.Update(units=[unit_to_proto(unit) for unit in update.units], ordinal=update.ordinal)


def update_from_proto(update: common_pb2.Update) -> Update:
    """An update."""
    return Update(tuple(unit_from_proto(unit) for unit in update.units), update.ordinal)


def positions_to_proto(units: Mapping[tuple[int, int], UnitBitmap]) -> list[common_pb2.UnitSet]:
    """Sets of units."""
    return [common_pb2.UnitSet(dataset=d, epoch=e, bitmap=bits.to_bytes()) for (d, e), bits in sorted(units.items())]


def positions_from_proto(sets: Iterable[common_pb2.UnitSet]) -> dict[tuple[int, int], UnitBitmap]:
    """Sets of units."""
    return {(each.dataset, each.epoch): UnitBitmap(each.bitmap) for each in sets}


def description_from_proto(reply: ps_pb2.DescribeUnitsReply) -> ServerDescription:
    """What a ps has applied."""
    return ServerDescription(
        closed=positions_from_proto(reply.closed),
        open={update_from_proto(each.update): each.num_servers for each in reply.open},
        store_epoch=reply.store_epoch,
        step=reply.step,
        initialized=reply.initialized,
    )


def plan_from_proto(request: chief_pb2.OpenDatasetRequest, seed: int) -> Plan:
    """The plan a worker asks for.

    Raises:
        ProtocolError: the numbers make no plan.
        LimitError: of too many units.
    """
    try:
        plan = Plan(
            num_examples=request.num_examples,
            batch_size=request.batch_size,
            drop_last=request.drop_last,
            shuffle=request.shuffle,
            num_slices=request.num_slices,
            staleness=request.staleness,
            seed=seed,
        )
    except ValueError as error:
        raise ProtocolError(
            f"dataset {request.dataset} has no valid plan "
            f"(batch size and slices at least 1, staleness at least 0): {error}"
        ) from None
    return _checked(plan)


def _checked(plan: Plan) -> Plan:
    if plan.num_units > MAX_UNITS:
        raise LimitError(
            f"{plan.num_units:,} units in an epoch, at most {MAX_UNITS:,} are possible: take larger batches"
        )
    return plan


def leases_to_proto(leases: Leases) -> chief_pb2.NextUnitsReply:
    """The answer to a worker that asks for units."""
    granted = [lease_to_proto(lease) for lease in leases.granted]
    return chief_pb2.NextUnitsReply(leases=granted, end=leases.end, attempt=leases.attempt)


def lease_request_from_proto(request: chief_pb2.NextUnitsRequest) -> LeaseRequest:
    """What a worker reports and wants.

    Raises:
        ProtocolError: the numbers make no plan.
        LimitError: of too many units.
    """
    units_of: TrainingPass | EvaluationPass
    if request.HasField("evaluation"):
        units_of = evaluation_from_proto(request.evaluation)
        states = [MetricState(units_of.name, Unit(0, 0, each.index), each.data) for each in request.states]
    else:
        units_of = TrainingPass(request.dataset, request.epoch, request.stop or None, request.group)
        states = states_from_proto(request.states, request.dataset, request.epoch)
    return LeaseRequest(
        life_from_proto(request.sender),
        units_of,
        request.accepted,
        states,
        request.held,
        min(request.want, MAX_WANT),
        min(request.at_most, MAX_WANT),
        request.wait,
        request.leave,
        request.counts,
    )


def step_report_from_proto(request: chief_pb2.StartStepRequest) -> LeaseRequest:
    """What a worker reports that wants to start a step."""
    states = states_from_proto(request.states, request.dataset, request.epoch)
    units_of = TrainingPass(request.dataset, request.epoch)
    return LeaseRequest(life_from_proto(request.sender), units_of, request.accepted, states)


def topic_from_proto(name: chief_pb2.Topic) -> Topic:
    """The name of a topic, or what an agreement is about."""
    return Topic(name.group, name.ordinal)


def states_from_proto(states: Iterable[chief_pb2.MetricState], dataset: int, epoch: int) -> list[MetricState]:
    """What was counted on units of an epoch."""
    return [MetricState(topic_from_proto(each.topic), Unit(dataset, epoch, each.index), each.data) for each in states]


def evaluation_from_proto(evaluation: chief_pb2.EvaluationPass) -> EvaluationPass:
    """Which evaluation is meant, and how its data are cut.

    Raises:
        ProtocolError: the numbers make no plan.
        LimitError: of too many units.
    """
    name = topic_from_proto(evaluation.name)
    try:
        plan = _checked(plan_of(evaluation.num_examples, evaluation.batch_size, evaluation.drop_last))
    except ValueError as error:
        raise ProtocolError(f"{name} has no valid plan (expected a batch size of at least 1): {error}") from None
    return EvaluationPass(name, plan, evaluation.attempt)


def logs_from_proto(logs: Iterable[chief_pb2.Log]) -> Logs:
    """Named numbers."""
    return tuple((log.name, log.value) for log in logs)


def logs_to_proto(logs: Logs) -> list[chief_pb2.Log]:
    """Named numbers."""
    return [chief_pb2.Log(name=name, value=value) for name, value in logs]


def page_to_proto(page: Page) -> chief_pb2.GetMetricStatesReply:
    """Part of a topic."""
    logs = logs_to_proto(page.logs or ())
    return chief_pb2.GetMetricStatesReply(
        closed=page.logs is not None, logs=logs, states=page.states, num_left=page.num_left
    )


def request_from_proto(request: chief_pb2.SessionRequest) -> events.Request:
    """What a task says in its session.

    Raises:
        ProtocolError: an empty message.
    """
    if request.HasField("join"):
        join = request.join
        held = tuple(lease_from_proto(lease) for lease in join.held)
        return events.Join(join.task, join.address, join.pid, join.resume_incarnation, held, join.store_epoch)
    if request.HasField("heartbeat"):
        progress = request.heartbeat.progress
        return events.Heartbeat(progress.SerializeToString(), progress.waiting_step)
    if request.HasField("goodbye"):
        return events.Goodbye(request.goodbye.exit_code, request.goodbye.message)
    raise ProtocolError("expected Join, Heartbeat or Goodbye in a session, got an empty message")


def event_to_proto(event: events.Event) -> chief_pb2.SessionEvent:
    """What the chief says in a session."""
    if isinstance(event, events.Welcome):
        welcome = chief_pb2.Welcome(
            incarnation=event.incarnation,
            chief_epoch=event.chief_epoch,
            heartbeat_interval_s=event.heartbeat_interval_s,
            session_timeout_s=event.session_timeout_s,
            job_started=event.job_started,
        )
        return chief_pb2.SessionEvent(welcome=welcome)
    if isinstance(event, events.Membership):
        membership = chief_pb2.Membership(
            ready=event.ready,
            tasks=[_member_to_proto(member) for member in event.members],
            lead=event.lead,
            routing_epoch=event.routing_epoch,
        )
        return chief_pb2.SessionEvent(membership=membership)
    if isinstance(event, events.Fenced):
        return chief_pb2.SessionEvent(fenced=chief_pb2.Fenced(reason=event.reason))
    return chief_pb2.SessionEvent(stop=chief_pb2.Stop(exit_code=event.exit_code, reason=event.reason))


def _member_to_proto(member: events.Member) -> common_pb2.TaskInfo:
    return common_pb2.TaskInfo(
        task=member.task, address=member.address, incarnation=member.incarnation, live=member.live
    )


def progress_from_proto(data: bytes) -> TaskProgress:
    """What a task said in a heartbeat."""
    said = chief_pb2.Progress.FromString(data)
    return TaskProgress(
        step=said.step,
        examples=said.examples,
        loss=said.loss if said.has_loss else None,
        step_s=said.step_s,
        exposed_s=said.exposed_s,
        waiting_s=said.waiting_s,
        store_epoch=said.store_epoch,
        bytes_held=said.bytes_held,
        skipped=said.skipped,
        reported=dict(said.metrics),
    )


def status_to_proto(status: JobStatus) -> chief_pb2.GetStatusReply:
    """The status page."""
    tasks = []
    for task in status.tasks:
        progress = chief_pb2.Progress.FromString(task.progress)
        if task.waiting_on:
            progress.waiting_on, progress.waiting_s = task.waiting_on, task.waiting_s or progress.waiting_s
        tasks.append(
            chief_pb2.TaskStatus(
                info=_member_to_proto(task.member),
                progress=progress,
                heartbeat_age_s=task.heartbeat_age_s,
                pid=task.pid,
                units_held=task.units_held,
                clock=task.clock,
                state=task.state,
            )
        )
    return chief_pb2.GetStatusReply(
        tasks=tasks,
        chief_epoch=status.chief_epoch,
        ready=status.ready,
        lead=status.lead,
        units_accepted=status.units_accepted,
        units_planned=status.units_planned,
        epoch=status.epoch,
        examples_accepted=status.examples_accepted,
        checkpoint=status.checkpoint,
        updates_lost=status.updates_lost,
        waiting_for=status.waiting_for,
        stop_reason=status.stop_reason,
        restored=status.restored,
        updates_undone=status.updates_undone,
    )
