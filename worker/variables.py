"""The variables of one ``prepare``: created once in the job, attached to by everybody else, pulled and assigned."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from stratagem.errors import ClusterTimeoutError
from stratagem.rpc.codec import to_wire_dtype
from stratagem.rpc.generated import frame_pb2, ps_pb2
from stratagem.worker.host_tensors import WeightTargets
from stratagem.worker.layout import Layout
from stratagem.worker.ps_client import PendingCall, PsClient

logger = logging.getLogger(__name__)

INITIAL_WAIT_S = 2.0  # one wait for the lead's initial values; then look again who the lead is


def send_values(client: PsClient, layout: Layout, source: WeightTargets, groups: Sequence[int]) -> ps_pb2.TransferRef:
    """Sends one ps its part of ``groups``; an AssignValues must name what this returns."""
    transfer, num_frames = client.new_transfer(), 0
    for chunk in layout.chunks:
        if chunk.ps == client.index and chunk.group in groups:
            pieces = source.pieces(chunk)
            client.lane.send(frame_pb2.VALUES, transfer, chunk.group, chunk.offset, pieces, chunk.num_elements)
            num_frames += 1
    return ps_pb2.TransferRef(transfer=transfer, num_frames=num_frames)


class Attached(NamedTuple):
    """What came of an attempt to attach to the variables of one ps."""

    num_given: int
    """Variables that got their values from this process."""
    num_lacking: int
    """Groups that have none yet: another worker is to give them."""

    @classmethod
    def from_reply(cls, request: ps_pb2.CreateVariablesRequest, reply: ps_pb2.CreateVariablesReply) -> Attached:
        """Of groups that this process was told to give values of it has done so."""
        given = [group for group in request.groups if group.group in reply.initialize]
        num_lacking = len(request.groups) - len({*reply.initialize, *reply.initialized})
        return cls(sum(len(group.shards) for group in given), num_lacking)


class RemoteVariables:
    """Variables that live on the parameter servers, and their copies in this process.

    Args:
        clients: one per ps.
        layout: where the rows live.
        tensors: the copies in this process, in the order of ``layout.variables``.
        optimizers: for each group the name of its torch.optim class; "" for values that no optimizer changes.
        is_lead: whether this worker supplies initial values if nobody has.
        timeout_s: seconds to wait for initial values.
    """

    def __init__(
        self,
        clients: Sequence[PsClient],
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        optimizers: dict[int, str],
        is_lead: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self.clients = clients
        self.layout = layout
        self.targets = WeightTargets(layout, tensors)
        self._optimizers = optimizers
        self._is_lead = is_lead
        self._timeout_s = timeout_s
        self._have: dict[tuple[int, int], ps_pb2.Version] = {}

    @property
    def optimized(self) -> bool:
        """Whether an optimizer changes these variables."""
        return any(self._optimizers.values())

    def create_or_attach(self) -> None:
        """Creates the variables with this process's values if it is the lead, else takes the job's values.

        Raises:
            VariableError: the job has them with another shape, dtype or optimizer.
            UnsupportedOptimizerError: a ps cannot run the optimizer.
            ClusterTimeoutError: no lead supplied initial values in time.
        """
        for client in self.clients:
            self.attach(client, self._is_lead())
        deadline = time.monotonic() + self._timeout_s
        waiting = list(self.clients)
        while waiting:
            waiting = [client for client in waiting if not self.pull([client], wait_s=INITIAL_WAIT_S)]
            if waiting and time.monotonic() > deadline:
                raise ClusterTimeoutError(
                    f"{waiting[0].task} got no initial values within {self._timeout_s:.0f} s; "
                    "the lead (the lowest live worker) supplies them in prepare(). Look at its log."
                )
            for client in waiting:
                self.attach(client, self._is_lead())

    def attach(self, client: PsClient, can_initialize: bool) -> Attached:
        """Tells one ps which shards it holds; assigns their values where this worker is asked to."""
        request = ps_pb2.CreateVariablesRequest(groups=self._specs(client.index), can_initialize=can_initialize)
        reply: ps_pb2.CreateVariablesReply = client.call("CreateVariables", request)
        if reply.initialize:
            self.assign(client, list(reply.initialize))
        return Attached.from_reply(request, reply)

    def assign(self, client: PsClient, groups: Sequence[int]) -> None:
        """Sends this process's values of ``groups`` to one ps."""
        values = send_values(client, self.layout, self.targets, groups)
        request = ps_pb2.AssignValuesRequest(values=values, groups=groups)
        reply: ps_pb2.AssignValuesReply = client.call("AssignValues", request, sequenced=True)
        self._remember(client, reply.versions)

    @property
    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Every variable by its name in the job, and its copy in this process."""
        names = (variable.name for variable in self.layout.variables)
        return list(zip(names, self.targets.tensors, strict=True))

    def assign_all(self) -> None:
        """Sends this process's values to every ps."""
        for client in self.clients:
            groups = [group for group, ps in self.layout.shards if ps == client.index]
            if groups:
                self.assign(client, groups)

    def forget(self) -> None:
        """The copies here are no version of the job's: the next pull takes all."""
        self._have.clear()

    def pull(self, clients: Iterable[PsClient] | None = None, wait_s: float = 0.0) -> bool:
        """Takes weights newer than the copies here; unchanged ones cost no payload.

        Returns:
            False when a ps has no initial values yet.
        """
        calls: list[tuple[PsClient, PendingCall]] = []
        for client in self.clients if clients is None else clients:
            groups = [group for group, ps in self.layout.shards if ps == client.index]
            if not groups:
                continue
            request = ps_pb2.PullWeightsRequest(
                groups=[
                    ps_pb2.PullWeightsRequest.Want(group=group, have=self._have.get((group, client.index)))
                    for group in groups
                ],
                reply_transfer=client.new_transfer(),
                wait_s=wait_s,
            )
            calls.append((client, client.start("PullWeights", request)))
        complete = True
        for client, call in calls:
            reply: ps_pb2.PullWeightsReply = self.take(client, call)
            complete = complete and bool(reply.versions)
        self.targets.finish()
        return complete

    def take(self, client: PsClient, call: PendingCall) -> Any:
        """Waits for a reply with versions, and writes the weights that it brings into the tensors; call
        ``targets.finish()`` after the last ps."""
        reply = call.result(lambda frame: self.targets.write(client.index, frame))
        self._remember(client, reply.versions)
        return reply

    def have(self, group: int, ps: int) -> ps_pb2.Version | None:
        """Version of the copies here."""
        return self._have.get((group, ps))

    def _remember(self, client: PsClient, versions: Sequence[ps_pb2.GroupVersion]) -> None:
        for version in versions:
            self._have[version.group, client.index] = version.version

    def _specs(self, ps: int) -> list[ps_pb2.GroupSpec]:
        specs = []
        for (group, holder), shards in sorted(self.layout.shards.items()):
            if holder != ps:
                continue
            first = self.layout.variables[shards[0].variable]
            specs.append(
                ps_pb2.GroupSpec(
                    group=group,
                    optimizer=self._optimizers.get(group, ""),
                    dtype=to_wire_dtype(first.dtype),  # type: ignore[arg-type]  # an enum is an int on the wire
                    shards=[
                        ps_pb2.ShardSpec(
                            variable=self.layout.variables[shard.variable].name,
                            shape=self.layout.variables[shard.variable].shape,
                            first_row=shard.first_row,
                            num_rows=shard.num_rows,
                            offset=shard.offset,
                            param_group=self.layout.variables[shard.variable].param_group,
                        )
                        for shard in shards
                    ],
                )
            )
        return specs
