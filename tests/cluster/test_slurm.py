"""`srun python train.py`, without Slurm: tasks with the variables of a step find each other and train."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from stratagem.cluster.resolvers import SlurmClusterResolver
from stratagem.cluster.spec import split_address
from tests import forks
from tests.cluster.test_exactly_once import check_counts

SCRIPTS = Path(__file__).parent / "scripts"


def step(rank: int, job: int) -> dict[str, str]:
    """The variables of a task of a step of three, all on this machine."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_TASKS_PER_NODE": "3",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "STRATAGEM_NUM_PS": "1",
    }


def job_with_a_free_port() -> int:
    """The port of the chief follows from the job's id."""
    for job in range(os.getpid(), os.getpid() + 1000):  # where other tests do not begin
        cluster = SlurmClusterResolver(environ=step(0, job)).cluster_spec()
        assert cluster is not None
        try:
            socket.create_server(split_address(cluster.chief_address)).close()
        except OSError:
            continue
        return job
    raise AssertionError("no free port")


def test_a_step_of_two_workers_and_a_ps(tasks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    job, out = job_with_a_free_port(), tmp_path / "out.pt"
    command = [sys.executable, str(SCRIPTS / "count_examples.py"), "--out", str(out)]
    for rank in range(3):
        environment = {**os.environ, **step(rank, job), "PYTHONPATH": str(SCRIPTS.parents[2]), "OMP_NUM_THREADS": "1"}
        tasks.append(forks.Popen(command, env=environment, stderr=subprocess.PIPE))
    errors = [task.communicate(timeout=240)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0], "\n".join(errors)
    assert "the cluster names no chief: started one" in errors[0]
    check_counts(out, 2)
