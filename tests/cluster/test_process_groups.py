"""``torch.distributed`` with our backend, started by torchrun: scripts that know nothing of Stratagem but its name."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
JOB_S = 100.0


def torchrun(num_ranks: int, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a script on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return subprocess.run(
        [*command, str(SCRIPTS / script), *arguments], capture_output=True, text=True, timeout=JOB_S, check=False
    )


def test_what_trains_over_torch_distributed_ends_as_in_one_process() -> None:
    job = torchrun(4, "process_groups.py")
    assert job.returncode == 0, job.stderr[-5000:]
    names = ["ddp", "fsdp2", "hsdp", "tensor_parallel", "pipeline", "checkpoint", "objects_and_batches"]
    assert [line.removeprefix("ok ") for line in job.stdout.splitlines() if line.startswith("ok ")] == names


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["stratagem", pytest.param("gloo", marks=pytest.mark.thorough)])
def test_a_script_of_torch_distributed_runs_unported_under_stratagem_run(backend: str) -> None:
    """With gloo several times: its thread and the end of the script once waited for each other in one of three."""
    for _ in range(6 if backend == "gloo" else 1):
        run_unported(backend)


def run_unported(backend: str) -> None:
    command = ["run", "--workers", "2", "--strategy", "ring", str(SCRIPTS / "ddp.py"), backend]
    job = subprocess.run(
        [sys.executable, "-m", "stratagem.cli", *command], capture_output=True, text=True, timeout=JOB_S, check=False
    )
    assert job.returncode == 0, job.stderr[-5000:]
    assert job.stdout.splitlines() == [f"agreed {backend}"]


def test_a_rank_that_fails_ends_and_the_other_is_told() -> None:
    """Though nobody destroys the group: a thread that waits for another rank keeps no process."""
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        environment["MASTER_PORT"] = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / "leaves_early.py")],
            env={**os.environ, **environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=JOB_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 1], said
    assert "ValueError: rank 1 has had enough" in said[1][1]
    told = [line for line in said[0][0].splitlines() if line.startswith("rank 0 was told: ")]
    assert len(told) == 2 and all("rank 1" in line or "worker:1" in line for line in told), said[0]
