"""The protocol, broken in one place each: a simulator that does not find them proves nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from stratagem.checkpoint.draft import CheckpointDraft
from stratagem.chief import scaling
from stratagem.chief.checkpointing import commit_hold, saving
from stratagem.chief.counting.metric_states import MetricStates
from stratagem.chief.job import ChiefJob
from stratagem.chief.journal.history import JobHistory
from stratagem.chief.leasing.lease_book import LeaseBook
from stratagem.chief.maintenance import Maintenance
from stratagem.chief.membership.session import Release
from stratagem.chief.membership.sessions import Sessions
from stratagem.chief.ps_return import PsReturn
from stratagem.data.healing_reader import HealingReader
from stratagem.ps import rows, snapshot, sync_commits, sync_steps
from stratagem.ps.backup import Backup
from stratagem.ps.commit_gate import CommitGate
from stratagem.ps.copies import StoreCopy
from stratagem.ps.senders import Senders
from stratagem.ps.state import StoreState
from stratagem.ps.sync_steps import SyncSteps
from stratagem.ps.units import UnitLedger
from stratagem.rpc import session
from stratagem.strategy import newcomers
from stratagem.worker.reduction.backward_status import BackwardStatus
from stratagem.worker.ring.failure_diagnosis import FailureDiagnosis
from stratagem.worker.ring.healing import Healing
from stratagem.worker.ring.ring_member import RingMember
from tests.simulation.threads import here

_Change = tuple[Any, str, Any]


def _nothing(*_: Any, **__: Any) -> None:
    return None


async def _soon(*_: Any, **__: Any) -> None:
    return None


def _unwritten(kind: str) -> _Change:
    real = JobHistory.apply
    return JobHistory, "apply", lambda self, record: None if record["kind"] == kind else real(self, record)


def _lost_fence() -> Iterator[_Change]:
    """A ps says that it refuses an incarnation, and goes on with it."""
    yield Senders, "check", _nothing


def _unasked_fence() -> Iterator[_Change]:
    """The chief gives units to others before any ps has refused the one who had them."""
    real = Sessions._fence

    def fence(self: Any, session: Any) -> Any:
        real(self, session)
        self.pending_fences.pop(session.incarnation, None)
        return [Release(session.incarnation)] if session.task.type == "worker" else []

    yield Sessions, "_fence", fence


def _forgetful_ledger() -> Iterator[_Change]:
    """A ps does not remember which updates it has applied."""
    yield UnitLedger, "is_applied", lambda self, unit, ordinal: False


def _taken_for_damaged() -> Iterator[_Change]:
    """What a ps cannot read for a moment counts as damaged."""
    yield snapshot, "check_disk", _nothing


def _empty_bitmaps() -> Iterator[_Change]:
    """A snapshot is saved without what is applied in it."""
    yield UnitLedger, "to_json", lambda self: {"closed": [], "open": []}


def _forgotten_acceptance() -> Iterator[_Change]:
    """What workers have reported is not in the journal, and the chief does not ask the ps when it starts again."""
    yield _unwritten("accepted")
    yield LeaseBook, "know_accepted", _nothing


def _open_gate() -> Iterator[_Change]:
    """Commits pass while a checkpoint is written."""
    yield CommitGate, "lets_through", lambda self, update, now: True


def _torn_cut() -> Iterator[_Change]:
    """A checkpoint does not wait for updates that only some of their ps have."""
    yield commit_hold, "torn_updates", lambda held: {}


def _uncounted_loss() -> Iterator[_Change]:
    """What a ps lacks after it went back to a checkpoint is not counted."""

    async def mark_lost(*_: Any) -> tuple[int, int]:
        return 0, 0

    yield PsReturn, "_mark_lost", mark_lost


def _unclosed_step() -> Iterator[_Change]:
    """A synchronous step that lost a worker is never settled on the ps."""
    yield SyncSteps, "close", lambda self, step, included, committed, is_applied: []


def _deaf_release() -> Iterator[_Change]:
    """What a dead worker held is given to nobody."""
    yield ChiefJob, "_release", _soon


def _left_draft() -> Iterator[_Change]:
    """A checkpoint is told of, and never becomes one."""
    yield CheckpointDraft, "commit", _nothing


def _forgotten_fences() -> Iterator[_Change]:
    """A chief that starts again has forgotten who is dead, and a ps that comes does not hear it."""
    yield _unwritten("over")


def _early_reply() -> Iterator[_Change]:
    """A ps acknowledges what its backup has not confirmed."""
    yield Backup, "settle", _nothing


def _copy_left_behind() -> Iterator[_Change]:
    """A ps goes on without a backup that broke off, whose copy is still there to be taken."""
    real = Backup.lost

    def lost(self: Any, lane: object) -> None:
        real(self, lane)
        if self._lane is None:
            self._whole = None

    yield Backup, "lost", lost


def _forgetful_copy() -> Iterator[_Change]:
    """A copy does not note which updates are in it."""
    real = StoreCopy.commit

    def commit(self: Any, request: Any, gradient: Any) -> None:
        real(self, request, gradient)
        for unit in request.update.units:
            self.state.units._open.pop(unit, None)

    yield StoreCopy, "commit", commit


def _inherited_versions() -> Iterator[_Change]:
    """A process that takes a copy over counts versions on under the epoch of the one that died."""
    real = StoreState.locked_group

    def locked_group(self: Any, group: int) -> Any:
        found = real(self, group)
        found._epoch = self.store_epoch
        return found

    yield StoreState, "locked_group", locked_group


def _rows_of_one() -> Iterator[_Change]:
    """Of the slices of a synchronous step only the first one's rows of a table are applied."""
    real = rows.merge_rows
    yield sync_commits, "merge_rows", lambda spec, gradients: real(spec, gradients[:1])


def _rows_left_behind() -> Iterator[_Change]:
    """A ps that goes back to a checkpoint begins its tables anew."""
    real = snapshot._read_rows

    def read_rows(source: Any, spec: Any, *rest: Any) -> None:
        if not spec.is_table:
            real(source, spec, *rest)

    yield snapshot, "_read_rows", read_rows


def _half_a_first_checkpoint() -> Iterator[_Change]:
    """The first checkpoint is not taken again when a script prepares another model."""
    yield Maintenance, "_has_first", property(lambda self: self.newest is not None)


def _models_by_step() -> Iterator[_Change]:
    """A checkpoint has all that ps have, once it has the most updates that a model has."""
    real = saving.content_of
    yield saving, "content_of", lambda described: real(described)._replace(num_updates=0)


def _model_in_no_checkpoint() -> Iterator[_Change]:
    """A model that is prepared later is trained before any checkpoint has it."""
    yield Maintenance, "_lacks_prepared", lambda self, num_groups: False


def _awaited_orphan() -> Iterator[_Change]:
    """Workers wait for the second update of a batch of one that is gone."""
    yield sync_steps._Closing, "counts", lambda self, unit, ordinal: unit in self.included


def _half_a_batch() -> Iterator[_Change]:
    """A batch is done for a checkpoint with the first of its updates."""
    for module in (saving, scaling):
        yield module, "unfinished_units", lambda described, steps_per_unit: {}


def _fit_counts_twice() -> Iterator[_Change]:
    """The chief forgets what it has counted once an epoch is closed."""
    yield MetricStates, "_in_logs", property(lambda self: {}, _nothing)


def _ring_forgotten_examples() -> Iterator[_Change]:
    """What a lost worker had of a step does not come again."""
    yield HealingReader, "_look_for_losses", _nothing


def _ring_mean_of_all() -> Iterator[_Change]:
    """The mean of a step that was made again counts the lost one's examples too."""
    real = BackwardStatus.decode

    def decode(self: Any, total: Any, size: int) -> Any:
        return dataclasses.replace(real(self, total, size), divisor=None)

    yield BackwardStatus, "decode", decode


def _ring_result_of_its_own() -> Iterator[_Change]:
    """A rank that lacks the end of a collective makes it again, and does not take over what the others have."""
    real = Healing._compare

    def compare(self: Any, *arguments: Any) -> Any:
        step, _, _ = real(self, *arguments)
        return step, False, None

    yield Healing, "_compare", compare


def _ring_new_cut() -> Iterator[_Change]:
    """The step that a loss has broken is dealt out anew, as the next one is."""
    yield HealingReader, "_members", lambda self: self._healing.placements[-1].members


def _ring_hasty_newcomer() -> Iterator[_Change]:
    """A rank takes a newcomer in as soon as it has heard of it itself."""
    yield Healing, "is_due", property(lambda self: self.sees_newcomer, _nothing)


def _ring_met_once_more() -> Iterator[_Change]:
    """A rank that goes on after a loss with others who take somebody in waits for them to come once more."""
    yield Healing, "_has_met", property(lambda self: False, _nothing)


def _ring_empty_newcomer() -> Iterator[_Change]:
    """A newcomer begins with weights of its own."""
    yield newcomers, "_put", _nothing


def _ring_of_newcomers() -> Iterator[_Change]:
    """The chief waits for ranks that cannot come back."""
    yield Sessions, "_end_of_ring", lambda self: []


def _ring_first_meeting_again() -> Iterator[_Change]:
    """Ranks whose connection broke count their meetings from the first one on."""
    yield RingMember, "_held", property(lambda self: (0, 0), _nothing)


def _ring_without_a_second_meeting() -> Iterator[_Change]:
    """A connection that breaks ends the ring as a rank does that stands still."""
    yield FailureDiagnosis, "is_out_of_step", property(lambda self: bool(self._reason), _nothing)


def _ring_late_rank_alone() -> Iterator[_Change]:
    """A rank that has not heard that the ring formed begins at once, while the others compare their counts."""
    yield Healing, "begin_late", _nothing


def _long_away() -> Iterator[_Change]:
    """A task counts how long its chief is away from the last event that it had of it."""
    handle, lose, heard_at = session.SessionClient._handle, session.SessionClient._handle_loss, dict[Any, float]()

    def hear(self: Any, event: Any) -> None:
        handle(self, event)
        heard_at[self] = here().now

    def be_lost(self: Any, error: Any) -> None:
        self._connected, self._lost_since = False, heard_at.get(self, here().now)
        lose(self, error)

    yield session.SessionClient, "_handle", hear
    yield session.SessionClient, "_handle_loss", be_lost


def _loaded_nowhere() -> Iterator[_Change]:
    """What workers load is in no checkpoint before the next one."""
    yield Maintenance, "save_loaded", _soon


MUTATIONS = {
    "fit: counts twice": _fit_counts_twice,
    "ring: forgotten examples": _ring_forgotten_examples,
    "ring: mean of all": _ring_mean_of_all,
    "ring: result of its own": _ring_result_of_its_own,
    "ring: new cut": _ring_new_cut,
    "ring: hasty newcomer": _ring_hasty_newcomer,
    "ring: met once more": _ring_met_once_more,
    "ring: empty newcomer": _ring_empty_newcomer,
    "ring: only newcomers": _ring_of_newcomers,
    "ring: first meeting again": _ring_first_meeting_again,
    "ring: no second meeting": _ring_without_a_second_meeting,
    "ring: late rank alone": _ring_late_rank_alone,
    "long away": _long_away,
    "loaded nowhere": _loaded_nowhere,
    "lost fence": _lost_fence,
    "unasked fence": _unasked_fence,
    "forgetful ledger": _forgetful_ledger,
    "taken for damaged": _taken_for_damaged,
    "ledger not saved": _empty_bitmaps,
    "forgotten acceptance": _forgotten_acceptance,
    "open gate": _open_gate,
    "torn cut": _torn_cut,
    "uncounted loss": _uncounted_loss,
    "unclosed step": _unclosed_step,
    "deaf release": _deaf_release,
    "left draft": _left_draft,
    "forgotten fences": _forgotten_fences,
    "early reply": _early_reply,
    "copy left behind": _copy_left_behind,
    "forgetful copy": _forgetful_copy,
    "inherited versions": _inherited_versions,
    "rows of one": _rows_of_one,
    "rows left behind": _rows_left_behind,
    "half a first checkpoint": _half_a_first_checkpoint,
    "awaited orphan": _awaited_orphan,
    "half a batch": _half_a_batch,
    "models: by step": _models_by_step,
    "models: in no checkpoint": _model_in_no_checkpoint,
}
"""By name."""


@contextlib.contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """Inside, the protocol is broken; None: it is not."""
    changes = list(MUTATIONS[name]()) if name is not None else []
    before = [(owner, attribute, getattr(owner, attribute, None)) for owner, attribute, _ in changes]
    for owner, attribute, value in changes:
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)
