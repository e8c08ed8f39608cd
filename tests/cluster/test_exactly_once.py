"""Every example of every epoch is applied exactly once on every ps, whatever dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stratagem as sg
from tests.cluster.scripts.count_examples import Counter

Start = Callable[..., Any]
LONG = ("--examples", 400, "--epochs", 1, "--pause-s", 0.02)
"""An epoch in which one worker leaves enough for the other, however late that is."""


def wait(task: str) -> dict[str, Any]:
    """That a worker trains no further before the first fault, of another, has happened."""
    return {"task": task, "step": 15, "action": "wait", "for": 0}


def check_counts(saved: Path | dict[str, torch.Tensor], epochs: int) -> None:
    state = torch.load(saved, weights_only=True) if isinstance(saved, Path) else saved
    for name, value in state.items():
        assert torch.equal(value, torch.full_like(value, -epochs)), f"{name}: {value.tolist()}"


@pytest.mark.thorough
@pytest.mark.parametrize("data_workers", [0, 2])
def test_two_workers_two_ps(cluster: Start, tmp_path: Path, data_workers: int) -> None:
    out = tmp_path / "out.pt"
    job = cluster(2, 2, "count_examples.py", "--epochs", 3, "--data-workers", data_workers, "--out", out)
    job.succeed()
    check_counts(out, 3)


@pytest.mark.thorough
def test_accumulation(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    # One worker, so that the number of batches it sees is a multiple of the accumulation.
    cluster(1, 2, "count_examples.py", "--accumulate", 3, "--out", out).succeed()
    check_counts(out, 2)


@pytest.mark.thorough
def test_a_worker_that_accumulates_leaves_its_loop_after_an_update(cluster: Start, tmp_path: Path) -> None:
    """The last batch of that update went to the other worker, beside another one: no ps could take the two."""
    out = tmp_path / "out.pt"
    script = ("--accumulate", 2, "--leave-after", 2, "--examples", 80, "--pause-s", 0.05, "--out", out)
    cluster(2, 1, "count_examples.py", *script).succeed()
    check_counts(out, 2)


@pytest.mark.thorough
def test_a_worker_that_accumulates_leaves_its_loop_before_an_update(cluster: Start, tmp_path: Path) -> None:
    """What its .grad has goes into its next update, and went to the other worker, too."""
    out = tmp_path / "out.pt"
    script = ("--accumulate", 2, "--leave-after", 3, "--examples", 80, "--pause-s", 0.05, "--out", out)
    cluster(2, 1, "count_examples.py", *script).succeed()
    for counts in torch.load(out, weights_only=True).values():
        assert (counts >= -2).all() and (counts == -2).sum() >= 80 - 2 * 4, (
            counts.tolist()
        )  # but what is left at the end


@pytest.mark.parametrize("leave_after", [1, 2])
def test_a_worker_leaves_its_loop_before_its_first_update(cluster: Start, tmp_path: Path, leave_after: int) -> None:
    """Of one batch it cannot know that more are to join: others compute it, and .grad drops it. Two it keeps."""
    out = tmp_path / "out.pt"
    script = ("--accumulate", 3, "--leave-after", leave_after, "--leave-once", "--examples", 48, "--pause-s", 0.05)
    cluster(2, 1, "count_examples.py", *script, "--out", out).succeed()
    for counts in torch.load(out, weights_only=True).values():
        assert (counts >= -2).all() and (counts == -2).sum() >= 48 - 4 * 4 * 2, counts.tolist()


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["worker:1", "ps:0", "ps:1"])
def test_whoever_dies_between_the_steps_of_two_optimizers_on_a_batch(cluster: Start, tmp_path: Path, task: str) -> None:
    """At staleness 0 the others waited for ever for the second step of a worker that was gone; where a ps died, the
    second step had no batch any more, and a checkpoint between the two took the batch for done."""
    out = tmp_path / "out.pt"
    script = ("--optimizers", 2, "--epochs", 1, "--out", out)
    faults = [{"task": "worker:1", "step": 5, "action": "kill", "target": task}]
    done = cluster(2, 2, "count_examples.py", *script, flags=["--staleness", "0"], faults=faults).finish()
    assert done.code == 0 and "fault-0" in done.faults, done.stderr
    check_counts(out, 1)


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.thorough), 2])
def test_worker_killed_in_mid_epoch(cluster: Start, ahead: int) -> None:
    # Long epochs: what a script holds ahead of time counts as seen when the loop ends, so the kill must come before.
    faults = [{"task": "worker:1", "step": 5, "action": "kill"}, wait("worker:0")]
    done = cluster(2, 2, "count_examples.py", *LONG, "--epochs", 2, "--ahead", ahead, faults=faults).finish()
    assert "fault-0" in done.faults
    assert done.code == 0, done.stderr
    assert done.summary["restarts"] == 1
    # The last checkpoint, not the lead's copies: a worker may work on what it holds after the lead has ended.
    check_counts(sg.load_checkpoint(done.summary["checkpoint"]), 2)


@pytest.mark.thorough
def test_the_lead_killed_in_mid_epoch(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    faults = [{"task": "worker:0", "step": 5, "action": "kill"}, wait("worker:1")]
    done = cluster(2, 2, "count_examples.py", *LONG, "--out", out, faults=faults).finish()
    assert "fault-0" in done.faults
    assert done.code == 0, done.stderr
    check_counts(out, 1)


@pytest.mark.thorough
def test_a_lead_that_starts_again_does_not_take_the_job_back(cluster: Start, tmp_path: Path) -> None:
    # The script restores first of all. Started again in a running job, it must not give the ps the old values.
    start = Counter(400)
    for parameter in start.parameters():
        parameter.data.fill_(-10.0)
    sg.Checkpoint(model=start, optimizer=torch.optim.SGD(start.parameters(), 1.0)).save(tmp_path / "step", step=1)
    out = tmp_path / "out.pt"
    faults = [{"task": "worker:0", "step": 5, "action": "kill"}, wait("worker:1")]
    done = cluster(2, 2, "count_examples.py", *LONG, "--restore", tmp_path, "--out", out, faults=faults).finish()
    assert "fault-0" in done.faults
    assert done.code == 0, done.stderr
    check_counts(out, 11)


@pytest.mark.thorough
def test_a_worker_that_starts_again_finds_checkpoints_where_the_others_had_none(cluster: Start, tmp_path: Path) -> None:
    # It waited for the others to restore, too.
    out, kept = tmp_path / "out.pt", tmp_path / "kept"
    faults = [{"task": "worker:1", "step": 15, "action": "kill"}]
    script = ("--examples", 40, "--epochs", 60, "--pause-s", 0.02, "--keep", kept, "--out", out)
    done = cluster(2, 2, "count_examples.py", *script, faults=faults).finish()
    assert "fault-0" in done.faults
    assert done.code == 0, done.stderr
    check_counts(out, 60)


LEAVES = """
import torch, stratagem as sg
strategy = sg.strategy_from_environment()
model, optimizer = strategy.prepare(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), 0.1))
data = torch.utils.data.TensorDataset(torch.ones(80, 1))

def step(batch):
    optimizer.zero_grad()
    model(batch[0]).mean().backward()
    optimizer.step()

for number, batch in enumerate(strategy.distribute_dataset(torch.utils.data.DataLoader(data, batch_size=4))):
    strategy.run(step, args=(batch,))
    if number == 4:
        break
"""


@pytest.mark.thorough
def test_the_step_after_which_a_script_leaves_its_loop_is_one_of_its_worker(cluster: Start, tmp_path: Path) -> None:
    """The job had five, and its only worker four."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    summary = cluster(1, 1, script).succeed().summary
    assert (summary["steps"], summary["examples"]) == (5, 20)
    assert summary["measures"]["worker:0"]["values"]["steps"] == 5


def test_a_dataset_that_the_script_has_no_more_is_not_kept(cluster: Start) -> None:
    """A script that distributes one for each epoch took 5 KB more of its worker with each."""
    assert "kept 0" in cluster(1, 1, "fresh_datasets.py").succeed().stdout
