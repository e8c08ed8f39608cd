"""What workers that run in step must give ``fit`` alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stratagem import RunConfig
from stratagem.errors import ConfigurationError
from stratagem.training.callbacks import BackupAndRestore, CSVLogger, EarlyStopping, ModelCheckpoint
from stratagem.training.estimator.training import EstimatorTraining
from stratagem.training.fit.agreement import InStep
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
        assert "give an Estimator the same, and max_steps is 8 on worker 0, 9 on worker 1" in str(error)


def test_callbacks_whose_work_is_done_together(tmp_path: Path) -> None:
    together = [ModelCheckpoint(tmp_path), BackupAndRestore(tmp_path), EarlyStopping(restore_best_weights=True)]
    assert all(callback.in_step for callback in together)
    assert not any(callback.in_step for callback in (EarlyStopping(), CSVLogger(tmp_path / "log.csv")))
