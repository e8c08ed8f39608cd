"""The store's side of checkpoints: holding commits, describing what is applied, writing shards, rolling back."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pathlib
import time
from collections.abc import Mapping, Sequence

from stratagem.checkpoint.manifest import SavedFile
from stratagem.cluster.units import UnitBitmap, Update
from stratagem.errors import CheckpointError, StaleStoreError
from stratagem.ps import snapshot
from stratagem.ps.locked_group import LockedGroup
from stratagem.ps.origin import Origin
from stratagem.ps.requests import Sender
from stratagem.ps.specs import GroupSpec, check_group, check_new_groups
from stratagem.ps.state import StoreState, new_epoch
from stratagem.ps.units import AppliedUnits, Epoch
from stratagem.ps.waiting import Call, wait
from stratagem.rpc.confinement import AllowedFolders

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StoreDescription:
    units: AppliedUnits
    store_epoch: int
    step: int
    """Largest number of updates applied to any group."""
    num_updates: int
    """Of all groups together: a model may be trained after another one."""
    initialized: bool
    complete: bool
    origin_elements: int
    """Of the variables in the checkpoint of another number of ps that this one began from."""
    taken_elements: int
    """Of these: what is here."""
    groups: tuple[int, ...]
    """Those that have values here."""
    untrained: bool
    """No optimizer changes any of them."""


class Checkpointing:
    """Holds, snapshots and restores, in ``folders``; None: everywhere."""

    def __init__(self, state: StoreState, index: int, folders: AllowedFolders | None = None) -> None:
        self._folders = folders
        self._state = state
        self._index = index
        self._num_restores = 0
        self._newest_restore = 0
        """Calls to go back that have begun, and the number of the last one that has gone back."""

    def describe_units(self) -> StoreDescription:
        """Units closed, and updates applied of open ones; a backup has them too."""
        if self._state.backup is not None:
            self._state.backup.settle()
        return self._description()

    def _description(self) -> StoreDescription:
        state = self._state
        with state.changed:
            origin = (state.origin.num_elements, state.origin.num_taken) if state.origin is not None else (0, 0)
            has = state.num_updates, state.initialized, state.complete, *origin
            groups = [number for number, one in state.locked_groups.items() if one.group.initialized]
            trained = state.trained()
            units = state.units.describe(trained, lacks_first=not all(trained.values()))
            return StoreDescription(units, state.store_epoch, state.step, *has, (*groups,), untrained=not trained)

    def hold_commits(self, sender: Sender, token: int, hold_s: float, call: Call) -> StoreDescription:
        """Holds commits for at most ``hold_s`` seconds; answers once those inside have finished. ProtocolError: another
        hold is on."""
        state = self._state
        with state.changed:
            state.gate.hold(token, time.monotonic(), hold_s)
            wait(state, lambda: state.gate.num_inside == 0, sender, call, hold_s)
            return self._description()

    def admit_updates(self, sender: Sender, token: int, updates: Sequence[Update], wait_s: float, call: Call) -> bool:
        """Lets updates through the hold; True when all of them are applied within ``wait_s`` seconds. ProtocolError:
        the hold is not on."""
        state = self._state

        def applied() -> bool:
            return state.gate.num_inside == 0 and all(
                state.units.is_applied(unit, update.ordinal) for update in updates for unit in update.units
            )

        with state.changed:
            state.gate.admit(token, updates, time.monotonic())
            state.changed.notify_all()
            return wait(state, applied, sender, call, wait_s)

    def save_shards(self, token: int, directory: str, nonce: str) -> tuple[list[SavedFile], int]:
        """Writes this ps's shards durably while commits are held. Returns files and step; ``token`` 0: none, for
        a chief that only asks. ProtocolError: commits are not held under ``token``. CheckpointError: the directory is
        not the chief's, or cannot be written. ForbiddenError: it is none of those that this ps was started for."""
        path = self._place(directory)
        if not token:
            return [], 0
        state = self._state
        with state.changed:
            state.gate.check_token(token, time.monotonic())
            groups = [locked.group for _, locked in sorted(state.locked_groups.items())]
            units = copy.deepcopy(state.units)  # a hold keeps nobody from closing some
            content = snapshot.Content(groups, units, state.store_epoch, state.num_moved)
            step = state.step
            if state.origin is not None:
                state.origin.close()
        snapshot.check_nonce(path, nonce, self._index)
        files = snapshot.save(path, self._index, content)
        with state.changed:
            if not state.gate.is_held(time.monotonic()):
                raise CheckpointError(
                    f"the hold on commits expired while ps:{self._index} was writing; hold them longer"
                )
        return files, step

    def release_commits(self, token: int) -> None:
        """Ends a hold; releasing twice does no harm."""
        with self._state.changed:
            self._state.gate.release(token)
            self._state.changed.notify_all()

    def restore_shards(self, directory: str, num_ps: int = 0, is_fresh: bool = False, call: Call | None = None) -> int:
        """Goes back to a checkpoint, as one of ``num_ps``; 0: of those that made it. Returns the new store epoch.

        The files of one that ``is_fresh`` are not looked through once more.

        Of a checkpoint that another number of ps made it takes what workers say that it is to hold, when they do. Every
        sender must say Hello again, and whoever waits gets ``StaleStoreError``. CheckpointError: the checkpoint is not
        complete or damaged; the store stays as it is. ForbiddenError: the directory is none of those that this ps was
        started for.
        """
        path = self._place(directory)
        state = self._state
        with state.changed:
            self._num_restores += 1
            number = self._num_restores
        is_own = snapshot.check(path, self._index, num_ps, is_fresh)
        origin = None if is_own else Origin(path)
        elsewhere: Sequence[GroupSpec] = ()
        if origin is not None:
            num_moved = 0 if self._index else origin.num_updates
            content = snapshot.Content([], origin.units, origin.store_epoch, num_moved)
        else:
            content, elsewhere = snapshot.load(path, self._index), snapshot.held_elsewhere(path, self._index)
        specs = [group.spec for group in content.groups]
        for spec in specs:
            check_group(spec)
        check_new_groups(specs, [], state.limits)
        with state.changed:
            is_over = call is not None and not call.is_active()
            if number < self._newest_restore or is_over:
                return state.store_epoch  # the call was repeated or given up meanwhile, and training may go on already
            self._newest_restore = number
            epoch = new_epoch(max(state.store_epoch, content.store_epoch))
            self.become(content, epoch)
            state.origin, state.num_ps, state.is_told = origin, num_ps, origin is None
            state.elsewhere = elsewhere
        state.copy_is_outdated()
        if origin is not None:
            logger.info("Begins from %s as one of %d ps, which others made", path, num_ps)
        else:
            logger.info("Restored %d groups at step %d from %s", len(content.groups), state.step, path)
        return epoch

    def become(self, content: snapshot.Content, epoch: int) -> None:
        """With ``changed`` held: puts another content in the place of what is here."""
        state = self._state
        state.store_epoch = epoch  # from here on nobody new gets inside: waiting calls see another epoch
        state.changed.notify_all()
        state.changed.wait_for(lambda: state.gate.num_inside == 0)
        state.locked_groups = {group.spec.group: LockedGroup(group) for group in content.groups}
        state.units, state.num_moved = content.units, content.num_moved
        state.steps.clear()
        state.staging.clear()
        state.origin, state.is_told, state.elsewhere = None, True, ()
        state.senders.forget_windows()
        state.close_lanes(StaleStoreError(f"ps:{self._index} holds other values now; send Hello again"))
        state.changed.notify_all()

    def _place(self, directory: str) -> pathlib.Path:
        return self._folders.resolve(directory) if self._folders is not None else pathlib.Path(directory)

    def mark_lost(self, units: Mapping[Epoch, UnitBitmap]) -> int:
        """Closes units whose updates a restore lost. Returns how many this ps did not have."""
        with self._state.changed:
            num_lost = self._state.units.mark_lost(units)
        if num_lost:
            self._state.copy_is_outdated()
        return num_lost
