"""The same script under every synchronous strategy ends with the weights of one process, uneven batches included.

Tolerance: 1e-5 absolute, after 47 updates of SGD (digits) and 13 of AdamW (charlm) in float32: sums of slices associate
differently.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests import forks

EXAMPLES = Path(__file__).parents[2] / "examples"
WIDTH = 16
SCRIPTS = {
    "digits": "--epochs 1 --batch-size 31 --optimizer SGD --lr 0.05",
    "charlm": f"--epochs 1 --windows 100 --batch-size 8 --width {WIDTH} --layers 1 --text-bytes 9000 --sample-bytes 1",
}
"""Neither 2, 3 nor 4 replicas divide a batch of 31 evenly; the last ones have 11 and 4 examples."""
PYTHON = [sys.executable]
RUN = [sys.executable, "-m", "stratagem.cli", "run", "--threads", "1", "--workers", "2"]
STRATEGIES = {
    "mirrored": (PYTHON, ["--strategy", "mirrored", "--devices", "cpu:0,cpu:1,cpu:2"]),
    "central": (PYTHON, ["--strategy", "central", "--devices", "cpu:0,cpu:1,cpu:2"]),
    "ring": (RUN, ["--strategy", "ring"]),
    "ring of several devices": ([*RUN, "--devices", "cpu:0,cpu:1"], ["--strategy", "ring"]),
    "synchronous ps": ([*RUN, "--ps", "2", "--staleness", "0"], ["--strategy", "ps"]),
}
TOLERANCE = 1e-5


def weights(command: Sequence[str], script: str, arguments: Sequence[str], folder: Path) -> dict[str, torch.Tensor]:
    out = folder / f"{script}.pt"
    every = [*command, str(EXAMPLES / f"{script}.py"), *SCRIPTS[script].split(), "--export", str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forks.run(every, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    read: dict[str, torch.Tensor] = torch.load(out, weights_only=True)
    if script == "charlm":
        # Attention does not depend on the bias of its keys: that gradient is rounding noise, which Adam blows up.
        read["blocks.0.qkv.bias"][WIDTH : 2 * WIDTH] = 0
    return read


@functools.cache
def alone(script: str, folder: Path) -> dict[str, torch.Tensor]:
    """Of one process."""
    return weights(PYTHON, script, ["--strategy", "one"], folder)


# The matrix of tests/conformance shows each of them on small models.
@pytest.mark.thorough
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_one_script_every_mode(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, script: str, strategy: str
) -> None:
    expected = alone(script, tmp_path_factory.getbasetemp())
    command, arguments = STRATEGIES[strategy]
    found = weights(command, script, arguments, tmp_path)
    assert found.keys() == expected.keys()
    differences = {name: float((found[name] - value).abs().max()) for name, value in expected.items()}
    assert {name: difference for name, difference in differences.items() if difference > TOLERANCE} == {}
