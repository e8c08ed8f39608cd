"""Converts protobuf messages to the chief's own types and back. No decisions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stratagem.chief import events
from stratagem.chief.counting.metric_states import Logs, MetricState, Page
from stratagem.chief.leasing.leases import Leases
from stratagem.chief.leasing.lending import EvaluationPass, LeaseRequest, TrainingPass
from stratagem.chief.monitoring.recent import Measures
from stratagem.chief.monitoring.status import JobStatus
from stratagem.cluster.membership import Membership
from stratagem.cluster.spec import split_address
from stratagem.cluster.units import MAX_UNITS, Plan, Topic, Unit
from stratagem.errors import LimitError, ProtocolError
from stratagem.rpc.fields import from_message, to_message
from stratagem.rpc.generated import chief_pb2, common_pb2
from stratagem.rpc.logs import MAX_LINES_AT_ONCE, shortened
from stratagem.rpc.units import incarnation_from_proto, lease_from_proto, lease_to_proto

MAX_WANT = 1024
"""Units that one answer leases; who wants more asks again."""
MAX_NAME = 1000
"""Characters of what a task calls something, that the chief keeps or tells others."""


def plan_from_proto(request: chief_pb2.OpenDatasetRequest, seed: int) -> Plan:
    """The plan a worker asks for. ProtocolError: the numbers make no plan. LimitError: of too many units."""
    try:
        plan = from_message(Plan, request, seed=seed)
    except ValueError as error:
        raise ProtocolError(
            f"dataset {request.dataset} has no valid plan "
            f"(batch size and slices at least 1, staleness at least 0): {error}"
        ) from None
    return _checked(plan)


def _checked(plan: Plan) -> Plan:
    if plan.num_units > MAX_UNITS:
        raise LimitError(
            f"{plan.num_units:,} units in an epoch, at most {MAX_UNITS:,} are possible: use larger batches"
        )
    return plan


def leases_to_proto(leases: Leases) -> chief_pb2.NextUnitsReply:
    granted = [lease_to_proto(lease) for lease in leases.granted]
    return chief_pb2.NextUnitsReply(
        leases=granted, end=leases.end, attempt=leases.attempt, first_open=leases.first_open
    )


def lease_request_from_proto(request: chief_pb2.NextUnitsRequest) -> LeaseRequest[Any]:
    """What a worker reports and wants; errors as :func:`plan_from_proto`."""
    units_of: TrainingPass | EvaluationPass
    if request.HasField("evaluation"):
        meant, name = request.evaluation, topic_from_proto(request.evaluation.name)
        try:
            plan = _checked(Plan(meant.num_examples, meant.batch_size, meant.drop_last, shuffle=False))
        except ValueError as error:
            raise ProtocolError(f"{name} has no valid plan (expected a batch size of at least 1): {error}") from None
        units_of = EvaluationPass(name, plan, meant.attempt)
        states = [MetricState(name, Unit(0, 0, each.index), each.data) for each in request.states]
    else:
        units_of = TrainingPass(request.dataset, request.epoch, request.stop or None, request.group)
        states = states_from_proto(request.states, request.dataset, request.epoch)
    who, want, at_most = incarnation_from_proto(request.sender), request.want, request.at_most
    told = {"units_of": units_of, "states": states, "want": min(want, MAX_WANT), "at_most": min(at_most, MAX_WANT)}
    return from_message(LeaseRequest, request, incarnation=who, **told)


def step_report_from_proto(request: chief_pb2.StartStepRequest) -> LeaseRequest[TrainingPass]:
    """What a worker reports that wants to start a step."""
    states = states_from_proto(request.states, request.dataset, request.epoch)
    units_of = TrainingPass(request.dataset, request.epoch)
    return LeaseRequest(incarnation_from_proto(request.sender), units_of, request.accepted, states)


def topic_from_proto(name: chief_pb2.Topic) -> Topic:
    _check_name("group", name.group)
    return Topic(name.group, name.ordinal)


def _check_name(what: str, name: str) -> None:
    if len(name) > MAX_NAME:
        raise LimitError(f"expected at most {MAX_NAME} characters as {what}, got {len(name):,}")


def states_from_proto(states: Iterable[chief_pb2.MetricState], dataset: int, epoch: int) -> list[MetricState]:
    return [MetricState(topic_from_proto(each.topic), Unit(dataset, epoch, each.index), each.data) for each in states]


def logs_from_proto(logs: Iterable[chief_pb2.Log]) -> Logs:
    return tuple((log.name, log.value) for log in logs)


def logs_to_proto(logs: Logs) -> list[chief_pb2.Log]:
    return [chief_pb2.Log(name=name, value=value) for name, value in logs]


def page_to_proto(page: Page) -> chief_pb2.GetMetricStatesReply:
    logs = logs_to_proto(page.logs or ())
    return chief_pb2.GetMetricStatesReply(
        closed=page.logs is not None, logs=logs, states=page.states, num_left=page.num_left
    )


def request_from_proto(request: chief_pb2.SessionRequest) -> events.Request:
    """What a task says in its session. ProtocolError: an empty message. ClusterSpecError: an address that is none.
    LimitError: too long a name."""
    if request.HasField("join"):
        join = request.join
        for what in ("task", "address", "stratagem_version", "torch_version"):
            _check_name(what, getattr(join, what))
        if join.address:  # others will try to reach it
            split_address(join.address)
        held = tuple(lease_from_proto(lease) for lease in join.held)
        return from_message(events.Join, join, held=held)
    if request.HasField("heartbeat"):
        said, progress = request.heartbeat, request.heartbeat.progress
        measured = said.measures.SerializeToString() if said.HasField("measures") else b""
        lines = tuple((line.at, line.level, line.text) for line in said.lines[:MAX_LINES_AT_ONCE])
        copies = progress.copy_to_drop, progress.copies_dropped
        said_of_it = progress.SerializeToString(), progress.waiting_step, measured, copies, progress.leaving
        return events.Heartbeat(*said_of_it, progress.bytes_held, lines, progress.step)
    if request.HasField("goodbye"):
        return from_message(events.Goodbye, request.goodbye, message=shortened(request.goodbye.message))
    raise ProtocolError("expected Join, Heartbeat or Goodbye in a session, got an empty message")


def event_to_proto(event: events.Event) -> chief_pb2.SessionEvent:
    if isinstance(event, events.Welcome):
        return chief_pb2.SessionEvent(welcome=to_message(chief_pb2.Welcome, event))
    if isinstance(event, Membership):
        tasks = [to_message(common_pb2.TaskInfo, member) for member in event.members]
        return chief_pb2.SessionEvent(membership=to_message(chief_pb2.Membership, event, tasks=tasks))
    if isinstance(event, events.Fenced):
        return chief_pb2.SessionEvent(fenced=chief_pb2.Fenced(reason=event.reason))
    return chief_pb2.SessionEvent(stop=chief_pb2.Stop(exit_code=event.exit_code, reason=event.reason))


def _add_measures(shown: chief_pb2.Measures, measured: Measures) -> None:
    shown.SetInParent()
    if isinstance(measured, bytes):
        shown.MergeFromString(measured)
    else:
        shown.values.update(measured)


def status_to_proto(
    status: JobStatus, with_measures: bool = False, with_earlier: bool = True
) -> chief_pb2.GetStatusReply:
    reply = to_message(chief_pb2.GetStatusReply, status, tasks=())
    for task, (said, measured) in zip(status.tasks, status.said, strict=True):
        progress, info = chief_pb2.Progress.FromString(said), to_message(common_pb2.TaskInfo, task)
        if task.waiting_on:
            progress.waiting_on, progress.waiting_s = task.waiting_on, task.waiting_s or progress.waiting_s
        reply.tasks.append(
            to_message(chief_pb2.TaskStatus, task, info=info, progress=progress, measures=None, earlier=None)
        )
        if with_measures:  # where they are to be: a message is copied when another takes it in
            shown = reply.tasks[-1]
            _add_measures(shown.measures, measured.newest)
            if with_earlier:
                _add_measures(shown.earlier, measured.earlier)
            shown.window_s, shown.measures_age_s = measured.window_s, measured.age_s
    return reply
