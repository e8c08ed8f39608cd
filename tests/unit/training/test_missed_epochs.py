"""Callbacks of a worker of parameter servers that was not there when others lived an epoch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.training.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau, TensorBoard


def test_a_worker_without_the_best_weights_meets_those_who_load_them() -> None:
    met: list[str] = []
    stopping = EarlyStopping("loss", restore_best_weights=True)
    servers = SimpleNamespace(load_once=lambda load, call: met.append(call))
    strategy = SimpleNamespace(is_lead=False, servers=servers)
    stopping.set_model(SimpleNamespace(strategy=strategy))  # type: ignore[arg-type]
    stopping.on_train_end()
    assert met == ["load_once()"]


def test_what_follows_a_value_hears_of_epochs_that_others_lived(tmp_path: Path) -> None:
    stopping = EarlyStopping("loss", patience=3, restore_best_weights=True)
    reducing, saving = ReduceLROnPlateau("loss", 0.5, 2), ModelCheckpoint(tmp_path, "loss", save_best_only=True)
    model = sg.Model(nn.Linear(1, 1))
    model.compile(partial(torch.optim.SGD, lr=0.1), "mse")
    for epoch, loss in enumerate([2.0, 1.0, 1.5, 1.5, 1.5]):
        assert not model.stop_training
        logs = {"loss": loss, "learning_rate": 0.3}
        for callback in (stopping, reducing, saving):
            callback.set_model(model)
            callback.on_epoch_missed(epoch, logs)
        assert logs["learning_rate"] == 0.3
    assert model.stop_training and model.learning_rate == 0.05
    assert saving.best == 1.0 and (stopping.best_epoch, stopping._weights) == (1, None)


def test_a_csv_has_the_epochs_that_others_lived(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "log.csv")
    logger.set_model(sg.Model(nn.Linear(1, 1)))
    logger.on_epoch_missed(0, {"loss": 2.0})
    logger.on_epoch_end(1, {"loss": 1.0})
    assert (tmp_path / "log.csv").read_text().split() == ["epoch,loss", "0,2.0", "1,1.0"]


def test_a_tensorboard_has_the_epochs_that_others_lived(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = TensorBoard(tmp_path)
    board.set_model(sg.Model(nn.Linear(1, 1)))
    board.on_epoch_missed(0, {"loss": 2.0, "val_loss": 3.0})
    board.on_epoch_missed(1, {"loss": 1.0, "val_loss": 2.0})
    board.on_train_end()
    for folder, values in ("train", [(0, 2.0), (1, 1.0)]), ("validation", [(0, 3.0), (1, 2.0)]):
        events = accumulators.EventAccumulator(str(tmp_path / folder)).Reload()
        assert [(event.step, event.value) for event in events.Scalars("epoch_loss")] == values
