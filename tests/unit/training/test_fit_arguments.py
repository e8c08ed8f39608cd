"""What is given to fit, compile and predict in other forms: taken for what it means, or refused with the way out."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stratagem as sg
from stratagem.errors import ConfigurationError
from stratagem.training.fit.sources import Arrays

X = np.linspace(-1, 1, 48, dtype=np.float32).reshape(16, 3)
Y = (X[:, 0] > 0).astype(np.int64)
LOADER = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y)), 8)


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


def turned(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return targets * 1j


def scalar(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def first_half(outputs: torch.Tensor, targets: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets[0])


class InKerasOrder(torch.nn.Module):
    def forward(self, target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return (target - output).mean()


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
        {"x": X[::-1].copy()[::-1], "y": Y[::-1].copy()[::-1]},
        {"x": X.astype(X.dtype.newbyteorder())},
    ],
    ids=lambda same: ", ".join(same),
)
def test_forms_that_mean_the_same(same: dict[str, Any]) -> None:
    assert fit(**same) == fit()


@pytest.mark.parametrize(
    "data",
    [[(X, Y)] * 2, [(X, Y)] * 3, [X, Y], (X, Y.tolist()), ((X,), Y)],
    ids=["two batches", "three batches", "a list", "a list of numbers", "a tuple of inputs"],
)
def test_forms_of_validation_data(data: Any) -> None:
    logs = fit(validation_data=data)
    assert logs["val_loss"] == pytest.approx(fit(validation_data=(X, Y))["val_loss"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 1.5}, "expected epochs= a whole number, got 1.5"),
        ({"epochs": -1}, "expected epochs of at least 0, a whole number, got -1"),
        ({"epochs": "2"}, "expected epochs= a whole number, got '2'"),
        ({"initial_epoch": True}, "expected initial_epoch= a whole number, got True"),
        ({"steps_per_epoch": 0}, "expected steps_per_epoch of at least 1, a whole number, got 0"),
        ({"batch_size": 2.0}, "expected batch_size= a whole number or None, got 2.0"),
        ({"shuffle": "batch"}, "expected shuffle= True or False, got 'batch'"),
        ({"compile_with": {"loss": torch.nn.CrossEntropyLoss}}, r"give CrossEntropyLoss\(\)"),
        ({"compile_with": {"accumulate_steps": 1.5}}, "expected accumulate_steps= a whole number, got 1.5"),
        ({"y": Y.astype(np.float32)}, r"whole class numbers.*y.astype\('int64'\)"),
        ({"class_weight": [1.0, 2.0]}, "expected class_weight= a dict or None, got a list"),
        ({"class_weight": {"0": 1.0}}, "expected class numbers in class_weight of at least 0, a whole number, got '0'"),
        ({"class_weight": {0: -1.0}}, r"expected class_weight\[0\] of at least 0, got -1.0"),
        ({"class_weight": {0: "2"}}, r"expected class_weight\[0\] of at least 0, got '2'"),
        ({"sample_weight": np.linspace(-1, 2, 16)}, r"weights of at least 0, .* got -1: .* f\(outputs, targets\)"),
        ({"class_weight": {-1: 1.0}}, "expected class numbers in class_weight of at least 0, a whole number, got -1"),
        ({"x": X[:0], "y": Y[:0]}, "expected at least one example, got none"),
        ({"compile_with": {"optimizer": {"name": "sgd"}}}, "expected the name of an optimizer.*got dict"),
        ({"compile_with": {"loss": "categorical_crossentropy"}}, 'loss="categorical_crossentropy" is Keras'),
        ({"compile_with": {"loss": {"a": "mse"}}}, r"got a dict: for several outputs, give loss=f, .* adds up their"),
        ({"compile_with": {"loss": ["mse", "mse"]}}, "got a list: for several outputs, give loss=f"),
        ({"compile_with": {"metrics": [torch.nn.L1Loss]}}, "got the class L1Loss"),
        ({"compile_with": {"metrics": [scalar]}}, "scalar returned a scalar"),
        ({"compile_with": {"metrics": [turned]}}, "one real number; turned returned complex ones"),
        ({"validation_data": (X, Y), "validation_freq": 0}, "expected validation_freq of at least 1"),
        ({"validation_data": (X, Y), "validation_freq": ["2"]}, r"expected validation_freq\[0\] of at least 1"),
        ({"x": X.tolist(), "y": Y.tolist()}, r"a list of lists of numbers.*numpy.array\(x\) makes it examples"),
        ({"x": torch.utils.data.DataLoader(LOADER.dataset, 32, drop_last=True), "y": None}, "gives no batch"),
        ({"x": [], "y": None}, "expected batches to train on, but there were none in epoch 1"),
        ({"x": [(X, Y)], "y": None, "validation_data": []}, "expected batches to evaluate, but there were none"),
        ({"y": Y[:9]}, "the same number of examples, got 16 and 9"),
        (
            {"x": LOADER, "y": None, "validation_data": LOADER, "validation_batch_size": 4},
            "^validation_batch_size= is for arrays and Datasets; a DataLoader has batches of its own",
        ),
        ({"validation_data": arrays(), "epochs": 2}, "can be iterated over only once, but there are 2 validations"),
        ({"validation_data": (X, Y), "validation_freq": torch.tensor(0)}, "expected validation_freq of at least 1"),
        ({"validation_data": arrays(), "epochs": 4, "validation_freq": 2}, "once, but there are 2 validations"),
        ({"validation_data": arrays(), "epochs": 4, "validation_freq": [1, 3, 5]}, "once, but there are 2 validations"),
        ({"validation_data": (X, Y), "validation_batch_size": 0}, "expected validation_batch_size of at least 1"),
        ({"compile_with": {"optimizer": "lbfgs"}}, r"write the loop, with optimizer.step\(closure\)"),
        ({"y": [Y, Y]}, "compares one tensor with one, and the targets are a list"),
        ({"compile_with": {"loss": first_half}, "y": [Y, Y]}, "the metric 'accuracy' compares one tensor with one"),
        (
            {"compile_with": {"loss": first_half, "metrics": None}, "y": [Y, Y], "class_weight": {1: 2.0}},
            "this is a list",
        ),
        ({"compile_with": {"loss": lambda *_: None}}, "expected a loss that returns a tensor, .* got a NoneType"),
        (
            {"compile_with": {"loss": lambda y_true, y_pred: ((y_true - y_pred) ** 2).mean()}},
            r"with \(outputs, targets\), .* takes \(y_true, y_pred\), in Keras's: write the outputs first",
        ),
        ({"compile_with": {"metrics": [lambda labels, logits: labels]}}, r"takes \(labels, logits\), in Keras's"),
        ({"compile_with": {"loss": InKerasOrder()}}, r"takes \(target, output\), in Keras's"),
        (
            {"compile_with": {"loss": lambda *_: {}}, "sample_weight": np.ones(16)},
            "expected a loss that returns a tensor, .* got a dict",
        ),
        (
            {"y": Y, "sample_weight": {"a": np.ones(16)}},
            "sample_weight is one weight for each example.* this is a dict",
        ),
        ({"class_weight": {1: 2.0}, "y": np.full((16, 2), 0.8, np.float32)}, "rows that do not add up to 1"),
    ],
    ids=lambda given: ", ".join(given) if isinstance(given, dict) else "",
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        fit(**options)


def test_inputs_may_begin_with_a_dict() -> None:
    arrays = Arrays([[({"a": X}, X)], Y])
    assert len(arrays) == len(X) and arrays[0][0][0][0]["a"].tolist() == X[0].tolist()


@pytest.mark.parametrize("asked", ["fit", "evaluate", "predict"])
def test_rows_of_numbers_are_no_batches(asked: str) -> None:
    with pytest.raises(ConfigurationError, match=r"a list of lists of numbers.*numpy.array\(x\) makes it examples"):
        getattr(compiled(), asked)(X.tolist(), verbose=0)


def test_the_order_of_the_arguments_is_that_of_keras() -> None:
    model = compiled()
    history = model.fit(X, Y, 8, 2, 0).history
    assert len(history["loss"]) == 2
    assert model.evaluate(X, Y, 8, 0) == model.evaluate(X, Y, batch_size=8, verbose=0)
    assert model.predict(X, 8).shape == (16, 2)


@pytest.mark.parametrize("verbose", [True, False])
def test_verbose_may_be_a_bool_as_in_keras(verbose: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = compiled()
    model.fit(X, Y, verbose=verbose)
    model.evaluate(X, Y, verbose=verbose)
    model.predict(X, verbose=verbose)
    assert bool("".join(capsys.readouterr())) == verbose


def test_class_numbers_of_numpy() -> None:
    weights = dict(zip(np.unique(Y), np.array([2.0, 0.5], np.float32), strict=True))
    assert fit(class_weight=weights) == fit(class_weight={0: 2.0, 1: 0.5})


def test_each_fit_outside_of_a_strategy_has_another_order_as_under_one() -> None:
    def untrained() -> sg.Model:
        return compiled(optimizer=lambda parameters: torch.optim.SGD(parameters, 0.0))

    model, orders = untrained(), []
    with sg.OneDeviceStrategy("cpu").scope():
        first, second = untrained(), untrained()  # the order is that of a fit of its model, not of the script
    for each in (model, model, first, first, second, second):
        losses: list[float] = []
        hear = sg.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, to=losses: to.append(logs["loss"]))
        each.fit(X, Y, batch_size=4, verbose=0, callbacks=hear)
        orders.append(losses)
    assert orders[0] != orders[1] and orders[:2] == orders[2:4] == orders[4:]


def test_a_function_is_a_metric_over_all_examples() -> None:
    def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.argmax(1) == targets

    model = compiled(metrics=["accuracy", right])
    found = model.evaluate(X, Y, batch_size=5, verbose=0, return_dict=True)
    assert found["right"] == found["accuracy"] > 0
    assert "again" in compiled(metrics={"again": right}).evaluate(X, Y, verbose=0, return_dict=True)


@pytest.mark.parametrize(("chosen", "epochs"), [(1, 4), (2, 2), (3, 1), ([1, 4], 2), (range(2, 4), 2)])
def test_a_validation_only_after_the_epochs_that_are_chosen(chosen: Any, epochs: int) -> None:
    for data in ((X, Y), [X, Y]):
        logs = fit(epochs=4, validation_data=data, validation_freq=chosen, validation_batch_size=3)
        assert len(logs["loss"]) == 4 and len(logs["val_loss"]) == epochs


def test_the_older_names_of_the_hooks_of_batches() -> None:
    heard: list[str] = []

    class Older(sg.callbacks.Callback):
        def on_batch_begin(self, batch: int, logs: Any = None) -> None:
            heard.append(f"begin {batch}")

        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            heard.append(f"end {batch} of {', '.join(logs)}")

    model = compiled()
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[Older()])
    assert heard == ["begin 0", "end 0 of loss, accuracy", "begin 1", "end 1 of loss, accuracy"]
    heard.clear()
    model.fit(X, Y, verbose=0, callbacks=sg.callbacks.LambdaCallback(on_batch_end=lambda batch, _: heard.append("end")))
    assert heard == ["end"]


@pytest.mark.parametrize("name", ["train_step", "test_step", "call", "metrics"])
def test_a_method_that_only_keras_would_call_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"Mine defines {name}, which is never called.*strategy.run\(step"):
        type("Mine", (sg.Model,), {name: lambda self, data: None})
    with pytest.raises(ConfigurationError, match=f"Mine defines {name}, which is never called"):
        type("Mine", (type("Mixin", (), {name: print}), sg.Model), {})
    model = compiled()
    setattr(model, name, print)
    with pytest.raises(ConfigurationError, match=f"model.{name} was set, which is never called"):
        model.fit(X, Y, verbose=0)


def test_a_module_with_a_train_step_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(torch.nn.Linear):
        def train_step(self, data: Any) -> None:
            """Nothing."""

        def test_step(self, data: Any) -> None:
            """As modules of Lightning have it."""

    sg.Model(Mine(3, 2))
    assert "Mine defines train_step, which is never called" in caplog.text and "test_step" not in caplog.text
    caplog.clear()
    compiled()
    assert not caplog.text


@pytest.mark.parametrize("strategy", [sg.OneDeviceStrategy(), sg.MirroredStrategy(["cpu:0", "cpu:1"])])
def test_an_attribute_that_only_keras_would_look_at_is_refused(strategy: sg.Strategy) -> None:
    class Faster(sg.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            assert self.model.optimizer is not None
            self.model.optimizer.learning_rate = 0.5  # type: ignore[attr-defined]

    with strategy.scope():
        model = compiled()
        with pytest.raises(ConfigurationError, match=r"set model\.learning_rate"):
            model.fit(X, Y, verbose=0, callbacks=[Faster()])
        model = compiled()
        vars(model.optimizer)["clipnorm"] = 1.0
        with pytest.raises(ConfigurationError, match=r"clipnorm was set, .* give compile\(clip_norm=\)"):
            model.fit(X, Y, verbose=0)
        model = compiled()
        model.trainable = False  # type: ignore[attr-defined]
        with pytest.raises(ConfigurationError, match=r"requires_grad_\(False\) on the module before compile"):
            model.fit(X, Y, verbose=0)


def test_an_optimizer_of_the_scripts_own_may_have_attributes_of_these_names() -> None:
    """They were refused as ones that torch ignores."""

    class Clipped(torch.optim.SGD):
        def __init__(self, parameters: Any, lr: float, clipnorm: float) -> None:
            super().__init__(parameters, lr)
            self.lr, self.clipnorm = lr, clipnorm

    net = torch.nn.Linear(X.shape[1], 2)
    with sg.OneDeviceStrategy("cpu").scope():
        model = sg.Model(net)
        model.compile(Clipped(net.parameters(), 0.1, 1.0), torch.nn.CrossEntropyLoss())
        assert model.fit(X, Y, verbose=0).history["loss"]


def test_a_module_that_is_frozen_altogether_is_refused_with_the_way_out() -> None:
    """It ended in torch's words about elements without a grad_fn."""
    layer = torch.nn.Linear(3, 2)
    model = sg.Model(layer.requires_grad_(False))
    model.compile("sgd", "cross_entropy")
    with pytest.raises(ConfigurationError, match=r"nothing to train: .* call requires_grad_\(True\)"):
        model.fit(X, Y, verbose=0)
    before = layer.weight.clone()
    layer.weight.requires_grad_(True)
    model.fit(X, Y, verbose=0)
    assert not torch.equal(layer.weight, before)


def test_a_layer_that_only_keras_would_not_train_is_refused() -> None:
    layer = torch.nn.Linear(3, 2)
    layer.trainable = False  # type: ignore[assignment]
    for is_as_said in (False, True):
        layer.requires_grad_(not is_as_said)
        model = sg.Model(torch.nn.Sequential(layer, torch.nn.Linear(2, 2)))
        model.compile("sgd", "cross_entropy")
        refused = pytest.raises(ConfigurationError, match=r"requires_grad_\(False\) on the module before compile")
        with contextlib.nullcontext() if is_as_said else refused:
            model.fit(X, Y, verbose=0)


def test_predict_says_how_long_it_took_when_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    model = compiled()
    model.predict(X)
    assert "prediction" not in capsys.readouterr().err
    model.predict(X, verbose=1)
    assert "prediction  16 examples in " in capsys.readouterr().err


def test_a_prediction_does_not_depend_on_the_replica_that_makes_it() -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = sg.Model(torch.nn.BatchNorm1d(1))
        model.compile("sgd", "mse")
    x = torch.arange(12.0)[:, None]  # the replicas see unlike halves
    model.fit(x, x, verbose=0, shuffle=False)
    assert model.evaluate(x, x, verbose=0) == pytest.approx(torch.nn.functional.mse_loss(model.predict(x), x).item())
    model.strategy.close()


def yields(batch: torch.Tensor) -> Iterator[torch.Tensor]:
    yield batch


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
    with pytest.raises(ConfigurationError, match="returns what it computes: yields has yield or async"):
        strategy.run(yields, (one,))


@pytest.mark.parametrize("device", [None, 0, b"cpu", "cpuu"])
def test_what_is_no_device(device: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected a device like 'cpu', 'cuda:0' or '/gpu:0', got"):
        sg.OneDeviceStrategy(device)


@pytest.mark.parametrize(("joint", "num_examples"), [(False, 12), (True, 14)])
def test_examples_that_batch_norm_leaves_out_are_told(
    joint: bool, num_examples: int, caplog: pytest.LogCaptureFixture
) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]).scope():
        model = sg.Model(torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)))
        model.compile("sgd", "cross_entropy", sync_batchnorm=joint)
    seen: list[int] = []
    count = sg.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(model.examples_in_epoch))
    model.fit(X[:14], Y[:14], batch_size=6, verbose=0, callbacks=count)
    assert seen[-1] == num_examples
    assert ("1 of 3 batches are skipped in each epoch" in caplog.text) is not joint


def test_a_model_from_outside_of_a_scope_is_told_to_be_built_inside() -> None:
    model = sg.Model(torch.nn.Linear(4, 1))
    with sg.OneDeviceStrategy().scope(), pytest.raises(ConfigurationError, match="which does not train it: build"):
        model.compile("sgd", "mse")


def test_a_module_of_a_scope_is_not_trained_outside_of_it() -> None:
    with contextlib.closing(sg.MirroredStrategy(["cpu:0", "cpu:1"])) as strategy:
        with strategy.scope():
            module = torch.nn.Sequential(torch.nn.Linear(3, 2))
        model = sg.Model(module)
        model.compile(loss="cross_entropy")  # evaluates
        with pytest.raises(ConfigurationError, match="inside the scope of MirroredStrategy, but this"):
            model.compile("sgd", "cross_entropy")
        sg.Model(copy.deepcopy(module)).compile("sgd", "cross_entropy")  # as it says
        head = torch.nn.Linear(2, 2)
        sg.Model(torch.nn.Sequential(module.requires_grad_(False), head)).compile("sgd", "cross_entropy")
    with sg.OneDeviceStrategy().scope():
        module = torch.nn.Sequential(torch.nn.Linear(3, 2))
    sg.Model(module).compile("sgd", "cross_entropy")  # one device here as there


def test_a_module_whose_hash_is_made_of_what_it_gets_last_is_built_inside_a_scope() -> None:
    class Named(torch.nn.Linear):
        def __init__(self, name: str) -> None:
            super().__init__(3, 2)
            self.name = name

        def __hash__(self) -> int:
            return hash(self.name)

    with contextlib.closing(sg.MirroredStrategy(["cpu:0", "cpu:1"])) as strategy, strategy.scope():
        assert Named("head").name == "head"


def test_a_dataset_creator_has_a_way_out() -> None:
    with pytest.raises(AttributeError, match="instead of a DatasetCreator fit takes a DataLoader"):
        sg.keras.utils.experimental.DatasetCreator(lambda context: [])  # type: ignore[attr-defined]


def test_a_sidecar_evaluator_has_a_way_out() -> None:
    with pytest.raises(AttributeError, match=r"evaluator loops over sg\.new_checkpoints\(\)"):
        sg.keras.utils.SidecarEvaluator  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"script loops over sg\.new_checkpoints\(\)"):
        sg.keras.experimental.SidecarEvaluator  # type: ignore[attr-defined]  # noqa: B018


def test_a_layer_that_is_replaced_after_compile_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """torch goes on without a word, and so did fit: the new layer kept its first weights."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model = sg.Model(net)
    for compiles in (True, False, True):
        net[1] = torch.nn.Linear(4, 2)
        if compiles:
            model.compile("SGD", "cross_entropy")
        for _ in range(2):
            model.fit(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]), verbose=0)
        said = [record.getMessage() for record in caplog.records if "after compile" in record.getMessage()]
        assert said == ["1.weight was put into the module after compile, so it is not trained: compile again"] * (
            not compiles
        )
        caplog.clear()
