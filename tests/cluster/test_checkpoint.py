"""Checkpoints of real jobs: going on with the same bits, and across strategies and numbers of parameter servers.

Tolerance across strategies: 2e-6 relative and absolute; parameter servers and rings sum in other orders.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem.checkpoint.catalog import find_damage
from stratagem.checkpoint.reading import latest_checkpoint, load_checkpoint, summarize
from stratagem.training.saving.checkpoint import Checkpoint
from tests.cluster.scripts.train_checkpoint import batch_of, make

Start = Callable[..., Any]
TOLERANCE = 2e-6


def run(start: Start, workers: int, ps: int, *arguments: object) -> None:
    start(workers, ps, "train_checkpoint.py", *arguments).succeed()


def check_equal(found: list[Any], net: torch.nn.Module, adam: torch.optim.Optimizer) -> None:
    torch.testing.assert_close(dict(found[0]), dict(net.state_dict()), rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(found[1]["state"], adam.state_dict()["state"], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.thorough
def test_a_ring_goes_on_with_the_same_bits(cluster: Start, tmp_path: Path) -> None:
    # Step 7 is in the middle of an epoch of 5; every worker has dropout of its own.
    whole, half = tmp_path / "whole.pt", tmp_path / "half.pt"
    run(cluster, 2, 0, "--dataset", "--steps", 12, "--out", whole)
    run(cluster, 2, 0, "--dataset", "--steps", 7, "--save", tmp_path / "saved")
    path = latest_checkpoint(tmp_path / "saved")
    assert path is not None and path.endswith("step-00000007") and not find_damage(Path(path))
    run(cluster, 2, 0, "--dataset", "--steps", 12, "--restore", path, "--out", half)
    expected, found = (torch.load(out, weights_only=True) for out in (whole, half))
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value), name
    assert found[2] == expected[2]


def test_from_servers_to_a_process_and_a_ring_and_back(cluster: Start, tmp_path: Path) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out.pt"
    run(cluster, 1, 2, "--steps", 4, "--save", saved, "--out", out)
    model, optimizer, scheduler = torch.load(out, weights_only=True)
    torch.testing.assert_close(load_checkpoint(saved), dict(model), rtol=0, atol=0)
    path = Path(latest_checkpoint(saved) or "")
    assert path.name == "step-00000004" and (path / "host" / "manifest.json").is_file() and not find_damage(path)

    net, adam = make()
    schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
    here = Checkpoint(model=net, optimizer=adam, scheduler=schedule, step=0)
    assert here.restore(path).step == 4 == here.step
    torch.testing.assert_close(adam.state_dict(), optimizer, rtol=0, atol=0)
    assert schedule.state_dict() == scheduler

    def train(*steps: int) -> None:
        for step in steps:
            images, labels = batch_of(step)
            adam.zero_grad()
            torch.nn.functional.cross_entropy(net(images), labels).backward()
            adam.step()
            schedule.step()

    train(4, 5, 6)

    run(cluster, 2, 0, "--steps", 7, "--restore", saved, "--save", tmp_path / "ring", "--out", out)
    check_equal(torch.load(out, weights_only=True), net, adam)
    run(cluster, 1, 3, "--steps", 8, "--restore", tmp_path / "ring", "--save", tmp_path / "back", "--out", out)
    train(7)
    check_equal(torch.load(out, weights_only=True), net, adam)
    assert Checkpoint(step=0).restore(tmp_path / "back").step == 8
    assert len(list(tmp_path.glob("back/step-00000008/ps-*.json"))) == 3
    # What the bits depend on besides the script is written with them (docs/protocol.md 24).
    made_by = [summarize(tmp_path / name)["made_by"] for name in ("saved", "ring", "back")]
    assert [made["lane"] for made in made_by] == ["shm"] * 3 and {made["wire_dtype"] for made in made_by} == {"float32"}
    torch.testing.assert_close(
        load_checkpoint(tmp_path / "back"), dict(net.state_dict()), rtol=TOLERANCE, atol=TOLERANCE
    )


@pytest.mark.thorough
def test_what_an_earlier_job_left_under_parameter_servers_is_said(cluster: Start, tmp_path: Path) -> None:
    words = "belongs to an earlier job and is left as it is"
    save = ("--steps", 2, "--save", tmp_path)
    pair = cluster(2, 1, "train_checkpoint.py", *save).finish()
    assert (pair.code, words in pair.stderr) == (0, False), pair.stderr  # the second worker saves what the first has
    again = cluster(1, 1, "train_checkpoint.py", *save).finish()
    assert (again.code, words in again.stderr) == (0, True), again.stderr
