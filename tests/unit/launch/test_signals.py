"""What the launcher hears of its signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from stratagem.launch.signals import heard, signal_pipe

AT_THE_END = """
import atexit, os, signal, sys
from stratagem.cli.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests without
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
sys.argv = ["stratagem", "version"]
main()
"""


@contextlib.contextmanager
def hangups(action: signal.Handlers) -> Iterator[None]:
    """Whatever these tests were started by: nohup, for one."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_goes_away_is_heard() -> None:
    with hangups(signal.SIG_DFL):
        with signal_pipe() as fd:
            for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
                os.kill(os.getpid(), number)
            assert heard(fd) == [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_nohup_is_heeded() -> None:
    with hangups(signal.SIG_IGN), signal_pipe() as fd:
        os.kill(os.getpid(), signal.SIGHUP)
        assert heard(fd) == []


def test_an_interrupt_at_the_very_end_of_a_process_is_no_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, ""), ended
