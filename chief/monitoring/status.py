"""What every task is doing: the status page, put together from the state."""

from __future__ import annotations

import dataclasses
import os

from stratagem.chief.chief_state import ChiefState
from stratagem.chief.membership.session import SessionState
from stratagem.chief.membership.session_streams import SessionStreams
from stratagem.chief.monitoring.recent import NOTHING, Measured
from stratagem.cluster.membership import Member


@dataclasses.dataclass(frozen=True)
class TaskReport:
    """One task."""

    member: Member
    progress: bytes
    """What the task said last, as it came."""
    heartbeat_age_s: float
    pid: int
    units_held: int
    clock: int
    state: str
    """"waiting", "live", "lost" or "done"."""
    suspicion: float = 0.0
    """phi of the silence; 0 for a task without a session."""
    waiting_on: str = ""
    """What the task waits for, as the chief knows it; empty: as the task says."""
    waiting_s: float = 0.0
    """0: as the task says."""
    measured: Measured = NOTHING


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """The whole job."""

    tasks: tuple[TaskReport, ...]
    chief_epoch: int
    ready: bool
    lead: str
    units_accepted: int
    units_planned: int
    epoch: int
    examples_accepted: int
    checkpoint: str
    updates_lost: int
    waiting_for: tuple[str, ...]
    stop_reason: str
    restored: str
    updates_undone: int
    wanted_workers: int = 0
    wanted_ps: int = 0
    num_ps: int = 0
    scaling: str = ""
    standby: str = ""


_SHOWN = {SessionState.AWAITED: "waiting", SessionState.JOINED: "waiting"}


def report(state: ChiefState, streams: SessionStreams, address: str, scaling: str, standby: str) -> JobStatus:
    """The status page.

    Args:
        streams: have what tasks said and measured.
        address: where the chief serves.
        scaling: why there are not as many ps as wanted.
        standby: which chief stands by.
    """
    sessions, lease_book, history, now = state.sessions, state.lease_book, state.journal.history, state.clock()
    # The chief's own row; its epoch stands in the place of an incarnation.
    chief, measured = Member("chief:0", address, history.chief_epoch, True), streams.recent.of("chief:0", now)
    tasks = [TaskReport(chief, b"", 0.0, os.getpid(), 0, 0, SessionState.LIVE.value, measured=measured)]
    for session in sessions.known:
        name = str(session.task)
        waiting_on, since = state.waits.noted.get(session.incarnation, ("", now))
        step = streams.waiting_steps.get(name, 0) if session.state is SessionState.LIVE else 0
        late = [
            incarnation.task
            for incarnation in lease_book.steps.unfinished(step)
            if streams.waiting_steps.get(incarnation.task) != step
        ]
        if late and not waiting_on:
            waiting_on = f"{', '.join(late)} to deliver their part of step {step}"
        tasks.append(
            TaskReport(
                member=session.member,
                progress=streams.progress.get(name, b""),
                heartbeat_age_s=now - session.heard_at if session.number else 0.0,
                suspicion=session.heartbeats.phi(now - session.heard_at) if session.open else 0.0,
                pid=session.pid,
                units_held=lease_book.num_held(session.incarnation),
                clock=lease_book.clocks.clock(session.incarnation),
                state=_SHOWN.get(session.state, session.state.value),
                waiting_on=waiting_on,
                waiting_s=now - since,
                measured=streams.recent.of(name, now),
            )
        )
    opened = [(key, leases) for key, leases in lease_book.epochs.items() if not leases.closed]
    (_, epoch), leases = max(opened or lease_book.epochs.items(), key=lambda each: each[0][1], default=((0, 0), None))
    return JobStatus(
        tasks=tuple(tasks),
        chief_epoch=history.chief_epoch,
        ready=sessions.ready,
        lead=sessions.lead,
        units_accepted=leases.num_accepted if leases else 0,
        units_planned=leases.plan.num_units if leases else 0,
        epoch=epoch,
        examples_accepted=lease_book.examples_accepted,
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
