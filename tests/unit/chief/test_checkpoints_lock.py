"""A folder of checkpoints is one job's at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.chief.__main__ import run
from stratagem.chief.journal import lock
from stratagem.cluster.config import ChiefConfig
from stratagem.errors import ConfigurationError


def test_checkpoints_of_a_job_that_runs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PREDECESSOR_S", 0.0)
    held = lock.CheckpointsLock(str(tmp_path))
    assert held.acquire()
    config = ChiefConfig(num_workers=1, num_ps=1, checkpoint_dir=str(tmp_path), bind="127.0.0.1:0")
    with pytest.raises(ConfigurationError, match=r"a running job, whose chief is process \d"):
        run(config)
    held.release()
