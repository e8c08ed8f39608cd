"""Keeps the copy of another ps up to date: a thread that follows it for the whole job."""

from __future__ import annotations

import logging
import threading

from stratagem.cluster.communication import Transport
from stratagem.cluster.membership import Member, Membership, kept_by
from stratagem.errors import PeerUnavailableError, StaleStoreError, StratagemError
from stratagem.ps.peer_client import PeerStore
from stratagem.ps.requests import Sender
from stratagem.ps.store import Store
from stratagem.rpc.security import Security
from stratagem.rpc.session import SessionClient

logger = logging.getLogger(__name__)

RETRY_S = 0.1
"""Before a ps that broke off is followed anew."""
MAX_RETRY_S = 30.0
"""The same after one failure more each time that is no matter of the connection: each attempt has the ps pause."""


class Following:
    """Follows the ps whose copy this one keeps, in ``store``; ``session`` gives its address, and this ps's identity."""

    def __init__(self, store: Store, session: SessionClient, security: Security, transport: Transport) -> None:
        self._store = store
        self._session = session
        self._security = security
        self._transport = transport
        self._closed = threading.Event()
        self._retry_s = RETRY_S
        self._number = 0
        """Of the following under way."""
        self._lock = threading.Lock()
        self.dropped = 0
        """Copies made in followings up to this one are gone."""
        self._kept_number = 0
        """Of the following in which the copy was made that is kept."""
        self._thread = threading.Thread(target=self._run, name="following", daemon=True)
        self._thread.start()

    def look(self, membership: Membership) -> None:
        """Drops a copy that its ps waits to be rid of: it lives, and cannot reach this one."""
        for task, copy in [*self._store.copies.kept.items()]:
            member = membership.member(task)
            if member is None or not membership.has(copy.source.key) or copy.is_taken:
                continue
            with self._lock:
                if self._kept_number <= member.copy_to_drop:
                    self._store.copies.kept.pop(task, None)
                    self.dropped = max(self.dropped, member.copy_to_drop)
                    logger.warning("Dropping the copy of %s, which has waited for this ps in vain", copy.source)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        said = ""
        while not self._closed.is_set() and self._session.stopped is None:
            try:
                if (member := self._member()) is not None:
                    self._follow(member)
            except Exception as error:  # no memory, say: there may be some later
                is_away = isinstance(error, PeerUnavailableError)
                self._retry_s = RETRY_S if is_away else min(2 * self._retry_s, MAX_RETRY_S)
                if str(error) != said and self._session.stopped is None:
                    said, level = str(error), logging.INFO if is_away else logging.WARNING
                    is_strange = not isinstance(error, StratagemError)
                    logger.log(level, "No copy of another ps for now: %s", error, exc_info=is_strange)
            self._closed.wait(self._retry_s)

    def _member(self) -> Member | None:
        """The process to follow, if there is one, and this one serves: until then it may be taking a copy over."""
        membership = self._session.membership
        if not membership.has((self._session.task, self._session.incarnation)):
            return None
        num_ps = membership.num_ps
        member = membership.member(kept_by(self._store.task, num_ps)) if num_ps > 1 else None
        return member if member is not None and member.live and member.task != self._store.task else None

    def _follow(self, member: Member) -> None:
        asker = Sender(self._session.task, self._session.incarnation)
        self._number = number = self._number + 1

        def goes_on() -> bool:  # also while a chief that has just started has not heard of both
            now = self._session.membership.member(member.task)
            is_same = now is not None and now.incarnation == member.incarnation
            return not self._closed.is_set() and self._session.stopped is None and is_same and self.dropped < number

        where, meter = (member.task, member.address), self._store.state.lanes
        with PeerStore(asker, *where, meter, self._security, goes_on, self._transport) as peer:
            if peer.incarnation != member.incarnation:
                raise PeerUnavailableError(f"{member.task} at {member.address} is not the process that the chief knows")

            def let_go() -> None:
                with self._lock:
                    self._store.copies.kept.pop(member.task, None)
                    self.dropped = max(self.dropped, number - 1)

            def begun() -> None:
                let_go()
                peer.confirm(0)

            while True:
                try:
                    image = peer.follow(member.task, number=number, dropped=self.dropped, begun=begun)
                    break
                except StaleStoreError:  # its worker waits until nobody takes over what lacks the new variables
                    let_go()
                if self._closed.wait(RETRY_S) or not goes_on():
                    return
            with self._lock:
                if self.dropped >= number:
                    return
                copy = self._store.copies.new_copy(image)
                self._kept_number = number
            told = image.number + 1
            peer.confirm(told)
            for change in peer.changes():
                if change is None:
                    copy.is_whole, self._retry_s = True, RETRY_S
                    logger.info("Keeping a copy of %s", copy.source)
                    continue
                copy.commit(*change)
                told += 1
                peer.confirm(told)
