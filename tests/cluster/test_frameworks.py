"""The examples of examples/distributed end over our backend as over gloo: the same script, the same loss."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from stratagem.rpc.binding import free_port
from tests import forks

EXAMPLES = Path(__file__).parents[2] / "examples" / "distributed"
JOB_S = 200.0


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def loss(script: str, backend: str, *arguments: str) -> float:
    """What two ranks under torchrun say they have come to; without a library, and over gloo, as forks: that is cheaper.
    Over our backend they have to end, too; over gloo the last process waits at times for a thread that waits for the
    GIL which the process holds, and is ended here."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *TORCHRUN, str(EXAMPLES / script), "--backend", backend, *arguments]
    environments = [environ]
    if backend == "gloo" and script == "ddp.py":
        environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environments = [{**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        command = [word for word in command if word not in TORCHRUN]
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        jobs = []
        for each in environments:
            job = forks.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=each)
            jobs.append(stack.enter_context(job))
            stack.callback(job.terminate)
        assert jobs[0].stdout is not None
        said = (re.match(rf"loss (\d+\.\d+) over {backend}$", line) for line in jobs[0].stdout)
        found = next(filter(None, said), None)
        ended = None if found and backend == "gloo" else jobs[0].wait(JOB_S)
        errors.seek(0)
        assert found and not ended, errors.read()[-5000:]
    return float(found[1])


# make test-frameworks has each, a step of .ci/run; test_process_groups.py trains so in every run of the tests.
@pytest.mark.thorough
@pytest.mark.timeout(2 * JOB_S)
@pytest.mark.parametrize(
    ("script", "library", "arguments"),
    [
        ("ddp.py", "torch", []),
        pytest.param("with_accelerate.py", "accelerate", ["--epochs", "1"], marks=pytest.mark.frameworks),
        pytest.param("with_lightning.py", "lightning", ["--epochs", "1"], marks=pytest.mark.frameworks),
        pytest.param("with_trainer.py", "transformers", ["--windows", "64"], marks=pytest.mark.frameworks),
    ],
)
def test_a_script_ends_as_over_gloo(script: str, library: str, arguments: list[str]) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: make test-frameworks")
    assert loss(script, "stratagem", *arguments) == pytest.approx(loss(script, "gloo", *arguments), abs=2e-4)


@pytest.mark.thorough
def test_fsdp_learns() -> None:
    """Its numbers are compared with one process in test_process_groups.py; over gloo it ends with SIGABRT at times."""
    short = ["--windows", "256", "--width", "32"]
    assert loss("fsdp.py", "stratagem", *short, "--epochs", "4") < loss("fsdp.py", "stratagem", *short, "--epochs", "1")
