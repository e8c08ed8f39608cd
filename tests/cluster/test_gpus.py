"""``torch.distributed`` with our backend on GPUs: over NCCL where every rank has one of its own, else through the host.

Ranks share a GPU where there are not enough: NCCL 2.31 and later can be told to let them.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forks
from tests.cluster.test_synchronous import one_process

SCRIPTS = Path(__file__).parent / "scripts"
JOB_S = 300.0
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
IS_ONE = torch.cuda.device_count() < 4
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]


def nccl_can_share() -> bool:
    """Of the library that is loaded, which may be another than torch was built with."""
    paths = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnccl.so" in line]
    version = ctypes.c_int()
    for library in map(ctypes.CDLL, [None, *paths]):  # where it was preloaded, the first one knows it
        if hasattr(library, "ncclGetVersion") and library.ncclGetVersion(ctypes.byref(version)) == 0:
            return version.value >= 23100
    return False


needs_gpus = pytest.mark.skipif(IS_ONE and not nccl_can_share(), reason="this NCCL wants a GPU for each rank")
WAYS = ["host", pytest.param("nccl", marks=needs_gpus)]


def variables(way: str) -> dict[str, str]:
    """What makes ranks go that way."""
    return SHARED if way == "nccl" else {"STRATAGEM_TRANSPORT": "auto" if IS_ONE else "shm"}


def run(way: str, script: str, size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A job of ranks on the GPUs there are."""
    command = [sys.executable, *TORCHRUN, f"--nproc-per-node={size}", str(SCRIPTS / script), *arguments]
    return forks.run(command, timeout=JOB_S, env={**os.environ, "DEVICE": "cuda", **variables(way)})


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


def check_equal(expected: dict[str, torch.Tensor], path: Path) -> None:
    """To a few roundings: a GPU adds the examples of shares in another order than those of the whole batch."""
    found = torch.load(path, weights_only=True)
    assert all(value.is_cuda for value in found.values())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, check_device=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_equals_one_process(
    cluster: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, size: int
) -> None:
    for name, value in variables(way).items():
        monkeypatch.setenv(name, value)
    out, arguments = tmp_path / "ring.pt", ["--optimizer", "momentum", "--clip-norm", "0.5", "--accumulate", "2"]
    job = cluster(size, 0, "train_small.py", *arguments, "--out", out, flags=["--strategy", "ring"]).succeed()
    assert ("nccl, because every worker has a GPU of its own" in job.stderr) == (way == "nccl"), job.stderr
    check_equal(one_process(tmp_path, *arguments), out)


def test_parameter_servers_equal_one_process(cluster: Callable[..., Any], tmp_path: Path) -> None:
    out, arguments = tmp_path / "ps.pt", ["--optimizer", "adamw"]
    cluster(3, 2, "train_small.py", *arguments, "--out", out, flags=["--staleness", "0"]).succeed()
    check_equal(one_process(tmp_path, *arguments), out)
