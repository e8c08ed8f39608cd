"""Estimator: train, evaluate and predict in one process, against plain loops.

Tolerance: 1e-6 where sums of slices associate differently; runs that were interrupted have the same bits.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

import stratagem as sg
from stratagem import Estimator, EstimatorSpec, ModeKeys, RunConfig, get_global_step, get_or_create
from stratagem.checkpoint.reading import describe
from stratagem.errors import CheckpointError, ConfigurationError
from stratagem.training.estimator import evaluation
from stratagem.training.saving.checkpoint import Checkpoint
from stratagem.training.saving.object_states import put_back
from tests.unit.training.checkpoint_objects import same
from tests.unit.training.estimating import data, loader, make_net, model_fn, trained_by_hand

TOLERANCE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}

_started: list[sg.Strategy] = []


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    """Ends the threads of the replicas, which otherwise live as long as the process."""
    yield
    while _started:
        _started.pop().close()


def one() -> sg.Strategy:
    return sg.OneDeviceStrategy()


def mirrored() -> sg.Strategy:
    _started.append(sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]))
    return _started[-1]


def make(folder: Path, strategy: Callable[[], sg.Strategy] = one, **choices: Any) -> Estimator:
    params = {"dropout": choices.pop("dropout", 0.0)}
    return Estimator(model_fn, folder, RunConfig(train_distribute=strategy, **choices), params)


def weights(estimator: Estimator) -> dict[str, torch.Tensor]:
    path = estimator.latest_checkpoint()
    assert path is not None
    return sg.load_checkpoint(path, "net")


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("model.ckpt-*"))


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [one, mirrored])
def test_training_is_the_plain_loop(tmp_path: Path, strategy: Callable[[], sg.Strategy]) -> None:
    estimator = make(tmp_path, strategy).train(loader, max_steps=13)  # the last epoch is left in its middle
    torch.testing.assert_close(weights(estimator), trained_by_hand(13), **TOLERANCE)
    assert steps_in(tmp_path) == [13]


def test_the_loader_is_gone_through_once_without_a_number_of_steps(tmp_path: Path) -> None:
    estimator = make(tmp_path).train(loader)
    torch.testing.assert_close(weights(estimator), trained_by_hand(5), **TOLERANCE)
    assert steps_in(tmp_path) == [5]


@pytest.mark.parametrize("strategy", [one, mirrored])
def test_a_later_process_goes_through_the_loader_once_more(tmp_path: Path, strategy: Callable[[], sg.Strategy]) -> None:
    """Where the checkpoint was of the last step, and not of the end, it had "no batch to train on"."""
    for _ in range(2):
        estimator = make(tmp_path, strategy, save_checkpoints_steps=5).train(loader)  # a pass has 5
    torch.testing.assert_close(weights(estimator), trained_by_hand(10), **TOLERANCE)


@pytest.mark.parametrize("strategy", [one, mirrored])
@pytest.mark.parametrize("nan", ["error", "skip"])
def test_a_loss_that_is_not_finite_ends_training_though_its_gradients_are(
    tmp_path: Path, strategy: Callable[[], sg.Strategy], nan: str
) -> None:
    steps = 0

    def lost_in_the_third(features: torch.Tensor, labels: torch.Tensor, mode: ModeKeys) -> EstimatorSpec:
        nonlocal steps
        steps = get_global_step() + 1
        net = get_or_create("net", make_net)
        optimizer = get_or_create("optimizer", lambda: torch.optim.SGD(net.parameters(), 0.1))
        loss = nn.functional.cross_entropy(net(features), labels) + (float("nan") if steps == 3 else 0.0)
        return EstimatorSpec(mode, loss=loss, optimizer=optimizer, prepare={"nan": nan})

    estimator = Estimator(lost_in_the_third, tmp_path, RunConfig(train_distribute=strategy))
    if nan == "skip":
        estimator.train(loader, max_steps=4)
        assert steps_in(tmp_path) == [4]
        return
    with pytest.raises(sg.NonFiniteGradientError, match="finite loss, got nan in step 3; nothing was applied"):
        estimator.train(loader, max_steps=4)
    assert steps == 3


def test_a_loss_that_is_not_finite_is_named_where_nobody_can_count_examples(tmp_path: Path) -> None:
    """The form of the batch was refused, which trains."""

    def lost(features: Any, labels: torch.Tensor, mode: ModeKeys) -> EstimatorSpec:
        net = get_or_create("net", make_net)
        optimizer = get_or_create("optimizer", lambda: torch.optim.SGD(net.parameters(), 0.1))
        loss = nn.functional.cross_entropy(net(features["x"]), labels) + features["edges"].mean()
        return EstimatorSpec(mode, loss=loss, optimizer=optimizer)

    def collated(examples: list[Any]) -> Any:
        x, y = default_collate(examples)
        return {"x": x, "edges": torch.full((2, 7), math.nan)}, y

    with pytest.raises(sg.NonFiniteGradientError, match="finite loss, got nan in step 1"):
        Estimator(lost, tmp_path, RunConfig(train_distribute=one)).train(lambda: loader(collate_fn=collated))


def test_a_number_of_steps_counts_from_here_and_max_steps_from_the_first(tmp_path: Path) -> None:
    estimator = make(tmp_path)
    estimator.train(loader, steps=4)
    estimator.train(loader, steps=3)
    assert steps_in(tmp_path) == [4, 7]
    estimator.train(loader, max_steps=7)
    make(tmp_path).train(loader, max_steps=6)
    assert steps_in(tmp_path) == [4, 7]
    make(tmp_path).train(loader, max_steps=8)
    assert steps_in(tmp_path) == [4, 7, 8]


@pytest.mark.parametrize("strategy", [one, mirrored])
def test_an_interrupted_training_goes_on_from_the_newest_checkpoint(
    tmp_path: Path, strategy: Callable[[], sg.Strategy]
) -> None:
    """It went on with the weights of its last step, and with the first batches of the data."""
    whole = make(tmp_path / "whole", strategy)
    whole.train(loader, max_steps=7)

    batches = itertools.count()

    def collated(rows: list[Any]) -> Any:
        if steps_in(tmp_path / "cut") == [3] and next(batches) == 1:
            raise KeyboardInterrupt
        return default_collate(rows)

    cut = make(tmp_path / "cut", strategy, save_checkpoints_steps=3)
    with pytest.raises(KeyboardInterrupt):
        cut.train(lambda: loader(collate_fn=collated), max_steps=7)
    assert steps_in(tmp_path / "cut") == [3]
    cut.train(loader, max_steps=7)
    assert steps_in(tmp_path / "cut") == [3, 6, 7]
    assert same(weights(cut), weights(whole))


@pytest.mark.parametrize("strategy", [one, mirrored])
@pytest.mark.parametrize("batch_sizes", [(8, 8, 8), (8, 6, 4)])
def test_a_training_after_one_that_is_done_resumes_in_its_own_input(
    tmp_path: Path, batch_sizes: tuple[int, ...], strategy: Callable[[], sg.Strategy], caplog: pytest.LogCaptureFixture
) -> None:
    """The one with nothing to do took the place in the data, or lost it where it has others."""

    def train(folder: str, *limits: int) -> dict[str, torch.Tensor]:
        estimator = make(tmp_path / folder, strategy)
        for limit, batch_size in zip(limits, batch_sizes, strict=True):
            estimator.train(functools.partial(loader, shuffle=True, batch_size=batch_size), max_steps=limit)
        return weights(estimator)

    whole = train("whole", 1, 2, 9)
    train("cut", 1, 2, 6)
    assert same(train("cut", 1, 2, 9), whole)
    assert "has changed" not in caplog.text


def test_a_checkpoint_whose_save_was_interrupted_is_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came while the next training was under way, which was told that another one saves there."""
    go_on, write = threading.Event(), Checkpoint._write

    def slow(*arguments: Any) -> None:
        assert go_on.wait(60)
        write(*arguments)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    estimator = make(tmp_path).train(loader, steps=2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoint, "_write", slow)
        patch.setattr(Future, "exception", interrupt)
        estimator.train(loader, steps=2)
    assert steps_in(tmp_path) == [2]
    timer = threading.Timer(0.2, go_on.set)
    timer.start()
    estimator.train(loader, steps=1)
    timer.join()
    assert steps_in(tmp_path) == [2, 4, 5]


def test_objects_whose_making_was_interrupted_are_made_anew(tmp_path: Path) -> None:
    """The first had been made, and the second got its random numbers."""
    interrupts = [False, True]

    def function(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        first = get_or_create("first", lambda: nn.Linear(7, 5))
        if interrupts.pop():
            raise KeyboardInterrupt
        interrupts.append(False)
        second = get_or_create("second", lambda: nn.Linear(5, 3))
        loss = nn.functional.cross_entropy(second(first(features)), labels)
        optimizer = get_or_create("optimizer", lambda: torch.optim.SGD(second.parameters(), 0.1))
        return EstimatorSpec(mode, loss=loss, optimizer=optimizer)

    cut = Estimator(function, tmp_path / "cut", RunConfig(seed=4))
    with pytest.raises(KeyboardInterrupt):
        cut.train(loader, max_steps=1)
    cut.train(loader, max_steps=1)
    whole = Estimator(function, tmp_path / "whole", RunConfig(seed=4)).train(loader, max_steps=1)
    ways = [sg.load_checkpoint(str(each.latest_checkpoint()), "second") for each in (cut, whole)]
    assert same(*ways)


@pytest.mark.parametrize("mode", ["train", "evaluate"])
def test_an_interrupted_prepare_needs_no_new_estimator(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused: build the model anew, which only the Estimator can."""
    strategy = mirrored()
    config = RunConfig(train_distribute=strategy, eval_distribute=strategy)
    estimator = Estimator(model_fn, tmp_path, config, {})
    call = functools.partial(estimator.train, max_steps=1) if mode == "train" else estimator.evaluate

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("stratagem.strategy.replicas.local_replicas.SeveralReplicas.together", interrupt)
        call(loader)
    call(loader)


def test_two_estimators_do_not_train_in_one_folder(tmp_path: Path) -> None:
    """Where their steps differed the checkpoints of both were mixed, and the next training continued from either."""
    first, second = make(tmp_path, save_checkpoints_steps=3), make(tmp_path, save_checkpoints_steps=2)
    first.train(loader, steps=3)
    second.train(loader, steps=2)
    with pytest.raises(
        CheckpointError, match=r"model.ckpt-00000005 is of another .* at step 3. Make a new one to continue"
    ):
        first.train(loader, steps=1)

    def trains_meanwhile(saved: Any) -> None:
        if saved.step == 6:
            make(tmp_path).train(loader, steps=3)

    with pytest.raises(CheckpointError, match=r"model.ckpt-00000009 is of another .* at step 8"):
        second.train(loader, steps=4, saving_listeners=[trains_meanwhile])
    assert steps_in(tmp_path) == [3, 4, 5, 6, 9]


def test_without_parameter_servers_a_checkpoint_has_what_it_always_had(tmp_path: Path) -> None:
    """A training asks for all that it saves: with another object it refuses to go on from those of before."""
    estimator = Estimator(model_fn, model_dir=tmp_path, params={})
    estimator.train(loader, max_steps=1)
    path = estimator.latest_checkpoint()
    assert path is not None
    named = [name for name in describe(Path(path)).objects if not name.startswith("_")]
    assert sorted(named) == ["global_step", "input_position", "net", "optimizer"]


@pytest.mark.parametrize("strategy", [one, mirrored])
def test_a_later_process_goes_on_with_the_same_bits(
    tmp_path: Path, strategy: Callable[[], sg.Strategy], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(9)
    whole = make(tmp_path / "whole", strategy, dropout=0.3)
    whole.train(lambda: loader(shuffle=True), max_steps=12)
    torch.manual_seed(9)
    for number in (3, 5, 12):  # an epoch has 5
        make(tmp_path / "cut", strategy, dropout=0.3).train(lambda: loader(shuffle=True), max_steps=number)
        torch.manual_seed(number)
    assert "In a loop of your own" not in caplog.text
    cut = weights(make(tmp_path / "cut"))
    assert all(torch.equal(cut[name], value) for name, value in weights(whole).items())


def test_a_process_that_is_told_to_end_saves_the_step_it_is_in(tmp_path: Path) -> None:
    def told(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        if get_global_step() == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return model_fn(features, labels, mode, {})

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        Estimator(told, tmp_path, RunConfig(train_distribute=one)).train(loader, max_steps=13)
    assert ended.value.code == 143
    assert steps_in(tmp_path) == [4]
    assert signal.getsignal(signal.SIGTERM) is before
    estimator = make(tmp_path).train(loader, max_steps=13)
    torch.testing.assert_close(weights(estimator), trained_by_hand(13), **TOLERANCE)


def test_other_data_after_an_interruption_starts_at_its_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path).train(loader, steps=3)
    with caplog.at_level(logging.WARNING):
        make(tmp_path).train(lambda: loader(batch_size=10), steps=3)
    assert steps_in(tmp_path) == [3, 6]
    assert "input starts from its beginning" in caplog.text


def test_checkpoints_by_steps_and_the_newest_are_kept(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []
    estimator = make(tmp_path, save_checkpoints_steps=2, keep_checkpoint_max=2)
    estimator.train(loader, max_steps=7, saving_listeners=[lambda saved: seen.append((saved.step, saved.is_last))])
    assert seen == [(2, False), (4, False), (6, False), (7, True)]
    assert steps_in(tmp_path) == [6, 7]


def test_a_pass_that_ends_with_a_checkpoint_says_so_afterwards(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []
    listener = [lambda saved: seen.append((saved.step, saved.is_last))]
    make(tmp_path, save_checkpoints_steps=5).train(loader, saving_listeners=listener)
    assert seen == [(5, False), (5, True)]


def test_a_damaged_checkpoint_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    estimator = make(tmp_path, save_checkpoints_steps=3).train(loader, max_steps=6)
    newest = Path(str(estimator.latest_checkpoint())) / "net.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    with caplog.at_level(logging.WARNING):
        again = make(tmp_path).train(loader, max_steps=6)
    assert "Skipped the checkpoint" in caplog.text
    torch.testing.assert_close(weights(again), trained_by_hand(6), **TOLERANCE)


def test_the_learning_rate_may_follow_the_step(tmp_path: Path) -> None:
    seen: list[int] = []

    def decaying(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        spec = model_fn(features, labels, mode, {})
        assert spec.optimizer is not None
        seen.append(get_global_step())
        for group in spec.optimizer.param_groups:
            group["lr"] = 0.0 if get_global_step() >= 4 else 0.05
        return spec

    estimator = Estimator(decaying, tmp_path, RunConfig(train_distribute=one)).train(loader, max_steps=9)
    assert seen == [0, *range(9)]  # the first creates the objects
    still = trained_by_hand(4)
    torch.testing.assert_close(weights(estimator), still, **TOLERANCE)


def test_creating_the_model_leaves_no_traces(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.LazyLinear(16), nn.BatchNorm1d(16), nn.LazyLinear(3))

    calls = 0

    def with_batch_norm(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        nonlocal calls
        calls += 1
        net = get_or_create("net", build)
        optimizer = get_or_create("optimizer", lambda: torch.optim.SGD(net.parameters(), 0.1))
        return EstimatorSpec(mode, loss=nn.functional.cross_entropy(net(features), labels), optimizer=optimizer)

    estimator = Estimator(with_batch_norm, tmp_path, RunConfig(train_distribute=one))
    estimator.train(loader, steps=4)
    assert calls == 5
    assert weights(estimator)["1.num_batches_tracked"] == 4


def test_gradients_are_clipped_when_the_spec_says_so(tmp_path: Path) -> None:
    def clipped(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        net = get_or_create("net", make_net)
        optimizer = get_or_create("optimizer", lambda: torch.optim.SGD(net.parameters(), 1.0))
        loss = 1e6 * nn.functional.cross_entropy(net(features), labels)
        return EstimatorSpec(mode, loss=loss, optimizer=optimizer, prepare={"clip_norm": 0.5})

    trained = weights(Estimator(clipped, tmp_path, RunConfig(train_distribute=one)).train(loader, steps=1))
    change = torch.cat([(trained[name] - value).flatten() for name, value in make_net().state_dict().items()])
    assert float(change.norm()) == pytest.approx(0.5, rel=1e-5)


def test_a_seed_makes_models_alike(tmp_path: Path) -> None:
    def seeded(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        net = get_or_create("net", lambda: nn.Linear(7, 3))
        optimizer = get_or_create("optimizer", lambda: torch.optim.SGD(net.parameters(), 0.1))
        return EstimatorSpec(mode, loss=nn.functional.cross_entropy(net(features), labels), optimizer=optimizer)

    found = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        estimator = Estimator(seeded, tmp_path / name, RunConfig(train_distribute=one, seed=seed))
        found.append(weights(estimator.train(loader, steps=1))["weight"])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


# -- inputs ------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (data()[index] for index in range(len(data())))


@pytest.mark.parametrize(
    "input_fn",
    [
        lambda: list(loader()),
        lambda: iter(list(loader())),
        lambda: DataLoader(Stream(), 12),
        lambda: DataLoader(
            TensorDataset(torch.arange(50)), 12, collate_fn=lambda rows: data()[[int(r[0]) for r in rows]]
        ),
        lambda: DataLoader(
            data(), batch_sampler=[list(range(first, min(first + 12, 50))) for first in range(0, 50, 12)]
        ),
        lambda mode, params, config: loader() if mode == ModeKeys.TRAIN and "dropout" in params and config else None,
    ],
    ids=["list", "iterator", "stream", "collate_fn", "batch_sampler", "arguments"],
)
def test_inputs_of_every_kind(tmp_path: Path, input_fn: Callable[..., Any]) -> None:
    estimator = make(tmp_path).train(input_fn, steps=5)
    torch.testing.assert_close(weights(estimator), trained_by_hand(5), **TOLERANCE)


def test_an_iterator_that_ends_before_the_steps_are_made_ends_the_training(tmp_path: Path) -> None:
    make(tmp_path).train(lambda: iter(list(loader())), max_steps=100)
    assert steps_in(tmp_path) == [5]


def test_an_input_that_knows_its_place_gives_batches_of_replicas(tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []

    def input_fn(input_context: sg.InputContext) -> Any:
        seen.append(
            (
                input_context.num_input_pipelines,
                input_context.input_pipeline_id,
                input_context.num_replicas_in_sync,
            )
        )
        return loader(batch_size=input_context.get_per_replica_batch_size(12))

    estimator = make(tmp_path, mirrored).train(input_fn, steps=4)
    assert seen == [(1, 0, 3)]
    torch.testing.assert_close(weights(estimator), trained_by_hand(4), **TOLERANCE)


def test_worker_processes_of_the_loader(tmp_path: Path) -> None:
    estimator = make(tmp_path).train(lambda: loader(num_workers=1), steps=5)
    torch.testing.assert_close(weights(estimator), trained_by_hand(5), **TOLERANCE)


# -- evaluating and predicting -----------------------------------------------------------------------------------------


def expected(net: nn.Module, num_examples: int = 50) -> dict[str, float]:
    x, y = data()[:num_examples]
    with torch.no_grad():
        logits = net.eval()(x)
    right = float((logits.argmax(1) == y).float().mean())
    return {"loss": float(nn.functional.cross_entropy(logits, y)), "accuracy": right, "wrong": 1 - right}


def net_of(state: dict[str, torch.Tensor]) -> nn.Module:
    net = make_net()
    net.load_state_dict(state)
    return net


@pytest.mark.parametrize("strategy", [None, mirrored], ids=["one device", "mirrored"])
def test_each_example_counts_once(tmp_path: Path, strategy: Callable[[], sg.Strategy] | None) -> None:
    estimator = make(tmp_path, eval_distribute=strategy, save_checkpoints_steps=3, dropout=0.5).train(
        loader, max_steps=6
    )
    wanted = {**expected(net_of(weights(estimator))), "global_step": 6}
    assert estimator.evaluate(loader) == pytest.approx(wanted, rel=1e-6)
    assert estimator.evaluate(loader, steps=2)["loss"] == pytest.approx(
        expected(net_of(weights(estimator)), 24)["loss"], rel=1e-6
    )
    early = tmp_path / "model.ckpt-00000003"
    found = estimator.evaluate(loader, checkpoint_path=early)
    assert found["global_step"] == 3
    assert found["loss"] == pytest.approx(expected(net_of(sg.load_checkpoint(early, "net")))["loss"], rel=1e-6)


def test_without_a_checkpoint_the_model_is_as_it_was_created(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = make(tmp_path).evaluate(loader)
    assert "There is no checkpoint" in caplog.text
    assert found["global_step"] == 0 and found["loss"] == pytest.approx(expected(make_net())["loss"], rel=1e-6)


def test_metrics_of_torchmetrics_are_merged_by_their_own_rules(tmp_path: Path) -> None:
    def measured(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        spec = model_fn(features, labels, mode, {})
        logits = get_or_create("net", make_net)(features)
        both = torchmetrics.MetricCollection(
            [torchmetrics.Precision("multiclass", num_classes=3), torchmetrics.Recall("multiclass", num_classes=3)]
        )
        f1 = torchmetrics.F1Score("multiclass", num_classes=3, average="macro")
        metrics = {"f1": (f1, logits, labels), "of": (both, logits, labels), "batch_loss": spec.loss}
        return EstimatorSpec(mode, loss=spec.loss, metrics=metrics)  # type: ignore[arg-type]

    x, y = data()[:]
    logits = make_net().eval()(x).detach()
    for strategy in (None, mirrored):
        found = Estimator(measured, tmp_path, RunConfig(eval_distribute=strategy)).evaluate(loader)
        f1 = torchmetrics.functional.f1_score(logits, y, "multiclass", num_classes=3, average="macro")
        assert found["f1"] == pytest.approx(float(f1))
        assert {"of_MulticlassPrecision", "of_MulticlassRecall", "batch_loss"} <= found.keys()


def test_predictions_come_one_by_one_in_order(tmp_path: Path) -> None:
    estimator = make(tmp_path, dropout=0.5).train(loader, max_steps=3)
    found = list(estimator.predict(loader))
    logits = net_of(weights(estimator)).eval()(data()[:][0])
    torch.testing.assert_close(torch.stack([each["logits"] for each in found]), logits, **TOLERANCE)
    assert torch.equal(torch.stack([each["class"] for each in found]), logits.argmax(1))
    only_features = list(estimator.predict(lambda: [data()[:][0][:2]]))
    assert len(only_features) == 2


def test_predictions_of_two_checkpoints_are_gone_through_side_by_side(tmp_path: Path) -> None:
    estimator = make(tmp_path)
    paths = [estimator.train(loader, steps=1).latest_checkpoint() for _ in range(2)]
    one, other = ([row["logits"] for row in estimator.predict(loader, path)] for path in paths)
    pairs = zip(estimator.predict(loader, paths[0]), estimator.predict(loader, paths[1]), strict=True)
    for (a, b), first, second in zip(pairs, one, other, strict=True):
        assert torch.equal(a["logits"], first) and torch.equal(b["logits"], second)


def test_predictions_go_on_with_their_weights_after_an_interrupted_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what they went on with were the other checkpoint's."""
    estimator = make(tmp_path, save_checkpoints_steps=3).train(loader, max_steps=6)
    first, second = (tmp_path / f"model.ckpt-{step:08}" for step in (3, 6))
    whole = [row["logits"] for row in estimator.predict(loader, first)]

    def interrupted(*arguments: Any) -> None:
        put_back(*arguments)
        raise KeyboardInterrupt

    predictions = estimator.predict(loader, first)
    begun = [next(predictions)["logits"]]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(evaluation, "put_back", interrupted)
        next(estimator.predict(loader, second))
    torch.testing.assert_close([*begun, *(row["logits"] for row in predictions)], whole, rtol=0, atol=0)


def test_an_export_predicts_without_stratagem(tmp_path: Path) -> None:
    estimator = make(tmp_path, dropout=0.5).train(loader, max_steps=3)
    with pytest.raises(ConfigurationError, match="example_inputs"):
        estimator.export_model(tmp_path / "export")
    estimator.export_model(tmp_path / "export", sg.TensorSpec((None, 7)))
    program = torch.export.load(tmp_path / "export" / "model.pt2").module()
    x = data()[:][0][:5]
    torch.testing.assert_close(program(x)["logits"], net_of(weights(estimator)).eval()(x), **TOLERANCE)
    assert sg.load_model(tmp_path / "export").metadata == {"global_step": 3}
    state = torch.load(tmp_path / "export" / "state_dict.pt", weights_only=True)
    assert set(state) == {f"net.{name}" for name in make_net().state_dict()}


def test_a_model_function_that_makes_its_optimizer_in_each_mode_is_exported(tmp_path: Path) -> None:
    """As those of tf.estimator do that have no branches; the export alone refused it."""

    def each_mode(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        net = sg.get_or_create("net", make_net)
        optimizer = sg.get_or_create("optimizer", lambda: torch.optim.Adam(net.parameters()))
        logits = net(features)
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return EstimatorSpec(mode, loss=loss, optimizer=optimizer, predictions={"logits": logits})

    estimator = Estimator(each_mode, tmp_path / "model").train(loader, max_steps=2)
    estimator.export_model(tmp_path / "export", sg.TensorSpec((None, 7)))
    x = data()[:][0][:5]
    expected = net_of(weights(estimator)).eval()(x)
    torch.testing.assert_close(sg.load_model(tmp_path / "export")(x)["logits"], expected, **TOLERANCE)


def test_checkpoints_of_another_model_are_refused(tmp_path: Path) -> None:
    make(tmp_path).train(loader, steps=1)

    def other(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        net = get_or_create("other", make_net)
        return EstimatorSpec(mode, loss=nn.functional.cross_entropy(net(features), labels))

    with pytest.raises(CheckpointError, match="has no other; it has global_step, net"):
        Estimator(other, tmp_path).evaluate(loader)


def test_checkpoints_of_another_model_are_refused_again(tmp_path: Path) -> None:
    """The second training began from scratch."""
    make(tmp_path).train(loader, steps=1)

    def wider(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        net = get_or_create("net", lambda: nn.Linear(7, 3))
        optimizer = get_or_create("optimizer", lambda: torch.optim.SGD(net.parameters(), 0.1))
        return EstimatorSpec(mode, loss=nn.functional.cross_entropy(net(features), labels), optimizer=optimizer)

    estimator = Estimator(wider, tmp_path, RunConfig(train_distribute=one))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="of a different model than net"):
            estimator.train(loader, steps=2)
    assert steps_in(tmp_path) == [1]
    with pytest.raises(CheckpointError, match="of a different model than net"):
        estimator.evaluate(loader)


def test_a_folder_that_cannot_be_written_is_said_before_the_first_batch(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")

    def unread() -> Any:
        raise AssertionError("the input was opened")

    with pytest.raises(CheckpointError, match=f"cannot write {tmp_path}/model: File exists"):
        make(tmp_path / "model").train(unread, steps=1)


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(tmp_path: Path, function: Callable[..., EstimatorSpec], match: str, **arguments: Any) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Estimator(function, tmp_path, RunConfig(train_distribute=one)).train(loader, **{"steps": 3, **arguments})


def test_an_optimizer_of_its_own_in_each_step_is_refused(tmp_path: Path) -> None:
    def fresh(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        net = get_or_create("net", make_net)
        loss = nn.functional.cross_entropy(net(features), labels)
        return EstimatorSpec(mode, loss=loss, optimizer=torch.optim.SGD(net.parameters(), 0.1))

    refused(tmp_path, fresh, "not from sg.get_or_create")


def test_an_object_created_in_a_later_step_is_refused(tmp_path: Path) -> None:
    calls = 0

    def late(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        nonlocal calls
        calls += 1
        spec = model_fn(features, labels, mode, {})
        if calls == 3:
            get_or_create("late", make_net)
        return spec

    refused(tmp_path, late, "creates 'late' in a later step")


@pytest.mark.parametrize(
    ("name", "factory", "match"),
    [
        ("a b", make_net, "identifier"),
        ("_net", make_net, "identifier"),
        ("global_step", make_net, "other than global_step"),
        ("metric", lambda: torchmetrics.MeanMetric(), "Metrics go to"),
        ("table", dict, "modules and optimizers"),
    ],
)
def test_what_cannot_be_created(tmp_path: Path, name: str, factory: Callable[[], Any], match: str) -> None:
    def creating(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        get_or_create(name, factory)
        return model_fn(features, labels, mode, {})

    refused(tmp_path, creating, match)


def test_outside_of_a_model_fn_nothing_is_created() -> None:
    with pytest.raises(ConfigurationError, match="get_or_create is for the model_fn"):
        get_or_create("net", make_net)
    with pytest.raises(ConfigurationError, match="get_global_step is for the model_fn"):
        get_global_step()


def test_specs_that_lack_what_their_mode_needs() -> None:
    loss = torch.tensor(1.0)
    with pytest.raises(ConfigurationError, match="needs the optimizer"):
        EstimatorSpec(ModeKeys.TRAIN, loss=loss)
    with pytest.raises(ConfigurationError, match=r"scalar tensor, got \[2\]"):
        EstimatorSpec(ModeKeys.EVAL, loss=torch.ones(2))
    with pytest.raises(ConfigurationError, match="needs predictions"):
        EstimatorSpec(ModeKeys.PREDICT, loss=loss)
    with pytest.raises(ConfigurationError, match="expected ModeKeys of TRAIN, EVAL, PREDICT"):
        EstimatorSpec("test", loss=loss)
    assert EstimatorSpec("eval", loss=loss).mode == ModeKeys.EVAL


def test_functions_with_other_arguments(tmp_path: Path) -> None:
    refused(tmp_path, lambda features, mode: EstimatorSpec(mode, predictions=1), "takes no labels")
    with pytest.raises(ConfigurationError, match="takes no argument called features"):
        Estimator(lambda labels: None, tmp_path)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigurationError, match="takes 'x'"):
        Estimator(lambda features, x: None, tmp_path)  # type: ignore[arg-type,return-value]
    refused(tmp_path, lambda features, labels: model_fn(features, labels, ModeKeys.EVAL, {}), "of mode train, got")
    refused(tmp_path, lambda features, labels: 1, "EstimatorSpec of mode train, got int")  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("input_fn", "match"),
    [
        (lambda: data(), "wrap it in a DataLoader"),
        (lambda: None, "an iterable of batches from the input_fn"),
        (lambda: (torch.zeros(4, 7), torch.zeros(4)), "features and labels, not batches of them: wrap them"),
        (lambda: {"x": torch.zeros(4, 7)}, "returned a dict, not batches"),
        (lambda: torch.zeros(4, 7), "returned a Tensor, not batches"),
        (lambda: [], "no examples"),
        (lambda: DataLoader(TensorDataset(torch.zeros(0, 7)), 4), "no examples"),
        (lambda batch_size: loader(), "takes 'batch_size'"),
        (loader(), "write lambda: loader"),
    ],
)
def test_what_an_input_fn_cannot_be(tmp_path: Path, input_fn: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        make(tmp_path).train(input_fn, steps=3)


def test_a_folder_of_checkpoints_stands_for_its_newest(tmp_path: Path) -> None:
    make(tmp_path / "other").train(loader, steps=2, saving_listeners=None)
    estimator = make(tmp_path / "own")
    assert estimator.evaluate(loader, checkpoint_path=tmp_path / "other")["global_step"] == 2
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        estimator.evaluate(loader, checkpoint_path=tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="expected functions of a SavedStep in saving_listeners="):
        estimator.train(loader, steps=1, saving_listeners=[object()])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="expected example_inputs with a tensor"):
        estimator.export_model(tmp_path / "export", lambda: None)


def test_what_an_estimator_is_not_made_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="expected config= RunConfig or None, got a dict"):
        Estimator(model_fn, tmp_path, {"seed": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected params= a dict or None, got a list"):
        Estimator(model_fn, tmp_path, params=[1])  # type: ignore[arg-type]


def test_numbers_that_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="steps or max_steps"):
        make(tmp_path).train(loader, steps=3, max_steps=3)
    with pytest.raises(ConfigurationError, match="max_steps of at least 1"):
        make(tmp_path).train(loader, max_steps=0)
    with pytest.raises(ConfigurationError, match="steps of at least 1"):
        make(tmp_path).evaluate(loader, steps=0)
    with pytest.raises(ConfigurationError, match="got both"):
        RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1)
    with pytest.raises(ConfigurationError, match="save_summary_steps of at least 1"):
        RunConfig(save_summary_steps=0)
    with pytest.raises(ConfigurationError, match="expected train_distribute= Strategy or a function or None"):
        RunConfig(train_distribute="ring")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected a strategy from"):
        make(tmp_path, lambda: 1).train(loader, steps=1)  # type: ignore[arg-type,return-value]


def test_the_folder_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Estimator(model_fn, config=RunConfig(model_dir=tmp_path)).model_dir == tmp_path
    with pytest.raises(ConfigurationError, match="one model_dir"):
        Estimator(model_fn, tmp_path, RunConfig(model_dir=tmp_path / "other"))
    with pytest.raises(ConfigurationError, match='model_dir= a folder, got ""'):
        Estimator(model_fn, config=RunConfig(model_dir=""))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert Estimator(model_fn).model_dir.parent == tmp_path
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}')
    with pytest.raises(ConfigurationError, match="give model_dir"):
        Estimator(model_fn)
