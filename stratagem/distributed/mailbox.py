"""Incoming messages between two ranks: those that arrived before they were requested, and open requests."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import threading

import torch

from stratagem.distributed.tensors import movable, told
from stratagem.errors import CollectiveError

UNREAD_BYTES = 64 << 20
"""Bytes of messages from one rank that nobody has asked for, beyond which no more is read unless somebody waits."""


@dataclasses.dataclass(eq=False)
class PostedReceive:
    """A receive that waits for its message."""

    source: int | None
    """None: any rank."""
    tag: int
    into: torch.Tensor
    """Flat."""
    done: concurrent.futures.Future[int] = dataclasses.field(default_factory=concurrent.futures.Future)
    """Ends with the rank that sent."""


class Mailbox:
    """Of one rank; ``sources`` are the others."""

    def __init__(self, rank: int, sources: list[int]) -> None:
        self._rank = rank
        self._changed = threading.Condition()
        self._posted: list[PostedReceive] = []
        self._early: dict[int, collections.deque[tuple[int, torch.Tensor]]] = {
            source: collections.deque() for source in sources
        }
        self._broken: dict[int, CollectiveError] = {}

    def post(self, receive: PostedReceive) -> None:
        """Takes a message that is here already, or waits for it in turn behind those posted before."""
        with self._changed:
            for source in self._early if receive.source is None else [receive.source]:
                for place, (tag, values) in enumerate(self._early[source]):
                    if tag == receive.tag:
                        del self._early[source][place]
                        self._changed.notify_all()
                        self._deliver(receive, source, values)
                        return
            error = self._failure(receive.source)
            if error is None:
                self._posted.append(receive)
                self._changed.notify_all()
        if error is not None:
            receive.done.set_exception(error)

    def withdraw(self, receive: PostedReceive) -> bool:
        """Waits no longer; False when its message has come meanwhile."""
        with self._changed:
            if receive not in self._posted:
                return False
            self._posted.remove(receive)
            return True

    def unread(self, source: int | None) -> str:
        """What has come from a rank, or any, and no receive has taken; empty: nothing."""
        with self._changed:
            of_each = [(rank, *early) for rank in self._early if source in (None, rank) for early in self._early[rank]]
        return ", ".join(f"{told(values)} with tag {tag} from rank {rank}" for rank, tag, values in of_each[:3])

    def expected(self, source: int, tag: int, num_elements: int, dtype: torch.dtype) -> PostedReceive | None:
        """The receive whose memory a message may go into straight away."""
        with self._changed:
            receive = self._waiting(source, tag)
            if receive is None or (receive.into.numel(), receive.into.dtype) != (num_elements, dtype):
                return None
            self._posted.remove(receive)
            return receive

    def put(self, source: int, tag: int, values: torch.Tensor) -> None:
        """A message that came without being expected."""
        with self._changed:
            if (receive := self._waiting(source, tag)) is None:
                self._early[source].append((tag, values))
                return
            self._posted.remove(receive)
        self._deliver(receive, source, values)

    def wait_for_room(self, source: int) -> None:
        """Returns when the next message of a rank may be read."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    source in self._broken
                    or any(receive.source in (None, source) for receive in self._posted)
                    or sum(values.nbytes for _, values in self._early[source]) < UNREAD_BYTES
                )
            )

    def broke(self, source: int, error: CollectiveError) -> None:
        """Nothing more comes from a rank."""
        with self._changed:
            self._broken.setdefault(source, error)
            failed = [receive for receive in self._posted if self._failure(receive.source) is not None]
            self._posted = [receive for receive in self._posted if receive not in failed]
            self._changed.notify_all()
        for receive in failed:
            receive.done.set_exception(error)

    def _waiting(self, source: int, tag: int) -> PostedReceive | None:
        return next((each for each in self._posted if each.source in (None, source) and each.tag == tag), None)

    def _failure(self, source: int | None) -> CollectiveError | None:
        if source is None:
            return next(iter(self._broken.values())) if len(self._broken) == len(self._early) else None
        return self._broken.get(source)

    def _deliver(self, receive: PostedReceive, source: int, values: torch.Tensor) -> None:
        if values.numel() != receive.into.numel() or (values.numel() and values.dtype != receive.into.dtype):
            text = f"rank {source} sent {told(values)} with tag {receive.tag}, rank {self._rank} expects "
            receive.done.set_exception(CollectiveError(text + told(receive.into)))  # nobody is gone
            return
        movable(receive.into).copy_(movable(values))
        receive.done.set_result(source)
