"""Losses by name: torch's names mean what torch means by them, Keras's what Keras means."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import stratagem as sg
from stratagem.errors import ConfigurationError
from stratagem.training.losses import Loss

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [-3.0, 0.0, 4.0]])
CLASSES = torch.tensor([0, 1])
PROBABILITIES = LOGITS.softmax(1)


def trained(loss: str, *last: nn.Module) -> tuple[list[float], torch.Tensor]:
    """The losses of three epochs, and the weight in the end."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 3 if "cat" in loss or loss == "cross_entropy" else 1), *last)
    x, classes = torch.randn(48, 4), torch.randint(0, 3, (48,))
    one_hot = functional.one_hot(classes, 3)
    y = {"sparse_categorical_crossentropy": classes, "cross_entropy": classes, "categorical_crossentropy": one_hot}
    model = sg.Model(net)
    model.compile(torch.optim.SGD(net.parameters(), 0.5), loss)
    history = model.fit(x, y.get(loss, (classes > 0).float()), batch_size=16, epochs=3, verbose=0)
    weight = net[0].weight
    assert isinstance(weight, nn.Parameter)
    return history.history["loss"], weight.detach()


@pytest.mark.parametrize(
    ("keras", "last", "plain"),
    [
        ("sparse_categorical_crossentropy", nn.Softmax(1), "cross_entropy"),
        ("categorical_crossentropy", nn.Softmax(1), "cross_entropy"),
        ("binary_crossentropy", nn.Sigmoid(), "bce_with_logits"),
    ],
)
def test_keras_names_train_what_keras_trains(keras: str, last: nn.Module, plain: str) -> None:
    losses, weight = trained(keras, last)
    expected, theirs = trained(plain)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight, theirs, rtol=1e-5, atol=1e-6)


def test_probabilities_of_zero_cost_what_they_cost_in_keras() -> None:
    sure = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    found = Loss("sparse_categorical_crossentropy")(sure, torch.tensor([1, 0])).mean
    torch.testing.assert_close(found, torch.tensor(-math.log(1e-7) / 2), rtol=1e-5, atol=0)
    found = Loss("binary_crossentropy")(sure[:, 0], torch.tensor([0.0, 1.0])).mean
    torch.testing.assert_close(found, torch.tensor(-math.log(1e-7) / 2), rtol=2e-2, atol=0)  # 1 - 1e-7 in float32


def test_weights_of_classes_and_ignored_targets_count_as_with_logits() -> None:
    weighted = Loss("sparse_categorical_crossentropy").weighted({0: 3.0})(PROBABILITIES, CLASSES)
    torch.testing.assert_close(weighted, Loss("cross_entropy").weighted({0: 3.0})(LOGITS, CLASSES))


@pytest.mark.parametrize(
    ("name", "outputs", "way_out"),
    [
        ("sparse_categorical_crossentropy", LOGITS, 'go from -3 to 4.*module with a softmax, or use "cross_entropy"'),
        ("categorical_crossentropy", LOGITS.sigmoid(), "add up to 1"),
        ("binary_crossentropy", LOGITS[:, 0], 'with a sigmoid, or use "bce_with_logits"'),
        ("bce", LOGITS[:, 0], 'with a sigmoid, or use "bce_with_logits"'),
        ("nll", PROBABILITIES, 'expects log-probabilities.*"cross_entropy"'),
    ],
)
def test_outputs_that_are_not_what_the_name_says_are_refused(name: str, outputs: torch.Tensor, way_out: str) -> None:
    loss = Loss(name)
    loss(outputs[:0], torch.zeros(0, dtype=torch.long if outputs.dim() > 1 else None))  # an empty share shows nothing
    with pytest.raises(ConfigurationError, match=way_out):
        loss(outputs, CLASSES)


def test_logits_are_not_taken_from_a_softmax_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Loss("cross_entropy")(LOGITS, CLASSES)
        assert not caplog.messages
        loss = Loss("cross_entropy")
        for _ in range(2):
            loss(PROBABILITIES, CLASSES)
    assert len(caplog.messages) == 1 and "expects logits" in caplog.messages[0]
