"""The variables of one ``prepare``: created once in the job, attached to by all other workers, pulled and assigned; and
whether a script has changed its copies of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from stratagem.errors import ConfigurationError
from stratagem.rpc.codec import Frame, FrameKind
from stratagem.worker.push import wire
from stratagem.worker.push.host_tensors import WeightTargets
from stratagem.worker.push.layout import Layout
from stratagem.worker.push.ps_client import PendingCall, PsClient
from stratagem.worker.reduction.same_bits import sum_of_bits

logger = logging.getLogger(__name__)

WEIGHTS = int(FrameKind.WEIGHTS)

INITIAL_WAIT_S = 2.0  # one wait for the lead's initial values; then look again who the lead is
NUM_EXACT, EXACT_EVERY = 3, 256
"""So often at first, and now and then later, all values are looked at: ``tensor.data`` and ``grad.data`` hide changes
from torch's counters."""
NUM_SAMPLED_BYTES = 1024
"""The first bytes of one tensor, another one each time, are looked at in every other step: whoever loads a model
changes all of it."""
WAY_OUT = (
    "The parameter servers hold the weights of the job, and the next update brings theirs back. Load or change weights "
    "before strategy.prepare, or after it in strategy.load_once(lambda: model.load_state_dict(…)) on every worker; "
    "what happens in every step (clamping, normalising) belongs in forward, as torch.nn.utils.parametrize does it"
)
ALONE = (
    "No optimizer that strategy.prepare was given updates it, so every worker would train it separately: pass its "
    "optimizer to strategy.prepare (an update of your own works on rings and mirrored devices, where .grad is the "
    "whole batch's)"
)


def send_values(client: PsClient, layout: Layout, source: WeightTargets, groups: Sequence[int]) -> wire.Transfer:
    """Sends one ps its part of ``groups``; an AssignValues must name what this returns."""
    transfer, num_frames = client.new_transfer(), 0
    for chunk in layout.chunks:
        if chunk.ps == client.index and chunk.group in groups:
            pieces = source.pieces(chunk)
            client.lane.send(FrameKind.VALUES, transfer, chunk.group, chunk.offset, pieces, chunk.num_elements)
            num_frames += 1
    return wire.Transfer(transfer, num_frames)


class RemoteVariables:
    """Variables that live on the parameter servers, and their copies in this process: ``tensors``, in the order of
    ``layout.variables``. ``optimizer``: name of its torch.optim class; "" for values that no optimizer changes."""

    def __init__(
        self, clients: Sequence[PsClient], layout: Layout, tensors: Sequence[torch.Tensor], optimizer: str
    ) -> None:
        self.clients = clients
        self.layout = layout
        self.optimizer = optimizer
        self.targets = WeightTargets(layout, tensors)
        self.have: dict[int, dict[int, wire.Version]] = {}
        """Versions of the copies here: of each ps, by group."""
        self.num_updates = self.num_made = 0
        """That the copies here have, of a job before this one too, and with those that were skipped."""
        self.is_given = False
        """A ps has asked this process for its values."""
        self.copies = TrainedCopies(self.named if optimizer else [])
        self.rerouted()

    def rerouted(self) -> None:
        """The layout has changed, and with it whose versions the copies here are."""
        self.targets.rerouted()
        self.have = {client.index: {} for client in self.clients}
        self.groups: dict[int, list[int]] = {client.index: [] for client in self.clients}
        """On each ps."""
        for group, ps in self.layout.shards:
            self.groups[ps].append(group)

    @property
    def title(self) -> str:
        """What it is, for messages."""
        return f"{len(self.layout.variables)} variables"

    def specs(self, ps: int) -> list[wire.GroupSpec]:
        """The groups on one ps."""
        specs = []
        for (group, holder), shards in sorted(self.layout.shards.items()):
            if holder == ps:
                variables = [self.layout.variables[shard.variable] for shard in shards]
                parts = [
                    wire.shard_spec(variable.name, variable.shape, shard, shard.offset, variable.param_group)
                    for variable, shard in zip(variables, shards, strict=True)
                ]
                specs.append(wire.group_spec(group, self.optimizer, variables[0].dtype, parts))
        return specs

    def has_values(self, client: PsClient) -> bool:
        """Takes the weights that one ps has, and waits a moment for initial ones; False when it has none yet."""
        return pull([self], [client], INITIAL_WAIT_S)

    def give(self, client: PsClient, groups: Sequence[int]) -> None:
        """Sends this process's values of ``groups`` to one ps, which has none yet or none any more. Raises
        ConfigurationError: a script has changed them."""
        self.is_given = True
        if self.optimizer:
            self.copies.check()
        self.assign(client, groups)

    def assign(self, client: PsClient, groups: Sequence[int]) -> None:
        """Sends this process's values of ``groups`` to one ps. Raises ConfigurationError: as :meth:`check_form`."""
        self.check_form()
        values = send_values(client, self.layout, self.targets, groups)
        self.have[client.index] |= wire.assign_values(client, values, groups)
        self.finish()

    def check_form(self) -> None:
        """Raises ConfigurationError: a script has given one another dtype or size, and a ps refuses all it is sent."""
        for variable, tensor in zip(self.layout.variables, self.targets.tensors, strict=True):
            if (tensor.dtype, tensor.numel()) != (variable.dtype, math.prod(variable.shape)):
                raise ConfigurationError(
                    f"{variable.name} is {tensor.dtype} of shape {[*tensor.shape]} here, and {variable.dtype} of shape "
                    f"{[*variable.shape]} on the parameter servers: give it its dtype and shape (.half(), "
                    ".to(dtype), .data = …) before strategy.prepare"
                )

    @property
    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Every variable by its name in the job, and its copy in this process."""
        names = (variable.name for variable in self.layout.variables)
        return list(zip(names, self.targets.tensors, strict=True))

    def assign_all(self) -> None:
        for client in self.clients:
            if groups := self.groups[client.index]:
                self.assign(client, groups)

    def forget(self) -> None:
        """The copies here are no version of the job's: the next pull takes all."""
        self.copies.forget()
        for versions in self.have.values():
            versions.clear()

    def finish(self) -> None:
        """What came is in the tensors, which are as the ps have them from now on."""
        self.targets.finish()
        self.copies.note()

    def take(self, client: PsClient, call: PendingCall) -> Any:
        """Waits for a reply with versions, and writes the weights that it brings into the tensors; call
        :meth:`finish` after the last ps."""
        reply = _receive(client, call, dict.fromkeys(self.groups[client.index], self))
        self._note(client.index, reply.versions)
        return reply

    def _note(self, ps: int, versions: Sequence[Any]) -> None:
        """What the copies here have become by a reply."""
        self.have[ps] |= wire.versions_of(versions)
        self.num_updates = max((each.num_updates for each in versions), default=self.num_updates)
        self.num_made = wire.num_made(versions, self.num_made)


def pull(
    every: Sequence[RemoteVariables],
    clients: Sequence[PsClient],
    wait_s: float = 0.0,
    changed: Mapping[RemoteVariables, str] = MappingProxyType({}),
) -> bool:
    """Takes weights newer than the copies here, with one request to each ps; unchanged ones cost no payload. False: a
    ps has no initial values yet. ``changed``: whose copies a script has changed, each with the name of one. They stay
    as they are; ConfigurationError: the ps have made updates that those copies lack."""
    lacking: set[RemoteVariables] = set()
    calls: list[tuple[PsClient, dict[int, RemoteVariables], PendingCall]] = []
    for client in clients:
        owners = {group: one for one in every for group in one.groups[client.index]}
        if owners:
            have = {group: one.have[client.index].get(group) for group, one in owners.items()}
            calls.append((client, owners, wire.pull_weights(client, have, wait_s)))
    is_complete = True
    for client, owners, call in calls:
        taking = {group: one for group, one in owners.items() if one not in changed}
        versions = _receive(client, call, taking).versions
        is_complete = is_complete and bool(versions)
        news: dict[RemoteVariables, list[Any]] = {}
        for each in versions:
            news.setdefault(owners[each.group], []).append(each)
        for one, its in news.items():
            if one not in changed:
                one._note(client.index, its)
            elif max(each.num_updates for each in its) > one.num_updates:
                lacking.add(one)
    for one in every:
        if one not in changed:
            one.finish()
    for one in lacking:
        one.forget()
        one.copies.refuse(changed[one])
    return is_complete


def _receive(client: PsClient, call: PendingCall, owners: Mapping[int, RemoteVariables]) -> Any:
    """Waits for a reply, and writes the weights that it brings into the tensors of ``owners``, by group; those of other
    groups are dropped."""
    for one in {*owners.values()}:
        one.copies.forget()  # until all have come: a reply that breaks off leaves some of it

    def place(kind: int, group: int, offset: int, num: int) -> torch.Tensor | None:
        owner = owners.get(group) if kind == WEIGHTS else None
        return None if owner is None else owner.targets.place(client.index, group, offset, num)

    def write(frame: Frame) -> None:
        if (owner := owners.get(frame.group)) is not None:
            owner.targets.write(client.index, frame)

    return call.result(write, place)


class TrainedCopies:
    """Copies of variables that only an optimizer may change, or nothing. ``way_out``: what to do if they were changed,
    for the error."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], way_out: str = WAY_OUT) -> None:
        self._way_out = way_out
        self._names = [name for name, _ in named]
        self._tensors = [tensor for _, tensor in named]
        self._counters: list[tuple[int, int]] | None = None
        """Of torch, one for each tensor, which count changes in place, and where it lies, which ``tensor.data = …``
        changes; None: whatever they are is right."""
        self._sums: list[int] | None = None
        self._heads = [_head(tensor) for tensor in self._tensors]
        self._sample: tuple[int, bytes] | None = None
        self._num_checked = 0
        self._has_warned = False

    def note(self) -> None:
        """From now on they are to stay as they are."""
        self._counters = [(tensor._version, tensor.data_ptr()) for tensor in self._tensors]
        is_exact = self._has_warned or self._num_checked < NUM_EXACT or not self._num_checked % EXACT_EVERY
        self._sums = [sum_of_bits(tensor.detach().reshape(-1)) for tensor in self._tensors] if is_exact else None
        self._sample = None
        if not is_exact and self._heads:
            index = self._num_checked % len(self._heads)
            self._sample = index, self._heads[index].tobytes()

    def forget(self) -> None:
        """They may be anything until the next :meth:`note`."""
        self._counters = self._sums = self._sample = None

    def look_closely(self) -> None:
        """Changes are likely from now on: the next looks are at all values."""
        self._num_checked = 0

    def check(self) -> None:
        """Raises ConfigurationError, once: one has other values."""
        if name := self.changed():
            self.forget()
            self.refuse(name)

    def changed(self) -> str:
        """Looks whether they have stayed so: the name of one that has other values, else nothing. Where only the
        counters differ, values that were put back may be the same, so there is but a warning; whoever writes to them
        once may do so again, so all values are looked at from then on."""
        if self._counters is None:
            return ""
        self._num_checked += 1
        if self._sums is not None:
            for name, tensor, bits in zip(self._names, self._tensors, self._sums, strict=True):
                if sum_of_bits(tensor.detach().reshape(-1)) != bits:
                    return name
            return ""
        if self._sample is not None and self._heads[self._sample[0]].tobytes() != self._sample[1]:
            return self._names[self._sample[0]]
        if not self._has_warned:
            for name, tensor, counter in zip(self._names, self._tensors, self._counters, strict=True):
                if (tensor._version, tensor.data_ptr()) != counter:
                    self._has_warned = True
                    logger.warning("%s was written to since the last update. %s", name, self._way_out)
                    break
        return ""

    def refuse(self, name: str) -> NoReturn:
        """Raises ConfigurationError: ``name`` has other values."""
        raise ConfigurationError(f"{name} was changed here since the last update. {self._way_out}")


def _head(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The first bytes of a tensor, where they lie; none where that is not so simple."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return np.empty(0, np.uint8)
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()[:NUM_SAMPLED_BYTES]
