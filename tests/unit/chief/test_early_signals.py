"""A chief that is told to end while it starts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from stratagem.chief.__main__ import serve
from stratagem.chief.journal.lock import CheckpointsLock, JournalLock
from stratagem.cluster.config import ChiefConfig
from stratagem.cluster.exit_codes import EXIT_PREEMPTED


@pytest.mark.parametrize("kind", [JournalLock, CheckpointsLock])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_as_a_lock_is_taken_ends_the_chief(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[JournalLock], signum: signal.Signals
) -> None:
    acquire, told = JournalLock.acquire, []

    def tells(lock: JournalLock) -> bool:
        if type(lock) is kind:
            told.append(signum)
            os.kill(os.getpid(), signum)
        return acquire(lock)

    monkeypatch.setattr(JournalLock, "acquire", tells)
    state, checkpoints = tmp_path / "journal", tmp_path / "checkpoints"
    state.mkdir()
    checkpoints.mkdir()
    config = ChiefConfig(
        num_workers=1, num_ps=1, bind="127.0.0.1:0", state_dir=str(state), checkpoint_dir=str(checkpoints)
    )
    assert asyncio.run(asyncio.wait_for(serve(config), timeout=10)) == EXIT_PREEMPTED
    assert told == [signum]
