"""Calls to the chief, repeated while it restarts. All of them may be repeated without harm."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import grpc

from stratagem.arguments import told_path
from stratagem.cluster.units import Plan
from stratagem.errors import PeerUnavailableError
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.fields import to_message
from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc, common_pb2
from stratagem.rpc.session import SessionClient

IN_TIME = "save, evaluate and train before the script ends, not in an atexit handler or a thread that outlives it"
"""Way out for who comes later."""

_Reply = TypeVar("_Reply")

PATIENCE_S = 10.0  # a call that waits at the chief is repeated this often, to see the end of the job
LOOK_S = 0.5
"""How often a call that is not repeated looks for that end."""
REPORT_WAIT_S = 1.0
"""Seconds that a report may wait for its answer."""


class ChiefClient:
    """The worker's side of the ``Chief`` service. What workers count and agree on has a topic: a group and a number in
    it, the same on every worker. The session's channel carries the calls, and its end ends them; ``timeout_s``: seconds
    the chief may be away."""

    def __init__(self, session: SessionClient, timeout_s: float) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self._channel = session.channel
        self._newest_stub = chief_pb2_grpc.ChiefStub(session.channel)
        self._num_groups: collections.Counter[str] = collections.Counter()
        self.meanwhile: Callable[[], None] = lambda: None
        """Called now and then while this worker waits for others to agree, or for all ps: they may wait for it."""

    @property
    def _sender(self) -> common_pb2.Sender:
        return common_pb2.Sender(task=self._session.task, incarnation=self._session.incarnation)

    def open_dataset(self, dataset: int, plan: Plan) -> int:
        """Registers the plan; returns the seed of its permutations."""
        request = to_message(chief_pb2.OpenDatasetRequest, plan, sender=self._sender, dataset=dataset)
        return self._call(lambda stub: stub.OpenDataset, request).seed

    def next_units(self, request: chief_pb2.NextUnitsRequest) -> chief_pb2.NextUnitsReply:
        """Reports accepted units, with what was counted on them, and acquires further ones."""
        request.sender.CopyFrom(self._sender)
        # What it waits for may wait for ps that came since, and for what they are told to hold.
        meanwhile = self.meanwhile if request.wait else lambda: None
        return self._call(lambda stub: stub.NextUnits, request, meanwhile=meanwhile)

    def report_units(self, dataset: int, epoch: int, accepted: Sequence[int]) -> None:
        """Reports units of a pass as accepted, and wants none. For workers that go on while the chief is away. Raises
        PeerUnavailableError: the chief has not answered within :data:`REPORT_WAIT_S`."""
        self.report(chief_pb2.NextUnitsRequest(dataset=dataset, epoch=epoch, accepted=accepted))

    def report(self, request: chief_pb2.NextUnitsRequest) -> None:
        """The same with what was counted on the units."""
        request.sender.CopyFrom(self._sender)
        self._call(lambda stub: stub.NextUnits, request, timeout_s=REPORT_WAIT_S)

    def start_step(
        self, dataset: int, epoch: int, accepted: Sequence[int], states: Sequence[chief_pb2.MetricState], clock: int
    ) -> chief_pb2.StartStepReply:
        """Waits until the staleness bound lets this worker start; the reply has its clock, and how far it may go."""
        request = chief_pb2.StartStepRequest(
            sender=self._sender, dataset=dataset, epoch=epoch, accepted=accepted, states=states, clock=clock
        )
        return self._call(lambda stub: stub.StartStep, request)

    def new_group(self, kind: str) -> str:
        """A group of topics that every worker gets who asks in the same order: "fit 1", "fit 2", …"""
        self._num_groups[kind] += 1
        return f"{kind} {self._num_groups[kind]}"

    def logs(self, group: str, ordinal: int) -> dict[str, float] | None:
        """What came of a topic; None while nobody has said it."""
        reply = self._get_metric_states(group, ordinal, only_logs=True)
        return {log.name: log.value for log in reply.logs} if reply.closed else None

    def states(self, group: str, ordinal: int) -> list[bytes] | dict[str, float]:
        """What all workers have counted, unit by unit, or what came of it if somebody has said that."""
        found: list[bytes] = []
        while True:
            reply = self._get_metric_states(group, ordinal, len(found))
            if reply.closed:
                return {log.name: log.value for log in reply.logs}
            found += reply.states
            if not reply.num_left:
                return found

    def _get_metric_states(
        self, group: str, ordinal: int, first: int = 0, only_logs: bool = False
    ) -> chief_pb2.GetMetricStatesReply:
        topic = chief_pb2.Topic(group=group, ordinal=ordinal)
        request = chief_pb2.GetMetricStatesRequest(sender=self._sender, topic=topic, first=first, only_logs=only_logs)
        return self._call(lambda stub: stub.GetMetricStates, request)

    def record_logs(self, group: str, ordinal: int, logs: Mapping[str, float]) -> dict[str, float]:
        """Says what came of a topic. Returns what stands: what the first worker said."""
        request = chief_pb2.RecordLogsRequest(
            sender=self._sender,
            topic=chief_pb2.Topic(group=group, ordinal=ordinal),
            logs=[chief_pb2.Log(name=name, value=value) for name, value in logs.items()],
        )
        return {log.name: log.value for log in self._call(lambda stub: stub.RecordLogs, request).logs}

    def agree(self, group: str, ordinal: int, value: int) -> int:
        """Says a number (at least 0) and waits until every worker that takes part has said one: the largest is decided,
        for good."""
        topic = chief_pb2.Topic(group=group, ordinal=ordinal)
        request = chief_pb2.AgreeRequest(sender=self._sender, topic=topic, value=value)
        return self._call(lambda stub: stub.Agree, request, meanwhile=self.meanwhile).value

    def leave_group(self, group: str) -> None:
        """Nobody need wait for this worker in a group of agreements, nor in steps that are made in it, any more, unless
        it says another number."""
        topic = chief_pb2.Topic(group=group)
        self._call(lambda stub: stub.Agree, chief_pb2.AgreeRequest(sender=self._sender, topic=topic, leave=True))

    def take_in(self, newcomers: Sequence[tuple[str, int]] = ()) -> None:
        """Makes newcomers (task, incarnation) ranks of the ring; without any this worker is one, and waits."""
        named = [common_pb2.Sender(task=task, incarnation=incarnation) for task, incarnation in newcomers]
        self._call(lambda stub: stub.TakeIn, chief_pb2.TakeInRequest(sender=self._sender, newcomers=named))

    def save_checkpoint(self, directory: str) -> str:
        """Takes a checkpoint of all ps; returns its path."""
        request = chief_pb2.SaveCheckpointRequest(sender=self._sender, directory=told_path(directory))
        return self._call(self._saving, request, meanwhile=self.meanwhile).path

    def check_folder(self, directory: str) -> None:
        """Refuses, by a ForbiddenError, what :meth:`save_checkpoint` would, because of where it lies."""
        request = chief_pb2.SaveCheckpointRequest(sender=self._sender, directory=told_path(directory), asks=True)
        self._call(self._saving, request)

    def save_loaded(self) -> list[int] | None:
        """Takes a checkpoint of what this worker has just loaded; of each ps the store that is in it. None: the chief
        keeps none."""
        reply = self._call(self._saving, chief_pb2.SaveCheckpointRequest(sender=self._sender, loaded=True))
        return list(reply.store_epochs) if reply.path else None

    def status(self) -> chief_pb2.GetStatusReply:
        return self._call(lambda stub: stub.GetStatus, chief_pb2.GetStatusRequest())

    def _stub(self) -> chief_pb2_grpc.ChiefStub:
        """On the session's channel, which is another one after this worker's certificate was renewed."""
        if (channel := self._session.channel) is not self._channel:
            self._channel, self._newest_stub = channel, chief_pb2_grpc.ChiefStub(channel)
        return self._newest_stub

    def _saving(self, stub: chief_pb2_grpc.ChiefStub) -> Callable[..., chief_pb2.SaveCheckpointReply]:
        """A checkpoint takes as long as the disks do, and a call that is repeated would begin another one."""

        def save(request: chief_pb2.SaveCheckpointRequest, timeout: float) -> chief_pb2.SaveCheckpointReply:
            call: Any = stub.SaveCheckpoint.future(request)
            while True:
                try:
                    reply: chief_pb2.SaveCheckpointReply = call.result(timeout=LOOK_S)
                    return reply
                except grpc.FutureTimeoutError:
                    if self._session.stopped is not None:
                        call.cancel()
                        self._session.raise_if_stopped()
                except grpc.FutureCancelledError:
                    raise ValueError("the channel was closed") from None

        return save

    def _call(
        self,
        method: Callable[[chief_pb2_grpc.ChiefStub], Callable[..., _Reply]],
        request: Any,
        timeout_s: float | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> _Reply:
        patient, timeout_s = timeout_s is None, timeout_s or self._timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            self._session.raise_if_stopped()
            asked = time.monotonic()
            try:
                return method(self._stub())(request, timeout=PATIENCE_S if patient else timeout_s)
            except grpc.RpcError as rpc_error:
                code: Any = rpc_error
                is_repeated = patient and code.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if is_repeated or (patient and time.monotonic() > asked + PATIENCE_S):  # the chief was there
                    deadline = time.monotonic() + timeout_s
                if is_repeated:
                    meanwhile()
                    continue
                error = error_from_rpc(rpc_error, "chief")
                self._session.raise_if_stopped()
                if not isinstance(error, PeerUnavailableError):
                    raise error from None
                if time.monotonic() > deadline:
                    raise PeerUnavailableError(
                        f"{self._session.task} could not reach the chief for {timeout_s:.0f} s: {error}"
                    ) from None
                meanwhile()
                self._session.wait_stopped(0.1)
            except ValueError:  # the channel was closed under the call: there is another one, or the session is over
                self._session.raise_if_stopped()
                if self._session.channel is self._channel:
                    raise PeerUnavailableError(f"{self._session.task} has left the cluster: {IN_TIME}") from None
