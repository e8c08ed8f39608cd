"""What every task is doing: the status page, put together from the state. Pure, no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from stratagem.chief.journal.history import JobHistory
from stratagem.chief.leasing.lease_book import LeaseBook
from stratagem.chief.membership.session import Session, SessionState
from stratagem.chief.membership.sessions import Sessions
from stratagem.chief.monitoring.recent import NOTHING, Measured, Recent
from stratagem.cluster.incarnation import Incarnation
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
    """What the task measured, as it came."""


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


def member_of(session: Session) -> Member:
    """A task as the others see it."""
    # A worker that has not come back to a restarted chief yet is no loss: the others of its ring would break it off.
    is_awaited = session.state is SessionState.AWAITED and session.task.type == "worker"
    is_live = session.state is SessionState.LIVE or is_awaited
    ring = session.joining, session.waits
    return Member(str(session.task), session.address, session.number, is_live, *ring, *session.copies)


def chief_report(address: str, chief_epoch: int, pid: int, measured: Measured) -> TaskReport:
    """The chief's own row; its epoch stands in the place of an incarnation."""
    member = Member("chief:0", address, chief_epoch, True)
    return TaskReport(member, b"", 0.0, pid, 0, 0, SessionState.LIVE.value, measured=measured)


def report(
    sessions: Sessions,
    lease_book: LeaseBook,
    history: JobHistory,
    progress: Mapping[str, bytes],
    waiting_steps: Mapping[str, int],
    waits: Mapping[Incarnation, tuple[str, float]],
    recent: Recent,
    chief: TaskReport,
    now: float,
    scaling: str = "",
    standby: str = "",
) -> JobStatus:
    """The status page.

    Args:
        sessions: membership.
        lease_book: units.
        history: what the journal says.
        progress: newest progress of each task, as it came.
        waiting_steps: step of the job whose update a task waits for; 0: none.
        waits: what each incarnation waits for inside the chief, and since when.
        recent: what tasks have measured.
        chief: what the chief says about itself.
        now: seconds, on the clock of the heartbeats.
        scaling: why there are not as many ps as wanted.
        standby: which chief stands by.
    """
    tasks = [chief]
    for session in sessions.known:
        name = str(session.task)
        waiting_on, since = waits.get(session.incarnation, ("", now))
        step = waiting_steps.get(name, 0) if session.state is SessionState.LIVE else 0
        late = [
            incarnation.task
            for incarnation in lease_book.steps.unfinished(step)
            if waiting_steps.get(incarnation.task) != step
        ]
        if late and not waiting_on:
            waiting_on = f"{', '.join(late)} to deliver their part of step {step}"
        tasks.append(
            TaskReport(
                member=member_of(session),
                progress=progress.get(name, b""),
                heartbeat_age_s=now - session.heard_at if session.number else 0.0,
                suspicion=session.heartbeats.phi(now - session.heard_at) if session.open else 0.0,
                pid=session.pid,
                units_held=lease_book.num_held(session.incarnation),
                clock=lease_book.clocks.clock(session.incarnation),
                state=_SHOWN.get(session.state, session.state.value),
                waiting_on=waiting_on,
                waiting_s=now - since,
                measured=recent.of(name, now),
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
