"""Many random calls of ``fit`` in one job: every strategy counts and applies what one process does, and none hangs.

Where workers run in step, histories and evaluations are those of one process: 1e-3 relative after up to 100 calls in
float32, whose sums of slices associate differently. Where they do not, the weights are others, but an epoch counts the
same batches, and each of them is applied once: 1e-4.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forks

Start = Callable[..., Any]
SCRIPT = Path(__file__).parent / "scripts" / "fit_often.py"
COUNTED = ("epochs", "number", "sum", "squares", "val_number", "val_sum", "val_squares")


def alone(out: Path, *arguments: object) -> dict[str, Any]:
    """What one process makes of it."""
    command = [sys.executable, str(SCRIPT), "--out", str(out), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[3]), "OMP_NUM_THREADS": "1"}
    forks.run(command, check=True, timeout=300, env=environment)
    return read(out, 0)


def read(out: Path, worker: int) -> dict[str, Any]:
    news: dict[str, Any] = json.loads(Path(f"{out}.worker:{worker}").read_text())
    return news


def check(found: dict[str, Any], one: dict[str, Any], in_step: bool) -> None:
    assert found["applied"] == pytest.approx(one["applied"], rel=1e-4, abs=1e-6)
    assert len(found["calls"]) == len(one["calls"])
    for call, expected in zip(found["calls"], one["calls"], strict=True):
        if in_step:
            assert call.get("evaluation", {}) == pytest.approx(expected.get("evaluation", {}), rel=1e-3), call
        if call["is_broken"] and not in_step:
            continue  # a worker breaks off where it has come to, perhaps nowhere
        for history, law in zip(call["fits"], expected["fits"], strict=True):
            assert history.keys() == law.keys(), call
            assert history.get("broken") == law.get("broken"), call
            for name in law.keys() - {"broken"} if in_step else COUNTED:
                assert history.get(name, []) == pytest.approx(law.get(name, []), rel=1e-3), (name, call)


def check_job(start: Start, folder: Path, fits: int, num_ps: int, staleness: str, seed: int = 1) -> None:
    arguments = ["--seed", seed, "--fits", fits]
    one = alone(folder / "one", *arguments, "--strategy", "one")
    job = start(2, num_ps, SCRIPT.name, *arguments, "--out", folder / "job", flags=["--staleness", staleness])
    job.succeed(60 + 10 * fits)
    for worker in range(2):
        found = read(folder / "job", worker)
        check(found, one, in_step=staleness == "0")
        for name in ("after 5", "after None") if num_ps else ():
            [history] = found[name]
            assert history["number"] == [40, 36, 40, 36]  # 8 batches in a pass, the last of 4; 5 an epoch
            assert history["val_number"] == [40] * 4


@pytest.mark.thorough
@pytest.mark.parametrize("staleness", ["0", "inf"])
def test_a_few_calls(cluster: Start, tmp_path: Path, staleness: str) -> None:
    check_job(cluster, tmp_path, 8, 2, staleness)


@pytest.mark.thorough
@pytest.mark.parametrize(("num_ps", "staleness"), [(2, "0"), (2, "inf"), (2, "1"), (0, "0")])
def test_a_hundred_calls(cluster: Start, tmp_path: Path, num_ps: int, staleness: str) -> None:
    check_job(cluster, tmp_path, 100, num_ps, staleness)


@pytest.mark.thorough
def test_a_hundred_calls_on_two_replicas(tmp_path: Path) -> None:
    arguments = ["--seed", 1, "--fits", 100]
    one = alone(tmp_path / "one", *arguments, "--strategy", "one")
    mirrored = alone(tmp_path / "two", *arguments, "--strategy", "mirrored", "--devices", "cpu:0,cpu:1")
    check(mirrored, one, in_step=True)
