"""``torch.distributed`` with our backend: scripts that know nothing of Stratagem but its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.rpc.binding import free_port
from tests import forks

SCRIPTS = Path(__file__).parent / "scripts"
JOB_S = 240.0


# torchrun imports all of torch in each rank; make test-frameworks has it in every run of .ci/run.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["forks", "torchrun"])
def test_what_trains_over_torch_distributed_ends_as_in_one_process(launcher: list[str]) -> None:
    job = forks.run([sys.executable, *launcher, str(SCRIPTS / "process_groups.py")], timeout=JOB_S)
    assert job.returncode == 0, job.stderr[-5000:]
    names = [
        "ddp",
        "uneven_inputs",
        "fsdp2",
        "hsdp",
        "tensor_parallel",
        "pipeline",
        "checkpoint",
        "compiled",
        "objects_and_batches",
        "loaders",
        "groups_by_other_names",
    ]
    assert [line.removeprefix("ok ") for line in job.stdout.splitlines() if line.startswith("ok ")] == names


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["stratagem", pytest.param("gloo", marks=pytest.mark.thorough)])
def test_a_script_of_torch_distributed_runs_unported_under_stratagem_run(backend: str) -> None:
    """With gloo several times: its thread and the end of the script once waited for each other in one of three."""
    for _ in range(6 if backend == "gloo" else 1):
        run_unported(backend)


def run_unported(backend: str) -> None:
    command = ["run", "--workers", "2", "--strategy", "ring", str(SCRIPTS / "ddp.py"), backend]
    job = forks.run([sys.executable, "-m", "stratagem.cli", *command], timeout=JOB_S)
    assert job.returncode == 0, job.stderr[-5000:]
    assert job.stdout.splitlines() == [f"agreed {backend}"]


def test_a_rank_that_fails_ends_and_the_other_is_told() -> None:
    """Though nobody destroys the group: a thread that waits for another rank keeps no process."""
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        forks.Popen(
            [sys.executable, str(SCRIPTS / "leaves_early.py"), "stratagem"],
            env={**os.environ, **environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=JOB_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 1], said
    assert "ValueError: rank 1 has had enough" in said[1][1]
    told = [line for line in said[0][0].splitlines() if line.startswith("rank 0 was told: ")]
    assert len(told) == 2 and all("ended, at ValueError: rank 1 has had enough" in line for line in told), said[0]


@pytest.mark.thorough
def test_a_rank_that_fails_over_gloo_ends_its_job() -> None:
    """Though gloo would wait half an hour for the barrier that the rank has begun, and the other rank for its end."""
    command = ["run", "--workers", "2", "--strategy", "ring", str(SCRIPTS / "leaves_early.py"), "gloo"]
    job = forks.run([sys.executable, "-m", "stratagem.cli", *command], timeout=JOB_S)
    assert job.returncode == 1, job.stderr[-5000:]
    assert "worker:1: ValueError: rank 1 has had enough" in job.stderr
