"""``torch.distributed`` with our backend on GPUs: over NCCL where every rank has one of its own, else through the host.

Ranks share a GPU where there are not enough: NCCL 2.31 and later can be told to let them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import forks

SCRIPTS = Path(__file__).parent / "scripts"
JOB_S = 300.0
IS_ONE = torch.cuda.device_count() < 4
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
WAYS = [
    "host",
    pytest.param(
        "nccl",
        marks=pytest.mark.skipif(
            torch.cuda.is_available() and IS_ONE and torch.cuda.nccl.version() < (2, 31),
            reason="this NCCL wants a GPU for each rank",
        ),
    ),
]


def run(way: str, script: str, size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A job of ranks on the GPUs there are."""
    ways = {"host": {"STRATAGEM_TRANSPORT": "auto" if IS_ONE else "shm"}, "nccl": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}}
    command = [sys.executable, *TORCHRUN, f"--nproc-per-node={size}", str(SCRIPTS / script), *arguments]
    return forks.run(command, timeout=JOB_S, env={**os.environ, "DEVICE": "cuda", **ways[way]})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_collective(way: str, size: int) -> None:
    job = run(way, "gpu_collectives.py", size, way)
    assert job.returncode == 0, job.stderr[-5000:]
    assert len([line for line in job.stdout.splitlines() if line.startswith("ok ")]) == 8


@pytest.mark.parametrize("way", WAYS)
def test_what_trains_on_gpus_ends_as_in_one_process(way: str) -> None:
    job = run(way, "process_groups.py", 4)
    assert job.returncode == 0, job.stderr[-5000:]
    assert len([line for line in job.stdout.splitlines() if line.startswith("ok ")]) == 9
