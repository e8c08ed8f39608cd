"""``stratagem ps``: one parameter server, from start to exit code."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from stratagem.checkpoint.ended import note_leaving, note_left, take_end
from stratagem.cluster.config import PsConfig
from stratagem.cluster.exit_codes import EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE
from stratagem.cluster.membership import Membership
from stratagem.cluster.spec import split_address
from stratagem.cluster.task import TaskId
from stratagem.errors import ConfigurationError, JobStoppedError, StratagemError
from stratagem.measuring import measures
from stratagem.measuring.flight import FLIGHT
from stratagem.measuring.process_use import ProcessUse
from stratagem.ps import optimizers
from stratagem.ps.backup import Backup
from stratagem.ps.following import Following
from stratagem.ps.servicer import SERVICE, ParameterServerServicer
from stratagem.ps.socket_lanes import SocketLanes
from stratagem.ps.specs import Limits
from stratagem.ps.store import Store
from stratagem.rpc.binding import advertised_address
from stratagem.rpc.confinement import AllowedFolders
from stratagem.rpc.heap import keep_freed_memory, share_one_heap
from stratagem.rpc.host_id import own_host_id
from stratagem.rpc.observer import OBSERVER, observed
from stratagem.rpc.security import Security, security_of
from stratagem.rpc.segment import free_bytes
from stratagem.rpc.server import RunningServer, serve
from stratagem.rpc.session import SessionClient

logger = logging.getLogger("stratagem.ps")

SIGNAL_S = 1.0
"""Seconds after which a signal is heeded at the latest."""
LEAVE_S = 20.0
"""For the checkpoint of a ps that is told to end: less than a supervisor waits before it kills."""


class _Terminated(BaseException):
    """SIGTERM or SIGINT came."""


def run(config: PsConfig) -> int:
    """Serves until the chief stops the job or a signal comes.

    Listens first, then joins; ready means that the chief has registered it and put it back to a checkpoint, if any.
    Returns the exit code: the job's when the chief stopped it, 1 after a failure, 2 for a configuration that cannot
    work, 143 after SIGTERM or SIGINT.
    """
    try:
        with _signals_raise():
            return _run(config)
    except _Terminated:
        logger.info("Ended by a signal")
        return EXIT_PREEMPTED
    except StratagemError as error:
        logger.error("%s", error)
        return EXIT_USAGE if isinstance(error, ConfigurationError) else EXIT_FAILED


def _run(config: PsConfig) -> int:
    if not config.chief:
        raise ConfigurationError(f"{config.task} must know its chief: set chief to its host:port")
    security = security_of(config)
    torch.set_num_threads(config.num_threads)
    keep_freed_memory()
    share_one_heap()
    free = config.max_store_bytes or free_bytes()
    limits = Limits(
        config.max_variables,
        Limits.max_store_bytes if free is None else free,
        config.max_peer_bytes,
        config.max_peers,
        config.max_message_bytes,
        config.max_ids_per_request,
    )
    folders = AllowedFolders.of(config.checkpoint_dir, config.checkpoint_roots)
    store = Store(config.task, limits, folders=folders)
    lanes = SocketLanes(store, split_address(config.bind)[0], security, config.max_lanes_per_peer)
    FLIGHT.values = store.state.totals.values
    server = serve(
        config,
        observed(SERVICE, ParameterServerServicer(store, lanes, config.max_message_bytes, security)),
        services=[SERVICE.full_name, OBSERVER.full_name],
        security=security,
    )
    try:
        logger.info("Listening on %s%s", server.address, security.words)
        optimizers.warm_up()
        gc.freeze()  # what is here now stays: looking through torch's 300,000 objects takes 0.2 s
        return _stay(config, store, server, security)
    finally:
        if store.state.backup is not None:
            store.state.backup.close()
        store.state.close_lanes(JobStoppedError(f"{config.task} ends", 0))
        lanes.close()
        server.stop(1.0)


def _stay(config: PsConfig, store: Store, server: RunningServer, security: Security) -> int:
    state = store.state
    following: Following | None = None
    leaving = threading.Event()
    session = SessionClient(
        config.chief,
        config.task,
        advertised_address(config.advertise, server.address),
        progress=lambda: dict(
            step=state.step,
            store_epoch=state.store_epoch,
            bytes_held=state.num_bytes,
            leaving=leaving.is_set(),
            **_copies(state.backup, following),
        ),
        measures=functools.partial(_measures, store, ProcessUse()),
        store_epoch=lambda: state.store_epoch if state.initialized else 0,
        chief_timeout_s=config.peer_timeout_s,
        security=security,
    )

    has_served, is_told = threading.Event(), threading.Event()
    index = TaskId.parse(config.task).index

    def note_ready(membership: Membership) -> None:
        if (member := membership.member(config.task)) is not None and member.live:
            store.incarnation = session.incarnation
            server.set_serving(True)
            has_served.set()
        elif index >= membership.num_ps and has_served.is_set():
            session.end(f"the others have what {config.task} held; the job has {membership.num_ps} ps now")
        elif index >= membership.num_ps:
            server.set_serving(True)  # whoever waits for all ps to be ready need not wait for this one
            if not is_told.is_set():
                wanted = index + 1, membership.num_ps
                logger.info("Waiting to be admitted, by stratagem scale --ps %d: there are %d ps", *wanted)
            is_told.set()
        if state.backup is not None:
            state.backup.look(membership)
        if following is not None:
            following.look(membership)

    session.on_membership(note_ready)
    try:
        session.start(config.start_timeout_s, lambda: take_end(config.checkpoint_dir, config.task))
        note_left(config.checkpoint_dir, config.task)  # by a process before this one, which is needed again
        if session.ps_replicas > 1:
            state.backup = Backup(lambda: state.num_bytes)
            following = Following(store, session, security, config.transport)
        raise _end_of(session, leaving, index)
    except JobStoppedError as stopped:
        logger.info("Exiting: %s" if 0 < session.membership.num_ps <= index else "The job is over: %s", stopped)
        if stopped.exit_code == 0 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a pod that is deleted now has ended well
        if session.incarnation:
            note_leaving(config.checkpoint_dir, config.task, str(stopped))
            session.goodbye(0)
        return stopped.exit_code
    except _Terminated:
        state.gate.is_paused = True  # what came before the chief hears of the end would be lost
        session.goodbye(EXIT_PREEMPTED, f"{config.task} was ended by a signal")
        raise
    finally:
        if following is not None:
            following.close()
        session.close()


def _end_of(session: SessionClient, leaving: threading.Event, index: int) -> StratagemError:
    """Why this ps ends. Of a signal the chief hears first: it takes a checkpoint of what is here, and lets it go.
    Raises _Terminated: the signal is why, and not the job, which may be over; or it is the second one."""
    stopped: StratagemError | None = None
    try:
        while stopped is None:  # a signal that another thread is given wakes nobody: Python looks when this one runs
            stopped = session.wait_stopped(SIGNAL_S)
    except _Terminated:
        logger.info("Shutting down once what it holds is saved, in at most %.0f s; a second signal: at once", LEAVE_S)
        leaving.set()
        stopped = session.wait_to_leave(LEAVE_S)
        if stopped is None:
            logger.warning("No chief has saved what is here: updates since the newest checkpoint may be lost")
        if not isinstance(stopped, JobStoppedError) or index >= session.membership.num_ps:
            raise
    assert stopped is not None
    return stopped


def _copies(backup: Backup | None, following: Following | None) -> dict[str, Any]:
    if backup is None:
        return {}
    dropped = following.dropped if following is not None else 0
    return {"backup": backup.words, "copy_to_drop": backup.copy_to_drop, "copies_dropped": dropped}


def _measures(store: Store, process: ProcessUse) -> dict[str, Any]:
    state = store.state
    values = state.totals.values() | state.lanes.values() | process.values() | state.hottest_rows()
    values = measures.bounded(values) | {measures.THREADS: float(torch.get_num_threads())}
    return {"values": values, "notes": {"host": own_host_id()}}


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """In the main thread, turns SIGTERM and SIGINT into an exception; elsewhere the caller owns the signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)
