"""What must hold where ps keep copies of one another: whatever one has acknowledged is in the copy that is taken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from stratagem.cluster.membership import backup_of
from stratagem.cluster.units import Update
from stratagem.ps.applying import Applying
from stratagem.ps.backup import SILENCE_S
from stratagem.ps.commits import Commits
from stratagem.ps.copies import StoreCopies, StoreCopy, StoreImage
from stratagem.ps.requests import CommitResult, CommitUpdate
from stratagem.ps.state import StoreState
from stratagem.ps.store import Store
from stratagem.ps.units import UnitLedger
from stratagem.worker.push.variables import RemoteVariables
from tests.simulation.invariants import Invariants, checks, variables_of
from tests.simulation.threads import here

_Process = tuple[str, int]
"""Task and incarnation."""


def applied_of(ledger: UnitLedger) -> set[tuple[int, int]]:
    """(pass, unit) that a ledger knows to be applied, or to be done without."""
    described, job = ledger.describe(), checks().cluster.job
    closed = {(job.pass_of(key), index) for key, bitmap in described.closed.items() for index in bitmap}
    return closed | {(job.pass_of(unit[:2]), unit.index) for update, _ in described.open for unit in update.units}


class Copies:
    """Of one world.

    Args:
        checks: the other invariants.
    """

    def __init__(self, checks: Invariants) -> None:
        self._checks = checks
        self._world = checks.world
        self.acknowledged: defaultdict[_Process, set[Update]] = defaultdict(set)
        """What each process of a ps has answered to workers that it is applied."""
        self.stores: dict[_Process, Store] = {}
        self.owners: dict[StoreState, Store] = {}
        self.sources: dict[StoreState, _Process] = {}
        """The process that a copy is of."""
        self.contents: dict[tuple[_Process, int, int, int], bytes] = {}
        """What a group holds after so many updates, by its process, number, store epoch and version."""
        self.doomed: set[str] = set()
        """ps that die once a worker has an update of theirs that the copy lacks yet."""

    @property
    def is_kept(self) -> bool:
        """Whether this job has copies."""
        return self._checks.cluster.job.ps_replicas > 1

    def begin(self, image: StoreImage, state: StoreState) -> None:
        """A copy is made: what happens in it has happened on its ps."""
        self.sources[state] = image.source.key
        self._checks.copied |= {state, state.units}

    def acknowledge(self, state: StoreState, update: Update) -> None:
        """A worker is told that an update is applied."""
        store = self.owners[state]
        self.stores[store.task, store.incarnation] = store
        self.acknowledged[store.task, store.incarnation].add(update)

    def applied(self, state: StoreState, groups: Any) -> None:
        """An update changes the copy of a group as it changes the group, bit for bit."""
        source = self.sources.get(state)
        if source is None:
            source = self.owners[state].task, self.owners[state].incarnation
        for number in [commit.group for commit in groups]:
            group = state.locked_groups[number].group
            key = (source, number, state.store_epoch, group.counter)
            data = b"".join(each.numpy().tobytes() for each in (group.weights, *group.slots.values()))
            if self.contents.setdefault(key, data) != data:
                self._world.fail(f"{self._checks.task()}: the copy of {key} is another one than the original")

    def given(self, copy: StoreCopy) -> None:
        """A copy is taken: it has what the ps had, if that has nothing under way."""
        store = self.stores.get(copy.source.key)
        if store is None or store.state.backup is None or store.state.backup._lane is None:
            return
        is_quiet = not store.state.gate.num_inside and not store.state.lock.locked()  # type: ignore[attr-defined]
        if is_quiet and store.state.backup._told == copy.number:  # type: ignore[attr-defined]
            theirs, mine = applied_of(store.state.units), applied_of(copy.state.units)
            if theirs != mine:
                self._world.fail(f"the copy of {copy.source} differs in {sorted(theirs ^ mine)}")

    def taken(self, heir: str, image: StoreImage) -> None:
        """Nothing that the ps acknowledged is lacking; weights and ledger of the copy say the same."""
        checks, ledger, source = self._checks, image.content.units, image.source
        lacking = [
            update
            for update in self.acknowledged[source.key]
            if not all(ledger.is_applied(unit, update.ordinal) for unit in update.units)
        ]
        if lacking:
            self._world.fail(f"{heir} takes a copy of {source} that lacks what was acknowledged: {sorted(lacking)}")
        if checks.cluster.chief_job is not None:
            checks.check_rows(image.content.groups, f"the copy of {source}")
            for name, weights in variables_of(image.content.groups).items():
                what = f"{name} in the copy of {source}"
                units = checks.units_of(checks.cluster.chief_job, name, weights, what)
                lost = {(epoch, unit) for task, epoch, unit in checks.lost_units if task == source.task}
                lost |= checks.dropped
                known = checks.of_model(name, applied_of(ledger))
                if checks.cluster.job.num_optimizers > 1:  # of a batch under way it may have another one's update
                    ordinal = checks.ordinal_of(name)
                    opened = [one for one, has in ledger._open.items() if ordinal not in has]
                    known -= {(checks.cluster.job.pass_of(one[:2]), one.index) for one in opened}
                if units - known or known - units - lost:
                    self._world.fail(f"{what} has {sorted(units)}, its ledger {sorted(known)}")

    def go_on(self, store: Store, source: _Process) -> None:
        """A process has taken a copy: it answers for what the last one acknowledged."""
        self.stores[store.task, store.incarnation] = store
        self.acknowledged[store.task, store.incarnation] |= self.acknowledged[source]
        for task, epoch, unit in [*self._checks.recorded]:
            if task == store.task and (epoch, unit) in applied_of(store.state.units):
                self._checks.recorded[task, epoch, unit] = store.state.units

    def are_whole(self) -> bool:
        """Whether every ps that holds something is copied, to the last update, by another one that is there."""
        stores = {task: store for task, store in self._checks.stores.items() if store.state.locked_groups}
        return bool(stores) and all(self._is_whole(store) for store in stores.values())

    def came(self, task: str, have: Mapping[int, Any]) -> None:
        """A worker has weights of a ps, which may be one to die now."""
        if task not in self.doomed or not self.are_whole():
            return
        copy = self._checks.stores[backup_of(task, self._checks.cluster.job.num_ps)].copies.kept[task]
        if any(version.counter > copy.state.locked_groups[group].group.counter for group, version in have.items()):
            self.doomed.discard(task)
            cluster, world = self._checks.cluster, self._world
            for name, process in cluster.tasks.items():
                if name.startswith("worker:") and process is not world.process:  # the update comes again late
                    process.paused_until = max(process.paused_until, world.now + 4 * world.random.random())
            cluster.network.lose(cluster.tasks[task])  # at once: another one may be to die at the same moment

    def _is_whole(self, store: Store) -> bool:
        cluster, backup = self._checks.cluster, store.state.backup
        holder = backup_of(store.task, cluster.job.num_ps)
        if backup is None or not backup._is_told:
            return False
        if backup._waiting and self._world.now - backup._silent_since > SILENCE_S / 2:
            return False  # it may be told to drop what it has
        copy = self._checks.stores[holder].copies.kept.get(store.task)
        is_told = any(
            (call.client, call.server) == (cluster.tasks[holder], cluster.tasks[store.task])
            for call in cluster.network.calls
            if call.method.endswith("/Transfer")
        )
        return is_told and copy is not None and copy.is_whole and copy.source.key == (store.task, store.incarnation)


def hooks() -> Iterator[tuple[Any, str, Any]]:
    """As :func:`tests.simulation.invariants.hooks`."""

    def on_commit(real: Any) -> Any:
        def commit_update(self: Commits, request: CommitUpdate, call: Any) -> CommitResult:
            result: CommitResult = real(self, request, call)
            if self._state.backup is not None:
                copies().acknowledge(self._state, request.update)
            return result

        return commit_update

    def on_apply(real: Any) -> Any:
        def apply(self: Applying, groups: Any, *arguments: Any, **named: Any) -> None:
            real(self, groups, *arguments, **named)
            if copies().is_kept:
                copies().applied(self._state, groups)

        return apply

    def on_copy(real: Any) -> Any:
        def init(self: Any, image: StoreImage, state: StoreState) -> None:
            real(self, image, state)
            self.number = image.number
            copies().begin(image, state)

        return init

    def on_change(real: Any) -> Any:
        def commit(self: Any, *arguments: Any) -> None:
            real(self, *arguments)
            self.number += 1

        return commit

    def on_give(real: Any) -> Any:
        def give(self: StoreCopy, *arguments: Any) -> None:
            real(self, *arguments)
            copies().given(self)

        return give

    def on_take(real: Any) -> Any:
        def take(self: StoreCopies, image: StoreImage) -> None:
            copies().taken(self._task, image)
            real(self, image)
            copies().go_on(copies().owners[self._state], image.source.key)

        return take

    def on_store(real: Any) -> Any:
        def init(self: Store, *arguments: Any, **named: Any) -> None:
            real(self, *arguments, **named)
            copies().owners[self.state] = self

        return init

    def on_come(real: Any) -> Any:
        def take(self: RemoteVariables, client: Any, call: Any) -> Any:
            reply = real(self, client, call)
            copies().came(client.task, self.have[client.index])
            return reply

        return take

    yield RemoteVariables, "take", on_come
    yield Commits, "commit_update", on_commit
    yield Applying, "apply", on_apply
    yield StoreCopy, "__init__", on_copy
    yield StoreCopy, "commit", on_change
    yield StoreCopy, "give", on_give
    yield StoreCopies, "take", on_take
    yield Store, "__init__", on_store


def copies() -> Copies:
    """Of the world that runs."""
    found: Copies = here().copies  # type: ignore[attr-defined]
    return found
