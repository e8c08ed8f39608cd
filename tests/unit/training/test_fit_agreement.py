"""What workers that run in step must give ``fit`` alike."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stratagem import RunConfig
from stratagem.errors import ConfigurationError
from stratagem.training.callbacks import BackupAndRestore, CSVLogger, EarlyStopping, ModelCheckpoint
from stratagem.training.estimator.training import EstimatorTraining
from stratagem.training.fit.agreement import InStep, check_alike_on_servers
from stratagem.worker.ring.communicator import Communicator
from tests.unit.ring.thread_group import run_ranks, run_ranks_with_errors


def test_what_one_worker_alone_was_given_is_refused_on_all() -> None:
    def meet(communicator: Communicator) -> None:
        agreement = InStep(communicator, None, None)  # type: ignore[arg-type]
        agreement.meet({"epochs": 2, "callbacks": ["EarlyStopping"]})
        agreement.meet({"epochs": 2, "callbacks": ["ModelCheckpoint"] * (communicator.rank == 0)})

    _, errors = run_ranks_with_errors(3, meet)
    for error in errors:
        assert isinstance(error, ConfigurationError)
        assert "callbacks is ['ModelCheckpoint'] on worker 0, [] on worker 1" in str(error)
    assert run_ranks(2, lambda each: InStep(each, None, None).meet({"epochs": 1})) == [None] * 2  # type: ignore[arg-type]


def test_what_one_worker_alone_gives_an_estimator_is_refused_on_all(tmp_path: Path) -> None:
    def train(communicator: Communicator) -> None:
        strategy: Any = SimpleNamespace(communicator=communicator, servers=None)
        config = RunConfig(save_checkpoints_steps=4)
        EstimatorTraining(None, strategy, tmp_path, config).run(None, None, 8 + communicator.rank)  # type: ignore[arg-type]

    _, errors = run_ranks_with_errors(2, train)
    for error in errors:
        assert "give an Estimator the same, but max_steps is 8 on worker 0, 9 on worker 1" in str(error)


GIVEN = {"initial_epoch": 0, "epochs": 2, "callbacks": ["ModelCheckpoint"], "the epochs with a validation": 2}


@pytest.mark.parametrize(
    ("its", "is_refused"),
    [
        ({}, False),
        ({"initial_epoch": 1, "callbacks": [], "the epochs with a validation": 0}, False),
        ({"callbacks": ["EarlyStopping"]}, True),
        ({"the epochs with a validation": 3}, True),
        ({"epochs": 3}, True),
    ],
)
def test_on_servers_the_lead_alone_may_save_and_evaluate(its: dict[str, Any], is_refused: bool) -> None:
    servers: Any = SimpleNamespace(beside=lambda topic, mine: [("worker:1", mine, GIVEN | its)])
    with pytest.raises(ConfigurationError, match="on worker:1") if is_refused else contextlib.nullcontext():
        check_alike_on_servers(servers, "fit", "fit 1", GIVEN)


def test_on_servers_an_estimator_elsewhere_is_refused(tmp_path: Path) -> None:
    other = {"model_dir": "/elsewhere"}
    chief = SimpleNamespace(new_group=lambda kind: f"{kind} 1")
    servers = SimpleNamespace(chief=chief, beside=lambda topic, mine: [("worker:1", mine, mine | other)])
    strategy: Any = SimpleNamespace(communicator=None, servers=servers)
    with pytest.raises(ConfigurationError, match=f"model_dir is {tmp_path} on the lead, /elsewhere on worker:1"):
        EstimatorTraining(None, strategy, tmp_path, RunConfig()).run(None, None, 8)  # type: ignore[arg-type]


def test_callbacks_whose_work_is_done_together(tmp_path: Path) -> None:
    together = [ModelCheckpoint(tmp_path), BackupAndRestore(tmp_path), EarlyStopping(restore_best_weights=True)]
    assert all(callback.in_step for callback in together)
    assert not any(callback.in_step for callback in (EarlyStopping(), CSVLogger(tmp_path / "log.csv")))
