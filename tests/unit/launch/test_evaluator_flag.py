"""Which jobs can have an evaluator beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.errors import ConfigurationError
from stratagem.launch.plan import LocalJob


@pytest.mark.parametrize("num_ps", [0, 1])
def test_a_cluster_can(tmp_path: Path, num_ps: int) -> None:
    script = tmp_path / "train.py"
    script.touch()
    job = LocalJob(script, num_workers=2, num_ps=num_ps, evaluator=True)
    assert [str(task) for task in job.servers if task.type == "evaluator"] == ["evaluator:0"]


def test_a_process_alone_cannot(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ConfigurationError, match="add --workers 2 or --ps 1"):
        LocalJob(script, evaluator=True)
