"""A training that is told to end by real signals, and goes on: bit for bit what it would have been without them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.errors import ConfigurationError
from stratagem.training.callbacks import BackupAndRestore, Callback
from stratagem.training.preemption import RESUME_VARIABLE
from stratagem.worker.interrupts import Preempted, preemption

EPOCHS = 3
STEPS = 5  # of an epoch
MAKERS: dict[str, Callable[[], sg.Strategy]] = {
    "one": lambda: sg.OneDeviceStrategy("cpu"),
    "mirrored": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
}


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[], sg.Strategy]]:
    """Makes strategies, and ends the threads of their replicas after the test."""
    made: list[sg.Strategy] = []

    def one_more() -> sg.Strategy:
        made.append(MAKERS[request.param]())
        return made[-1]

    yield one_more
    for strategy in made:
        strategy.close()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No handler outlives the test, and no request."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert not preemption.is_watched and not preemption.requested and not preemption.agreed


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 2))


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randn(18, 4, generator=generator), torch.randint(0, 2, (18,), generator=generator))


class ByHand:
    """One life of a script with a loop of its own; in the steps ``stops`` this process gets a signal."""

    def __init__(
        self, strategy: sg.Strategy, folder: Path, stops: dict[int, Callable[[], None]], **options: Any
    ) -> None:
        with strategy.scope():
            self.model = network()
            optimizer = torch.optim.Adam(self.model.parameters(), 0.05)
        self.model, optimizer = strategy.prepare(self.model, optimizer)
        data = strategy.distribute_dataset(DataLoader(examples(), batch_size=4, shuffle=True))
        checkpoint = sg.Checkpoint(strategy=strategy, model=self.model, optimizer=optimizer, data=data)
        self.num_steps = 0

        def step(batch: Any) -> torch.Tensor:
            context = sg.get_replica_context()
            if context is not None and context.replica_id_in_sync_group == 0:
                stops.pop(self.handler.total_run_calls, lambda: None)()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            return loss.detach()

        with sg.PreemptionCheckpointHandler(checkpoint, folder, **options) as self.handler:
            for _ in range(data.epoch, EPOCHS):
                for batch in data:
                    self.handler.run(step, args=(batch,))
                    self.num_steps += 1


def check_same(one: nn.Module, other: nn.Module) -> None:
    for (name, value), (_, expected) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(value, expected), name


def test_a_loop_interrupted_three_times_ends_with_the_weights_of_one_that_was_not(
    make: Callable[[], sg.Strategy], tmp_path: Path
) -> None:
    whole = ByHand(make(), tmp_path / "whole", {})
    assert whole.num_steps == whole.handler.total_run_calls == EPOCHS * STEPS
    # In mid-epoch, in the last step of an epoch, and in the one after it.
    stops = {2: terminate, 4: lambda: os.kill(os.getpid(), signal.SIGINT), 10: terminate}
    for steps_done in (3, 5, 11):
        with pytest.raises(Preempted, match="143") as ended:
            ByHand(make(), tmp_path / "parts", stops)
        assert ended.value.code == 143 and str(tmp_path / "parts" / "step-") in ended.value.message
        saved = sg.Checkpoint(total_run_calls=0)
        saved.restore(tmp_path / "parts", random=False)
        assert saved.total_run_calls == steps_done
    assert not stops
    parts = ByHand(make(), tmp_path / "parts", {})
    assert parts.num_steps == 4 and parts.handler.total_run_calls == EPOCHS * STEPS
    assert parts.handler.restored is not None
    check_same(parts.model, whole.model)


class At(Callback):
    """Sends signals in hooks, once each: ``{("on_train_batch_begin", epoch, batch): send}``."""

    def __init__(self, stops: dict[tuple[str, int, int], Callable[[], None]]) -> None:
        self._stops = stops
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._send("train", batch)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._send("test", batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._send("end", 0)

    def _send(self, hook: str, batch: int) -> None:
        self._stops.pop((hook, self._epoch, batch), lambda: None)()


def fit(
    strategy: sg.Strategy, folder: Path, stops: dict[tuple[str, int, int], Callable[[], None]], **options: Any
) -> sg.Model:
    """One life of a script that calls ``fit``."""
    with strategy.scope():
        model = sg.Model(network())
    model.compile(lambda parameters: torch.optim.Adam(parameters, 0.05), "cross_entropy", ["accuracy"], **options)
    x, y = examples().tensors
    callbacks = [At(stops), BackupAndRestore(folder)]
    model.fit(x, y, batch_size=4, epochs=EPOCHS, validation_data=(x[:9], y[:9]), callbacks=callbacks, verbose=0)
    return model


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_a_fit_interrupted_anywhere_has_the_weights_and_the_history_of_one_that_was_not(
    make: Callable[[], sg.Strategy], tmp_path: Path, accumulate_steps: int
) -> None:
    whole = fit(make(), tmp_path / "whole", {}, accumulate_steps=accumulate_steps)
    stops = {
        ("train", 0, 2): terminate,
        ("train", 0, 4): terminate,  # the last one of the epoch
        ("test", 1, 0): terminate,
        ("end", 2, 0): terminate,  # all is done, but the script does not know yet
    }
    for _ in range(4):
        with pytest.raises(Preempted):
            fit(make(), tmp_path / "parts", stops, accumulate_steps=accumulate_steps)
        assert sg.latest_checkpoint(tmp_path / "parts") is not None
    assert not stops
    parts = fit(make(), tmp_path / "parts", stops, accumulate_steps=accumulate_steps)
    check_same(parts.module, whole.module)
    assert parts.history is not None and whole.history is not None
    assert parts.history.history == whole.history.history
    assert parts.num_steps == whole.num_steps == EPOCHS * STEPS
    assert not (tmp_path / "parts").exists()


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        terminate()
        terminate()

    with pytest.raises(SystemExit) as ended:
        ByHand(MAKERS["one"](), tmp_path / "run", {1: twice})
    assert ended.value.code == 143 and not isinstance(ended.value, Preempted)
    assert sg.latest_checkpoint(tmp_path / "run") is None


def test_a_step_that_does_not_end_is_ended(tmp_path: Path) -> None:
    def hang() -> None:
        terminate()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            pass
        raise AssertionError("nobody ended the step")

    with pytest.raises(SystemExit) as ended:
        ByHand(MAKERS["one"](), tmp_path / "run", {1: hang}, grace_s=0.05)
    assert ended.value.code == 143 and not isinstance(ended.value, Preempted)


def test_the_handlers_of_the_script_are_back_when_training_is_over(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        handler = sg.PreemptionCheckpointHandler(sg.Checkpoint(epoch=0), tmp_path)
        terminate()
        assert preemption.requested and not heard
        handler.close()  # nobody has followed the request
        assert heard == [signal.SIGTERM]
        terminate()
        assert len(heard) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_fit_that_leaves_signals_alone(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        model = sg.Model(network())
        model.compile("sgd", "cross_entropy")
        backup = BackupAndRestore(tmp_path / "backup", save_before_preemption=False)
        x, y = examples().tensors
        model.fit(x, y, callbacks=[At({("train", 0, 0): terminate}), backup], verbose=0)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_error_ends_the_watch(tmp_path: Path) -> None:
    def fail() -> None:
        raise ArithmeticError("boom")

    with pytest.raises(ArithmeticError):
        fit(MAKERS["one"](), tmp_path / "run", {("train", 0, 1): fail})
    (tmp_path / "run").mkdir(exist_ok=True)
    fit(MAKERS["one"](), tmp_path / "run", {})
    (tmp_path / "other").mkdir()
    sg.Checkpoint(epoch=1).write(tmp_path / "other")  # a backup of something else
    with pytest.raises(sg.CheckpointError, match="no model"):
        fit(MAKERS["one"](), tmp_path / "other", {})


def test_a_checkpoint_of_before_there_was_a_handler(tmp_path: Path) -> None:
    sg.Checkpoint(epoch=4).save(tmp_path / "step")
    checkpoint = sg.Checkpoint(epoch=0)
    with sg.PreemptionCheckpointHandler(sg.CheckpointManager(checkpoint, tmp_path)) as handler:
        assert (checkpoint.epoch, handler.total_run_calls) == (4, 0)
        assert handler.restored == sg.latest_checkpoint(tmp_path)


def test_where_to_save_has_to_be_clear(tmp_path: Path) -> None:
    checkpoint = sg.Checkpoint(epoch=0)
    with pytest.raises(ConfigurationError, match="checkpoint_dir"):
        sg.PreemptionCheckpointHandler(checkpoint)
    with pytest.raises(ConfigurationError, match="checkpoint_dir"):
        sg.PreemptionCheckpointHandler(sg.CheckpointManager(checkpoint, tmp_path), tmp_path)


def test_the_launcher_is_told_that_the_script_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RESUME_VARIABLE, str(tmp_path / "resumes"))
    with sg.PreemptionCheckpointHandler(sg.Checkpoint(epoch=0), tmp_path / "run"):
        assert (tmp_path / "resumes").exists()
    (tmp_path / "resumes").unlink()
    fit(MAKERS["one"](), tmp_path / "backup", {})
    assert (tmp_path / "resumes").exists()


def test_a_function_that_runs_all_replicas_is_refused_by_the_handler_with_the_way_out(tmp_path: Path) -> None:
    """TensorFlow's handler is given such a one."""
    strategy = sg.OneDeviceStrategy("cpu")
    with sg.PreemptionCheckpointHandler(sg.Checkpoint(strategy=strategy, seen=1), tmp_path) as handler:
        with pytest.raises(ConfigurationError, match="give it the step of a replica"):
            handler.run(lambda: strategy.run(lambda: 1))
        assert handler.total_run_calls == 0
