"""Threads that keep a worker's process when its script is over."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from stratagem.worker import __main__ as worker
from tests.polling import until


def test_threads_that_outlive_a_script_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    lasting = [threading.Thread(target=over.wait, name=name, daemon=name == "daemon") for name in ("own", "daemon")]
    for thread in lasting:
        thread.start()
    said = io.StringIO()  # what capsys has read it drops, with what another thread has written meanwhile
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(worker, "THREADS_S", 0.01)
    worker._watch_threads("worker:1")
    until(lambda: said.getvalue().endswith("\n"))
    over.set()
    for thread in lasting:
        thread.join()
    assert (
        said.getvalue()
        == "worker:1: the script has ended, but its threads still run: own. End them, or make them daemons\n"
    )
