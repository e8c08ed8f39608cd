"""From models and optimizers to variables on parameter servers: names, groups, placement."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

import torch

from stratagem.errors import (
    ClusterTimeoutError,
    PeerUnavailableError,
    StaleStoreError,
    UnsupportedOptimizerError,
    VariableError,
)
from stratagem.ps.optimizers import check_for_rows
from stratagem.strategy.model_parts import saved_buffers_of
from stratagem.strategy.partitioners import FixedShardsPartitioner, Partitioner, place
from stratagem.strategy.ps.checks import check_optimizer, grouped_parameters, refuse_prepared
from stratagem.worker.gradient_guard import GradientPolicy
from stratagem.worker.push.close_reports import CloseReports
from stratagem.worker.push.gradient_push import GradientPush
from stratagem.worker.push.layout import Layout, RowPlacement, VariableSpec
from stratagem.worker.push.optimizer_state import OptimizerState, TableState, check_loaded
from stratagem.worker.push.ps_client import PsClient, Rerouted, insist
from stratagem.worker.push.remote_table import RemoteTable
from stratagem.worker.push.remote_tables import Placed, RemoteTables, attach, create_or_attach, every_table
from stratagem.worker.push.row_reads import RowReads, TableLink
from stratagem.worker.push.variables import ALONE, RemoteVariables, TrainedCopies, pull
from stratagem.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

GROUPS_PER_OPTIMIZER = 16  # one for each dtype; keeps group numbers equal on all workers
RETRY_S = 0.05  # until the next look whether another worker has given a ps its values, or become the lead


class VariableGroups:
    """Creates the variables of every ``prepare``, cut by the partitioner or (None) each whole on one ps, and keeps
    their copies here up to date."""

    def __init__(self, runtime: WorkerRuntime, partitioner: Partitioner | None) -> None:
        self._runtime = runtime
        self._partitioner = partitioner
        self.closes = CloseReports(runtime.clients, self.recover)  # units on their way to the ps
        self.pushes: list[GradientPush] = []
        """One for each optimizer."""
        self._load_bytes = [0] * len(runtime.clients)
        self._epochs = {client.index: client.store_epoch for client in runtime.clients}
        """Of each ps: the store to which everything is attached."""
        self._placed: list[Placed] = []
        """In the order in which they were shared out; those of a ``prepare`` under way may not be on the ps yet."""
        self._all: list[RemoteVariables] = []
        self._tables: list[RemoteTables] = []
        self._held: dict[int, tuple[str, torch.Tensor]] = {}
        """By identity: name and tensor of what an optimizer changes, of tables, and of what would get gradients."""
        self._alone: set[RemoteVariables] = set()
        """That no optimizer changes, and got gradients since somebody looked."""
        self._num_models = 0
        self._next_group = 0
        self._turn = threading.RLock()
        self.reads = RowReads(self._turn)

    @property
    def num_updates(self) -> int:
        """Updates that the copies here have, also those that a job before this one made."""
        return max((variables.num_updates for variables in self._all), default=0)

    def create(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        policy: GradientPolicy,
        on_backward: Callable[[], None],
    ) -> list[GradientPush]:
        """Creates or attaches to the variables of ``models``; returns what pushes the gradients of each optimizer.
        ``on_backward`` is called in a backward whenever a gradient was accumulated."""
        known = {id(tensor) for variables in self._all if variables.optimizer for _, tensor in variables.named}
        refuse_prepared(optimizers, self._held, known, {id(table.handle) for table in every_table(self._tables)})
        names = self._names(models)
        taken = set(self._held)  # of an earlier call: the ps keep them
        found = (getattr(part, "remote_table", None) for model in models for part in model.modules())
        tables_found = [table for table in found if isinstance(table, RemoteTable)]
        every = {id(table.handle): table for table in tables_found if id(table.handle) not in taken}
        trained: list[tuple[torch.optim.Optimizer, list[torch.nn.Parameter], RemoteVariables, list[RemoteTables]]] = []
        num_placed = len(self._placed)
        for optimizer in optimizers:
            check_optimizer(optimizer)
            kind = type(optimizer).__name__
            dense, by_row = [], list[tuple[RemoteTable, str, int]]()
            for parameter, group in grouped_parameters(optimizer, names, taken):
                name = names[id(parameter)]
                if (table := every.get(id(parameter))) is None:
                    dense.append((name, parameter, group))
                    continue
                check = functools.partial(check_for_rows, kind, optimizer.param_groups[group])
                try:
                    check()
                    check_loaded(optimizer, parameter, name)
                    by_row.append((table, name, group))
                except UnsupportedOptimizerError:
                    if parameter.requires_grad:
                        raise
                    self._place_tables([(table, name, 0)], "", check)  # refused once it is trained
            tables = self._place_tables(by_row, kind, on_backward)
            trained.append((optimizer, [parameter for _, parameter, _ in dense], self._place(dense, kind), tables))
        others = [(table, names[identity], 0) for identity, table in every.items() if identity not in taken]
        self._place_tables(others, "", on_backward)
        taken.update(every)
        tensors = [tensor for model in models for tensor in (*model.parameters(), *saved_buffers_of(model))]
        rest = {id(tensor): (names[id(tensor)], tensor, 0) for tensor in tensors if id(tensor) not in taken}
        if rest:
            kept = self._place([*rest.values()], "")
            alone = [(name, tensor) for name, tensor, _ in rest.values() if tensor.requires_grad]
            kept.copies = TrainedCopies(alone, ALONE)
            for _, tensor in alone:
                tensor.register_post_accumulate_grad_hook(lambda _: self._alone.add(kept))
        self._create(self._placed[num_placed:])
        held = [tensor for tensor in tensors if tensor.requires_grad or id(tensor) in taken]
        self._held = {id(tensor): (names[id(tensor)], tensor) for tensor in held} | self._held
        pushes = []
        for optimizer, parameters, variables, tables in trained:
            state = OptimizerState(variables, optimizer, parameters, self._runtime.may_assign, self.reconnect)
            state.begin(variables.is_given)
            if tables:
                insist(TableState(optimizer, [*every_table(tables)]).send, self.reconnect)
            treated = policy, models, self.closes, self._runtime.meter, self.recover, self.reads
            pushes.append(GradientPush(optimizer, parameters, variables, tables, on_backward, *treated))
        self.pushes += pushes
        return pushes

    @property
    def optimized(self) -> list[tuple[str, torch.Tensor]]:
        """Every variable that an optimizer changes, by its name in the job, and its copy in this process.

        Tables, and what stands for them, are among them, also those that no optimizer changes.
        """
        dense = [pair for variables in self._all if variables.optimizer for pair in variables.named]
        return [*dense, *((table.link.name, table.handle) for table in every_table(self._tables))]

    @property
    def table_names(self) -> frozenset[str]:
        return frozenset(table.link.name for table in every_table(self._tables))

    @property
    def store_epochs(self) -> list[int]:
        """Of each ps: the store to which everything is attached."""
        return [self._epochs[client.index] for client in self._runtime.clients]

    @property
    def num_groups(self) -> int:
        """Shard groups, counted on each ps."""
        return sum([len(one.layout.shards) for one in self._all]) + sum([len(each.servers) for each in self._tables])

    def push(self) -> None:
        """Gives the ps the values of this process."""
        for variables in self._all:
            variables.assign_all()

    def pull(self) -> None:
        """Takes newer weights of everything an optimizer changes. Copies that a script has changed stay as they are; a
        ConfigurationError where there are updates of them. Rows of tables that were read and not asked for yet are
        dropped."""
        with self._turn:
            self.reads.clear()
            trained = [variables for variables in self._all if variables.optimizer]
            changed = {variables: name for variables in trained if (name := variables.copies.changed())}
            pull(trained, self._runtime.clients, changed=changed)

    def check(self, used: Sequence[torch.Tensor] | None = None) -> None:
        """Raises ConfigurationError where a script has changed the copies here of what an optimizer changes together
        with one of ``used``; None: of anything, and the next pull then takes everything."""
        wanted = None if used is None else {*map(id, used)}
        for variables in [one for one in self._all if one.optimizer]:
            is_used = wanted is None or not wanted.isdisjoint(map(id, variables.targets.tensors))
            if is_used and (name := variables.copies.changed()):
                if wanted is None:
                    self.forget()
                variables.copies.refuse(name)

    def look_closely(self) -> None:
        """A script may change the copies here now that an epoch is over; see :class:`TrainedCopies`."""
        for variables in self._all:
            variables.copies.look_closely()

    def refresh(self, attach: Callable[[], None] | None = None) -> None:
        """As :meth:`pull`, of ps that come back as well; ``attach`` sees to these, else :meth:`reconnect`, and the next
        commit finds what one of them undid."""
        insist(self.pull, attach or self.reconnect)

    def forget(self) -> None:
        """The next pull takes everything that an optimizer changes, whatever a script makes of the copies here."""
        for variables in self._all:
            variables.forget()

    def recover(self, client: PsClient) -> None:
        """Connects to a ps that was lost, waits for it if it is away, and attaches everything to it if it restarted.

        What it has no values of (its checkpoint is older, or there is none) it takes from whoever comes first. Raises
        PeerUnavailableError: it does not come back in time; ClusterTimeoutError: another worker is to give it values,
        and does not.
        """
        with self._turn:
            logger.info("Connecting to %s again", client.task)  # which warns where that takes long
            self._connect(client)

    def reconnect(self, only_replaced: bool = False) -> None:
        """To every ps; or to those that came back since, and may wait for values that this worker has."""
        for client in [*self._runtime.clients]:
            if client in self._runtime.clients and (client.is_replaced or not only_replaced):
                self.recover(client)

    def roll_back(self) -> None:
        """After the ps went back to a checkpoint: forgets what was staged, takes their weights."""
        for push in self.pushes:
            push.staging.reset()
        for table in every_table(self._tables):
            table.pending.clear()
        with self._turn:
            for client in self._runtime.clients:
                self._connect(client)
            self.refresh()
        for push in self.pushes:
            push.reattached()

    def _connect(self, client: PsClient) -> None:
        self.reads.clear()
        try:
            self._connect_to(client)
        except Rerouted:
            self._reroute()
            return
        for push in self.pushes:
            push.staging.lost(client.index)

    def _connect_to(self, client: PsClient) -> None:
        deadline = time.monotonic() + self._runtime.config.peer_timeout_s
        while True:
            client.connect()
            try:
                if client.store_epoch != self._epochs[client.index]:
                    self._attach(client)
                break
            except (PeerUnavailableError, StaleStoreError):  # it were lost meanwhile
                if time.monotonic() > deadline:
                    raise

    def _reroute(self) -> None:
        """There is another number of ps: shares everything out among them, and attaches to it."""
        clients = self._runtime.clients
        while True:
            self._runtime.reroute()
            self.closes.rerouted()
            logger.info("The variables are now on %d ps", len(clients))
            self._load_bytes = [0] * len(clients)
            self._epochs = dict.fromkeys(range(len(clients)), 0)
            for one in self._placed:
                if isinstance(one, RemoteTables):
                    rows = self._rows_of(one.tables)
                    for table, placement in zip(one.tables, rows, strict=True):
                        table.link_to(dataclasses.replace(table.link, placement=placement))
                else:
                    shapes = [(spec.shape, spec.dtype) for spec in one.layout.variables]
                    one.layout.place(place(shapes, self._partitioner, self._load_bytes))
                    one.rerouted()
            for push in self.pushes:
                push.staging.rerouted()
            try:
                for client in clients:
                    self._connect_to(client)
                break
            except Rerouted:  # and another one
                continue
        for push in self.pushes:
            push.rerouted()

    def _attach(self, client: PsClient) -> None:
        deadline = time.monotonic() + self._runtime.config.start_timeout_s
        created: list[Placed] = [*self._all, *self._tables]
        trained = [one for one in self._all if one.num_updates and self._runtime.meter.in_step]
        if trained and attach(trained, client, False)[1]:
            raise VariableError(
                f"{client.task} went back to a checkpoint without variables that were trained since, on examples that "
                "come again: a worker that starts again gives it the first values"
            )
        while created:  # within the first ``prepare`` there is nothing, and that goes on by itself
            given, lacking = attach(created, client, True)
            if given:
                logger.warning(
                    "%s restarted without %d variables that its checkpoint is too old to have: they continue with this "
                    "worker's values and a fresh optimizer state",
                    *(client.task, given),
                )
            if not lacking:
                break
            if time.monotonic() > deadline:
                raise ClusterTimeoutError(
                    f"{client.task} restarted without the values of {lacking} groups, and the worker that should "
                    f"supply them did not within {self._runtime.config.start_timeout_s:.0f} s; look at its log"
                )
            client.session.wait_stopped(RETRY_S)
            client.session.raise_if_stopped()
        self._epochs[client.index] = client.store_epoch
        if self._runtime.meter.in_step:  # all went back with it: units of before are leased again
            self.closes.clear()

    def _place_tables(
        self, named: Sequence[tuple[RemoteTable, str, int]], optimizer: str, on_backward: Callable[[], object]
    ) -> list[RemoteTables]:
        """Distributes tables, each with its name and its param_group; those that are alike make one group."""
        alike: dict[tuple[int, int, torch.dtype], list[tuple[RemoteTable, str]]] = {}
        for table, name, param_group in named:
            alike.setdefault((param_group, table.width, table.dtype), []).append((table, name))
        placed = []
        for (param_group, _, _), some in alike.items():
            group, tables = self._next_group, [table for table, _ in some]
            self._next_group += 1
            for (table, name), placement in zip(some, self._rows_of(tables), strict=True):
                table.link_to(TableLink(name, self._runtime, placement, group, on_backward, self.recover, self.reads))
            placed.append(RemoteTables(group, optimizer, param_group, tables))
        self._placed += placed
        return placed

    def _rows_of(self, tables: Sequence[RemoteTable]) -> list[RowPlacement]:
        """Of the tables of one group."""
        partitioner = self._partitioner or FixedShardsPartitioner(len(self._runtime.clients))
        held: dict[int, int] = {}
        shapes = [((table.num_rows, table.width), table.dtype) for table in tables]
        return [RowPlacement(place([shape], partitioner, self._load_bytes)[0], held) for shape in shapes]

    def _place(self, named: Sequence[tuple[str, torch.Tensor, int]], optimizer: str) -> RemoteVariables:
        """Shares out tensors, each with its name and its param_group."""
        first_group = self._next_group
        self._next_group += GROUPS_PER_OPTIMIZER
        tensors = [tensor for _, tensor, _ in named]
        dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
        specs = [
            VariableSpec(name, tuple(tensor.shape), tensor.dtype, first_group + dtypes.index(tensor.dtype), param_group)
            for name, tensor, param_group in named
        ]
        rows = place([(spec.shape, spec.dtype) for spec in specs], self._partitioner, self._load_bytes)
        layout = Layout(specs, rows, self._runtime.config.frame_bytes)
        copies = tensors if optimizer else [tensor.data for tensor in tensors]
        variables = RemoteVariables(self._runtime.clients, layout, copies, optimizer)
        self._placed.append(variables)
        return variables

    def check_alone(self) -> None:
        """Raises ConfigurationError where a script steps by itself with what no optimizer changes."""
        while self._alone:
            copies = self._alone.pop().copies
            copies.check()
            copies.note()

    def _create(self, every: Sequence[Placed]) -> None:
        """Creates, or attaches to what is there; begins again with a ps that goes away meanwhile and comes back."""
        runtime = self._runtime
        if runtime.meter.in_step and self._all:  # the others would wait for a step of this worker without a word
            runtime.chief.agree(runtime.chief.new_group("further prepare"), 0, 0)
        deadline = math.inf  # since a ps went: the lead may have been waited for longer
        while True:
            began = time.monotonic()
            try:
                create_or_attach(every, runtime.clients, runtime.gives_values, runtime.config.start_timeout_s)
                break
            except (PeerUnavailableError, StaleStoreError) as error:
                if began > deadline:
                    raise
                deadline = min(deadline, time.monotonic() + runtime.config.peer_timeout_s)
                logger.warning("%s", error)
                self.reconnect()
        self._all += [one for one in every if isinstance(one, RemoteVariables)]
        self._tables += [one for one in every if isinstance(one, RemoteTables)]

    def _names(self, models: Sequence[torch.nn.Module]) -> dict[int, str]:
        """Names as in ``state_dict``; of several models, with the prefix "model0.", "model1.", …"""
        plain = self._num_models == 0 and len(models) == 1
        names: dict[int, str] = {}
        for model in models:
            prefix = "" if plain else f"model{self._num_models}."
            self._num_models += 1
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                names.setdefault(id(tensor), prefix + name)
        return names
