"""A ring that goes on without the workers it loses: real processes, kill -9."""

from __future__ import annotations

import collections
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
Start = Callable[..., Any]

NUM_EXAMPLES, NUM_EPOCHS = 100, 3


def kill(task: str, step: int) -> dict[str, Any]:
    return {"task": task, "step": step, "action": "kill"}


def news_of(out: Path, workers: list[int]) -> list[dict[str, Any]]:
    return [json.loads(Path(f"{out}.{worker}").read_text()) for worker in workers]


def check_same_and_exact(news: list[dict[str, Any]]) -> None:
    """All workers saw the same gradients, of the true mean, and each example once an epoch."""
    for one in news[1:]:
        for name in ("seen", "losses", "totals", "sizes", "changes"):
            assert one[name] == news[0][name], name
    assert all(one["agree"] for one in news)
    for rows, total in zip(news[0]["seen"], news[0]["totals"], strict=True):
        assert total == pytest.approx(1.0, abs=1e-5), "divided by something else than the number of its examples"
        assert len(rows) == len(set(rows))
    counts = collections.Counter(itertools.chain.from_iterable(news[0]["seen"]))
    assert counts == dict.fromkeys(range(NUM_EXAMPLES), NUM_EPOCHS)
    every = list(itertools.chain.from_iterable(news[0]["seen"]))
    for epoch in range(NUM_EPOCHS):
        assert sorted(every[epoch * NUM_EXAMPLES :][:NUM_EXAMPLES]) == list(range(NUM_EXAMPLES))


def train(
    cluster: Start,
    out: Path,
    *faults: dict[str, Any],
    transport: str = "auto",
    workers: int = 4,
    min_workers: int = 2,
    restarts: int = 0,
    arguments: Sequence[object] = (),
) -> Any:
    flags = ["--strategy", "ring", "--min-workers", str(min_workers), "--transport", transport]
    flags += ["--max-restarts", str(restarts)]
    arguments = ["--out", out, "--examples", NUM_EXAMPLES, "--epochs", NUM_EPOCHS, *arguments]
    return cluster(workers, 0, "train_healing.py", *arguments, flags=flags, faults=faults).finish()


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_ring_of_four_loses_one_and_goes_on(cluster: Start, tmp_path: Path, transport: str) -> None:
    done = train(cluster, tmp_path / "news", kill("worker:1", 4), transport=transport)
    assert done.code == 0, done.stderr
    assert done.faults == ["fault-0"]
    assert done.summary["workers_lost"] == ["worker:1"] and done.summary["restarts"] == 0
    assert "worker:1 ended (killed by SIGKILL); the ring continues with 3 workers" in done.stderr
    news = news_of(tmp_path / "news", [0, 2, 3])
    check_same_and_exact(news)
    assert set(news[0]["sizes"]) == {4, 3}
    assert news[0]["changes"] == [[4, 3, 5]], "called once, before the step after the one in which the ring healed"
    assert news[0]["sizes"] == sorted(news[0]["sizes"], reverse=True)
    slowest = max(after - before for before, after in itertools.pairwise(news[0]["times"]))
    print(f"{transport}: the longest step, in which the ring healed, took {slowest:.2f} s")


@pytest.mark.thorough
def test_the_lead_and_one_more_are_lost_and_then_too_many(cluster: Start, tmp_path: Path) -> None:
    done = train(cluster, tmp_path / "news", kill("worker:0", 3), kill("worker:3", 9), transport="tcp")
    assert done.code == 0, done.stderr
    assert done.summary["workers_lost"] == ["worker:0", "worker:3"]
    news = news_of(tmp_path / "news", [1, 2])
    check_same_and_exact(news)
    assert [change[:2] for change in news[0]["changes"]] == [[4, 3], [3, 2]]
    assert [one["is_lead"] for one in news] == [True, False]
    done = train(cluster, tmp_path / "few", kill("worker:0", 3), kill("worker:1", 5), workers=3)
    assert done.code != 0
    assert "fewer than --min-workers 2 are left; start the job again" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_one_is_left(cluster: Start, tmp_path: Path, transport: str) -> None:
    done = train(cluster, tmp_path / "news", kill("worker:0", 6), transport=transport, workers=2, min_workers=1)
    assert done.code == 0, done.stderr
    check_same_and_exact(news_of(tmp_path / "news", [1]))


@pytest.mark.thorough
def test_fit_goes_on_too(cluster: Start, tmp_path: Path) -> None:
    arguments = ["--by", "fit", "--folder", tmp_path / "backup", "--out", tmp_path / "weights.pt"]
    flags = ["--strategy", "ring", "--min-workers", "2", "--max-restarts", "0"]
    job = cluster(3, 0, "train_preempted.py", *arguments, flags=flags, faults=[kill("worker:1", 9)])
    done = job.succeed()
    assert done.summary["workers_lost"] == ["worker:1"] and done.summary["restarts"] == 0
    assert "are repeated at the end of the epoch" in done.stderr


def check_newcomer(news: dict[str, Any], other: dict[str, Any]) -> None:
    """It saw what another did, from the step on in which it joined."""
    for name in ("seen", "losses", "totals", "sizes"):
        assert news[name] == other[name][news["first"] :], name
    assert news["first"] > 0 and news["agree"]
    assert news["changes"] == [[b, n, at - news["first"]] for b, n, at in other["changes"] if at >= news["first"]]


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.thorough)])
def test_one_of_four_is_killed_and_comes_back(cluster: Start, tmp_path: Path, transport: str) -> None:
    faults = [kill("worker:1", 4)]
    arguments = ["--scales", "--meet", 9]
    done = train(cluster, tmp_path / "news", *faults, transport=transport, restarts=1, arguments=arguments)
    assert done.code == 0, done.stderr
    assert done.faults == ["fault-0"]
    assert done.summary["workers_lost"] == [] and done.summary["restarts"] == 1
    old, back = news_of(tmp_path / "news", [0, 2, 3]), news_of(tmp_path / "news", [1])[0]
    check_same_and_exact(old)
    check_newcomer(back, old[0])
    assert back["first"] == 10
    assert [change[:2] for change in old[0]["changes"]] == [[4, 3], [3, 4]]


@pytest.mark.thorough
def test_a_newcomer_is_not_taken_in_after_the_last_batch_of_an_epoch(cluster: Start, tmp_path: Path) -> None:
    """Its loop would have none of that epoch, and a mean over them ends many scripts ("division by zero")."""
    arguments = ["--meet", 14]  # 100 examples are 7 batches of 16, and 8 where one worker's part comes again
    done = train(cluster, tmp_path / "news", kill("worker:1", 4), restarts=1, arguments=arguments)
    assert done.code == 0, done.stderr
    old, back = news_of(tmp_path / "news", [0, 2, 3]), news_of(tmp_path / "news", [1])[0]
    check_same_and_exact(old)
    check_newcomer(back, old[0])
    assert back["first"] == 16, "after the first step of the next epoch"


@pytest.mark.thorough
def test_a_newcomer_with_a_schedule_of_its_own_ends_alone(cluster: Start, tmp_path: Path) -> None:
    """It begins where the others began, which ended the whole job; and what comes again are more steps than a
    OneCycleLR was told of, which ended it too."""
    arguments = ["--schedule", "--meet", 9]
    done = train(cluster, tmp_path / "news", kill("worker:1", 4), restarts=1, arguments=arguments)
    assert done.code == 0, done.stderr
    assert done.summary["workers_lost"] == ["worker:1"] and done.summary["restarts"] == 1
    assert "worker:1: ConfigurationError: the settings of an optimizer differ" in done.stderr
    assert "OneCycleLR stays where it ends" in done.stderr
    old = news_of(tmp_path / "news", [0, 2, 3])
    check_same_and_exact(old)
    assert [change[:2] for change in old[0]["changes"]] == [[4, 3], [3, 4], [4, 3]]


@pytest.mark.thorough
def test_a_worker_comes_back_into_the_ring_of_an_example(cluster: Start) -> None:
    """It began at epoch 0, with the learning rate of that, and ended alone each time it came."""
    flags = ["--strategy", "ring", "--min-workers", "1", "--max-restarts", "1", "--chaos", "kill worker:1@step=50"]
    done = cluster(2, 0, EXAMPLES / "digits.py", "--epochs", 40, flags=flags).succeed()
    assert done.summary["restarts"] == 1 and done.summary["workers_lost"] == []
    assert "the ring has 2 ranks after" in done.stderr


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.thorough)])
@pytest.mark.thorough
def test_a_newcomer_in_another_collective_ends_alone(cluster: Start, tmp_path: Path, transport: str) -> None:
    """It counts its batches from 0, and the others have begun with the job: all ended with 1."""
    arguments = ["--barrier-every", 4, "--meet", 9]
    faults = [kill("worker:1", 4)]
    done = train(cluster, tmp_path / "news", *faults, transport=transport, restarts=1, arguments=arguments)
    assert done.code == 0, done.stderr
    assert done.summary["workers_lost"] == ["worker:1"] and done.summary["restarts"] == 1
    assert "has to be an sg.Variable" in done.stderr, done.stderr
    old = news_of(tmp_path / "news", [0, 2, 3])
    check_same_and_exact(old)
    assert [change[:2] for change in old[0]["changes"]] == [[4, 3], [3, 4], [4, 3]]


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_fit_takes_a_worker_in_again_in_the_middle_of_an_epoch(cluster: Start, tmp_path: Path, transport: str) -> None:
    out = tmp_path / "news"
    flags = ["--strategy", "ring", "--min-workers", "2", "--max-restarts", "1", "--transport", transport]
    arguments = ["--out", out, "--meet", 9]
    done = cluster(3, 0, "train_fit_healing.py", *arguments, flags=flags, faults=[kill("worker:0", 3)]).succeed()
    assert done.summary["workers_lost"] == [] and done.summary["restarts"] == 1
    said = re.findall(r"The loss and metrics are those of (\d+) examples: what worker:0/\d+ had counted", done.stderr)
    assert said == ["51"], done.stderr  # of 63: it had 4 in each of three steps
    back, *old = news_of(out, [0, 1, 2])
    assert old[0] == old[1]
    steps = [list(step) for epoch in range(6) for step in itertools.product([epoch], range(6))]
    assert [step for step in old[0]["steps"] if step[1] < 6] == steps  # and what came again, in one further step
    assert back["steps"] == old[0]["steps"][-len(back["steps"]) :] and back["steps"][0] == [1, 3]
    for name in ("history", "weights"):
        assert back[name] == old[0][name], name
    assert back["rates"] == old[0]["rates"][1:] and len(set(back["rates"])) > 1
    assert len(back["history"]["val_loss"]) == 6


@pytest.mark.thorough
def test_a_ring_that_loses_too_many_at_once_ends_and_says_so(cluster: Start, tmp_path: Path) -> None:
    """Those that were started again had waited for ever for others to take them in."""
    done = train(cluster, tmp_path / "news", kill("worker:1", 5), kill("worker:2", 5), workers=3, restarts=3)
    assert done.code == 1 and len(done.faults) == 2
    assert "fewer than --min-workers 2 are left; start the job again" in done.stderr
