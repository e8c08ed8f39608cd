"""Where a job leaves its results. Standard library only: the peers' jobs use it in their own environments."""

from __future__ import annotations

import os
from pathlib import Path

RESULT_VARIABLE = "STRATAGEM_BENCHMARK_RESULT"
"""Environment variable: the file that the job writes."""
ROOT_VARIABLE = "STRATAGEM_BENCHMARK_ROOT_PID"
"""Environment variable: the process whose descendants are the job."""


def result_path() -> Path:
    """The file that this job writes; files of single ranks lie beside it."""
    return Path(os.environ[RESULT_VARIABLE])


def rank_path(result: Path, rank: int) -> Path:
    """The file in which one rank leaves what it alone knows."""
    return result.with_suffix(f".rank{rank}")


def root_pid() -> int:
    """The process whose descendants are this job."""
    return int(os.environ[ROOT_VARIABLE])
