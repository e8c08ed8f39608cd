"""Threads that keep a worker's process when its script is over."""

from __future__ import annotations

import threading
import time

import pytest

from stratagem.worker import __main__ as worker


def test_threads_that_outlive_a_script_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()
    lasting = [threading.Thread(target=over.wait, name=name, daemon=name == "daemon") for name in ("own", "daemon")]
    for thread in lasting:
        thread.start()
    monkeypatch.setattr(worker, "THREADS_S", 0.01)
    worker._watch_threads("worker:1")
    said, deadline = "", time.monotonic() + 20
    while not said and time.monotonic() < deadline:
        said = capsys.readouterr().err
    over.set()
    for thread in lasting:
        thread.join()
    assert said == "worker:1: the script is over, but its threads run: own. End them, or make them daemons\n"
