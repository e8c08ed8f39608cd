"""A barrier that says who did not come, and breaks nothing: every rank tells rank 0 by a message, and hears from it."""

from __future__ import annotations

import itertools
import time

import torch

from stratagem.distributed.messages import Messages
from stratagem.errors import CollectiveError

_FIRST_TAG = 1 << 40
"""No script's; one for each barrier, so that nobody takes a late word for one of the next."""


class MonitoredBarriers:
    """Of one rank."""

    def __init__(self, messages: Messages, rank: int, size: int) -> None:
        self._messages = messages
        self._rank = rank
        self._size = size
        self._tags = itertools.count(_FIRST_TAG)

    def pass_next(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Returns when every rank has called it. Rank 0 waits ``timeout_s`` seconds for the others, and names the first
        who did not come, or with ``wait_all_ranks`` everybody.

        Raises:
            CollectiveError: somebody did not come, in torch's words.
        """
        tag = next(self._tags)
        deadline = time.monotonic() + timeout_s
        if self._rank == 0:
            self._gather(tag, deadline, timeout_s, wait_all_ranks)
        else:
            # Rank 0 may come as late as this rank may wait for it, and wait as long again.
            self._ask(tag, deadline + timeout_s, 2 * timeout_s)

    def _gather(self, tag: int, deadline: float, timeout_s: float, wait_all_ranks: bool) -> None:
        if timeout_s <= 0:
            raise CollectiveError(f"Rank 0 timed out in monitoredBarrier after {timeout_s:g} s", 0)
        missing = [other for other in range(1, self._size) if not self._comes(torch.zeros(1), other, tag, deadline)]
        for other in range(1, self._size):
            if other not in missing:
                self._messages.send(torch.tensor([float(len(missing))]), other, tag)
        if missing:
            named = missing if wait_all_ranks else missing[:1]
            who = f"Rank{'s' * (len(named) > 1)} {', '.join(map(str, named))}"
            raise CollectiveError(f"{who} failed to pass monitoredBarrier in {timeout_s:g} s", missing[0])

    def _ask(self, tag: int, deadline: float, patience_s: float) -> None:
        self._messages.send(torch.zeros(1), 0, tag)
        num_missing = torch.zeros(1)
        came = self._comes(num_missing, 0, tag, deadline)
        if came and not num_missing:
            return
        why = "it misses other ranks" if came else f"nothing came within {patience_s:g} s"
        raise CollectiveError(
            f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            f"from rank 0: {why}",
            0,
        )

    def _comes(self, into: torch.Tensor, source: int, tag: int, deadline: float) -> bool:
        receive = self._messages.receive(into, source, tag)
        try:
            with self._messages.waiting_for(source, "a monitored barrier"):
                receive.done.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return not self._messages.mailbox.withdraw(receive)
        except CollectiveError:  # it is gone
            return False
        return True
