"""What people know from Keras by name: metrics, callbacks, single batches, errors of loading."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import CheckpointError, ConfigurationError, NonFiniteGradientError
from stratagem.training.losses import Loss
from stratagem.training.metrics import metrics_of

X = torch.linspace(-1, 1, 24).reshape(12, 2)
Y = torch.arange(12) % 3


def make_model(strategy: sg.Strategy, rate: float = 0.1, **compiling: Any) -> sg.Model:
    with strategy.scope():
        torch.manual_seed(1)
        model = sg.Model(nn.Linear(2, 3))
        model.compile(lambda parameters: torch.optim.SGD(parameters, rate), "cross_entropy", **compiling)
    return model


def one() -> sg.Strategy:
    return sg.OneDeviceStrategy("cpu")


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "expected"),
    [
        ("sparse_categorical_accuracy", [[1, 3, 2], [4, 0, 1]], [1, 2], 0.5),
        ("sparse_categorical_accuracy", [[1, 3, 2], [4, 0, 1]], [[1], [0]], 1.0),
        ("categorical_accuracy", [[1, 3, 2], [4, 0, 1]], [[0, 1, 0], [0, 0, 1]], 0.5),
        ("sparse_top_k_categorical_accuracy", [[6, 5, 4, 3, 2, 1]] * 2, [4, 5], 0.5),
        ("top_k_categorical_accuracy", [[6, 5, 4, 3, 2, 1]], [[0, 0, 0, 0, 0, 1]], 0.0),
        ("top_5_accuracy", [[3, 2, 1]], [2], 1.0),
        ("root_mean_squared_error", [[3.0], [0.0]], [[0.0], [4.0]], math.sqrt(12.5)),
        ("mean_absolute_percentage_error", [[3.0], [1.0]], [[2.0], [1.0]], 25.0),
        ("msle", [[math.e - 1]], [[0.0]], 1.0),
        ("RootMeanSquaredError", [[3.0], [0.0]], [[0.0], [4.0]], math.sqrt(12.5)),
        ("cosine_similarity", [[3.0, 4.0]], [[1.0, 0.0]], 0.6),
        ("LogCoshError", [[1.0]], [[0.0]], math.log(math.cosh(1))),
        ("AUC", [[0.1], [1.0], [0.35], [0.8]], [[0], [1], [1], [0]], 0.75),
        ("AUC", [[0.0], [1.0], [1.0]], [[0], [1], [0]], 0.75),
        ("Precision", [[0.9], [0.8], [0.3]], [[1], [0], [1]], 0.5),
        ("recall", [[0.9, 0.8], [0.3, 0.2]], [[1, 0], [1, 1]], 1 / 3),
        ("crossentropy", [[0.25], [0.5]], [[0], [1]], -math.log(0.75 * 0.5) / 2),
        ("ce", [[0.25, 0.75], [0.5, 0.5]], [0, -100], math.log(4)),
        ("SparseCategoricalCrossentropy", [[0.25, 0.75], [0.5, 0.5]], [[0], [0]], math.log(8) / 2),
    ],
)
def test_metrics_of_keras(name: str, outputs: Any, targets: Any, expected: float) -> None:
    metric = metrics_of([name], torch.device("cpu"), takes_probabilities=True)[name]
    metric.update(torch.tensor(outputs, dtype=torch.float32), torch.tensor(targets))
    assert metric.compute([metric.states()])[""] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [  # computed by Keras 3.15
        ("KLDivergence", [1.151289, 0]),
        ("poisson", [0.8504307, 0.7349553]),
        ("hinge", [1.233333, 0.7066666]),
        ("SquaredHinge", [1.76, 0.5776666]),
        ("log_cosh", [0.1801523, 0]),
        ("huber", [0.1966667, 0]),
        ("BinaryFocalCrossentropy", [0.6235255, 0.08473529]),
        ("CosineSimilarity", [-0.3624221, -1]),
        ("mape", [3.5e08, 0]),
        ("msle", [0.1932573, 0]),
    ],
)
def test_losses_of_keras(name: str, expected: list[float]) -> None:
    outputs = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.9, 0.4]])
    targets = torch.tensor([[0, 1, 0], [1, 0, 0]])
    found = [float(Loss(name)(outputs, each).mean) for each in (targets, outputs)]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "refused"),
    [("bce_with_logits", None), ("cross_entropy", "end the module with a sigmoid"), ("mae", "-1 to 2")],
)
def test_rates_are_of_probabilities(loss: str, refused: str | None) -> None:
    model = sg.Model(nn.Identity())
    model.compile(loss=loss, metrics=["AUC", "Precision", "Recall"])
    x, y = torch.tensor([[0.25, -1.0], [2.0, 0.5]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    if refused is not None:
        with pytest.raises(ConfigurationError, match=refused):
            model.evaluate(x, y, verbose=0)
        return
    found = model.evaluate(x, y, verbose=0, return_dict=True)
    assert found["AUC"] == pytest.approx(0.5) and found["Precision"] == pytest.approx(2 / 3) and found["Recall"] == 1.0


@pytest.mark.parametrize("name", ["crossentropy", "SparseCategoricalCrossentropy"])
def test_a_metric_is_refused_by_the_name_it_was_given(name: str) -> None:
    metric = metrics_of([name], torch.device("cpu"))[name]
    with pytest.raises(ConfigurationError, match=f'the metric {name!r} is Keras.* use "cross_entropy" for logits'):
        metric.update(torch.tensor([[3.0, -1.0]]), torch.tensor([0]))


def test_rates_beside_a_softmax_count_probabilities() -> None:
    model = sg.Model(nn.Softmax(1))
    model.compile(loss="categorical_crossentropy", metrics=["binary_accuracy", "Recall"])
    found = model.evaluate(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.eye(2).flip(0), verbose=0)
    assert found[1:] == [0.0, 0.0]


def test_one_number_an_example_is_a_row_of_one() -> None:
    outputs, targets = torch.tensor([0.5, 0.25]), torch.tensor([1.0, 1.0])
    for name in ("kld", "cosine_similarity"):
        flat, rows = (Loss(name)(each, targets, torch.tensor([1.0, 3.0])).mean for each in (outputs, outputs[:, None]))
        assert flat == rows == Loss(name).weighted({0: 2.0})(outputs, targets, torch.tensor([1.0, 3.0])).mean


def test_a_lambda_callback_hears_with_logs_as_in_keras() -> None:
    heard: list[Any] = []
    callback = sg.callbacks.LambdaCallback(
        on_train_begin=lambda logs: heard.append(logs),
        on_epoch_end=lambda epoch, logs: heard.append((epoch, sorted(logs))),
        on_train_batch_end=lambda batch, logs: heard.append(batch),
        on_train_end=None,
    )
    make_model(one()).fit(X, Y, batch_size=6, verbose=0, callbacks=[callback])
    assert heard == [{}, 0, 1, (0, ["loss"])]
    with pytest.raises(ConfigurationError, match=r"expected hooks of .*on_epoch_end.*, got 'on_epoch_ends'"):
        sg.callbacks.LambdaCallback(on_epoch_ends=print)
    with pytest.raises(ConfigurationError, match="expected a function for on_epoch_end, got int"):
        sg.callbacks.LambdaCallback(on_epoch_end=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("nan", ["error", "skip"])
def test_a_loss_that_is_nan_ends_training(nan: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(one(), nan=nan)
    poisoned = X.clone()
    poisoned[7] = float("nan")
    if nan == "error":
        with pytest.raises(NonFiniteGradientError):
            model.fit(poisoned, Y, batch_size=6, shuffle=False, epochs=3, verbose=0)
    seen: list[int] = []
    counting = sg.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: seen.append(batch))
    with caplog.at_level(logging.WARNING):
        history = model.fit(
            poisoned,
            Y,
            batch_size=6,
            shuffle=False,
            epochs=3,
            verbose=0,
            callbacks=[sg.callbacks.TerminateOnNaN(), counting],
        )
    assert seen == [0, 1] and len(history.epoch) == (0 if nan == "error" else 1)
    assert "training ends" in caplog.text


class Frozen(nn.BatchNorm1d):
    """As the page for people from Keras has it."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_a_frozen_layer_keeps_its_statistics(devices: list[str]) -> None:
    means = []
    for kind in (Frozen, nn.BatchNorm1d):
        with sg.MirroredStrategy(devices).scope():
            model = sg.Model(nn.Sequential(kind(2).requires_grad_(False), nn.Linear(2, 3)))
            model.compile("sgd", "cross_entropy")
        model.fit(X + 1, Y, batch_size=6, verbose=0)
        means.append(model.state_dict()["0.running_mean"].abs().max())
    assert means[0] == 0 < means[1]


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_callbacks_hear_what_was_predicted(devices: list[str]) -> None:
    model = make_model(sg.MirroredStrategy(devices))
    heard: list[Any] = []
    listening = sg.callbacks.LambdaCallback(on_predict_batch_end=lambda batch, logs: heard.append(logs["outputs"]))
    outputs = model.predict(X, batch_size=5, callbacks=[listening])
    assert [len(each) for each in heard] == [5, 5, 2] and torch.equal(torch.cat(heard), outputs)


def test_examples_without_weight_have_the_loss_0() -> None:
    model = make_model(sg.MirroredStrategy(["cpu:0", "cpu:1"]))
    masked = {number: float(number > 0) for number in range(3)}
    seen: list[float] = []
    reading = sg.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))
    called = [reading, sg.callbacks.TerminateOnNaN()]
    history = model.fit(
        X, Y.sort()[0], batch_size=4, shuffle=False, verbose=0, class_weight=masked, callbacks=called
    ).history
    assert seen[0] == 0.0 and seen[2] == history["loss"][0] > 0.0
    assert model.evaluate(X, Y, sample_weight=torch.zeros(12), verbose=0) == 0.0


def test_single_batches_are_those_of_fit_and_evaluate_and_predict() -> None:
    mirrored = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    by_batch, by_fit = (make_model(each, metrics=["accuracy"]) for each in (mirrored, one()))
    try:
        for start in (0, 5):
            x, y = X[start : start + 5], Y[start : start + 5]
            before = by_fit.evaluate(x, y, verbose=0)
            assert by_batch.test_on_batch(x, y) == pytest.approx(before, abs=1e-6)
            by_fit.fit(x, y, batch_size=5, shuffle=False, verbose=0)
            assert by_batch.train_on_batch(x, y) == pytest.approx(before, abs=1e-6)
        assert by_batch.num_steps == 2
        torch.testing.assert_close(by_batch.predict_on_batch(X), by_fit.predict(X))
        weighted = by_batch.train_on_batch(X, Y, torch.ones(12), {0: 2.0}, return_dict=True)
        assert list(weighted) == ["loss", "accuracy"]
        for method in (by_batch.train_on_batch, by_batch.test_on_batch):
            with pytest.raises(ConfigurationError, match="sample_weight needs y"):
                method(X, sample_weight=torch.ones(12))
    finally:
        mirrored.close()


def test_a_loaded_model_is_not_compiled_for_training(tmp_path: Path) -> None:
    model = make_model(one())
    model.fit(X, Y, verbose=0)
    path = model.save(tmp_path / "exported")
    loaded = sg.Model(sg.load_model(path))
    with pytest.raises(ConfigurationError, match="cannot be trained; build the model from its class and load its weig"):
        loaded.compile("SGD", "cross_entropy")
    loaded.compile(loss="cross_entropy")
    assert loaded.evaluate(X, Y, verbose=0) == pytest.approx(model.evaluate(X, Y, verbose=0), abs=1e-6)
    again = nn.Linear(2, 3)
    again.load_state_dict(torch.load(path / "state_dict.pt"))
    torch.testing.assert_close(again.weight, model.module.weight)


def test_weights_of_another_model_and_no_checkpoint_at_all(tmp_path: Path) -> None:
    saved = make_model(one()).save_weights(tmp_path / "weights")
    other = sg.Model(nn.Linear(4, 5))
    with pytest.raises(CheckpointError, match=r"(?s)a different model than model, .*sg.load_checkpoint.*size mismatch"):
        other.load_weights(saved)
    deeper = sg.Checkpoint(model=nn.Sequential(nn.Linear(2, 3)))
    with pytest.raises(CheckpointError, match=r"Missing key\(s\) in state_dict: \"0.weight\""):
        deeper.restore(saved)
    assert deeper.restore(sg.latest_checkpoint(tmp_path / "nothing")) is None
