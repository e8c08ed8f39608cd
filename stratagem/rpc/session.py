"""The session of a task with the chief, from the task's side: join, heartbeats, membership, the end.

One background thread holds the stream and opens it again, with the same incarnation, when the chief comes back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from stratagem.cluster.identity import CHIEF
from stratagem.errors import (
    ClusterTimeoutError,
    FencedError,
    IdentityError,
    JobStoppedError,
    PeerUnavailableError,
    ProtocolError,
    StratagemError,
)
from stratagem.rpc import channels
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc
from stratagem.rpc.handshake import explain_refusal
from stratagem.rpc.security import OPEN, Security

logger = logging.getLogger(__name__)

RECONNECT_PAUSE_S = 0.2
LOOK_S = 10.0
"""Seconds without a chief after which a task looks for a reason."""
SILENCE_S = 1.0
"""Seconds after which a task that waits for its chief says so."""
PREEMPTED = 143
"""Exit code of a job that was preempted: its members leave at their own time, and nobody breaks off because of it."""


class SessionClient:
    """Joins the cluster and stays in it.

    Args:
        chief_address: host:port of the chief.
        task: task id of the caller.
        address: host:port where the caller serves its peers; empty if it serves nobody.
        progress: asked at every heartbeat.
        held: leases the task holds; asked when it joins a restarted chief.
        store_epoch: epoch of the caller's store (ps); asked when it joins.
        chief_timeout_s: seconds the chief may be away before the task gives up.
        security: of this task.
    """

    def __init__(
        self,
        chief_address: str,
        task: str,
        address: str,
        *,
        progress: Callable[[], chief_pb2.Progress] = chief_pb2.Progress,
        held: Callable[[], Sequence[chief_pb2.Lease]] = list,
        store_epoch: Callable[[], int] = lambda: 0,
        chief_timeout_s: float = 60.0,
        security: Security = OPEN,
    ) -> None:
        self.chief_address = chief_address
        self.task = task
        self.address = address
        self.incarnation = 0
        self.membership = chief_pb2.Membership()
        self.job_started = False
        self._progress = progress
        self._held = held
        self._store_epoch = store_epoch
        self._chief_timeout_s = chief_timeout_s
        self._heartbeat_interval_s = 0.5
        self._goodbye: chief_pb2.SessionRequest | None = None
        self._leaving = threading.Event()
        """Set when there is a goodbye to say, and when the session is closed."""
        self._changed = threading.Condition()
        self._welcomed = False
        self._stopped: StratagemError | None = None
        self._closing = False
        self._callbacks: list[Callable[[chief_pb2.Membership], None]] = []
        self._stop_callbacks: list[Callable[[JobStoppedError], None]] = []
        self.security = security
        self._certificates = security.certificates()
        self._channel = channels.connect(chief_address, CHIEF, security)
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="session", daemon=True)

    @property
    def channel(self) -> grpc.Channel:
        """The control connection to the chief; another one after this task's certificate was renewed."""
        return self._channel

    @property
    def stopped(self) -> StratagemError | None:
        """Why the session is over; None while it lives."""
        return self._stopped

    def start(self, timeout_s: float = 60.0, look: Callable[[], StratagemError | None] = lambda: None) -> int:
        """Joins; returns the incarnation.

        Args:
            timeout_s: seconds for the chief to answer.
            look: asked every :data:`LOOK_S` seconds without an answer for a reason to give up.

        Raises:
            PeerUnavailableError: no chief answers at the address within ``timeout_s`` seconds.
            StratagemError: the session has ended already, or ``look`` gave this.
        """
        deadline = time.monotonic() + timeout_s
        self._thread.start()
        with self._changed:
            if not self._changed.wait_for(self._joined_or_stopped, min(SILENCE_S, timeout_s)):
                logger.info("Waiting for the chief at %s (worker:0 starts it if no task is one)", self.chief_address)
            while not self._joined_or_stopped() and (left_s := deadline - time.monotonic()) > 0:
                if self._changed.wait_for(self._joined_or_stopped, min(left_s, LOOK_S)):
                    break
                if (error := look()) is not None:
                    raise error
            if self._stopped is not None:
                raise self._stopped
            if not self._welcomed:
                raise PeerUnavailableError(
                    f"{self.task} found no chief at {self.chief_address} within {timeout_s:.0f} s. "
                    "Start the chief first, or check the address in TF_CONFIG, --cluster or --chief."
                )
        return self.incarnation

    def wait_ready(self, timeout_s: float) -> chief_pb2.Membership:
        """Waits until every task of the cluster has joined.

        Raises:
            ClusterTimeoutError: not within ``timeout_s`` seconds; names who is missing.
            StratagemError: the session ended meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        last = ""
        while True:
            with self._changed:
                self._changed.wait_for(self._ready_or_stopped, max(0.0, min(1.0, deadline - time.monotonic())))
                if self._stopped is not None:
                    raise self._stopped
                if self.membership.ready:
                    return self.membership
                missing = ", ".join(info.task for info in self.membership.tasks if not info.live)
            if missing != last:
                logger.info("Waiting for the cluster: %s", missing)
                last = missing
            if time.monotonic() >= deadline:
                raise ClusterTimeoutError(
                    f"the cluster did not come up within {timeout_s:.0f} s; still missing: {missing}. "
                    "Start those tasks, or look at their logs."
                )

    def _joined_or_stopped(self) -> bool:
        return self._welcomed or self._stopped is not None

    def _ready_or_stopped(self) -> bool:
        return self.membership.ready or self._stopped is not None

    def on_membership(self, callback: Callable[[chief_pb2.Membership], None]) -> None:
        """Calls ``callback`` (in the session's thread) at every change of the cluster."""
        self._callbacks.append(callback)

    def on_stop(self, callback: Callable[[JobStoppedError], None]) -> None:
        """Calls ``callback`` (in the session's thread) when the chief says that the job is over."""
        self._stop_callbacks.append(callback)

    def wait_membership(self, accept: Callable[[chief_pb2.Membership], bool], timeout_s: float) -> bool:
        """Waits until ``accept(membership)`` holds; False when it does not within ``timeout_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: accept(self.membership) or self._stopped is not None, timeout_s)
            return accept(self.membership)

    def raise_if_stopped(self) -> None:
        """Raises the reason when the session is over."""
        if self._stopped is not None:
            raise self._stopped

    def wait_stopped(self, timeout_s: float | None) -> StratagemError | None:
        """Waits for the end of the session; None when it goes on after ``timeout_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped is not None, timeout_s)
            return self._stopped

    def goodbye(self, exit_code: int, message: str = "", timeout_s: float = 5.0) -> None:
        """Ends the session by the task's own will, and closes the connection.

        Who has finished (exit code 0) waits longer for a chief that is away: it would take the task for lost and wait
        for it.
        """
        self._goodbye = chief_pb2.SessionRequest(goodbye=chief_pb2.Goodbye(exit_code=exit_code, message=message))
        self._leaving.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if exit_code == 0 and self._welcomed and self._stopped is None and self._thread.is_alive():
                logger.info("Finished; the chief at %s is away and has to hear of it", self.chief_address)
                self._thread.join(self._chief_timeout_s)
        self.close()

    def close(self) -> None:
        """Drops the connection; to the chief this looks like a crash unless :meth:`goodbye` came first."""
        self._closing = True
        self._leaving.set()
        if self._call is not None:
            self._call.cancel()
        self._channel.close()
        if self._thread.ident is not None:
            self._thread.join(5.0)
            self._channel.close()  # the thread may have made another one meanwhile

    def _run(self) -> None:
        lost_since = time.monotonic()
        while not self._closing and self._stopped is None:
            try:
                self._renew_channel()
                call = chief_pb2_grpc.ChiefStub(self._channel).Session(self._requests())
                self._call = call
                for event in call:
                    lost_since = time.monotonic()
                    self._handle(event)
            except grpc.RpcError as error:
                self._handle_loss(self._explained(error_from_rpc(error, "chief")), time.monotonic() - lost_since)
            except ValueError:  # the channel was closed under the call
                break
            else:
                if self._goodbye is not None:
                    break
                if not self._closing and self._stopped is None:
                    self._handle_loss(
                        PeerUnavailableError("the chief ended the session"), time.monotonic() - lost_since
                    )
            if not self._closing and self._stopped is None:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, RECONNECT_PAUSE_S)

    def _renew_channel(self) -> None:
        """A channel keeps the certificate it was made with: when that was renewed, the next one has the new one."""
        if (found := self.security.certificates()) != self._certificates:
            old = self._channel
            self._channel, self._certificates = channels.connect(self.chief_address, CHIEF, self.security), found
            old.close()

    def _requests(self) -> Iterator[chief_pb2.SessionRequest]:
        yield chief_pb2.SessionRequest(
            join=chief_pb2.Join(
                task=self.task,
                address=self.address,
                pid=os.getpid(),
                resume_incarnation=self.incarnation,
                held=self._held() if self.incarnation else (),
                store_epoch=self._store_epoch(),
            )
        )
        while True:
            self._leaving.wait(self._heartbeat_interval_s)
            yield chief_pb2.SessionRequest(heartbeat=chief_pb2.Heartbeat(progress=self._progress()))
            if self._goodbye is not None:
                yield self._goodbye
                return
            # After a stop the task still says goodbye: without it, it would count as lost.
            is_told = isinstance(self._stopped, JobStoppedError)
            if self._closing or (self._stopped is not None and not is_told):
                return

    def _handle(self, event: chief_pb2.SessionEvent) -> None:
        kind = event.WhichOneof("event")
        with self._changed:
            if kind == "welcome":
                if self.incarnation and self.incarnation != event.welcome.incarnation:
                    self._stopped = FencedError(f"{self.task} came back too late: its units have been given to others")
                self.incarnation = event.welcome.incarnation
                self._heartbeat_interval_s = event.welcome.heartbeat_interval_s
                self.job_started = event.welcome.job_started
                self._welcomed = True
            elif kind == "membership":
                self.membership = event.membership
            elif kind == "fenced":
                self._stopped = FencedError(event.fenced.reason)
            elif kind == "stop":
                self._stopped = JobStoppedError(event.stop.reason, event.stop.exit_code)
            self._changed.notify_all()
        stopped = self._stopped
        if kind == "membership" and not (isinstance(stopped, JobStoppedError) and stopped.exit_code == PREEMPTED):
            for callback in self._callbacks:
                callback(event.membership)
        elif kind == "stop" and isinstance(stopped, JobStoppedError):
            for tell in self._stop_callbacks:
                tell(stopped)

    def _explained(self, error: StratagemError) -> StratagemError:
        """Before the first welcome: what lies behind a chief that seems not to be there, if it is TLS."""
        if self._welcomed or not isinstance(error, PeerUnavailableError):
            return error
        reason = explain_refusal(self.chief_address, CHIEF, self.security)
        return IdentityError(f"{self.task} cannot join: {reason}") if reason else error

    def _handle_loss(self, error: StratagemError, lost_s: float) -> None:
        with self._changed:
            if self._closing or self._stopped is not None:
                return
            if not isinstance(error, PeerUnavailableError):
                if self.incarnation and not isinstance(error, ProtocolError | FencedError):
                    error = PeerUnavailableError(str(error))
                else:
                    self._stopped = error
            elif self._welcomed and lost_s > self._chief_timeout_s:
                self._stopped = PeerUnavailableError(
                    f"{self.task} lost the chief at {self.chief_address} {lost_s:.0f} s ago and it did not come back: "
                    f"{error}"
                )
            self._changed.notify_all()
