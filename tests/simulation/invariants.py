"""What must hold, looked at whenever the product does what could break it."""

from __future__ import annotations

import collections
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stratagem.checkpoint.server_state import consolidate
from stratagem.chief.checkpointing import checkpoints
from stratagem.chief.checkpointing.checkpoints import ServersManifest
from stratagem.chief.checkpointing.saving import Saving
from stratagem.chief.job import ChiefJob
from stratagem.chief.leasing.lease_book import LeaseBook
from stratagem.chief.leasing.leases import EpochLeases
from stratagem.chief.maintenance import Maintenance
from stratagem.chief.membership.session import SessionState
from stratagem.chief.recovery import NOBODY, Recovery
from stratagem.data.index_batches import epoch_order
from stratagem.errors import CheckpointError, JournalLostError
from stratagem.ps import snapshot
from stratagem.ps.published import Publisher
from stratagem.ps.shard_group import ShardGroup
from stratagem.ps.state import StoreState
from stratagem.ps.store import Store
from stratagem.ps.table_group import TableGroup
from stratagem.ps.units import UnitLedger
from stratagem.strategy.ps.units import LeasedUnits
from stratagem.worker.push.variables import RemoteVariables
from stratagem.worker.unit_tracker import UnitTracker
from tests.simulation.threads import here
from tests.simulation.world import CHIEFS, START, World

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

LOADED = 8**7
"""What each element has of a script that loads other values."""
FROZEN = 0.5
"""What each element of a frozen table has: less than an update adds, so it counts as none."""
_TWICE = 0o66666666
"""Bits of the numbers in a variable that say that an example was applied more than once in an epoch."""


def digits(weights: torch.Tensor, epochs: int) -> list[list[int]]:
    """How often each example of each epoch was applied: [epoch][example]."""
    whole = weights.long()
    return [((whole >> 3 * epoch) & 7).tolist() for epoch in range(epochs)]


@functools.lru_cache(64)
def _order(num_examples: int, shuffle: bool, seed: int, dataset: int, epoch: int) -> list[int]:
    """Of the examples of an epoch, which every check of a checkpoint asks for."""
    return epoch_order(num_examples, shuffle, seed, dataset, epoch).tolist()


def variables_of(groups: Sequence[ShardGroup]) -> dict[str, torch.Tensor]:
    """Whole variables that are trained, by their names."""
    dense = [group for group in groups if group.spec.optimizer and not group.spec.is_table]
    return {shard.variable: group.weights[shard.offset : shard.stop] for group in dense for shard in group.spec.shards}


def rows_of(groups: Sequence[ShardGroup], frozen: bool) -> Iterator[tuple[int, torch.Tensor]]:
    """Of tables, of those that are trained or of the others: the first row of each shard, and a column of its rows."""
    for group in groups:
        for shard in group.spec.shards if group.spec.is_table and group.initialized else ():
            for column in group.weights[shard.offset : shard.stop].view(shard.local_shape).unbind(1):
                if ("frozen" in shard.variable) == frozen:
                    yield shard.first_row, column


class Invariants:
    """Of one world.

    Args:
        world: where they must hold.
        cluster: the job.
    """

    def __init__(self, world: World, cluster: Cluster) -> None:
        self.world = world
        self.cluster = cluster
        self.released: set[tuple[str, int]] = set()
        """Processes whose units went to others: nothing of theirs may count any more."""
        self.holders: dict[tuple[int, int, int], tuple[Any, ChiefJob]] = {}
        """Who has a unit, by the word of which chief."""
        self.accepted: set[tuple[int, int, int]] = set()
        """Units that are never leased again, unless all ps go back to a checkpoint."""
        self.published: dict[tuple[str, int, int, int], bytes] = {}
        self.stores: dict[str, Store] = {}
        """Of each ps the newest."""
        self.lost_units: set[tuple[str, int, int]] = set()
        """(ps, pass, unit) that a ps was told to do without; passes count as in :meth:`Job.pass_of`."""
        self.half_units: set[tuple[str, int, int]] = set()
        """Of these, those lost while the chief took less for a whole batch, as a script that raised in its first one
        between two updates had told it: a ps that has as much lacks nothing of them."""
        self.dropped: set[tuple[int, int]] = set()
        """(pass, unit) of which a script had gradients as its pass ended, and had made no update."""
        self.recorded: dict[tuple[str, int, int], UnitLedger] = {}
        """In which memory of a ps (ps, pass, unit) was: a worker may not have reported it yet when that is gone."""
        self.copied: set[object] = set()
        """States and ledgers of copies: what is in them another ps has done."""
        self.num_checkpoints = 0
        self.num_starts = 0
        """How often all scripts began, with all there is from a checkpoint."""
        self.partial: tuple[str, str, set[int]] = "", "", set()
        """The newest checkpoint, and models that it lacks, or has in part."""
        self.saved_complete = True
        """Whether the last checkpoint waited for what was under way: not where nobody is left to send it."""
        self.is_saved = True
        """The last attempt to save at the end did not fail; else the log says that there is no last checkpoint."""

    @property
    def is_counted(self) -> bool:
        """Whether the weights say which examples were applied: not where scripts that begin anew undo them."""
        job = self.cluster.job
        return job.is_counted and not (self.num_starts > 1 and (job.saves or job.loads or job.reloads))

    def task(self) -> str:
        """Of the process that runs."""
        return self.world.process.name if self.world.process is not None else "-"

    def ends_for_good(self, reason: str) -> bool:
        """Whether a job in step, of updates over several batches, has lost somebody, or passes are left early, and it
        ends as it says it does."""
        job, chief, served = self.cluster.job, self.cluster.chief_job, self.cluster.served
        tasks = [process for process in self.world.processes if process.name not in CHIEFS]
        is_whole = all(process.alive or process.name in served for process in tasks) and not chief.sessions.fenced
        may_end = job.accumulates > 1 and not job.staleness and (not is_whole or job.breaks > 0)
        # Where it is not seen that one is in the middle of an update, as it had its batches at once, each waits for the
        # other.
        return may_end and ("resumes from its last" in reason or "workers wait for each other" in reason)

    # -- on a ps -----------------------------------------------------------------------------------------------

    def applied(self, group: ShardGroup) -> None:
        """No example counts twice."""
        weights = group.weights.numpy().astype(int)  # a third of what torch takes for so few
        if (weights & _TWICE).any():
            self.world.fail(
                f"{self.task()} applied examples {(weights & _TWICE).nonzero()[0].tolist()} twice: "
                f"{[oct(value) for value in weights.tolist()]}"
            )

    def entered(self, incarnation: tuple[str, int]) -> None:
        """Fences are final on every ps that the chief has not given up, nor awaits since it was started again: such a
        one hears of them before it hears from another worker."""
        job = self.cluster.chief_job
        away = SessionState.LOST, SessionState.AWAITED
        is_member = job is None or job.sessions.tasks[self.task()].state not in away
        if incarnation in self.released and is_member:
            self.world.fail(f"{self.task()} takes an update from {incarnation}, whose units have gone to others")

    def publish(self, ps: str, group: int, version: Any, weights: torch.Tensor) -> None:
        """A version says which weights are meant, for ever: on the ps that sends it, and on the worker that has it."""
        data = weights.numpy().tobytes()
        if self.published.setdefault((ps, group, version.epoch, version.counter), data) != data:
            self.world.fail(f"{self.task()} has another content of version {version} of {ps}")

    def came(self, variables: RemoteVariables, ps: int) -> None:
        """A worker has what a reply says that it has, whether that brought it or not."""
        for group, version in variables.have[ps].items():
            shards = variables.layout.shards.get((group, ps))
            if shards is None:  # a table, of which a worker has no copy
                continue
            tensors = [variables.targets.tensors[shard.variable] for shard in shards]
            self.publish(f"ps:{ps}", group, version, torch.cat([tensor.detach() for tensor in tensors]))

    def note_lost(self, units: Any, closed: Any) -> None:
        """A ps is told to do without units that it has not."""
        for key, bitmap in units.items():
            mine, number = closed.get(key), self.cluster.job.pass_of(key)
            new = {(self.task(), number, unit) for unit in bitmap if mine is None or unit not in mine}
            self.lost_units |= new
            if 0 < self.cluster.chief_job.lease_book.steps.per_unit < self.cluster.job.num_optimizers:
                self.half_units |= new

    def check_rows(self, groups: Sequence[ShardGroup], what: str) -> None:
        """A ps has the same updates in its rows of a table as in its variable: both are in one commit; and what its
        optimizer keeps is of the updates that are in the weights."""
        # Where no checkpoint that has a model is whole, it goes on with a worker's values, as the log says.
        is_fresh = self.cluster.job.prepares_late
        for group in groups:
            if (total := group.slots.get("sum")) is not None and not is_fresh:
                counts = torch.tensor(digits(group.weights, self.cluster.job.epochs)).double()
                expected = 64.0 ** torch.arange(len(counts)).double() @ counts
                if not torch.allclose(total.double(), expected, rtol=1e-5):
                    self.world.fail(f"{what}: the squares of {group.weights.tolist()} are {total.tolist()}")
        if self.cluster.wanted and self.lost_units:
            return  # what one ps lost of a row is not what another one lost of the variable that it has now
        for _, rows in rows_of(groups, frozen=True):
            self.read_frozen(rows)
        for variable, weights in variables_of(groups).items():
            for first, rows in rows_of(groups, frozen=False):
                if not torch.equal(rows, weights[first : first + len(rows)]):
                    numbers = [[oct(int(value)) for value in each.tolist()] for each in (rows, weights)]
                    self.world.fail(f"{what}: rows from {first} on are {numbers[0]}, {variable} is {numbers[1]}")

    def read_frozen(self, rows: torch.Tensor) -> None:
        """Rows of frozen tables are what they were at first."""
        if not (rows == FROZEN).all():
            self.world.fail(f"{self.task()} has rows of a frozen table {rows.tolist()}")

    def trained_on(self, rows: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
        """At staleness 0 a step that counts saw rows and weights of one version, unless ps went back meanwhile."""
        num_started = sum(process.name.startswith("ps:") for process in self.world.processes)
        if num_started == self.cluster.job.num_ps and any(
            not torch.equal(column, each) for column in rows.unbind(1) for each in weights
        ):
            self.world.fail(f"{self.task()} trained on rows {rows.tolist()} and weights {weights}")

    # -- in the chief --------------------------------------------------------------------------------------------

    def acquired(self, key: tuple[int, int], index: int, incarnation: Any) -> None:
        """No unit is with two workers."""
        unit = (*key, index)
        name, created, lacking = self.partial
        job = self.cluster.job
        may_lack = (job.prepares_late or job.prepares_apart) and (self.cluster.wanted or self.cluster.disk.has_refused)
        if (
            self.model_of_epoch(job.pass_of(key)) in lacking
            and not may_lack
            and not any(name <= flipped for flipped in self.cluster.disk.flipped)  # a newer one had it
            and self._is_newest(name, created)  # else a chief died as it had written another one
        ):
            self.world.fail(f"unit {unit} is leased, and {name} lacks what was prepared last")
        before, chief = self.holders.get(unit, (None, None))
        if unit in self.accepted:
            self.world.fail(f"unit {unit} is leased to {incarnation}, and it was accepted")
        if incarnation == NOBODY:
            return
        is_given_up = before in (None, incarnation) or self._is_released(before)
        if not is_given_up and (chief is self.cluster.chief_job or self._knows_of_lease(before, unit)):
            self.world.fail(f"unit {unit} is leased to {incarnation}, and {before} has it still")
        self.holders[unit] = incarnation, self.cluster.chief_job

    def _is_newest(self, name: str, created: str) -> bool:
        """Whether a checkpoint is the newest one."""
        with self.cluster.disk.looked_at():
            newest = checkpoints.newest(str(self.cluster.folder / "checkpoints"))
        return newest is not None and (newest[0].name, newest[1].created) == (name, created)

    def _is_released(self, incarnation: Any) -> bool:
        """Whether its units may go to others: a chief that follows has every ps refuse it, and releases nothing."""
        key, job = (incarnation.task, incarnation.number), self.cluster.chief_job
        servers = [self.stores[one.task] for one in job.sessions.live("ps")]
        if all(store.state.senders._fenced.get(key[0], 0) >= key[1] for store in servers):
            self.released.add(key)
        return key in self.released

    def _knows_of_lease(self, incarnation: Any, unit: tuple[int, int, int]) -> bool:
        """Whether a worker has heard of a lease: the chief that gave it may have died with the reply."""
        strategy = self.cluster.tasks[incarnation.task].globals.get("strategy")
        held = strategy._runtime._held() if strategy is not None else []
        return any((lease.unit.dataset, lease.unit.epoch, lease.unit.index) == unit for lease in held)

    def committed(self, job: ChiefJob, path: pathlib.Path) -> None:
        """A checkpoint is one cut: what is in it of an update is on all ps."""
        self.num_checkpoints += 1
        manifest = ServersManifest.read(path)
        if manifest is None:
            self.world.fail(f"{path.name} has no manifest")
            return
        if not self.is_counted or (self.num_starts > 1 and not job.lease_book.plans):  # resumed, nothing opened yet
            return
        seen = []
        for task in sorted({file.ps for file in manifest.files}):
            content = snapshot.load(path, int(task.removeprefix("ps:")))
            closed = content.units.describe().closed
            self.check_rows(content.groups, f"{path.name}, {task}")
            for variable, weights in variables_of(content.groups).items():
                units = self.units_of(job, variable, weights, f"{path.name}, {variable} on {task}")
                seen.append((task, variable, units))
                for key, bitmap in manifest.accepted.items():
                    number = self.cluster.job.pass_of(key)
                    if self.model_of_epoch(number) != self.model_of(variable):
                        continue
                    missing = bitmap - closed.get(key, type(bitmap)())
                    applied = {unit for unit in units if unit[0] == number}
                    if any((number, unit) not in applied | self.dropped for unit in missing):
                        self.world.fail(f"{path.name} says {missing!r} is accepted, and {task} has not closed it")
        its = self.cluster.job
        counted = collections.Counter(self.model_of(variable) for _, variable, _ in seen)
        lacking = {model for model in range(its.num_models) if counted[model] < its.num_variables // its.num_models}
        self.partial = path.name, manifest.created, lacking
        may_lack = {*range(1, its.num_models)} if its.prepares_late else set()
        if manifest.step == 0 and (its.prepares_apart or its.num_models > 1):
            may_lack = lacking
        if lacking - may_lack:
            self.world.fail(f"{path.name} has {[variable for _, variable, _ in seen]} only")
        gone = {key for key, ledger in self.recorded.items() if ledger is not self.stores[key[0]].state.units}
        lost = self.lost_units | gone
        if self.cluster.wanted:  # what one ps lost another one lacks by now
            lost = {(task, epoch, unit) for _, epoch, unit in lost for task, _, _ in seen}
        lost |= {(task, *unit) for unit in self.dropped for task, _, _ in seen}
        for task, variable, units in seen:
            for _, other, theirs in seen:
                torn = {unit for unit in theirs - units if (task, *unit) not in lost}
                is_of_same = self.model_of(variable) == self.model_of(other)
                if torn and self.saved_complete and is_of_same and self.ordinal_of(variable) == self.ordinal_of(other):
                    self.world.fail(f"{path.name} is no cut: {other} has {sorted(torn)}, {variable} lacks them")

    def ordinal_of(self, variable: str) -> int:
        """Which update of a batch changes it: the one of its optimizer."""
        job, number = self.cluster.job, int(variable.rpartition(".")[2])
        return int(job.num_optimizers > 1 and number >= job.num_variables // 2)

    def model_of_epoch(self, epoch: int) -> int:
        """The one whose turn it is."""
        return max(epoch, ~epoch) % self.cluster.job.num_models

    def model_of(self, variable: str) -> int:
        """The one that has it."""
        prefix = variable.partition(".counts.")[0] if variable.startswith("model") else "model0"
        return int(prefix.removeprefix("model")) - self.cluster.job.prepares_apart

    def of_model(self, variable: str, units: set[tuple[int, int]]) -> set[tuple[int, int]]:
        """Those of ``units`` (epoch, unit) that train the model of a variable."""
        return {unit for unit in units if self.model_of_epoch(unit[0]) == self.model_of(variable)}

    def units_of(self, job: ChiefJob, variable: str, weights: torch.Tensor, what: str) -> set[tuple[int, int]]:
        """(epoch, unit) whose examples are in the weights, all of them or none; of epochs before other values were
        loaded there is nothing, and each unit counts as one."""
        found: set[tuple[int, int]] = set()
        first = self.cluster.job.reloads
        if first or self.cluster.job.loads:
            loaded = (weights.long() // LOADED).unique().tolist()
            if len(loaded) > 1:
                self.world.fail(f"{what}: loaded in part")
            first *= loaded[0]
        epochs = self.cluster.job.epochs
        counts = digits(weights, epochs)
        for epoch in range(epochs):
            key = self.cluster.job.key_of(epoch)
            plan = job.lease_book.plans.get(key[0])
            if plan is None:
                if any(counts[epoch]):
                    self.world.fail(f"{what} has updates before there is a plan")
                continue
            order = _order(plan.num_examples, plan.shuffle, plan.seed, *key)
            for index in range(plan.num_units):
                start, stop = plan.bounds(index)
                values = {counts[epoch][example] for example in order[start:stop]}
                if epoch < first and values != {0}:
                    self.world.fail(f"{what} has unit {epoch}/{index}, which is older than what was loaded")
                if len(values) != 1:
                    self.world.fail(f"{what} has a part of unit {epoch}/{index}")
                elif values != {0} and self.model_of_epoch(epoch) != self.model_of(variable):
                    self.world.fail(f"{what} has unit {epoch}/{index} of another model")
                elif self.ordinal_of(variable) and self.cluster.job.is_left_out(order[start:stop]):
                    if values != {0}:
                        self.world.fail(f"{what} has unit {epoch}/{index}, which its optimizer leaves out")
                    found.add((epoch, index))  # nothing of it can be missing
                elif values == {1} or epoch < first:
                    found.add((epoch, index))
        return found

    # -- at the end --------------------------------------------------------------------------------------------

    def ended(self) -> None:
        """Everybody has finished; every example of every epoch counts once on every ps, or was told to be lost."""
        cluster, world = self.cluster, self.world
        if cluster.finished is None or not cluster.is_over:
            world.fail(f"not over after {world.now - START:.0f} s: {self.waiting()}")
            return
        self._check_set_aside()
        job: ChiefJob = cluster.chief_job
        kept = {path.name for path in pathlib.Path(cluster.checkpoint_dir).glob("step-*")}
        if job.ps_pool.without_memory and kept <= cluster.disk.flipped:
            return  # the log says that there is no last checkpoint, and that no other one is whole
        # Where the work is done and is not on the disk all counts hold, too.
        if cluster.finished not in ((1, 42) if job.journal.history.unsaved else (0,)):
            stopping = job.sessions.stopping
            reason = stopping.reason if stopping else "-"
            # Before anything is trained, and where none is whole, a checkpoint has to be written, and a script's; a ps
            # without memory needs one that is whole.
            has_to = kept <= cluster.disk.flipped or not job.lease_book.has_leased or "worker:" in reason
            cannot = ("No space left on device", "Read-only file system", "(Input/output error)", "(Permission denied)")
            is_told = has_to and any(words in reason for words in cannot)
            is_told |= "is complete on every ps" in reason and kept <= cluster.disk.flipped
            is_told |= cluster.disk.was_unreadable_long and "It may be whole, and stays where it is" in reason
            words = "begins from cannot be read", "was altered: its SHA-256"
            is_told |= bool(cluster.disk.flipped) and any(one in reason for one in words)
            is_told |= self.ends_for_good(reason)
            if not is_told:
                world.fail(f"the job ended with {cluster.finished}: {reason}")
            return
        its, epochs = cluster.job, cluster.job.epochs
        lost = job.journal.history.lost.values()
        told = sum(len(units) for each in lost for key, units in each.items() if its.pass_of(key) >= its.reloads)
        variables = self._variables()
        for ps in range(job.sessions.num_ps):
            held = self.stores[f"ps:{ps}"].state.locked_groups.values()
            self.check_rows([locked.group for locked in held], f"ps:{ps} at the end")
        self._check_last()
        if variables is None or not self.is_counted:
            return
        if its.breaks and job.journal.history.restored:
            return  # who went through to the end may have ended before the job began anew, and others leave
        loaded = [*variables] if cluster.job.loads else []
        if cluster.job.reloads:
            loaded = [name for name in variables if name.endswith("counts.0")]
        for name in () if cluster.disk.has_refused or cluster.disk.flipped else loaded:
            if not (variables[name].long() // LOADED == 1).all():
                world.fail(f"{name} has lost what was loaded: {[oct(one) for one in variables[name].long().tolist()]}")
        found = {name: self.units_of(job, name, each, f"{name} at the end") for name, each in variables.items()}
        pairs = [(epoch, unit) for epoch in range(epochs) for unit in range(job.lease_book.plans[1].num_units)]
        every = {*pairs[: its.steps_per_epoch * epochs or None]} - self.dropped
        found = {name: units - self.dropped for name, units in found.items()}
        own = {name: self.of_model(name, every) for name in found}
        if not job.journal.history.updates_lost and found != own:
            world.fail(f"nothing is told to be lost, and there is {found}")
        every = {(epoch, unit) for epoch, unit in every if epoch >= cluster.job.reloads}
        missing = {name: own[name] & every - units for name, units in found.items()}
        of_models = [{name for name in missing if self.model_of(name) == model} for model in range(its.num_models)]
        least = sum(max((len(missing[name]) for name in names), default=0) for names in of_models)
        most = sum(map(len, missing.values()))
        if not cluster.wanted:
            placed = self._placed()
            is_known = sum(map(len, placed)) == len(missing)  # else there is one on a ps, or one has just died
            on_ps = placed if is_known else [[name] for name in missing]
            num_lost = sum(len(set[tuple[int, int]]().union(*(missing[name] for name in names))) for names in on_ps)
            if is_known or len(missing) <= len(placed):
                least, most = (num_lost, num_lost) if cluster.job.staleness else (least, least)
        elif cluster.job.has_table or cluster.job.prepares_apart:  # a ps without a variable has rows of something else
            most += len(self.lost_units)
        if its.num_models > 1:
            most += len(self.lost_units)  # likewise; and a ps expects an update of each optimizer in its first unit
        if its.alternates:  # as it does here, and one that has the second's variables only lacks nothing of a batch
            most += len(every) * job.sessions.num_ps
        least -= len(self.half_units)
        most += len(self.dropped) * len(found)  # a ps may be told that it lacks these, too
        if not least <= told <= most:
            counts = {name: len(units) for name, units in missing.items()}
            world.fail(f"{counts} updates of each variable are not there at the end, and {told} are told to be lost")
        # Of a batch whose epoch is over one optimizer's update may be lost, and told, and the other's not.
        is_in_halves = cluster.job.num_optimizers > 1 and told
        if (
            cluster.job.staleness == 0
            and not is_in_halves
            and len({(self.model_of(name), frozenset(units & every)) for name, units in found.items()})
            > cluster.job.num_models
        ):
            world.fail(f"at staleness 0 the ps differ: {[len(units) for units in found.values()]}")

    def _check_set_aside(self) -> None:
        """Nothing that is whole is taken for damaged."""
        for path in pathlib.Path(self.cluster.checkpoint_dir).glob(".damaged-*"):
            if path.stat().st_ino not in self.cluster.disk.spoiled:
                self.world.fail(f"{path.name} was whole, and is set aside")

    def _check_last(self) -> None:
        """The last checkpoint has what the ps had at the end."""
        job, cluster = self.cluster.chief_job, self.cluster
        if not self.is_saved or job.journal.history.unsaved or not cluster.checkpoint_dir:
            return
        there = [path for path, _, _ in checkpoints.scan_all(cluster.checkpoint_dir)]
        if there and there[0].stat().st_ino in cluster.disk.spoiled:
            return  # since it was written
        path, manifest = checkpoints.newest(cluster.checkpoint_dir) or (None, None)
        if path is None or manifest is None:
            self.world.fail("there is no checkpoint at the end")
            return
        saved = consolidate(path)
        for index in range(job.sessions.num_ps):
            groups = self.stores[f"ps:{index}"].state.locked_groups.values()
            for name, weights in variables_of([locked.group for locked in groups]).items():
                if name not in saved or not torch.equal(saved[name], weights):
                    self.world.fail(f"the last checkpoint, {path.name}, has {name} as {saved.get(name)}: {weights}")

    def _placed(self) -> list[list[str]]:
        """Names of the variables that each ps holds."""
        states = [self.stores[f"ps:{index}"].state for index in range(self.cluster.chief_job.sessions.num_ps)]
        return [[*variables_of([locked.group for locked in state.locked_groups.values()])] for state in states]

    def _variables(self) -> dict[str, torch.Tensor] | None:
        """What the ps hold; of one that died in the last moment, what the last checkpoint holds, if it is whole."""
        found: dict[str, torch.Tensor] = {}
        for index in range(self.cluster.chief_job.sessions.num_ps):
            groups = self.stores[f"ps:{index}"].state.locked_groups.values()
            found |= variables_of([locked.group for locked in groups])
        if len(found) == self.cluster.job.num_variables:
            return found
        is_whole = self.is_saved and not self.cluster.disk.flipped  # else that may be an older one
        newest = checkpoints.newest(self.cluster.checkpoint_dir) if is_whole else None
        if newest is None:
            return None
        try:
            saved = consolidate(newest[0])
        except CheckpointError:
            return None
        return {name: weights for name, weights in saved.items() if "counts" in name} | found

    def waiting(self) -> str:
        """Who is there, and what they wait for, by the word of the chief."""
        job = self.cluster.chief_job
        alive = [process.name for process in self.cluster.tasks.values() if process.alive]
        if job is None:
            return f"no chief; alive: {alive}"
        report = job.get_status()
        waits = [f"{task.task} {task.state} waits for {task.waiting_on}" for task in report.tasks]
        return f"{report.waiting_for} {report.stop_reason} {waits}; alive: {alive}"


def hooks() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Where the product is looked at: owner, name, and what makes a method of the one that is there."""

    def after_apply(real: Any) -> Any:
        def apply(self: Any, *arguments: Any, **named: Any) -> Any:
            result = real(self, *arguments, **named)
            checks().applied(self)
            return result

        return apply

    def on_enter(real: Any) -> Any:
        def enter(self: Any, sender: Any) -> Any:
            if self not in checks().copied:
                checks().entered(sender.key)
            return real(self, sender)

        return enter

    def on_send(real: Any) -> Any:
        def send(self: Any, version: Any, weights: Any, *arguments: Any) -> Any:
            checks().publish(checks().task(), self._group, version, weights)
            return real(self, version, weights, *arguments)

        return send

    def on_take(real: Any) -> Any:
        def take(self: Any, client: Any, call: Any) -> Any:
            reply = real(self, client, call)
            checks().came(self, client.index)
            return reply

        return take

    def on_release(real: Any) -> Any:
        async def release(self: Any, incarnation: Any) -> None:
            await real(self, incarnation)
            checks().released.add((incarnation.task, incarnation.number))

        return release

    def on_epoch(real: Any) -> Any:
        def epoch(self: Any, dataset: int, number: int) -> Any:
            leases = real(self, dataset, number)
            leases.key = (dataset, number)
            return leases

        return epoch

    def on_acquire(real: Any) -> Any:
        def acquire(self: Any, index: int, incarnation: Any, *rest: Any) -> Any:
            if hasattr(self, "key"):  # else units of an evaluation
                checks().acquired(self.key, index, incarnation)
            return real(self, index, incarnation, *rest)

        return acquire

    def on_end(real: Any) -> Any:
        def end(self: Any, index: int) -> Any:
            if hasattr(self, "key"):
                checks().holders.pop((*self.key, index), None)
            return real(self, index)

        return end

    def on_accept(real: Any) -> Any:
        def mark_accepted(self: Any, index: int) -> Any:
            if hasattr(self, "key"):
                checks().accepted.add((*self.key, index))
            return real(self, index)

        return mark_accepted

    def on_revoke(real: Any) -> Any:
        def revoke(self: Any, indices: Any) -> Any:
            if hasattr(self, "key"):
                checks().accepted.difference_update((*self.key, index) for index in indices)
            return real(self, indices)

        return revoke

    def on_roll_back(real: Any) -> Any:
        def roll_back(self: Any, *arguments: Any, **named: Any) -> Any:
            if named.get("reopen"):  # also what a chief that was killed had not written yet
                checks().accepted.clear()
            return real(self, *arguments, **named)

        return roll_back

    def on_committed(real: Any) -> Any:
        def committed(self: Any, saved: Any) -> Any:
            real(self, saved)
            path = pathlib.Path(saved.path)
            if path.name not in (disk := checks().cluster.disk).flipped:
                with disk.looked_at():
                    checks().committed(self._state, path)

        return committed

    def on_save(real: Any) -> Any:
        async def write(self: Any, *arguments: Any) -> Any:
            *_, is_complete, _ = arguments
            checks().saved_complete = is_complete and self._commit_hold.is_complete
            return await real(self, *arguments)

        return write

    def on_save_last(real: Any) -> Any:
        async def save_last(self: Any, *arguments: Any) -> None:
            checks().is_saved = False
            await real(self, *arguments)
            checks().is_saved = True

        return save_last

    def on_job(real: Any) -> Any:
        def init(self: Any, *arguments: Any, **named: Any) -> None:
            cluster = checks().cluster
            before, cluster.chief_job = cluster.chief_job, self
            try:
                real(self, *arguments, **named)
            except JournalLostError:
                cluster.chief_job = before
                raise
            # It goes on from a checkpoint, and leases what that lacks; or only the memory of the one before had some.
            if self.journal.history.is_new or cluster.disk.has_lost:
                checks().accepted.clear()
            cluster.disk.has_lost = False

        return init

    def on_store(real: Any) -> Any:
        def init(self: Any, *arguments: Any, **named: Any) -> None:
            real(self, *arguments, **named)
            if self.task not in checks().cluster.served:
                checks().stores[self.task] = self

        return init

    def on_lost(real: Any) -> Any:
        def mark_lost(self: Any, units: Any) -> Any:
            closed = {key: bitmap for key, bitmap in self.describe().closed.items()}
            result = real(self, units)
            store = checks().stores.get(checks().task())
            if store is not None and store.state.units is self:  # else one that is read
                checks().note_lost(units, closed)
            return result

        return mark_lost

    def on_begin_anew(real: Any) -> Any:
        def begin_anew(self: Any) -> None:
            checks().num_starts += 1
            real(self)

        return begin_anew

    yield ShardGroup, "apply", after_apply
    yield TableGroup, "apply", after_apply
    yield StoreState, "enter", on_enter
    yield Publisher, "send", on_send
    yield RemoteVariables, "take", on_take
    yield Recovery, "release", on_release
    yield LeaseBook, "epoch", on_epoch
    yield EpochLeases, "acquire", on_acquire
    yield EpochLeases, "_end", on_end
    yield LeaseBook, "roll_back", on_roll_back
    yield EpochLeases, "mark_accepted", on_accept
    yield EpochLeases, "revoke", on_revoke
    yield Saving, "_note", on_committed
    yield ChiefJob, "_begin_anew", on_begin_anew
    yield Saving, "_write", on_save
    yield Maintenance, "save_last", on_save_last
    yield ChiefJob, "__init__", on_job
    yield Store, "__init__", on_store

    def on_record(real: Any) -> Any:
        def record(self: Any, update: Any, num_servers: int, groups: Any) -> None:
            real(self, update, num_servers, groups)
            if self not in checks().copied:
                numbered = [(checks().cluster.job.pass_of(unit[:2]), unit.index) for unit in update.units]
                checks().recorded.update(((checks().task(), *each), self) for each in numbered)

        return record

    def on_drop_waiting(real: Any) -> Any:
        def drop_waiting(self: Any) -> Any:
            left = real(self)
            if (job := checks().cluster.job).accumulates > 1:
                checks().dropped.update((job.pass_of(unit[:2]), unit.index) for unit in left)
            return left

        return drop_waiting

    def on_leave(real: Any) -> Any:
        def leave(self: Any) -> None:
            tracker, job = self._tracker, checks().cluster.job
            if job.accumulates > 1 and 0 < tracker._num_steps < job.num_optimizers:  # the script makes no other update
                left = tracker.step().units
                checks().dropped.update((job.pass_of(unit[:2]), unit.index) for unit in left)
            real(self)

        return leave

    yield LeasedUnits, "leave", on_leave
    yield UnitLedger, "mark_lost", on_lost
    yield UnitLedger, "record", on_record
    yield UnitTracker, "drop_waiting", on_drop_waiting


def checks() -> Invariants:
    """Of the world that runs."""
    found: Invariants = here().checks  # type: ignore[attr-defined]
    return found
