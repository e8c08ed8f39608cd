"""What every task is doing: the status page, assembled from the state."""

from __future__ import annotations

import dataclasses
import os

from stratagem.chief.chief_state import ChiefState
from stratagem.chief.membership.roster import Roster
from stratagem.chief.membership.session import Session, SessionState
from stratagem.chief.membership.session_streams import SessionStreams
from stratagem.chief.monitoring.recent import Measured
from stratagem.chief.monitoring.standstill import late_for
from stratagem.rpc.status_view import StatusView, TaskState


@dataclasses.dataclass(frozen=True)
class JobStatus(StatusView):
    """The whole job; of each task what the chief knows of it."""

    said: tuple[tuple[bytes, Measured], ...] = ()
    """What each task said last, and what it measured, as it came."""


_SHOWN = {SessionState.AWAITED: "waiting", SessionState.JOINED: "waiting"}


def _state_of(session: Session, sessions: Roster) -> str:
    if session.state is SessionState.LOST and not sessions.serves(session):
        return SessionState.DONE.value  # others have what it held, or it never held anything: nobody waits for it
    return "waiting" if sessions.is_wanted_again(session) else _SHOWN.get(session.state, session.state.value)


def report(state: ChiefState, streams: SessionStreams, address: str, scaling: str, standby: str) -> JobStatus:
    """The status page. ``scaling``: why there are not as many ps as wanted; ``standby``: which chief stands by."""
    sessions, lease_book, history, now = state.sessions, state.lease_book, state.journal.history, state.clock()
    # The chief's own row; its epoch stands in the place of an incarnation.
    tasks = [TaskState("chief:0", SessionState.LIVE.value, address, history.chief_epoch, os.getpid())]
    said = [(b"", streams.recent.of("chief:0", now))]
    for session in sessions.known:
        name = str(session.task)
        waiting_on, since = state.waits.noted.get(session.incarnation, ("", now))
        if not waiting_on and session.state is SessionState.LIVE:
            waiting_on, _ = late_for(state, streams, name)
        tasks.append(
            TaskState(
                name,
                _state_of(session, sessions),
                session.address,
                session.number,
                session.pid,
                heartbeat_age_s=now - session.heard_at if session.number else 0.0,
                suspicion=session.heartbeats.phi(now - session.heard_at) if session.open else 0.0,
                units_held=len(lease_book.held(session.incarnation)),
                clock=lease_book.clocks.clock(session.incarnation),
                waiting_on=waiting_on,
                waiting_s=now - since,
            )
        )
        said.append((streams.progress.get(name, b""), streams.recent.of(name, now)))
    shown = lease_book.current
    if shown not in lease_book.epochs:  # none has been asked about since the chief was started
        shown = max(lease_book.epochs, key=lambda each: each[1], default=shown)
    leases = lease_book.epochs.get(shown)
    return JobStatus(
        tasks=tuple(tasks),
        said=tuple(said),
        chief_epoch=history.chief_epoch,
        ready=sessions.ready,
        lead=sessions.lead,
        units_accepted=leases.num_accepted if leases else 0,
        units_planned=leases.plan.num_units if leases else 0,
        epoch=shown[1],
        examples=lease_book.examples_accepted,
        checkpoint=history.checkpoint,
        updates_lost=history.updates_lost,
        waiting_for=() if sessions.ready else tuple(sessions.waiting_for),
        stop_reason=sessions.stopping.reason if sessions.stopping else "",
        restored=history.restored,
        updates_undone=history.updates_undone,
        wanted_workers=history.wanted_workers,
        wanted_ps=history.wanted_ps,
        num_ps=sessions.num_ps,
        scaling=scaling,
        standby=standby,
    )
