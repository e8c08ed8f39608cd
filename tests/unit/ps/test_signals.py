"""A ps hears of SIGTERM whichever of its threads the kernel gives it to."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.ps.__main__ import _end_of, _signals_raise, _Terminated


class Session:
    """One whose job goes on, and whose chief saves nothing."""

    membership = SimpleNamespace(num_ps=1)

    def __init__(self) -> None:
        self.waits = threading.Event()

    def wait_stopped(self, timeout_s: float | None) -> None:
        self.waits.set()
        threading.Event().wait(timeout_s)

    def wait_to_leave(self, timeout_s: float) -> None:
        """No chief lets it go."""


def test_a_signal_that_another_thread_is_given_ends_a_ps() -> None:
    session: Any = Session()
    ended, leaving = threading.Event(), threading.Event()

    def get_signal() -> None:
        session.waits.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        ended.wait()

    thread = threading.Thread(target=get_signal)
    with _signals_raise():
        thread.start()
        with pytest.raises(_Terminated):
            _end_of(session, leaving, 0)
    ended.set()
    thread.join()
    assert leaving.is_set()
