"""Under parameter servers each example counts once in histories and evaluations, on every worker, whatever dies.

Tolerance: 1e-5 relative; batches of other sizes sum in another order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem import latest_checkpoint
from stratagem.training.model import Model
from tests.cluster.scripts.fit_counted import NUM_EVALUATED, NUM_TRAINED, make_data, make_net, metrics

Start = Callable[..., Any]


def both(out: Path) -> list[dict[str, Any]]:
    return [json.loads(Path(f"{out}.worker:{worker}").read_text()) for worker in range(2)]


def evaluated_alone(out: Path, num_examples: int = NUM_TRAINED + NUM_EVALUATED) -> dict[str, float]:
    """What one process without Stratagem's cluster makes of the weights."""
    net = make_net()
    net.load_state_dict(torch.load(f"{out}.pt", weights_only=True))
    model = Model(net)
    model.compile(loss="cross_entropy", metrics=metrics())
    x, y = make_data()
    found: dict[str, float] = model.evaluate(x[:num_examples], y[:num_examples], verbose=0, return_dict=True)
    return found


def check(out: Path, num_epochs: int) -> list[dict[str, Any]]:
    news = both(out)
    for name in ("history", "epochs", "evaluation", "of_an_iterable", "first_batches"):
        assert news[0][name] == news[1][name], name
    one = news[0]
    assert one["epochs"] == list(range(num_epochs))
    assert one["history"]["number"] == [NUM_TRAINED] * num_epochs
    assert one["history"]["val_number"] == [NUM_EVALUATED] * num_epochs
    assert one["history"]["learning_rate"] == [1e-2 * 0.5**epoch for epoch in range(num_epochs)]
    assert one["history"]["val_loss"][-1] < one["history"]["val_loss"][0]
    alone = evaluated_alone(out)
    assert one["evaluation"] == pytest.approx(alone, rel=1e-5)
    assert one["of_an_iterable"] == pytest.approx(alone, rel=1e-5)
    assert one["first_batches"] == pytest.approx(evaluated_alone(out, 30), rel=1e-5)
    return news


def test_every_worker_has_the_same_history_and_one_stops_all(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--epochs", 9, "--stop-in-epoch", 2, "--pause-s", 0.002]
    cluster(2, 2, "fit_counted.py", "--out", out, *arguments, flags=["--staleness", "0"]).succeed()
    news = check(out, num_epochs=3)
    assert [one["num_epochs_lived"] for one in news] == [3, 3]
    assert [one["num_steps"] for one in news] == [3 * NUM_TRAINED // 2] * 2  # a slice of each batch for each


@pytest.mark.thorough
def test_a_job_that_is_started_again_has_the_epochs_that_were_over(cluster: Start, tmp_path: Path) -> None:
    out, flags = tmp_path / "out", ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    faults = [{"task": "worker:0", "step": NUM_TRAINED, "action": "terminate", "target": "launcher"}]  # 2 epochs
    first = cluster(1, 1, "fit_counted.py", "--out", out, flags=flags, faults=faults).finish()
    assert (first.code, first.faults) == (143, ["fault-0"]), first.stderr
    cluster(1, 1, "fit_counted.py", "--out", out, "--pause-s", 0, flags=flags).succeed()
    news = json.loads(Path(f"{out}.worker:0").read_text())
    assert (news["num_epochs_lived"], news["num_validated"]) == (1, NUM_EVALUATED // 2)
    assert news["epochs"] == [0, 1, 2]
    assert news["history"]["number"][:2] == [NUM_TRAINED] * 2
    assert news["history"]["val_number"] == [NUM_EVALUATED] * 3
    assert news["history"]["learning_rate"] == [1e-2, 5e-3, 2.5e-3]


@pytest.mark.thorough
@pytest.mark.parametrize("alone", [0, 1])
def test_an_evaluation_on_one_worker_alone_puts_no_later_one_out_of_order(
    cluster: Start, tmp_path: Path, alone: int
) -> None:
    out = tmp_path / "out"
    cluster(2, 1, "evaluates_alone.py", "--out", out, "--alone", alone).succeed()
    lead, other = [json.loads(Path(f"{out}.worker:{worker}").read_text()) for worker in range(2)]
    assert len(lead) == 3 and len(other) == 2 and lead[:2] == other
    for told, of_its_weights in [*lead, *other]:
        assert told == pytest.approx(of_its_weights, rel=1e-5)
    assert lead[0][0] > lead[1][0]


@pytest.mark.thorough
def test_what_another_worker_than_the_lead_was_given_alone_is_refused(cluster: Start, tmp_path: Path) -> None:
    of_the_lead = cluster(2, 1, "fit_one_sided.py", "--out", tmp_path / "a", "--alone", 0).finish()
    assert of_the_lead.code == 0 and latest_checkpoint(tmp_path / "a"), of_the_lead.stderr
    done = cluster(2, 1, "fit_one_sided.py", "--out", tmp_path / "b", "--alone", 1).finish()
    assert done.code == 2
    assert "fit the same, but callbacks is [] on the lead, ['ModelCheckpoint'] on worker:1" in done.stderr


@pytest.mark.thorough
def test_workers_killed_in_training_and_in_evaluation(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    faults = [
        {"task": "worker:1", "step": 3, "action": "kill"},
        {"task": "worker:0 evaluates", "step": 9, "action": "kill"},
    ]
    done = cluster(2, 2, "fit_counted.py", "--out", out, faults=faults).finish()
    assert done.faults == ["fault-0", "fault-1"]
    assert done.code == 0, done.stderr
    assert done.summary["restarts"] == 2
    check(out, num_epochs=3)


@pytest.mark.thorough
@pytest.mark.parametrize("killed", ["chief:0", "ps:1"])
def test_chief_or_ps_killed_in_an_evaluation(cluster: Start, tmp_path: Path, killed: str) -> None:
    out = tmp_path / "out"
    faults = [{"task": "worker:1 evaluates", "step": 5, "action": "kill", "target": killed}]
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every-s", "0.1"]
    done = cluster(2, 2, "fit_counted.py", "--out", out, faults=faults, flags=flags).finish()
    assert done.faults == ["fault-0"]
    assert done.code == 0, done.stderr
    check(out, num_epochs=3)


@pytest.mark.parametrize("staleness", [pytest.param("0", marks=pytest.mark.thorough), "inf"])
@pytest.mark.thorough
def test_the_last_update_of_an_epoch_may_have_fewer_batches(cluster: Start, tmp_path: Path, staleness: str) -> None:
    out = tmp_path / "out.pt"
    cluster(2, 2, "fit_accumulated.py", "--out", out, flags=["--staleness", staleness]).succeed()
    for name, value in torch.load(out, weights_only=True).items():
        assert torch.equal(value, torch.full_like(value, -2)), f"{name}: {value.tolist()}"
