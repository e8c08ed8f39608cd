"""A request to end this process soon, which a training follows when it has saved, and how its ranks come to agree.

Ranks that run in step must stop after the same step. Each says in the small collective at the end of every backward
whether it has been asked to end (:mod:`stratagem.worker.reduction.backward_status`), so all know it in the same step.
"""

from __future__ import annotations

import os
import signal
import threading

import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.worker.ring.communicator import Communicator


class PreemptionRequest:
    """The state of one process; :data:`preemption` is that of this one."""

    def __init__(self) -> None:
        self.requested = False
        """Whether this process has been asked to end."""
        self.agreed = False
        """Whether every rank knows by now that some rank has been asked."""
        self.is_leaving = False
        """Whether this process is about to end because of it."""
        self._num_watching = 0
        self._grace_s = 0.0
        self._process = 0
        self._timer: threading.Timer | None = None

    def watch(self, grace_s: float) -> None:
        """Somebody looks for requests from now on; without, :meth:`request` refuses. ``grace_s``: seconds from a
        request to a second SIGTERM, which this process sends itself."""
        if not self._num_watching:
            self.is_leaving = False
        self._num_watching += 1
        self._grace_s = grace_s
        self._process = os.getpid()

    @property
    def is_watched(self) -> bool:
        """Whether anybody looks for requests."""
        return self._num_watching > 0

    def unwatch(self) -> bool:
        """Undoes one :meth:`watch`. Returns whether nobody is left to follow a request that has been made."""
        self._num_watching -= 1
        if self._num_watching:
            return False
        was_left = self.requested and not self.is_leaving
        self._cancel()
        self.requested = self.agreed = False
        return was_left

    def request(self) -> bool:
        """Asks this process to end. Returns whether that is new to it and somebody watches; from any thread.

        A forked child has what it inherited, and nobody there follows it.
        """
        if self.requested or not self._num_watching or os.getpid() != self._process:
            return False
        self.requested = True
        self._timer = threading.Timer(self._grace_s, os.kill, (os.getpid(), signal.SIGTERM))
        self._timer.daemon = True
        self._timer.start()
        return True

    def agree(self, workers: Communicator | None) -> bool:
        """Whether any rank has been asked, by a collective of its own. Every rank has to call it. Without ``workers``
        this process decides alone."""
        if workers is None:
            return self.requested
        if bool(workers.all_reduce(torch.tensor(int(self.requested)), ReduceOp.MAX)):
            self.agreed = True
        return self.agreed

    def is_due(self, workers: Communicator | None) -> bool:
        """Whether to save and to leave now, after a step: the same on every rank."""
        return self.requested if workers is None else self.agreed

    def leave(self) -> None:
        """The request is being followed: there is no hurry any more that the saving does not have by itself."""
        self.is_leaving = True
        self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


preemption = PreemptionRequest()
"""Of this process: signals are the process's too."""
