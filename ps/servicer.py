"""The wire of a parameter server: each method decodes, makes one call, encodes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator

import grpc

from stratagem.cluster.spec import split_address
from stratagem.cluster.task import TaskId
from stratagem.errors import PeerUnavailableError, StratagemError
from stratagem.ps import lane_requests, wire
from stratagem.ps.lane_server import serve_lane
from stratagem.ps.peer_client import PeerStore
from stratagem.ps.socket_lanes import SocketLanes
from stratagem.ps.store import Store
from stratagem.ps.waiting import Call
from stratagem.rpc.fields import to_message
from stratagem.rpc.generated import common_pb2, lane_pb2, ps_pb2
from stratagem.rpc.host_id import own_host_id
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.units import unit_from_proto, unit_sets_from_proto, unit_to_proto, update_from_proto

SERVICE = ps_pb2.DESCRIPTOR.services_by_name["ParameterServer"]


class ParameterServerServicer:
    """ParameterServer over a ``store``; ``lanes`` opens lanes other than grpc. ``max_message_bytes``: told to senders.
    ``security``: of this ps, where it asks another."""

    def __init__(self, store: Store, lanes: SocketLanes, max_message_bytes: int, security: Security = OPEN) -> None:
        self._security = security
        self._taking = threading.Lock()
        self._taken = 0
        """Incarnation of the process that this one goes on as, by a copy."""
        self._store = store
        self._lanes = lanes
        self._max_message_bytes = max_message_bytes
        # What comes over a lane, too: there these are served as here.
        self.PrepareUpdate = functools.partial(lane_requests.prepare_update, store)
        self.CommitUpdate = functools.partial(lane_requests.commit_update, store)
        self.PullWeights = functools.partial(lane_requests.pull_weights, store)

    def Hello(self, request: ps_pb2.HelloRequest, call: Call) -> ps_pb2.HelloReply:
        greeting = self._store.hello(wire.sender_from(request.sender), request.next_sequence, request.abandoned)
        return to_message(
            ps_pb2.HelloReply,
            greeting,
            server=to_message(common_pb2.Sender, greeting.server),
            max_message_bytes=self._max_message_bytes,
            place=own_host_id(),
        )

    def OpenLane(self, request: lane_pb2.OpenLaneRequest, call: Call) -> lane_pb2.OpenLaneReply:
        ticket = self._lanes.open(wire.sender_from(request.sender), *wire.lane_from(request))
        return lane_pb2.OpenLaneReply(token=ticket.token, port=ticket.port, socket_name=ticket.socket_name)

    def Transfer(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        sender = wire.sender_of_lane(context.invocation_metadata())
        yield from serve_lane(self._store, sender, messages, context)

    def CreateVariables(self, request: ps_pb2.CreateVariablesRequest, call: Call) -> ps_pb2.CreateVariablesReply:
        specs = [wire.group_spec_from(group) for group in request.groups]
        sender = wire.sender_from(request.sender)
        initialize, initialized = self._store.variables.create_variables(
            sender, specs, request.can_initialize, call, request.num_ps
        )
        return ps_pb2.CreateVariablesReply(initialize=initialize, initialized=initialized)

    def AssignValues(self, request: ps_pb2.AssignValuesRequest, call: Call) -> ps_pb2.AssignValuesReply:
        versions = self._store.variables.assign_values(wire.assign_from(request), call)
        reply = ps_pb2.AssignValuesReply()
        wire.add_versions(reply.versions, versions)
        return reply

    def CloseUnits(self, request: ps_pb2.CloseUnitsRequest, call: Call) -> ps_pb2.CloseUnitsReply:
        sender = wire.sender_from(request.sender)
        self._store.commits.close_units(sender, wire.closes_from(request.closes), call, request.SerializeToString)
        return ps_pb2.CloseUnitsReply()

    def Fence(self, request: ps_pb2.FenceRequest, call: Call) -> ps_pb2.FenceReply:
        sender = wire.sender_from(request.sender)
        committed = self._store.fence(sender, request.task, request.incarnation, call)
        return ps_pb2.FenceReply(
            committed=[
                ps_pb2.CommittedSlice(step=step, ordinal=ordinal, unit=unit_to_proto(unit))
                for (step, ordinal), unit in committed
            ]
        )

    def CloseStep(self, request: ps_pb2.CloseStepRequest, call: Call) -> ps_pb2.CloseStepReply:
        included = [unit_from_proto(unit) for unit in request.included]
        committed = [update_from_proto(update) for update in request.committed]
        sender = wire.sender_from(request.sender)
        self._store.commits.sync.close_step(sender, request.step, included, committed, call)
        return ps_pb2.CloseStepReply()

    def DescribeUnits(self, request: ps_pb2.DescribeUnitsRequest, call: Call) -> ps_pb2.DescribeUnitsReply:
        return wire.description_to(self._store.checkpoints.describe_units())

    def HoldCommits(self, request: ps_pb2.HoldCommitsRequest, call: Call) -> ps_pb2.DescribeUnitsReply:
        sender = wire.sender_from(request.sender)
        return wire.description_to(self._store.checkpoints.hold_commits(sender, request.token, request.hold_s, call))

    def AdmitUpdates(self, request: ps_pb2.AdmitUpdatesRequest, call: Call) -> ps_pb2.AdmitUpdatesReply:
        updates = [update_from_proto(update) for update in request.updates]
        sender = wire.sender_from(request.sender)
        complete = self._store.checkpoints.admit_updates(sender, request.token, updates, request.wait_s, call)
        return ps_pb2.AdmitUpdatesReply(complete=complete)

    def SaveShards(self, request: ps_pb2.SaveShardsRequest, call: Call) -> ps_pb2.SaveShardsReply:
        files, step = self._store.checkpoints.save_shards(request.token, request.directory, request.nonce)
        return ps_pb2.SaveShardsReply(files=[to_message(ps_pb2.SavedFile, file) for file in files], step=step)

    def ReleaseCommits(self, request: ps_pb2.ReleaseCommitsRequest, call: Call) -> ps_pb2.ReleaseCommitsReply:
        self._store.checkpoints.release_commits(request.token)
        return ps_pb2.ReleaseCommitsReply()

    def RestoreShards(self, request: ps_pb2.RestoreShardsRequest, call: Call) -> ps_pb2.RestoreShardsReply:
        self._store.checkpoints.restore_shards(request.directory, request.num_ps, request.is_fresh, call)
        return ps_pb2.RestoreShardsReply()

    def TakeOver(self, request: ps_pb2.TakeOverRequest, call: Call) -> ps_pb2.TakeOverReply:
        asker, holder = wire.sender_from(request.asked), (request.holder, request.address)
        TaskId.parse(request.holder), split_address(request.address)  # what is none is refused before anybody connects
        try:
            with self._taking:
                if request.incarnation != self._taken:  # else it is a call of before: workers may have gone on already
                    with PeerStore(asker, *holder, self._store.state.lanes, self._security, call.is_active) as peer:
                        self._store.copies.take(peer.follow(asker.task, request.incarnation))
                    self._taken = request.incarnation
        except PeerUnavailableError:
            raise  # the chief knows whether the holder is there still
        except StratagemError as error:
            return ps_pb2.TakeOverReply(refusal=str(error))
        return ps_pb2.TakeOverReply()

    def MarkLost(self, request: ps_pb2.MarkLostRequest, call: Call) -> ps_pb2.MarkLostReply:
        self._store.checkpoints.mark_lost(unit_sets_from_proto(request.units))
        return ps_pb2.MarkLostReply()
