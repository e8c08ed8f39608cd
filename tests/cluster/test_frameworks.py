"""The examples of examples/distributed end over our backend as over gloo: the same script, the same loss."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests import forks

EXAMPLES = Path(__file__).parents[2] / "examples" / "distributed"
JOB_S = 200.0


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def loss(script: str, backend: str, *arguments: str) -> float:
    """What two ranks under torchrun say they have come to. Over our backend they have to end, too; over gloo the last
    process waits at times for a thread that waits for the GIL which the process holds, and is ended here."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *TORCHRUN, str(EXAMPLES / script), "--backend", backend, *arguments]
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        job = stack.enter_context(forks.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environ))
        stack.callback(job.terminate)
        assert job.stdout is not None
        said = (re.match(rf"loss (\d+\.\d+) over {backend}$", line) for line in job.stdout)
        found = next(filter(None, said), None)
        ended = None if found and backend == "gloo" else job.wait(JOB_S)
        errors.seek(0)
        assert found and not ended, errors.read()[-5000:]
    return float(found[1])


@pytest.mark.thorough
def test_ddp_comes_to_the_loss_of_one_process() -> None:
    toy = runpy.run_path(str(EXAMPLES / "ddp.py"))["ToyModel"]
    states: list[torch.Tensor] = []
    for rank in (1, 0):
        torch.manual_seed(rank)
        model = toy()
        states.insert(0, torch.get_rng_state())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        losses = []
        for rank, state in enumerate(states):
            torch.set_rng_state(state)
            losses.append(torch.nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5)))
            states[rank] = torch.get_rng_state()
        torch.stack(losses).mean().backward()
        optimizer.step()
    assert loss("ddp.py", "stratagem") == pytest.approx(torch.stack(losses).mean().item(), abs=2e-4)


# make test-frameworks has each, a step of .ci/run; test_process_groups.py trains so in every run of the tests.
@pytest.mark.thorough
@pytest.mark.timeout(2 * JOB_S)
@pytest.mark.parametrize(
    ("script", "library", "arguments"),
    [
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
