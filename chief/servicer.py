"""The service ``Chief`` on the wire: decode, one call, encode."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from stratagem.chief import wire
from stratagem.chief.events import Event
from stratagem.chief.job import ChiefJob
from stratagem.errors import StratagemError
from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc
from stratagem.rpc.units import incarnation_from_proto

SERVICE = "stratagem.Chief"

_Call = Callable[["ChiefServicer", Any, Any], Awaitable[Any]]


def _acknowledged(call: _Call) -> _Call:
    @functools.wraps(call)
    async def answer(servicer: ChiefServicer, request: Any, context: Any) -> Any:
        with servicer.acknowledging():
            return await call(servicer, request, context)

    return answer


class ChiefServicer(chief_pb2_grpc.ChiefServicer):
    def __init__(self, job: ChiefJob) -> None:
        self.job = job
        self._told: tuple[Event | None, chief_pb2.SessionEvent] = None, chief_pb2.SessionEvent()

    @contextlib.contextmanager
    def acknowledging(self) -> Iterator[None]:
        """No reply or refusal leaves a chief that could not write its journal: what a task asks for again, or says
        again, may be done in the books and not be known to the next chief."""
        try:
            yield
        except StratagemError:
            self.job.journal.check()
            raise
        self.job.journal.check()

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[chief_pb2.SessionEvent]:
        requests = (wire.request_from_proto(request) async for request in request_iterator)
        with self.acknowledging():
            async for event in self.job.streams.attend(requests):
                if event is not self._told[0]:  # what all are told is encoded once
                    self._told = event, wire.event_to_proto(event)
                yield self._told[1]

    @_acknowledged
    async def OpenDataset(self, request: chief_pb2.OpenDatasetRequest, context: Any) -> chief_pb2.OpenDatasetReply:
        plan = wire.plan_from_proto(request, self.job.config.seed)
        known = await self.job.training.open_dataset(incarnation_from_proto(request.sender), request.dataset, plan)
        return chief_pb2.OpenDatasetReply(seed=known.seed)

    @_acknowledged
    async def NextUnits(self, request: chief_pb2.NextUnitsRequest, context: Any) -> chief_pb2.NextUnitsReply:
        lender = self.job.evaluation if request.HasField("evaluation") else self.job.training
        return wire.leases_to_proto(await lender.next_units(wire.lease_request_from_proto(request)))

    @_acknowledged
    async def StartStep(self, request: chief_pb2.StartStepRequest, context: Any) -> chief_pb2.StartStepReply:
        clock, limit = await self.job.training.start_step(wire.step_report_from_proto(request), request.clock)
        return chief_pb2.StartStepReply(clock=clock, limit=limit)

    @_acknowledged
    async def GetMetricStates(
        self, request: chief_pb2.GetMetricStatesRequest, context: Any
    ) -> chief_pb2.GetMetricStatesReply:
        name = wire.topic_from_proto(request.topic)
        incarnation = incarnation_from_proto(request.sender)
        return wire.page_to_proto(
            await self.job.metric_store.get_metric_states(incarnation, name, request.first, request.only_logs)
        )

    @_acknowledged
    async def RecordLogs(self, request: chief_pb2.RecordLogsRequest, context: Any) -> chief_pb2.RecordLogsReply:
        name, logs = wire.topic_from_proto(request.topic), wire.logs_from_proto(request.logs)
        stands = await self.job.metric_store.record_logs(incarnation_from_proto(request.sender), name, logs)
        return chief_pb2.RecordLogsReply(logs=wire.logs_to_proto(stands))

    @_acknowledged
    async def Agree(self, request: chief_pb2.AgreeRequest, context: Any) -> chief_pb2.AgreeReply:
        incarnation, topic = incarnation_from_proto(request.sender), wire.topic_from_proto(request.topic)
        if request.leave:
            await self.job.leave_group(incarnation, topic.group)
            return chief_pb2.AgreeReply()
        return chief_pb2.AgreeReply(value=await self.job.metric_store.agree(incarnation, topic, request.value))

    @_acknowledged
    async def TakeIn(self, request: chief_pb2.TakeInRequest, context: Any) -> chief_pb2.TakeInReply:
        newcomers = [incarnation_from_proto(one) for one in request.newcomers]
        await self.job.streams.take_in(incarnation_from_proto(request.sender), newcomers)
        return chief_pb2.TakeInReply()

    @_acknowledged
    async def Scale(self, request: chief_pb2.ScaleRequest, context: Any) -> chief_pb2.ScaleReply:
        self.job.scaling.scale(request.num_workers, request.num_ps)
        return chief_pb2.ScaleReply()

    @_acknowledged
    async def SaveCheckpoint(
        self, request: chief_pb2.SaveCheckpointRequest, context: Any
    ) -> chief_pb2.SaveCheckpointReply:
        incarnation = incarnation_from_proto(request.sender)
        saved = None
        if request.asks:
            await self.job.check_folder(incarnation, request.directory)
        elif request.loaded:
            saved = await self.job.save_loaded(incarnation)
        else:
            saved = await self.job.save_checkpoint(incarnation, request.directory)
        if saved is None:
            return chief_pb2.SaveCheckpointReply()
        return chief_pb2.SaveCheckpointReply(path=saved.path, store_epochs=saved.store_epochs)

    async def GetStatus(self, request: chief_pb2.GetStatusRequest, context: Any) -> chief_pb2.GetStatusReply:
        return wire.status_to_proto(self.job.get_status(), request.measures)
