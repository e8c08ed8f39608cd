"""Losses by name: torch's names mean what torch means by them, Keras's what Keras means."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import stratagem as sg
from stratagem.errors import ConfigurationError
from stratagem.training.losses import Loss, LossFunction
from stratagem.training.metrics import metrics_of

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


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_classes_of_one_output_have_their_weights(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Each counted as class 0."""
    outputs, targets = torch.tensor([[0.1], [0.9], [0.4], [0.7], [0.2], [0.6]]), torch.tensor([0, 1, 1, 0, 0, 1])
    weights = torch.tensor([1.0, 5.0])[targets]
    each = functional.binary_cross_entropy(outputs[:, 0], targets.float(), reduction="none")
    found = Loss("binary_crossentropy").weighted({1: 5.0})(outputs, targets.reshape(shape).to(dtype))
    assert found.mean == pytest.approx((each * weights).sum() / weights.sum()) and found.divisor == 18.0


def test_a_class_below_0_is_none_that_was_named() -> None:
    found = Loss(nn.CrossEntropyLoss(ignore_index=-1)).weighted({2: 5.0})(LOGITS, torch.tensor([0, -1]))
    assert found.divisor == 1.0


@pytest.mark.parametrize("given", ["cross_entropy", nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 2.0]))])
@pytest.mark.parametrize("targets", [[0, -100, 1], [[0, 1], [2, -100], [-100, -100]]])
def test_weights_of_1_change_no_loss(given: LossFunction | str, targets: list[int] | list[list[int]]) -> None:
    """Also where targets are ignored, or the loss has weights of its own."""
    classes = torch.tensor(targets)
    outputs = torch.randn(3, 3, *classes.shape[1:], generator=torch.Generator().manual_seed(0))
    alone = functional.cross_entropy(outputs, classes, weight=getattr(given, "weight", None))
    torch.testing.assert_close(Loss(given)(outputs, classes, torch.ones(3)).mean, alone)
    if classes.dim() == 1:  # one class for each example
        torch.testing.assert_close(Loss(given).weighted({0: 1.0})(outputs, classes).mean, alone)


@pytest.mark.parametrize("given", ["cross_entropy", nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="none")])
@pytest.mark.parametrize("num_targets", [1, 2])
def test_replicas_whose_targets_are_ignored_train_as_one_process(given: LossFunction | str, num_targets: int) -> None:
    """Those of the second replica all are, and of torch's mean of nothing comes NaN."""
    x, y = torch.randn(4, 3), torch.tensor([[0, 1], [2, -100], [-100, -100], [-100, -100]])
    net = nn.Linear(3, 8) if num_targets == 2 else nn.Linear(3, 4)
    y = y if num_targets == 2 else y[:, 1]
    found = []
    for strategy in (sg.OneDeviceStrategy(), sg.MirroredStrategy(["cpu:0", "cpu:1"])):
        torch.manual_seed(0)
        with strategy.scope():
            model = sg.Model(
                nn.Sequential(copy.deepcopy(net), nn.Unflatten(1, (4, 2)) if num_targets == 2 else nn.Identity())
            )
            model.compile(lambda p: torch.optim.SGD(p, 0.1), given)
        losses = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
        found.append([*losses, model.evaluate(x, y, batch_size=4, verbose=0)])
        strategy.close()
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("loss", ["cross_entropy", nn.CrossEntropyLoss(ignore_index=2)])
def test_metrics_of_classes_leave_out_the_targets_that_the_loss_ignores(loss: LossFunction | str) -> None:
    ignored = -100 if isinstance(loss, str) else 2
    for targets, outputs in (
        (torch.tensor([0, ignored, 1, ignored]), torch.eye(3)[[0, 0, 0, 0]]),
        (torch.tensor([[0, ignored], [1, ignored]]), torch.eye(3)[[0, 0]].unsqueeze(2).expand(2, 3, 2)),
    ):
        model = sg.Model(nn.Identity())
        model.compile(loss=loss, metrics=["accuracy", "sparse_categorical_accuracy", "top_1_accuracy"])
        assert model.evaluate(outputs, targets, batch_size=1, verbose=0)[1:] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("given", ["mse", "bce_with_logits", nn.MSELoss()])
def test_targets_whose_channels_come_last_are_refused(given: LossFunction | str) -> None:
    """As many elements, in another order."""
    outputs = torch.zeros(2, 3, 4, 4)
    with pytest.raises(ConfigurationError, match=r"\[2, 3, 4, 4\], got \[2, 4, 4, 3\].*permute"):
        Loss(given)(outputs, torch.zeros(2, 4, 4, 3))
    mae = metrics_of("mae", torch.device("cpu"))["mae"]
    with pytest.raises(ConfigurationError, match="permute"):
        mae.update(outputs, torch.zeros(2, 4, 4, 3))
    mae.update(outputs, torch.ones(2, 48))
    assert (
        Loss(given)(outputs, torch.zeros(2, 1, 48)[:, 0]).mean == Loss(given)(outputs, torch.zeros_like(outputs)).mean
    )


def test_a_loss_module_is_the_scripts_own() -> None:
    """What a callback sets in it counts."""

    class Scaled(nn.Module):
        factor = 1.0

        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return self.factor * (outputs - targets).abs()

    given = Scaled()
    loss = Loss(given)
    before = loss(LOGITS, LOGITS + 1.0).mean
    given.factor = 3.0
    assert loss(LOGITS, LOGITS + 1.0).mean == 3.0 * before


@pytest.mark.parametrize("given", [nn.MSELoss(), nn.HuberLoss(), functional.l1_loss])
def test_torchs_distances_compare_each_example_with_its_own_target(given: LossFunction) -> None:
    """As those of a name do; torch warns, and compares each with each."""
    outputs = torch.tensor([[1.0], [2.0], [3.0]])
    assert Loss(given)(outputs, torch.tensor([1.0, 2.0, 3.0])).mean == 0.0


@pytest.mark.parametrize(
    ("loss", "accuracy", "warns"),
    [
        ("mse", 1.0, False),
        (nn.L1Loss(), 1.0, False),
        (functional.binary_cross_entropy, 1.0, False),
        ("bce_with_logits", 0.5, False),
        (lambda outputs, targets: (outputs - targets) ** 2, 0.5, True),
    ],
)
def test_what_is_a_positive_answer_of_one_output(
    loss: LossFunction | str, accuracy: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = sg.Model(nn.Identity())
    model.compile(loss=loss, metrics=["accuracy"])
    x, y = torch.tensor([[0.1], [0.9], [0.4], [0.7]]), torch.tensor([[0.0], [1.0], [0.0], [1.0]])
    assert model.evaluate(x, y, verbose=0)[1] == accuracy
    assert ("as probabilities do" in caplog.text) == warns


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
        (
            "sparse_categorical_crossentropy",
            LOGITS,
            'range from -3 to 4.*module with a softmax, or use "cross_entropy"',
        ),
        ("categorical_crossentropy", LOGITS.sigmoid(), "add up to 1"),
        ("binary_crossentropy", LOGITS[:, 0], 'with a sigmoid, or use "bce_with_logits"'),
        ("bce", LOGITS[:, 0], 'with a sigmoid, or use "bce_with_logits"'),
        ("nll", PROBABILITIES, 'expects log-probabilities.*"cross_entropy"'),
        ("cross_entropy", LOGITS[:, :1], 'one output is 0, .* an output for each class, .* "bce_with_logits"'),
        ("categorical_crossentropy", LOGITS[:, :1], '"binary_crossentropy" after a sigmoid'),
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
