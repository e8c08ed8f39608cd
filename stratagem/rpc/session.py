"""The session of a task with the chief, from the task's side: join, heartbeats, membership, the end.

One background thread holds the stream and reopens it, with the same incarnation, when the chief comes back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc

from stratagem.cluster.exit_codes import EXIT_PREEMPTED
from stratagem.cluster.identity import CHIEF
from stratagem.cluster.membership import Member, Membership
from stratagem.cluster.units import Lease
from stratagem.errors import (
    ClusterTimeoutError,
    ConfigurationError,
    FencedError,
    IdentityError,
    JobStoppedError,
    PeerUnavailableError,
    ProtocolError,
    StratagemError,
)
from stratagem.rpc import channels
from stratagem.rpc.binding import is_loopback
from stratagem.rpc.chief_address import ChiefAddress
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.fields import from_message
from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc
from stratagem.rpc.handshake import explain_refusal
from stratagem.rpc.logs import PACKAGE, LogTail
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.units import lease_to_proto
from stratagem.rpc.versions import own_version, torch_version

logger = logging.getLogger(__name__)

RECONNECT_PAUSE_S = 0.2
MEASURES_S = 0.95
"""Seconds between heartbeats that say what was measured: every second one, as heartbeats come."""
LOOK_S = 10.0
"""Seconds without a chief after which a task looks for a reason."""
ABSENT_S = 2.0
"""Seconds that a task which is to end waits for a chief that is away."""
SILENCE_S = 1.0
"""Seconds after which a task that waits for its chief says so."""


class SessionClient:
    """Joins the cluster and stays in it.

    Args:
        chief_address: where the chief is, as :class:`ChiefAddress` takes it.
        address: host:port where the caller serves its peers; empty if it serves nobody.
        progress: fields of ``Progress``; asked at every heartbeat.
        measures: fields of ``Measures``; asked about once a second, for what the task has measured.
        held: leases the task holds; asked when it joins a restarted chief.
        store_epoch: epoch of the caller's store (ps); asked when it joins.
        chief_timeout_s: seconds the chief may be away before the task gives up.
    """

    def __init__(
        self,
        chief_address: str,
        task: str,
        address: str,
        *,
        progress: Callable[[], Mapping[str, Any]] = dict,
        measures: Callable[[], Mapping[str, Any]] | None = None,
        held: Callable[[], Sequence[Lease]] = list,
        store_epoch: Callable[[], int] = lambda: 0,
        chief_timeout_s: float = 60.0,
        security: Security = OPEN,
    ) -> None:
        self.chief_address = chief_address
        self.task = task
        self.address = address
        self.incarnation = 0
        self._process = os.getpid()
        self.membership = Membership()
        self.job_started = False
        self.ps_replicas = 1
        self.waits_for = "the task chief:0, or worker:0 where the cluster names no chief"
        self._failure: StratagemError | str = "no answer yet"  # of the last attempt to reach the chief
        self._progress = progress
        self._measures = measures
        self._measured_at = float("-inf")
        self._log = LogTail()
        self._held = held
        self._store_epoch = store_epoch
        self._chief_timeout_s = chief_timeout_s
        self._heartbeat_interval_s = 0.5
        self._goodbye: chief_pb2.SessionRequest | None = None
        self._hurry = threading.Event()
        """Set when there is something to say at once, a goodbye too, and when the session is closed."""
        self._connected = False
        self._lost_since, self._told_away = 0.0, False  # when the chief was there last, and whether the log says so
        self._changed = threading.Condition()
        self._welcomed = False
        self.stopped: StratagemError | None = None
        """Why the session is over; None while it lives."""
        self._closing = False
        self._callbacks: list[Callable[[Membership], None]] = []
        self.on_stop: Callable[[StratagemError], object] = bool
        """Called (in the session's thread) when the chief says that the job is over, or this task none of it."""
        self.security = security
        self._certificates = security.certificates()
        self._where = ChiefAddress(chief_address)
        self._tried = self._where.current
        self.channel = channels.connect(self._tried, CHIEF, security)
        """The control connection to the chief; another one where it serves elsewhere, or our certificate is new."""
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="session", daemon=True)

    def start(self, timeout_s: float = 60.0, look: Callable[[], StratagemError | None] = lambda: None) -> int:
        """Joins; returns the incarnation. ``look`` is asked every :data:`LOOK_S` seconds without an answer for a reason
        to give up. PeerUnavailableError: no chief answers at the address within ``timeout_s`` seconds. StratagemError:
        the session has ended already, or ``look`` gave this."""
        deadline = time.monotonic() + timeout_s
        self._thread.start()
        with self._changed:
            if not self._changed.wait_for(self._joined_or_stopped, min(SILENCE_S, timeout_s)):
                logger.info("Waiting for the chief at %s (%s): %s", self.chief_address, self.waits_for, self._failure)
            while not self._joined_or_stopped() and (left_s := deadline - time.monotonic()) > 0:
                is_over = self._changed.wait_for(self._joined_or_stopped, min(left_s, LOOK_S))
                if not is_over and (error := look()) is not None:
                    raise error
            if self.stopped is not None:
                raise self.stopped
            if not self._welcomed:
                raise PeerUnavailableError(
                    f"{self.task} found no chief at {self.chief_address} within {timeout_s:.0f} s: "
                    f"{self._failure}. Start the chief first, or check the address in TF_CONFIG, --cluster or --chief."
                )
        if is_loopback(self.address.rpartition(":")[0]) and not is_loopback(self._tried.rpartition(":")[0]):
            logger.warning(
                "%s serves at %s, where other machines cannot reach it, and its chief at %s: if any task of the job is "
                "elsewhere, give --bind ADDRESS:0",
                *(self.task, self.address, self._tried),
            )
        return self.incarnation

    def wait_ready(self, timeout_s: float) -> Membership:
        """Waits until every task of the cluster has joined. ClusterTimeoutError: not within ``timeout_s`` seconds;
        names who is missing. StratagemError: the session ended meanwhile."""
        deadline = time.monotonic() + timeout_s
        last = ""
        while True:
            with self._changed:
                left_s = max(0.0, min(1.0, deadline - time.monotonic()))
                self._changed.wait_for(lambda: self.membership.ready or self.stopped is not None, left_s)
                if self.stopped is not None:
                    raise self.stopped
                if self.membership.ready:
                    return self.membership
                missing = ", ".join(member.task for member in self.membership.members if not member.live)
            if missing != last:
                logger.info("Waiting for the cluster: %s", missing)
                last = missing
            if time.monotonic() >= deadline:
                raise ClusterTimeoutError(
                    f"the cluster did not come up within {timeout_s:.0f} s; still missing: {missing}. "
                    "Start those tasks, or look at their logs."
                )

    def _joined_or_stopped(self) -> bool:
        return self._welcomed or self.stopped is not None

    def on_membership(self, callback: Callable[[Membership], None]) -> None:
        """Calls ``callback`` (in the session's thread) at every change of the cluster."""
        self._callbacks.append(callback)

    def wait_membership(self, accept: Callable[[Membership], bool], timeout_s: float) -> bool:
        """Waits until ``accept(membership)`` holds; False when it does not within ``timeout_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: accept(self.membership) or self.stopped is not None, timeout_s)
            return accept(self.membership)

    def raise_if_stopped(self) -> None:
        """Raises the reason when the session is over, or this process is a fork of the one that has it: gRPC would wait
        for ever for threads that a fork does not have."""
        if os.getpid() != self._process:
            raise ConfigurationError(
                f"this process was forked by {self.task} and is not a task of the job: let it end with os._exit(), or "
                "use subprocess or multiprocessing"
            )
        if self.stopped is not None:
            raise self.stopped

    def wait_stopped(self, timeout_s: float | None) -> StratagemError | None:
        """Waits for the end of the session; None when it goes on after ``timeout_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped is not None, timeout_s)
            return self.stopped

    def wait_to_leave(self, timeout_s: float) -> StratagemError | None:
        """Says at once what there is to say about progress, and waits for the end of the session, at most ``timeout_s``
        seconds, and :data:`ABSENT_S` while no chief is there; None when it goes on."""
        self._hurry.set()
        deadline = until = time.monotonic() + timeout_s
        with self._changed:
            while self.stopped is None and (now := time.monotonic()) < until:
                until = deadline if self._connected else min(until, now + ABSENT_S)
                self._changed.wait(until - now)
            return self.stopped

    def end(self, reason: str) -> None:
        """The job goes on without this task: to it, that is the end of the job."""
        with self._changed:
            self.stopped = self.stopped or JobStoppedError(reason, 0)
            self._changed.notify_all()

    def goodbye(self, exit_code: int, message: str = "", follows: bool = False, timeout_s: float = 5.0) -> None:
        """Ends the session by the task's own will, and closes the connection; ``follows``: another task had failed.

        Who has finished (exit code 0) waits longer for a chief that is away: it would take the task for lost and wait
        for it. A chief that has done so already hears it too.
        """
        said = message.encode(errors="backslashreplace").decode()  # it may name a file by bytes that are no UTF-8
        goodbye = chief_pb2.Goodbye(exit_code=exit_code, message=said, follows=follows)
        self._goodbye = chief_pb2.SessionRequest(goodbye=goodbye)
        self._hurry.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if exit_code == 0 and self._welcomed and self.stopped is None and self._thread.is_alive():
                logger.info("Finished; waiting to report it to the chief at %s, which is away", self.chief_address)
                self._thread.join(min(self._chief_timeout_s, threading.TIMEOUT_MAX))
                if self._thread.is_alive() or isinstance(self.stopped, PeerUnavailableError):
                    logger.warning("%s will count as lost: the chief did not reply within peer_timeout_s", self.task)
        if exit_code == 0 and isinstance(self.stopped, FencedError):
            logger.info("Finished; telling the chief at %s, which took %s for lost", self.chief_address, self.task)
            self._insist()
        self.close()

    def _insist(self) -> None:
        """Tells a chief that took this task for lost that it has finished."""
        deadline = time.monotonic() + self._chief_timeout_s
        while not self._closing and time.monotonic() < deadline:
            try:
                self._renew_channel()
                for _ in chief_pb2_grpc.ChiefStub(self.channel).Session(iter([self._join()])):
                    pass
                return
            except grpc.RpcError as error:
                if not isinstance(error_from_rpc(error, "chief"), PeerUnavailableError):
                    return  # another process has come in its place
            self._where.turn()
            time.sleep(RECONNECT_PAUSE_S)

    def close(self) -> None:
        """Drops the connection; to the chief this looks like a crash unless :meth:`goodbye` came first."""
        self._closing = True
        PACKAGE.removeHandler(self._log)
        self._hurry.set()
        if self._call is not None:
            self._call.cancel()
        self.channel.close()
        if self._thread.ident is not None:
            self._thread.join(5.0)
            self.channel.close()  # the thread may have made another one meanwhile

    def _run(self) -> None:
        while not self._closing and self.stopped is None:
            try:
                self._renew_channel()
                call = chief_pb2_grpc.ChiefStub(self.channel).Session(self._requests())
                self._call = call
                for event in call:
                    self._handle(event)
            except grpc.RpcError as error:
                self._handle_loss(self._explained(error_from_rpc(error, "chief")))
            except ConfigurationError as error:  # the next address is none to send a token to, say
                self._handle_loss(error)
            except ValueError:  # the channel was closed under the call
                break
            else:
                if self._goodbye is not None:
                    break
                if not self._closing and self.stopped is None:
                    self._handle_loss(PeerUnavailableError("the chief ended the session"))
            self._where.turn()
            with self._changed:
                self._connected = False
                self._changed.notify_all()
                if self.stopped is None:
                    self._changed.wait_for(lambda: self._closing, RECONNECT_PAUSE_S)

    def _renew_channel(self) -> None:
        """A channel keeps the address and the certificate it was made with: the next one has what holds now."""
        wanted = (self._where.current, self.security.certificates())
        if wanted != (self._tried, self._certificates):
            old, self.channel = self.channel, channels.connect(wanted[0], CHIEF, self.security)
            self._tried, self._certificates = wanted
            old.close()

    def _heartbeat(self) -> chief_pb2.Heartbeat:
        heartbeat = chief_pb2.Heartbeat(progress=chief_pb2.Progress(**self._progress()))
        now = time.monotonic()
        if self._measures is not None and (self._goodbye is not None or now >= self._measured_at + MEASURES_S):
            self._measured_at = now
            heartbeat.measures.CopyFrom(chief_pb2.Measures(**self._measures()))
        for at, level, text in self._log.take():
            heartbeat.lines.add(at=at, level=level, text=text)
        return heartbeat

    def _join(self) -> chief_pb2.SessionRequest:
        join = chief_pb2.Join(
            task=self.task,
            address=self.address,
            pid=os.getpid(),
            resume_incarnation=self.incarnation,
            held=map(lease_to_proto, self._held() if self.incarnation else ()),
            store_epoch=self._store_epoch(),
            finished=self._goodbye is not None and self._goodbye.goodbye.exit_code == 0,
            stratagem_version=own_version(),
            torch_version=torch_version(),
        )
        return chief_pb2.SessionRequest(join=join)

    def _requests(self) -> Iterator[chief_pb2.SessionRequest]:
        yield self._join()
        while True:
            if self._hurry.wait(self._heartbeat_interval_s) and self._goodbye is None and not self._closing:
                self._hurry.clear()
            yield chief_pb2.SessionRequest(heartbeat=self._heartbeat())
            if self._goodbye is not None:
                yield self._goodbye
                return
            # After a stop the task still says goodbye: without it, it would count as lost.
            is_told = isinstance(self.stopped, JobStoppedError)
            if self._closing or (self.stopped is not None and not is_told):
                return

    def _handle(self, event: chief_pb2.SessionEvent) -> None:
        kind = event.WhichOneof("event")
        with self._changed:
            if kind == "welcome":
                self.incarnation = event.welcome.incarnation
                self._heartbeat_interval_s = event.welcome.heartbeat_interval_s
                self.job_started = event.welcome.job_started
                self.ps_replicas = event.welcome.ps_replicas
                (PACKAGE.addHandler if event.welcome.wants_log else PACKAGE.removeHandler)(self._log)
                if self._told_away:
                    logger.warning("The chief is back, at %s", self._tried)
                self._welcomed, self._connected, self._told_away = True, True, False
            elif kind == "membership":
                said = event.membership
                members = tuple(from_message(Member, info) for info in said.tasks)
                self.membership = from_message(Membership, said, members=members)
            elif kind == "fenced":
                self.stopped = self.stopped or FencedError(event.fenced.reason)
            elif kind == "stop":
                self.stopped = JobStoppedError(event.stop.reason, event.stop.exit_code)
            self._changed.notify_all()
        stopped = self.stopped
        # Members of a job that was preempted leave at their own time, and nobody breaks off because of it.
        if kind == "membership" and not (isinstance(stopped, JobStoppedError) and stopped.exit_code == EXIT_PREEMPTED):
            for callback in self._callbacks:
                callback(self.membership)
        elif stopped is not None and kind in ("stop", "fenced"):
            self.on_stop(stopped)

    def _explained(self, error: StratagemError) -> StratagemError:
        """Before the first welcome: what lies behind a chief that seems not to be there, if it is TLS."""
        if self._welcomed or not isinstance(error, PeerUnavailableError):
            return error
        reason = explain_refusal(self._tried, CHIEF, self.security)
        return IdentityError(f"{self.task} cannot join: {reason}") if reason else error

    def _handle_loss(self, error: StratagemError) -> None:
        with self._changed:
            if self._closing or self.stopped is not None:
                return
            self._failure, now = error, time.monotonic()
            if self._connected:
                self._lost_since = now
            lost_s = now - self._lost_since
            is_final = isinstance(error, ProtocolError | FencedError) or not self.incarnation
            if is_final and not isinstance(error, PeerUnavailableError):
                self.stopped = error
                self.on_stop(error)
            elif self._welcomed and lost_s > self._chief_timeout_s:
                self.stopped = PeerUnavailableError(
                    f"{self.task} lost the chief at {self.chief_address} {lost_s:.0f} s ago and could not reconnect: "
                    f"{error}"
                )
            elif self._welcomed and lost_s >= SILENCE_S and self._goodbye is None and not self._told_away:
                left_s = self._chief_timeout_s - lost_s
                logger.warning("Waiting for the chief at %s, %.0f s more: %s", self.chief_address, left_s, error)
                self._told_away = True
            self._changed.notify_all()
