"""Weights that a script changes after prepare, under every strategy of several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Start = Callable[..., Any]


@pytest.mark.parametrize(
    ("num_ps", "flags"),
    [
        (2, ["--staleness", "0"]),
        pytest.param(1, [], marks=pytest.mark.thorough),
        pytest.param(0, [], marks=pytest.mark.thorough),
    ],
)
def test_what_is_loaded_once_is_the_jobs(cluster: Start, num_ps: int, flags: list[str]) -> None:
    cluster(2, num_ps, "changes_weights.py", "kept", flags=flags).succeed()


@pytest.mark.thorough
def test_a_worker_that_was_started_again_after_the_best_epoch_gets_its_weights(cluster: Start) -> None:
    """It has none to load, and the other one, which waits for it here, loads."""
    faults = [
        {"task": "worker:1", "step": 1, "action": "kill"},
        {"task": "worker:0", "step": 1, "action": "wait", "for": 2},
        {"task": "worker:1", "step": 10, "action": "slow", "seconds": 0},
    ]
    done = cluster(2, 1, "changes_weights.py", "best", flags=["--staleness", "0"], faults=faults).succeed()
    assert len(done.faults) == 3, done.stderr


@pytest.mark.thorough
def test_who_meets_when_the_lead_has_ended_waits_for_nobody(cluster: Start) -> None:
    cluster(2, 1, "changes_weights.py", "lead ends first").succeed(60)


@pytest.mark.thorough
def test_what_would_be_lost_is_refused(cluster: Start) -> None:
    done = cluster(2, 1, "changes_weights.py", "refused").finish()
    assert done.code == 2, done.stderr
    assert "weight was changed here since the last update" in done.stderr
    assert "strategy.load_once(lambda: model.load_state_dict" in done.stderr


@pytest.mark.thorough
def test_rows_are_loaded_by_all_workers_together(cluster: Start) -> None:
    done = cluster(2, 2, "changes_weights.py", "table").finish()
    assert done.code == 2, done.stderr
    assert 'strategy.load_once(lambda: layer.load_state_dict({"weight": rows}))' in done.stderr


@pytest.mark.thorough
def test_an_update_of_ones_own_is_refused(cluster: Start) -> None:
    """Each worker trained by itself what it had prepared without an optimizer."""
    done = cluster(2, 1, "changes_weights.py", "by hand").finish()
    assert done.code == 2, done.stderr
    assert "No optimizer that strategy.prepare was given updates it" in done.stderr


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("weighed twice", "divided by 1 and by 2 (set_weight). In fit, where weights of examples or classes"),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in [
                ("weighed in two batches", "its losses were divided by 1 and by 2 (set_weight)"),
                (
                    "uneven batches",
                    "share differs between its batches (the last batch is smaller, or a worker was lost)",
                ),
                ("step first", "share differs between its batches"),
                ("after the loop", "make the last update inside of the loop"),
                ("left over", "where an epoch ends before an update is complete"),
                ("optimizer later", "weight is already prepared"),
                ("prepared twice", "weight is already prepared, or compiled, with an"),
            ]
        ),
    ],
)
def test_what_one_update_or_variable_cannot_have_is_refused(cluster: Start, mode: str, words: str) -> None:
    """The first weight was forgotten; a mean over both batches was of no process; the first prepare's went on."""
    done = cluster(2, 1, "changes_weights.py", mode, flags=["--staleness", "0"]).finish()
    assert done.code == 2, done.stderr
    assert words in done.stderr


@pytest.mark.thorough
def test_a_sum_over_batches_of_unequal_shares_has_no_weight(cluster: Start) -> None:
    cluster(2, 1, "changes_weights.py", "uneven sums", flags=["--staleness", "0"]).succeed()
