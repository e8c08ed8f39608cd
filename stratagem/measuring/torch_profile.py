"""The operators of torch's profiler in a trace: the thread that trains starts and stops it, between two steps."""

from __future__ import annotations

import logging
import threading
import time

import torch

from stratagem.measuring.flight import MAX_SPANS, TracedSpan

logger = logging.getLogger(__name__)

WAIT_S = 8.0
"""Seconds that the end of a trace waits for the end of a step."""


class TorchProfile:
    """One trace's. ``torch.profiler`` sees the thread that starts it, and the backward passes of that thread."""

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None
        self._is_over = threading.Event()
        self._has_stopped = threading.Event()
        self._offset_ns = 0
        self._spans: list[TracedSpan] = []
        self._num_dropped = 0

    def at_step(self) -> None:
        """Called by the training thread as a step begins."""
        if self.has_stopped:
            return
        if self._is_over.is_set():
            if self._profile is not None:
                self._profile.stop()
                self._collect(self._profile)
            else:
                logger.warning("A trace has no operators: no step began, or the script's own torch.profiler recorded")
            self._has_stopped.set()
        elif self._profile is None and not torch._C._autograd._profiler_enabled():  # a script's own would find nothing
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profile.start()
            self._offset_ns = time.time_ns() - time.perf_counter_ns()

    @property
    def has_stopped(self) -> bool:
        return self._has_stopped.is_set()

    def end(self) -> tuple[list[TracedSpan], int]:
        """Operators, and how many more there were; none if no step ended in time."""
        self._is_over.set()
        self._has_stopped.wait(WAIT_S)
        return self._spans, self._num_dropped

    def _collect(self, profile: torch.profiler.profile) -> None:
        results = profile.profiler.kineto_results if profile.profiler is not None else None
        for event in results.events() if results is not None else ():
            if len(self._spans) >= MAX_SPANS:
                self._num_dropped += 1
                continue
            start_ns = event.start_ns() - self._offset_ns
            thread = f"torch, thread {event.start_thread_id()}"
            self._spans.append(TracedSpan(event.name(), None, thread, start_ns, start_ns + event.duration_ns()))
