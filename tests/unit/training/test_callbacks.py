"""Callbacks: their hooks, what they write, what they decide, and going on after a crash."""

from __future__ import annotations

import contextlib
import csv
import errno
import functools
import io
import logging
import math
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.checkpoint.reading import latest_checkpoint
from stratagem.errors import CheckpointError, ConfigurationError
from stratagem.training import progress
from stratagem.training.callbacks import (
    BackupAndRestore,
    Callback,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TensorBoard,
    tensorboard,
)
from stratagem.training.callbacks.monitor import Monitor
from stratagem.training.fit.position import FitPosition
from stratagem.training.metrics import Mean
from stratagem.training.model import Model
from stratagem.worker import interrupts
from stratagem.worker.interrupts import preemption
from stratagem.worker.step_meter import active_meter
from tests.file_sizes import file_size_limit

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def make_model(lr: float = 0.05) -> Model:
    torch.manual_seed(0)
    with sg.OneDeviceStrategy().scope():
        model = Model(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
    model.compile(lambda parameters: torch.optim.Adam(parameters, lr), "mse", ["mae"])
    return model


def fit(model: Model, callbacks: Sequence[Callback] = (), epochs: int = 3, **arguments: Any) -> Any:
    return model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks, **arguments).history


class Tampering(Callback):
    """Replaces a value of the logs of the epochs."""

    def __init__(self, name: str, values: Sequence[float]) -> None:
        self._name = name
        self._values = values

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs[self._name] = self._values[epoch]


class Crash(Callback):
    """Ends ``fit`` by an error after so many steps."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.num_steps == self._after:
            raise KeyboardInterrupt


def test_hooks_come_in_the_order_of_keras() -> None:
    heard: list[str] = []

    class Hears(Callback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                heard.append(name)
            return super().__getattribute__(name)

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            heard.append(f"begin {batch}")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            heard.append(f"end {batch}: {', '.join(logs)}")

    model = make_model()
    told = Hears()
    fit(model, [told], epochs=1, validation_data=(X, Y))
    del heard[: heard.index("on_train_begin")]
    steps = [f"{kind} {step}{': loss, mae' * (kind == 'end')}" for step in range(3) for kind in ("begin", "end")]
    around = [
        "on_train_begin",
        "on_epoch_begin",
        *steps,
        "on_test_begin",
        "on_test_end",
        "on_epoch_end",
        "on_train_end",
    ]
    assert heard == around
    assert told.params["epochs"] == 1 and told.params["steps"] == 3
    heard.clear()
    model.predict(X, callbacks=[told])
    assert [name for name in heard if "batch" not in name] == ["on_predict_begin", "on_predict_end"]


def test_every_hook_of_keras_is_given_logs() -> None:
    def hook(self: Callback, *args: Any) -> None:
        heard.append(args[-1])

    heard: list[Any] = []
    names = [name for name in vars(Callback) if name.startswith("on_") and name != "on_train_interrupted"]
    hears = type("Hears", (Callback,), dict.fromkeys(names, hook))()
    model = make_model()
    fit(model, [hears], epochs=1, validation_data=(X, Y))
    model.predict(X, callbacks=[hears])
    assert len(heard) > 10 and all(isinstance(logs, Mapping) for logs in heard)


def test_logs_of_batches_are_computed_only_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    compute = Mean.compute

    def counted(self: Mean, parts: Any) -> dict[str, float]:
        computed.append(1)
        return compute(self, parts)

    monkeypatch.setattr(Mean, "compute", counted)

    class Reads(Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                assert logs["loss"] > 0 and logs["mae"] > 0

    fit(make_model(), [Reads()], epochs=1)
    assert len(computed) == 2  # one batch and the epoch


def test_stop_training_ends_it_at_once() -> None:
    class Stops(Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 1

    model = make_model()
    assert len(fit(model, [Stops()])["loss"]) == 1
    assert model.num_steps == 2
    assert len(fit(model, epochs=2)["loss"]) == 2  # a new fit is not stopped


def test_a_fit_within_a_fit_leaves_it_as_it_was(tmp_path: Path) -> None:
    class Adapts(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 1
            self.model.train_on_batch(X[:4], Y[:4])

    seen: list[int] = []
    counts = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(model.num_steps))
    model, backup = make_model(), BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
    history = model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[counts, Adapts(), backup])
    assert history.epoch == [0, 1] and model.history is history
    assert seen == [1, 2, 3, 5, 6, 7] and model.num_steps == 8 and not model.is_fitting
    assert fit(make_model(), [backup]) == history.history  # the backup is of this fit, which was over


@pytest.mark.parametrize(
    "schedule",
    [
        lambda epoch: 0.5 ** (epoch + 1),
        lambda epoch, rate: rate / 2,
        lambda epoch, rate=1.0: rate / 2,
        lambda *epoch_and_rate: epoch_and_rate[1] / 2,
        functools.partial(lambda rate, epoch: rate ** (epoch + 1), 0.5),
    ],
)
def test_a_schedule_sets_the_rate_of_each_epoch(schedule: Any) -> None:
    model = make_model(lr=1.0)
    assert fit(model, [LearningRateScheduler(schedule)])["learning_rate"] == [0.5, 0.25, 0.125]
    with pytest.raises(ConfigurationError, match="expected a schedule"):
        fit(model, [LearningRateScheduler(lambda epoch: None)])  # type: ignore[arg-type, return-value]


def test_a_plateau_lowers_the_rate_after_patience_and_not_in_the_cooldown() -> None:
    model = make_model(lr=1.0)
    values = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    plateau = ReduceLROnPlateau("loss", factor=0.1, patience=2, cooldown=2, min_lr=0.05)
    rates = fit(model, [Tampering("loss", values), plateau], epochs=9)["learning_rate"]
    # Lowered after epoch 3; 4 cools down, 5 and 6 count: lowered after 6, as far as it may be; the value that is logged
    # is the one that the epoch was trained with.
    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05])


def test_early_stopping_restores_the_best_weights() -> None:
    model = make_model()
    kept: list[dict[str, torch.Tensor]] = []

    class Keeps(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            kept.append({name: value.clone() for name, value in self.model.state_dict().items()})

    stopping = EarlyStopping("val_mae", patience=2, restore_best_weights=True)
    values = [3.0, 2.0, 2.5, 2.5, 0.0]
    history = fit(model, [Keeps(), Tampering("val_mae", values), stopping], epochs=5, validation_data=(X, Y))
    assert len(history["loss"]) == 4 and stopping.best == 2.0 and stopping.stopped_epoch == 3
    torch.testing.assert_close(model.state_dict(), kept[1], rtol=0, atol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(kept[1], kept[3])


def test_best_weights_evaluate_to_the_best_value_with_statistics_of_each_replica() -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = Model(nn.BatchNorm1d(1))
        model.compile("sgd", "mse")
    stopping = EarlyStopping("val_loss", restore_best_weights=True)
    x = torch.arange(12.0)[:, None]  # the replicas see unlike halves
    model.fit(x, x, verbose=0, callbacks=stopping, shuffle=False, validation_data=(x, x))
    assert model.evaluate(x, x, verbose=0) == pytest.approx(stopping.best)
    model.strategy.close()


def weights(model: Model) -> list[torch.Tensor]:
    return [parameter.data for parameter in model.module.parameters()]


class Failing(Callback):
    """Raises in a hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._fail)

    def _fail(self, logs: Any = None) -> None:
        raise RuntimeError("mine")


@pytest.mark.parametrize("hook", ["on_train_begin", "on_train_end"])
def test_an_error_of_a_callback_before_or_after_the_epochs_leaves_no_watch(tmp_path: Path, hook: str) -> None:
    """The next Ctrl-C did nothing."""
    model, handler = make_model(), signal.getsignal(signal.SIGINT)

    class Last(Failing):
        runs_last = hook == "on_train_begin"

    with pytest.raises(RuntimeError, match="mine"):
        fit(model, [BackupAndRestore(tmp_path), Last(hook)])
    try:
        assert not preemption.is_watched and signal.getsignal(signal.SIGINT) == handler
    finally:
        if preemption.is_watched:
            interrupts.unwatch()


def test_best_weights_are_restored_where_a_gradient_is_nan() -> None:
    model = make_model()
    best: list[torch.Tensor] = []

    class Spoiling(Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                best.extend(each.clone() for each in weights(model))
                weights(model)[0].fill_(math.nan)

    stop = EarlyStopping("score", mode="max", restore_best_weights=True, patience=3)
    fit(model, [Tampering("score", [0.0, 1.0]), stop, Spoiling(), sg.callbacks.TerminateOnNaN()], epochs=4)
    assert all(map(torch.equal, weights(model), best))


def test_best_weights_where_every_value_is_nan_are_the_first() -> None:
    model, first = make_model(), list[torch.Tensor]()

    class Keeps(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            first.extend(each.clone() for each in weights(model) if not epoch)

    stop = EarlyStopping("loss", patience=2, restore_best_weights=True)
    assert len(fit(model, [Keeps(), Tampering("loss", [math.nan] * 5), stop], epochs=5)["loss"]) == 2
    assert first and all(map(torch.equal, weights(model), first)) and stop.best_epoch == 0


def test_what_becomes_better_but_not_than_the_baseline_goes_on() -> None:
    stopping = EarlyStopping("loss", patience=2, baseline=0.5)
    assert len(fit(make_model(), [Tampering("loss", [4.0, 3.0, 2.0, 1.0, 1.5, 1.5]), stopping], epochs=6)["loss"]) == 5


def test_best_weights_of_what_is_in_no_process_are_refused_before_the_first_epoch() -> None:
    stopping = EarlyStopping("loss", restore_best_weights=True)
    stopping.set_model(sg.Model(torch.nn.Linear(2, 1, device="meta")))  # as a table on parameter servers is
    with pytest.raises(ConfigurationError, match=r"ModelCheckpoint\(path, monitor=\.\.\., save_best_only=True\)"):
        stopping.on_train_begin()


def test_whether_more_is_better_follows_from_the_name() -> None:
    assert Monitor("val_accuracy").improves(0.9, 0.8) and not Monitor("val_loss").improves(0.9, 0.8)
    assert Monitor("val_accuracy", "min").improves(0.7, 0.8)
    assert Monitor("loss").improves(1.0) and not Monitor("loss").improves(float("nan"))
    assert not Monitor("loss", min_delta=0.1).improves(0.95, 1.0)
    for unclear in ("val_cohen_kappa", "val_dice_loss"):
        with pytest.raises(
            ConfigurationError, match=f"the name '{unclear}' .* is better: give mode='max' or mode='min'"
        ):
            EarlyStopping(unclear)
        ModelCheckpoint("unused", unclear)


def test_a_value_that_is_not_there_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(fit(make_model(), [EarlyStopping("val_loss")])["loss"]) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "'val_loss' is not in the logs of the epoch, which have: loss, mae"
    ]


@pytest.mark.parametrize("value", [True, np.True_, torch.ones(1), np.float32(1)], ids=repr)
def test_a_number_of_any_kind_in_the_logs_is_shown(value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    callback = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(own=value))
    history = make_model().fit(X, Y, verbose=2, callbacks=callback).history
    assert repr(history["own"]) == "[1.0]" and "own 1 " in capsys.readouterr().err


@pytest.mark.parametrize("value", ["warm", None, np.ones((2, 2)), 10**400], ids=lambda value: type(value).__name__)
def test_what_a_callback_puts_into_the_logs_is_a_number(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"logs\['phase'\] is a \w+, put there by a callback"):
        fit(make_model(), [LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(phase=value))], epochs=1)


@pytest.mark.parametrize("rate", [-0.1, "0.1", None, math.nan])
def test_what_is_no_learning_rate_is_refused_before_a_step(rate: Any) -> None:
    model = make_model()
    with pytest.raises(ConfigurationError, match="expected a learning rate of at least 0, got"):
        model.learning_rate = rate
    schedule: Any = lambda epoch: "fast" if rate == "0.1" else rate  # noqa: E731
    with pytest.raises(ConfigurationError, match="expected a schedule that gives a learning rate, got"):
        fit(model, [LearningRateScheduler(schedule)], epochs=1)


def test_a_csv_that_cannot_be_written_is_refused_before_the_first_epoch(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no folder"):
        fit(make_model(), [CSVLogger(tmp_path / "absent" / "log.csv"), LambdaCallback(on_epoch_begin=pytest.fail)])
    with pytest.raises(ConfigurationError, match="one character"):
        CSVLogger(tmp_path / "log.csv", separator=", ")


def test_csv_has_a_line_an_epoch(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    model = make_model()
    history = fit(model, [CSVLogger(path)], epochs=2)
    fit(model, [CSVLogger(path, append=True)], epochs=3, initial_epoch=2)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert [float(row["loss"]) for row in rows[:2]] == history["loss"]
    fit(model, [CSVLogger(path)], epochs=1)
    assert len(path.read_text().splitlines()) == 2


def test_a_fit_that_resumes_behind_the_last_batch_of_an_epoch_is_told_of_no_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class CrashAtEnd(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), [CrashAtEnd(), BackupAndRestore(tmp_path, save_freq=3)])
    with caplog.at_level("INFO"):
        fit(make_model(), [BackupAndRestore(tmp_path, save_freq=3)])
    assert "Resuming at epoch 1, step 3" in caplog.text and "In a loop of your own" not in caplog.text


@pytest.mark.parametrize("append", [False, True])
def test_csv_has_one_line_of_an_epoch_that_comes_again(tmp_path: Path, append: bool) -> None:
    """Killed once its line was written, before the backup was."""

    class CrashAtEnd(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    path, folder = tmp_path / "log.csv", tmp_path / "backup"
    if append:
        fit(make_model(), [CSVLogger(path)], epochs=3)
    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), [BackupAndRestore(folder), CSVLogger(path, append=append), CrashAtEnd()], epochs=4)
    fit(make_model(), [BackupAndRestore(folder), CSVLogger(path, append=append)], epochs=4)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [int(row["epoch"]) for row in rows] == [*range(3 * append), 0, 1, 2, 3]


def test_a_worker_that_becomes_the_lead_goes_on_with_the_csv(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    loggers = [CSVLogger(path), CSVLogger(path)]
    for epoch, lead in enumerate([0, 0, 1]):
        for number, logger in enumerate(loggers[lead:], lead):
            strategy = SimpleNamespace(is_lead=number == lead)
            logger.set_model(SimpleNamespace(strategy=strategy, is_resumed=False))  # type: ignore[arg-type]
            logger.on_epoch_end(epoch, {"loss": 1.0})
    assert [row.partition(",")[0] for row in path.read_text().splitlines()] == ["epoch", "0", "1", "2"]


def test_csv_has_the_first_epoch_once_when_it_is_gone_on_with(tmp_path: Path) -> None:
    path, strategy = tmp_path / "log.csv", SimpleNamespace(is_lead=True)
    for is_resumed in (False, True):
        logger = CSVLogger(path)
        logger.set_model(SimpleNamespace(strategy=strategy, is_resumed=is_resumed))  # type: ignore[arg-type]
        logger.on_train_begin()
        for epoch in range(1 + is_resumed):
            logger.on_epoch_end(epoch, {"loss": 1.0})
    assert [row.partition(",")[0] for row in path.read_text().splitlines()] == ["epoch", "0", "1"]


def test_lines_of_a_csv_that_cannot_be_written_are_said_once_and_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    path = folder / "log.csv"

    def change(epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            folder.rename(tmp_path / "away")
        elif epoch == 3:
            (tmp_path / "away").rename(folder)

    fit(make_model(), [LambdaCallback(on_epoch_begin=change), CSVLogger(path)], epochs=4)
    assert [row["epoch"] for row in csv.DictReader(path.read_text().splitlines())] == ["0", "1", "2", "3"]
    said = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert said == [f"no lines in {path} at present: No such file or directory; make it writable, and they go on"]


def test_csv_has_the_values_of_a_validation_that_comes_later(tmp_path: Path) -> None:
    path, data = tmp_path / "log.csv", (X, Y)
    model = make_model()
    history = fit(model, [CSVLogger(path, ";")], validation_data=data, validation_freq=2)
    fit(model, [Tampering("warmth", [0, 0, 0, 7]), CSVLogger(path, ";", append=True)], epochs=4, initial_epoch=3)
    rows = list(csv.DictReader(path.read_text().splitlines(), delimiter=";"))
    assert [row["val_loss"] for row in rows] == ["NA", str(history["val_loss"][0]), "NA", "NA"]
    assert [row["warmth"] for row in rows] == ["NA", "NA", "NA", "7"] and list(tmp_path.iterdir()) == [path]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_scalars_that_cannot_be_written_are_said_once_and_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setattr(tensorboard, "AGAIN_S", 0.0)
    folder = tmp_path / "curves"
    summaries = tensorboard.Summaries(folder)
    summaries.write({"loss": 0.0}, step=0)
    (path,) = folder.iterdir()
    with file_size_limit(path.stat().st_size + 10):
        for step in (1, 2):
            summaries.write({"loss": 0.0}, step)
    summaries.write({"loss": 0.0}, step=3)
    summaries.close()
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"no summaries in {folder} at present: File too large; raise `ulimit -f`")
    steps = [event.step for event in accumulators.EventAccumulator(str(folder)).Reload().Scalars("loss")]
    assert (steps[0], steps[-1]) == (0, 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    model = make_model()
    history = fit(model, [TensorBoard(tmp_path, update_freq=2)], validation_data=(X, Y))

    def scalars(part: str, tag: str) -> list[tuple[int, Any]]:
        accumulator = accumulators.EventAccumulator(str(tmp_path / part)).Reload()
        return [(event.step, event.value) for event in accumulator.Scalars(tag)]

    assert scalars("train", "epoch_loss") == list(enumerate(map(pytest.approx, history["loss"])))
    assert scalars("validation", "epoch_mae") == list(enumerate(map(pytest.approx, history["val_mae"])))
    assert [step for step, _ in scalars("train", "batch_loss")] == [2, 4, 6, 8]
    assert scalars("train", "epoch_learning_rate")[0] == (0, pytest.approx(0.05))
    for part in ("forward", "backward", "optimizer", "script"):
        spent = scalars("train", f"phases/{part}_s")
        assert [epoch for epoch, _ in spent] == [0, 1, 2] and all(seconds > 0 for _, seconds in spent), part
    fit(model, [TensorBoard(tmp_path / "second")], epochs=1)  # measures its own epoch, not those before it too
    spent = [*scalars("train", "phases/optimizer_s"), *scalars("second/train", "phases/optimizer_s")]
    meter = active_meter()
    assert meter is not None
    assert sum(seconds for _, seconds in spent) < meter.values()["optimizer_s"] * 1.0001  # of float32


def test_checkpoints_of_epochs_are_loaded_by_another_model(tmp_path: Path) -> None:
    model = make_model()
    saving = ModelCheckpoint(tmp_path / "ckpt_{epoch}", save_weights_only=True)
    history = fit(model, [saving], validation_data=(X, Y))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["ckpt_1", "ckpt_2", "ckpt_3"]
    newest = latest_checkpoint(tmp_path)
    assert newest is not None and newest == saving.last_path
    other = make_model()
    other.load_weights(newest)
    assert other.evaluate(X, Y, verbose=0)[0] == pytest.approx(history["val_loss"][-1])
    other.load_weights(tmp_path / "ckpt_1")
    assert other.evaluate(X, Y, verbose=0)[0] == pytest.approx(history["val_loss"][0])


def test_only_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    model = make_model()
    saving = ModelCheckpoint(tmp_path / "best", "mae", save_best_only=True)
    fit(model, [Tampering("mae", [2.0, 1.0, 3.0]), saving])
    assert saving.best == 1.0 and saving.last_path is not None and saving.last_path.endswith("step-00000006")
    assert len([path for path in (tmp_path / "best").iterdir() if path.is_dir()]) == 1
    with pytest.raises(ConfigurationError, match="cannot be filled in"):
        fit(model, [ModelCheckpoint(tmp_path / "{nothing}")])
    with pytest.raises(ConfigurationError, match=r"cannot be filled in .*; there are loss, .*epoch"):
        fit(model, [ModelCheckpoint(tmp_path / "{epoch.name}")])


def test_names_of_checkpoints_may_hold_the_batch(tmp_path: Path) -> None:
    fit(make_model(), [ModelCheckpoint(tmp_path / "{epoch}-{batch:02d}", save_freq=2)], epochs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-02", "2-01", "2-03"]


@pytest.mark.parametrize("crash_after", [4, 6, 8])
def test_a_killed_fit_goes_on_where_it_was(tmp_path: Path, crash_after: int) -> None:
    folder = tmp_path / "backup"

    def others() -> list[Callback]:
        return [LearningRateScheduler(lambda epoch, rate: rate * 0.7), CSVLogger(tmp_path / "log.csv")]

    whole = make_model()
    expected = fit(whole, others(), epochs=4)
    (tmp_path / "log.csv").unlink()
    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), [BackupAndRestore(folder, save_freq=2), *others(), Crash(crash_after + 1)], epochs=4)
    assert folder.exists()
    model = make_model()
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    history = fit(model, [BackupAndRestore(folder, save_freq=2), *others(), Crash(-1)], epochs=4)
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=0, atol=0)
    assert model.is_resumed and model.num_steps == 12
    assert {name: pytest.approx(values) for name, values in expected.items()} == history
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [int(row["epoch"]) for row in rows] == [0, 1, 2, 3]
    assert not folder.exists()


@pytest.mark.parametrize("crash_in", [2, 3])
def test_early_stopping_goes_on_where_it_was(tmp_path: Path, crash_in: int) -> None:
    class CrashAtEnd(Callback):
        runs_last = True

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == crash_in:  # in epoch 3 it stops
                raise KeyboardInterrupt

    def callbacks(*crash: Callback) -> list[Callback]:
        early = EarlyStopping("val_mae", patience=2, restore_best_weights=True)
        return [Tampering("val_mae", [3.0, 2.0, *[2.5] * 4]), early, BackupAndRestore(tmp_path / "backup"), *crash]

    whole = make_model()
    expected = fit(whole, callbacks(), epochs=6, validation_data=(X, Y))
    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), callbacks(CrashAtEnd()), epochs=6, validation_data=(X, Y))
    model, resumed = make_model(), callbacks()
    assert fit(model, resumed, epochs=6, validation_data=(X, Y)) == expected
    assert resumed[1].stopped_epoch == 3  # type: ignore[attr-defined]
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("crash_in", ["train", "test"])
def test_a_stop_that_was_saved_within_an_epoch_is_not_forgotten(tmp_path: Path, crash_in: str) -> None:
    def stop_at_once(batch: int, logs: Any) -> None:
        model.stop_training = True

    class CrashNext(Callback):
        runs_last = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if crash_in == "train":
                raise KeyboardInterrupt

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            raise KeyboardInterrupt

    def script(*crash: Callback) -> Any:
        saving = BackupAndRestore(tmp_path / "backup", save_freq=1)
        return fit(model, [LambdaCallback(on_train_batch_end=stop_at_once), saving, *crash], validation_data=(X, Y))

    model = make_model()
    with pytest.raises(KeyboardInterrupt):
        script(CrashNext())
    model = make_model()
    assert len(script()["val_loss"]) == model.num_steps == 1
    assert model.stop_training


def test_a_validation_goes_on_with_the_order_of_its_epoch(tmp_path: Path) -> None:
    held_out = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
    more: dict[str, Any] = {"validation_data": held_out, "validation_steps": 1}
    expected = fit(make_model(), epochs=4, **more)["val_loss"]
    for hook in ("on_epoch_begin", "on_test_batch_end"):  # the latter in a validation, which is made again
        model = make_model()

        def interrupt(number: int, logs: Any, model: Model = model) -> None:
            if model.position.epoch:
                signal.raise_signal(signal.SIGTERM)

        with pytest.raises(interrupts.Preempted):
            fit(model, [LambdaCallback(**{hook: interrupt}), BackupAndRestore(tmp_path)], epochs=4, **more)
    assert fit(make_model(), [BackupAndRestore(tmp_path)], epochs=4, **more)["val_loss"] == pytest.approx(expected)


def test_the_path_of_the_best_checkpoint_outlives_an_interruption(tmp_path: Path) -> None:
    def callbacks(*crash: Callback) -> list[Callback]:
        best = ModelCheckpoint(tmp_path / "best", "mae", save_best_only=True)
        return [Tampering("mae", [1.0, 2.0, 3.0]), best, BackupAndRestore(tmp_path / "backup"), *crash]

    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), callbacks(Crash(5)))
    model, resumed = make_model(), callbacks()
    fit(model, resumed)
    assert model.is_resumed
    assert resumed[1].last_path == latest_checkpoint(tmp_path / "best")  # type: ignore[attr-defined]


def test_a_model_whose_training_was_over_is_saved(tmp_path: Path) -> None:
    """A job that died after its last epoch, before `Model.save`, could not be completed any more: exit code 2."""
    fit(make_model(), [BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)], epochs=1)
    model = make_model()
    fit(model, [BackupAndRestore(tmp_path / "backup")], epochs=1)
    model.save(tmp_path / "export")
    torch.testing.assert_close(sg.load_model(tmp_path / "export")(X), model.predict(X))


def test_the_end_is_told_of_the_last_epoch_where_it_was_over_before(tmp_path: Path) -> None:
    told: list[Any] = []
    for _ in range(2):
        end = LambdaCallback(on_train_end=told.append)
        history = fit(make_model(), [end, BackupAndRestore(tmp_path, delete_checkpoint=False)], epochs=2)
    assert told == [{name: values[-1] for name, values in history.items()}] * 2


def test_a_backup_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next fit had nothing left to do, and nobody knew why."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        fit(make_model(), [BackupAndRestore(tmp_path)], epochs=1)
    (left,) = tmp_path.glob("step-*")
    assert f"{left} could not be removed: remove it" in caplog.text
    caplog.clear()
    fit(make_model(), [BackupAndRestore(tmp_path)], epochs=1)
    assert not tmp_path.exists() and "could not be removed" not in caplog.text


def test_a_backup_that_has_lost_a_part_is_not_passed_over_without_a_word(tmp_path: Path) -> None:
    fit(make_model(), [BackupAndRestore(tmp_path, delete_checkpoint=False)], epochs=1)
    (weights,) = tmp_path.glob("*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"is damaged.*remove them to start afresh"):
        fit(make_model(), [BackupAndRestore(tmp_path)], epochs=2)


def test_a_backup_of_a_scripts_second_fit_is_not_taken_by_its_first(tmp_path: Path) -> None:
    """Killed in the second, started again: the first went on there, and the second trained further what it had."""

    def script(first: BackupAndRestore, second: BackupAndRestore, *crash: Callback) -> Model:
        model = make_model()
        fit(model, [first], epochs=2)
        model.learning_rate = 0.01
        fit(model, [second, *crash], epochs=3)
        return model

    def own() -> tuple[BackupAndRestore, BackupAndRestore]:
        return BackupAndRestore(tmp_path / "first", delete_checkpoint=False), BackupAndRestore(tmp_path / "second")

    shared = BackupAndRestore(tmp_path / "shared", save_freq=1)
    expected = script(shared, shared)
    with pytest.raises(KeyboardInterrupt):
        script(shared, shared, Crash(6 + 5))
    with pytest.raises(ConfigurationError, match=r"in fit call 2 of this model, but this is call 1: .* its own folder"):
        script(shared, shared)
    with pytest.raises(KeyboardInterrupt):
        script(*own(), Crash(6 + 5))
    torch.testing.assert_close(script(*own()).state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_an_epoch_is_gone_on_with_by_the_metrics_that_it_began_with(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), [BackupAndRestore(tmp_path, save_freq=1), Crash(2)])
    model = make_model()
    model.compile("adam", "mse", ["mae", "mse"])
    with pytest.raises(ConfigurationError, match="this epoch before an interruption, does not count 'mse'"):
        fit(model, [BackupAndRestore(tmp_path)])


def test_inputs_that_no_checkpoint_can_hold_stop_none() -> None:
    position: Any = FitPosition(None, mock.Mock(num_steps=0), [], 0)
    position.keep([1, 2])
    position.keep(object())
    assert position.state_dict()["example"] == [1, 2]


def test_plain_lines_say_what_matters() -> None:
    stream = io.StringIO()
    model = make_model()
    pace = progress.Pace()
    fit(model, [pace, *progress.display("auto", True, pace, stream)], epochs=2)
    first, second = stream.getvalue().splitlines()
    assert first.startswith("epoch 1/2  step 3/3  loss ") and "mae" in first and first.endswith("examples/s")
    assert second.startswith("epoch 2/2")
    assert progress.display("auto", False, pace, stream) == []


def test_examples_a_second_are_those_of_the_training_since_the_epoch_was_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation counted as time of the training, and what an earlier process had trained of the epoch as trained in
    no time."""
    now, stream, pace = [0.0], io.StringIO(), progress.Pace()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(progress, "LINE_S", 1.0)

    class TakesTime(sg.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now[0] += 1.0

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            now[0] += 1000.0

    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), [BackupAndRestore(tmp_path, save_freq=1), Crash(2)], epochs=2)
    shown = progress.display(2, True, pace, stream)
    callbacks = [BackupAndRestore(tmp_path, save_freq=1), TakesTime(), pace, *shown]
    fit(make_model(), callbacks, epochs=2, validation_data=(X, Y))
    told = [line.split("  ") for line in stream.getvalue().splitlines()]
    speeds = [" ".join([words[1], *(word for word in words if word.endswith(("/s", "left")))]) for words in told]
    of_first = ["step 2/3 8 examples/s 1 s left", "step 3/3 6 examples/s", "step 3/3 6 examples/s"]
    of_second = ["step 1/3 8 examples/s 2 s left", "step 2/3 8 examples/s 1 s left", *["step 3/3 7 examples/s"] * 2]
    assert speeds == of_first + of_second


def test_a_bar_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    pace = progress.Pace()
    bar = progress.display(1, True, pace, stream)
    fit(make_model(), [pace, *bar], epochs=9)
    assert "epoch 9/9" in stream.getvalue() and "3/3" in stream.getvalue() and "loss" in stream.getvalue()
    assert stream.getvalue().rindex("epoch 1/9") < stream.getvalue().index("epoch 2/9")  # no longer drawn


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected callbacks"):
        fit(make_model(), ["EarlyStopping"])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="save_freq"):
        ModelCheckpoint("x", save_freq=0)
    with pytest.raises(ConfigurationError, match="update_freq"):
        TensorBoard("x", update_freq=0)


def test_a_number_of_batches_may_be_one_of_numpy(tmp_path: Path) -> None:
    often: Any = np.int64(2)
    saving = ModelCheckpoint(tmp_path / "{epoch}", "loss", save_freq=often)
    fit(make_model(), [saving, BackupAndRestore(tmp_path / "backup", save_freq=often)], epochs=1)
    assert saving.last_path == latest_checkpoint(tmp_path / "1")


def test_a_backup_of_another_strategy_is_refused_under_parameter_servers(tmp_path: Path) -> None:
    """The training began anew, without a word."""
    fit(make_model(), [BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)], epochs=1)
    for name, refused in (("backup", pytest.raises(ConfigurationError, match="of a training without")), ("x", None)):
        callback = BackupAndRestore(tmp_path / name, save_before_preemption=False)
        callback.set_model(SimpleNamespace(has_servers=True))  # type: ignore[arg-type]
        with refused or contextlib.nullcontext():
            callback.on_train_begin()
