"""Tables on parameter servers: the numbers of one process, exactly once, and back from a checkpoint of other ps.

Tolerance: 2e-6 relative and absolute after 15 updates in float32; sums of slices associate differently.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stratagem as sg
from tests.cluster.test_exactly_once import LONG, check_counts, wait
from tests.cluster.test_synchronous import check_equal, one_process

Start = Callable[..., Any]
SCRIPT = "train_tables.py"


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param("sgd", marks=pytest.mark.thorough),
        "adagrad",
        pytest.param("sparse_adam", marks=pytest.mark.thorough),
    ],
)
def test_two_workers_two_ps_equal_one_process(cluster: Start, tmp_path: Path, optimizer: str) -> None:
    # 50 examples in batches of 12, and a last one of 2: a row may be in one slice, in both, or in none.
    out, rows = tmp_path / "ps.pt", tmp_path / "rows.pt"
    torch.save(torch.randn(41, 4), rows)
    arguments = ["--optimizer", optimizer, *(["--pretrained", rows] if optimizer == "adagrad" else [])]
    job = cluster(2, 2, SCRIPT, *arguments, "--out", out, flags=["--staleness", "0"])
    expected = one_process(tmp_path, *arguments, script=SCRIPT)
    job.succeed()
    check_equal(expected, out)


@pytest.mark.thorough
def test_rows_of_the_next_batch_come_with_an_update(cluster: Start) -> None:
    """The chief leases a few batches at a time: the first of those waits for its rows. The next one is read before the
    update leaves, which is time of the data."""
    found = json.loads(cluster(1, 2, "reads_ahead.py").succeed().stdout.splitlines()[-1])
    assert found["steps"] == 80 and 0 < found["trips"] <= found["steps"] // 2
    assert found["data_s"] >= found["steps"] * found["read_s"]


@pytest.mark.thorough
def test_clipping_accumulation_and_shards(cluster: Start, tmp_path: Path) -> None:
    # 48 examples in batches of 12: even slices, two batches an update. Five shards on two ps.
    out = tmp_path / "ps.pt"
    arguments = ["--accumulate", 2, "--examples", 48, "--clip-norm", 0.05, "--optimizer", "adagrad"]
    job = cluster(3, 2, SCRIPT, *arguments, "--shards", 5, "--out", out, flags=["--staleness", "0"])
    expected = one_process(tmp_path, *arguments, script=SCRIPT)
    job.succeed()
    check_equal(expected, out)


@pytest.mark.thorough
def test_a_checkpoint_goes_to_other_ps_and_to_one_process(cluster: Start, tmp_path: Path) -> None:
    rows = tmp_path / "rows.pt"  # the second job is given rows too, and goes on with the trained ones
    torch.save(torch.randn(41, 4), rows)
    common = ["--optimizer", "sparse_adam", "--epochs", 2, "--pretrained", rows]
    saved, out = tmp_path / "saved" / "step", tmp_path / "ps.pt"
    cluster(2, 2, SCRIPT, *common, "--save", saved, flags=["--staleness", "0"]).succeed()
    path = sg.latest_checkpoint(saved.parent)
    assert path is not None and len(list(Path(path).glob("ps-*.json"))) == 2
    state = sg.load_checkpoint(path)
    assert state["table.weight"].shape == (41, 4) and state["bags.weight"].shape == (23, 4)
    job = cluster(1, 3, SCRIPT, *common, "--restore", path, "--out", out, flags=["--staleness", "0"])
    expected = one_process(tmp_path, *common, "--restore", path, script=SCRIPT)
    job.succeed()
    check_equal(expected, out)


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["worker:1", "ps:1"])
def test_every_example_counts_once_whatever_dies(cluster: Start, tmp_path: Path, target: str) -> None:
    fault: dict[str, Any] = {"task": "worker:0" if target == "ps:1" else target, "step": 5, "action": "kill"}
    faults = [{**fault, "target": target}, wait("worker:1" if target == "ps:1" else "worker:0")]
    done = cluster(2, 2, "count_examples.py", "--table", *LONG, "--epochs", 2, faults=faults).finish()
    assert "fault-0" in done.faults
    assert done.code == 0, done.stderr
    assert done.summary["restarts"] == 1
    state = sg.load_checkpoint(done.summary["checkpoint"])
    if target == "worker:1":
        check_counts(state, 2)
    else:  # updates since the last checkpoint are lost, counted, and never applied twice
        assert float(state["table.weight"].min()) >= -2.0 and float(state["table.weight"].max()) <= 0.0
        assert torch.equal(state["table.weight"], state["table.weight"].round())


@pytest.mark.thorough
def test_a_worker_that_restores_keeps_no_table_in_its_memory(cluster: Start, tmp_path: Path) -> None:
    """Every worker read all of it, and of its slots; the lead does so a part at a time."""
    num_rows = 300_000
    for _ in ("saves and restores", "loads before compile"):
        cluster(2, 2, "restores_table.py", tmp_path, num_rows).succeed()
        said = [json.loads((tmp_path / f"worker:{index}.json").read_text()) for index in range(2)]
        (grown,) = (each["grown"] for each in said if not each["is_lead"])
        assert grown < num_rows * 64 * 4 / 4, said
