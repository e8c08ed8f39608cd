"""``torch.distributed`` with our backend, started by torchrun: scripts that know nothing of Stratagem but its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_a_script_of_torch_distributed_runs_unported_under_stratagem_run() -> None:
    command = ["run", "--workers", "2", "--strategy", "ring", str(SCRIPTS / "ddp.py"), "stratagem"]
    job = subprocess.run(
        [sys.executable, "-m", "stratagem.cli", *command], capture_output=True, text=True, timeout=JOB_S, check=False
    )
    assert job.returncode == 0, job.stderr[-5000:]
    assert job.stdout.splitlines() == ["agreed stratagem"]
