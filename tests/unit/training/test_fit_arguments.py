"""What is given to fit, compile and predict in other forms: taken for what it means, or refused with the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stratagem as sg
from stratagem.errors import ConfigurationError

X = np.linspace(-1, 1, 48, dtype=np.float32).reshape(16, 3)
Y = (X[:, 0] > 0).astype(np.int64)


def compiled(**changes: Any) -> sg.Model:
    torch.manual_seed(0)
    model = sg.Model(torch.nn.Linear(3, 2))
    options: dict[str, Any] = {"optimizer": "sgd", "loss": "cross_entropy", "metrics": ["accuracy"]}
    model.compile(**options | changes)
    return model


def fit(x: Any = X, y: Any = Y, compile_with: dict[str, Any] | None = None, **options: Any) -> dict[str, list[float]]:
    given: dict[str, Any] = {"verbose": 0, "shuffle": False, "batch_size": None} | options
    logs: dict[str, list[float]] = compiled(**compile_with or {}).fit(x, y, **given).history
    return logs


def arrays() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield X, Y


@pytest.mark.parametrize(
    "same",
    [
        {"y": Y.astype(np.int32)},
        {"y": Y.astype(bool)},
        {"compile_with": {"metrics": "accuracy"}},
        {"callbacks": None},
        {"callbacks": sg.callbacks.EarlyStopping("loss")},
        {"epochs": np.int64(1)},
        {"x": arrays(), "y": None},
        {"x": [(X, Y)], "y": None},
    ],
    ids=lambda same: ", ".join(same),
)
def test_forms_that_mean_the_same(same: dict[str, Any]) -> None:
    assert fit(**same) == fit()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 1.5}, "expected epochs of at least 0, a whole number, got 1.5"),
        ({"epochs": -1}, "expected epochs of at least 0, a whole number, got -1"),
        ({"epochs": "2"}, "expected epochs of at least 0, a whole number, got '2'"),
        ({"initial_epoch": True}, "expected initial_epoch of at least 0, a whole number, got True"),
        ({"steps_per_epoch": 0}, "expected steps_per_epoch of at least 1, a whole number, got 0"),
        ({"batch_size": 2.0}, "expected a batch_size of at least 1, a whole number, got 2.0"),
        ({"shuffle": "batch"}, "expected shuffle to be True or False, got 'batch'"),
        ({"compile_with": {"loss": torch.nn.CrossEntropyLoss}}, r"give CrossEntropyLoss\(\)"),
        ({"compile_with": {"accumulate_steps": 1.5}}, "expected accumulate_steps of at least 1, a whole number"),
        ({"y": Y.astype(np.float32)}, r"whole class numbers.*y.astype\('int64'\)"),
        ({"x": X.tolist(), "y": Y.tolist()}, r"got \[3\], \[3\], \[3\], \[3\] and 13 more"),
    ],
    ids=lambda given: ", ".join(given) if isinstance(given, dict) else "",
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        fit(**options)


def test_predict_says_how_long_it_took_when_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    model = compiled()
    model.predict(X)
    assert "prediction" not in capsys.readouterr().err
    model.predict(X, verbose=1)
    assert "prediction  16 examples in " in capsys.readouterr().err


@pytest.mark.parametrize(
    "strategy", [sg.get_strategy(), sg.OneDeviceStrategy(), sg.MirroredStrategy(["cpu:0", "cpu:1"])]
)
def test_a_tensor_is_not_taken_apart_into_arguments(strategy: sg.Strategy) -> None:
    one = torch.zeros(1, 3)
    with pytest.raises(ConfigurationError, match=r"expected args as a tuple, \(batch,\) for one argument, got Tensor"):
        strategy.run(lambda batch: batch, one)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected kwargs as a dict, got list"):
        strategy.run(lambda batch: batch, (one,), [])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected a function, got Tensor"):
        strategy.run(one)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", [None, 0, b"cpu", "cpuu"])
def test_what_is_no_device(device: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected a device like 'cpu', 'cuda:0' or '/gpu:0', got"):
        sg.OneDeviceStrategy(device)
