"""fit, evaluate and predict against a loop written by hand, under strategies of one process.

Tolerance: 1e-6; sums of slices associate differently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.errors import ConfigurationError
from stratagem.training.callbacks import Callback
from stratagem.training.losses import Loss
from stratagem.training.model import Model

TOLERANCE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
NUM_EXAMPLES = 50
STRATEGIES = ["none", "one", "mirrored"]


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(NUM_EXAMPLES, 7, generator=generator), torch.randint(0, 3, (NUM_EXAMPLES,), generator=generator)


_started: list[sg.Strategy] = []


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    """Ends the threads of the replicas, which otherwise live as long as the process."""
    yield
    while _started:
        _started.pop().close()


class Median(torchmetrics.Metric):
    """Of the largest outputs; one that has to keep them all."""

    largest: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", [], dist_reduce_fx="cat")

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.largest.append(outputs.amax(1))

    def compute(self) -> torch.Tensor:
        return torchmetrics.utilities.dim_zero_cat(self.largest).median()


def make_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 3))


def make_model(kind: str = "one", **compiling: Any) -> Model:
    scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if kind != "none":
        strategy = sg.OneDeviceStrategy() if kind == "one" else sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
        _started.append(strategy)
        scope = strategy.scope()
    with scope:
        model = Model(make_net())
    settings: dict[str, Any] = {"optimizer": sgd, "loss": "cross_entropy", "metrics": ["accuracy"], **compiling}
    model.compile(**settings)
    return model


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def by_hand(
    x: torch.Tensor, y: torch.Tensor, epochs: int = 2, batch_size: int = 12, accumulate: int = 1
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same training without Stratagem, in the order of the examples."""
    net, losses = make_net(), []
    optimizer = sgd(net.parameters())
    for _ in range(epochs):
        total = 0.0
        for step, start in enumerate(range(0, len(x), batch_size), 1):
            if step % accumulate == 1 or accumulate == 1:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x[start : start + batch_size]), y[start : start + batch_size])
            (loss / accumulate).backward()
            if step % accumulate == 0 or start + batch_size >= len(x):
                optimizer.step()
            total += loss.item() * len(x[start : start + batch_size])
        losses.append(total / len(x))
    return net.state_dict(), losses


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_fit_is_the_loop_by_hand(data: tuple[torch.Tensor, torch.Tensor], kind: str, accumulate: int) -> None:
    state, losses = by_hand(*data, accumulate=accumulate)
    model = make_model(kind, accumulate_steps=accumulate)
    history = model.fit(*data, batch_size=12, epochs=2, shuffle=False, verbose=0)
    torch.testing.assert_close(model.state_dict(), state, **TOLERANCE)
    np.testing.assert_allclose(history.history["loss"], losses, rtol=1e-6)
    assert history.epoch == [0, 1]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_evaluate_counts_each_example_once_and_predict_keeps_the_order(
    data: tuple[torch.Tensor, torch.Tensor], kind: str
) -> None:
    x, y = data
    f1 = torchmetrics.F1Score("multiclass", num_classes=3, average="macro")
    model = make_model(kind, metrics={"accuracy": "accuracy", "f1": f1, "median": Median()})
    outputs = make_net()(x).detach()
    # 50 in batches of 16: the last batch of 2 leaves the third replica nothing.
    logs = model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    expected = {
        "loss": float(nn.functional.cross_entropy(outputs, y)),
        "accuracy": float((outputs.argmax(1) == y).float().mean()),
        "f1": float(f1.clone()(outputs, y)),
        "median": float(outputs.detach().amax(1).median()),
    }
    assert logs.keys() == expected.keys()
    np.testing.assert_allclose(list(logs.values()), list(expected.values()), rtol=1e-6)
    torch.testing.assert_close(model.predict(x, batch_size=16), outputs, **TOLERANCE)
    assert model.evaluate(x, y, verbose=0) == pytest.approx(list(expected.values()), rel=1e-6)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_wrappers_of_torchmetrics_count_what_is_in_them(data: tuple[torch.Tensor, torch.Tensor], kind: str) -> None:
    x, y = data
    accuracy = torchmetrics.Accuracy("multiclass", num_classes=3, average="micro")
    model = make_model(kind, metrics={"most": torchmetrics.MinMaxMetric(accuracy)})  # its update is not counted
    logs = model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    assert logs["most_raw"] == logs["most_max"] == pytest.approx(float(accuracy(make_net()(x), y)))


def test_a_metric_of_the_last_updates_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"RunningMean is of the last 3 updates.*pass MeanMetric itself"):
        make_model(metrics={"mean": torchmetrics.RunningMean(3)})


@pytest.mark.parametrize("kind", STRATEGIES)
def test_weights_of_examples_and_classes_divide_by_their_sum(
    data: tuple[torch.Tensor, torch.Tensor], kind: str
) -> None:
    x, y = data
    weights = torch.rand(NUM_EXAMPLES, generator=torch.Generator().manual_seed(2))
    net = make_net()
    each = weights * torch.where(y == 2, 3.0, 1.0)
    loss = (nn.functional.cross_entropy(net(x), y, reduction="none") * each).sum() / each.sum()
    loss.backward()
    optimizer = sgd(net.parameters())
    optimizer.step()
    model = make_model(kind)
    history = model.fit(x, y, batch_size=50, sample_weight=weights.numpy(), class_weight={2: 3.0}, verbose=0)
    torch.testing.assert_close(model.state_dict(), net.state_dict(), **TOLERANCE)
    assert history.history["loss"] == [pytest.approx(loss.item(), rel=1e-6)]


@pytest.mark.parametrize("source", ["numpy", "dataset", "loader", "iterable", "distributed", "dict"])
def test_every_kind_of_source_trains_alike(data: tuple[torch.Tensor, torch.Tensor], source: str) -> None:
    x, y = data
    state, _ = by_hand(x, y)
    model = make_model()
    loader = DataLoader(TensorDataset(x, y), batch_size=12)
    sources: dict[str, Any] = {
        "numpy": lambda: {"x": x.double().numpy(), "y": y.numpy(), "batch_size": 12},
        "dataset": lambda: {"x": TensorDataset(x, y), "batch_size": 12},
        "loader": lambda: {"x": loader},
        "iterable": lambda: {"x": [(x[start : start + 12], y[start : start + 12]) for start in range(0, 50, 12)]},
        "distributed": lambda: {"x": model.strategy.distribute_dataset(loader)},
        "dict": lambda: {"x": {"input": x}, "y": y, "batch_size": 12},
    }
    model.fit(**sources[source](), epochs=2, shuffle=False, verbose=0)
    torch.testing.assert_close(model.state_dict(), state, **TOLERANCE)


def test_batches_that_shuffle_by_themselves_are_told_each_epoch(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    class Shuffled:
        def __init__(self) -> None:
            self.told: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

        def __iter__(self) -> Iterator[Any]:
            yield data

    trained, held_out = Shuffled(), Shuffled()
    make_model().fit(trained, epochs=3, validation_data=held_out, verbose=0)
    assert trained.told == held_out.told == [0, 1, 2]


def test_steps_of_an_epoch_go_on_in_the_data(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = data
    state, _ = by_hand(x, y, epochs=2)
    model = make_model()
    history = model.fit(x, y, batch_size=12, epochs=5, steps_per_epoch=2, shuffle=False, verbose=0)
    torch.testing.assert_close(model.state_dict(), state, **TOLERANCE)  # 5 x 2 steps are 2 passes of 5
    assert len(history.history["loss"]) == 5
    batches = ((x[start : start + 12], y[start : start + 12]) for start in range(0, 50, 12))
    with pytest.raises(ConfigurationError, match="steps_per_epoch"):
        model.fit(batches, epochs=2, verbose=0)


def test_the_order_is_shuffled_anew_each_epoch_and_the_same_again(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = data

    class Seen(Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.losses.append(logs["loss"])

    runs = []
    for _ in range(2):
        model, seen = make_model(optimizer=lambda p: torch.optim.SGD(p, 0.0)), Seen()
        model.fit(x, y, batch_size=12, epochs=2, verbose=0, callbacks=[seen])
        runs.append(seen.losses)
    assert runs[0] == runs[1]
    assert runs[0][:4] != runs[0][5:9]
    assert runs[0][4] == pytest.approx(runs[0][9])  # each epoch has every example


def test_validation_split_is_the_end_and_is_not_trained_on(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = data
    model, other = make_model(), make_model()
    split = model.fit(x, y, batch_size=10, epochs=2, validation_split=0.2, verbose=0)
    given = other.fit(x[:40], y[:40], batch_size=10, epochs=2, validation_data=(x[40:], y[40:]), verbose=0)
    assert split.history == given.history
    assert split.history["val_loss"][-1] == pytest.approx(model.evaluate(x[40:], y[40:], verbose=0)[0])


def test_a_second_fit_goes_on(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = data
    state, _ = by_hand(x, y, epochs=3)
    model = make_model()
    model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    history = model.fit(x, y, batch_size=12, epochs=3, initial_epoch=1, shuffle=False, verbose=0)
    torch.testing.assert_close(model.state_dict(), state, **TOLERANCE)
    assert history.epoch == [1, 2]
    assert model.num_steps == 15


def test_mixed_precision_computes_in_bfloat16_and_counts_in_float32(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = make_model(mixed_precision="bf16", metrics={"mse": torchmetrics.MeanSquaredError()}, loss="mse")
    dtypes = []
    model.module[2].register_forward_hook(lambda *args: dtypes.append(args[-1].dtype))  # type: ignore[index]
    model.fit(data[0], torch.zeros(NUM_EXAMPLES, 3), verbose=0)
    assert set(dtypes) == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.float32}


def test_clipping_and_nan_policy_reach_the_strategy(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = data
    model = make_model(optimizer=lambda p: torch.optim.SGD(p, 1.0), clip_norm=1e-3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.fit(x, y, batch_size=50, verbose=0)
    moved = torch.cat([(model.state_dict()[name] - value).flatten() for name, value in before.items()]).norm()
    assert float(moved) == pytest.approx(1e-3, rel=1e-3)
    model = make_model(nan="skip")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.fit(x * float("nan"), y, verbose=0)
    torch.testing.assert_close(model.state_dict(), before)


def test_a_model_is_trained_in_its_own_strategy_alone(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = make_model()
    with sg.OneDeviceStrategy().scope(), pytest.raises(ConfigurationError, match="scope"):
        model.fit(*data, verbose=0)


def test_a_loss_of_ones_own_and_losses_that_cannot_be_shared(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = data

    def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    def each(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    expected = make_model(metrics=None).evaluate(x, y, verbose=0)
    assert make_model(loss=mean, metrics=None).evaluate(x, y, verbose=0) == pytest.approx(expected)
    assert make_model(loss=each, metrics=None).evaluate(x, y, verbose=0) == pytest.approx(expected)
    assert make_model(loss=each).fit(x, y, sample_weight=np.ones(50), verbose=0).history["loss"][0] > 0
    with pytest.raises(ConfigurationError, match="one value per example"):
        make_model(loss=mean).fit(x, y, sample_weight=np.ones(50), verbose=0)
    with pytest.raises(ConfigurationError, match="reduction"):
        make_model(loss=nn.CrossEntropyLoss(reduction="sum"))


@pytest.mark.parametrize("batch_size", [0, -4, 2.5, True])
def test_a_batch_has_examples(data: tuple[torch.Tensor, torch.Tensor], batch_size: Any) -> None:
    model, dataset = make_model(), TensorDataset(*data)
    calls: list[Callable[[], Any]] = [
        lambda: model.fit(*data, batch_size=batch_size, verbose=0),
        lambda: model.evaluate(dataset, batch_size=batch_size, verbose=0),
        lambda: model.predict(data[0], batch_size=batch_size),
        lambda: model.strategy.distribute_dataset(dataset, batch_size=batch_size),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match=r"batch_size(= a whole number| of at least 1)"):
            call()


@pytest.mark.parametrize("devices", [["cpu"], ["cpu:0", "cpu:1"]])
@pytest.mark.parametrize(("num_batches", "num_epochs"), [(5, 3), (4, 2)])
def test_training_ends_when_a_generator_does(
    devices: list[str], num_batches: int, num_epochs: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As Keras's, with a warning."""
    strategy = sg.MirroredStrategy(devices)
    with strategy.scope():
        model = sg.Model(nn.Linear(2, 1))
        model.compile("sgd", "mse")
    ends: list[Any] = []
    hears = sg.callbacks.LambdaCallback(on_train_end=ends.append)
    batches = ((torch.ones(4, 2), torch.ones(4, 1)) for _ in range(num_batches))
    history = model.fit(batches, steps_per_epoch=2, epochs=9, verbose=0, callbacks=[hears]).history
    assert len(history["loss"]) == num_epochs and model.num_steps == num_batches and len(ends) == 1
    assert caplog.text.count("ran out of data") == 1
    with pytest.raises(ConfigurationError, match="expected batches to train on"):
        model.fit(iter(()), steps_per_epoch=2, epochs=9, verbose=0)
    strategy.close()


def test_losses_divide_by_what_counts() -> None:
    outputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 2, 0, 1, 2])
    weight = torch.tensor([1.0, 2.0, 3.0])
    mean, divisor = Loss(nn.CrossEntropyLoss(weight=weight))(outputs, targets)
    assert divisor == 12.0
    torch.testing.assert_close(mean, Loss("cross_entropy").weighted({1: 2.0, 2: 3.0})(outputs, targets).mean)
    tokens = torch.tensor([[0, -100], [1, 2], [-100, -100]])
    assert Loss("cross_entropy")(torch.zeros(3, 3, 2), tokens).divisor == 3.0
    assert Loss("cross_entropy")(outputs, targets).divisor == 6.0
    with pytest.raises(ConfigurationError, match="shape"):
        Loss("mse")(torch.zeros(3, 2), torch.zeros(3))


def test_what_cannot_be_compiled_or_trained_is_refused(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = data
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": "adem"}, "did you mean 'adam'"),
        ({"loss": "cross"}, "expected a loss of"),
        ({"metrics": ["accurate"]}, "expected a metric of"),
        ({"metrics": ["accuracy", "accuracy"]}, "two metrics"),
        ({"metrics": {"val_loss": "accuracy"}}, "give it a different name"),
        ({"mixed_precision": "fp8"}, "mixed_precision"),
        ({"accumulate_steps": 0}, "accumulate_steps"),
        ({"optimizer": torch.optim.SGD(make_net().parameters())}, "not in this model's module"),
    ]
    for wrong, words in wrongs:
        with pytest.raises(ConfigurationError, match=words):
            make_model(**wrong)
    model = make_model()
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: model.fit(TensorDataset(x, y), y), "y= goes with arrays"),
        (lambda: model.fit(DataLoader(TensorDataset(x, y)), batch_size=3), "batch_size= is for"),
        (lambda: model.fit(TensorDataset(x, y), validation_split=0.5), "validation_split is for arrays"),
        (lambda: model.fit(x, sample_weight=x), "sample_weight needs y"),
        (lambda: model.fit(x), "needs targets"),
        (lambda: model.fit(3), "expected arrays"),
        (lambda: model.predict(model.strategy.distribute_dataset([x])), "keeps the order"),
        (lambda: Model(make_net()).fit(x, y), "needs compile"),
        (lambda: Model(make_net()).evaluate(x, y), "needs compile"),
    ]
    for call, words in calls:
        with pytest.raises(ConfigurationError, match=words):
            call()


def test_an_uncompiled_model_predicts(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(Model(make_net()).predict(data[0].numpy()), make_net()(data[0]).detach())


def test_an_interrupt_on_the_way_into_a_prediction_leaves_the_module_training(
    data: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """A loop by hand went on without dropout in the layers that had been reached."""

    class Interrupted(nn.Identity):
        def train(self, mode: bool = True) -> Interrupted:
            if not mode:
                raise KeyboardInterrupt
            return super().train(mode)

    module = nn.Sequential(nn.Dropout(), Interrupted())
    with pytest.raises(KeyboardInterrupt):
        Model(module).predict(data[0])
    assert all(each.training for each in module.modules())


def test_save_asks_for_nothing_after_a_fit_and_the_program_evaluates_alike(
    data: tuple[torch.Tensor, torch.Tensor], tmp_path: Any
) -> None:
    from stratagem.training.export.loaded_model import load_model

    model = make_model()
    with pytest.raises(ConfigurationError, match="example_inputs"):
        model.save(tmp_path / "export")
    model.fit(*data, verbose=0)
    model.save(tmp_path / "export")
    loaded = Model(load_model(tmp_path / "export"))
    loaded.compile(loss="cross_entropy", metrics=["accuracy"])
    assert loaded.evaluate(*data, verbose=0) == pytest.approx(model.evaluate(*data, verbose=0), rel=1e-6)


def test_summary_counts_shared_parameters_once() -> None:
    net = make_net()
    net.append(nn.Linear(3, 3))
    net.append(net[-1])
    lines: list[str] = []
    Model(net).summary(lines.append)
    assert "Parameters: 191 " in "\n".join(lines)
    assert lines[-1] == "Strategy: DefaultStrategy, 1 replica in sync"
