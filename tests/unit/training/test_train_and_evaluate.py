"""train_and_evaluate in one process, exporters, and Estimators of sg.Model."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Mapping
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

import stratagem as sg
from stratagem import (
    BestExporter,
    Estimator,
    EvalSpec,
    FinalExporter,
    LatestExporter,
    RunConfig,
    TrainSpec,
    model_to_estimator,
    train_and_evaluate,
)
from stratagem.errors import ConfigurationError
from tests.unit.training.estimating import data, loader, make_net, model_fn

TRAIN = TrainSpec(lambda: loader(shuffle=True), max_steps=11)


def make(folder: Path, **choices: Any) -> Estimator:
    config = RunConfig(**{"train_distribute": sg.OneDeviceStrategy, "save_checkpoints_steps": 4, **choices})
    return Estimator(model_fn, folder, config, {"dropout": 0.3})


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    accumulators: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulators.EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


class Recorder:
    """An exporter that writes nothing."""

    name = "recorder"

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def export(
        self,
        estimator: Estimator,
        export_path: Path,
        checkpoint_path: str,
        eval_result: Mapping[str, float],
        is_the_final_export: bool,
    ) -> Path | None:
        assert Path(checkpoint_path).name == f"model.ckpt-{int(eval_result['global_step']):08d}"
        assert export_path == estimator.model_dir / "export" / self.name
        self.seen.append((int(eval_result["global_step"]), is_the_final_export))
        return None


def test_alone_each_checkpoint_is_evaluated_and_training_does_not_notice(tmp_path: Path) -> None:
    torch.manual_seed(4)
    plain = make(tmp_path / "plain").train(TRAIN.input_fn, max_steps=TRAIN.max_steps)
    torch.manual_seed(4)
    estimator, recorder = make(tmp_path / "evaluated", save_summary_steps=5), Recorder()
    found = train_and_evaluate(estimator, TRAIN, EvalSpec(loader, exporters=recorder))
    assert recorder.seen == [(4, False), (8, False), (11, True)]
    assert found is not None and found.results["global_step"] == 11 and found.exports == []
    ours, theirs = (sg.load_checkpoint(str(each.latest_checkpoint()), "net") for each in (estimator, plain))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert [step for step, _ in scalars(estimator.model_dir, "loss")] == [5, 10]
    assert [step for step, _ in scalars(estimator.model_dir, "global_step/sec")] == [5, 10]
    evaluated = scalars(estimator.model_dir / "eval", "loss")
    assert [step for step, _ in evaluated] == [4, 8, 11]
    assert len([*(estimator.model_dir / "eval").glob("events.*")]) == 1
    assert evaluated[-1][1] == pytest.approx(found.results["loss"])
    assert scalars(estimator.model_dir / "eval", "accuracy")[-1][1] == pytest.approx(found.results["accuracy"])


def test_replicas_that_evaluate_draw_in_training_what_they_would_have(tmp_path: Path) -> None:
    """The second one's dropout was another from the first evaluation on, and another again after an interrupt."""
    found = []
    for name, steps in {"plain": [11], "cut": [6, 11]}.items():
        for max_steps in steps:
            with contextlib.closing(sg.MirroredStrategy(["cpu:0", "cpu:1"])) as strategy:
                estimator = make(tmp_path / name, train_distribute=strategy, eval_distribute=strategy)
                if name == "plain":
                    estimator.train(TRAIN.input_fn, max_steps=max_steps)
                else:
                    train_and_evaluate(estimator, TrainSpec(TRAIN.input_fn, max_steps=max_steps), EvalSpec(loader))
        found.append(sg.load_checkpoint(str(estimator.latest_checkpoint()), "net"))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_listeners_of_a_spec_hear_of_each_checkpoint(tmp_path: Path) -> None:
    heard: list[int] = []
    spec = TrainSpec(loader, max_steps=7, saving_listeners=[lambda saved: heard.append(saved.step)])
    train_and_evaluate(make(tmp_path), spec, EvalSpec(loader))
    assert heard == [4, 7]


def test_one_pass_ends_with_a_final_export(tmp_path: Path) -> None:
    recorder = Recorder()
    train_and_evaluate(
        make(tmp_path, save_checkpoints_steps=5), TrainSpec(loader), EvalSpec(loader, exporters=[recorder])
    )
    assert recorder.seen == [(5, False), (5, True)]


def test_what_is_trained_already_is_evaluated_and_exported(tmp_path: Path) -> None:
    """Started again, perhaps after a death between the last checkpoint and its evaluation."""
    recorder = Recorder()
    make(tmp_path).train(TRAIN.input_fn, max_steps=TRAIN.max_steps)
    found = train_and_evaluate(make(tmp_path), TRAIN, EvalSpec(loader, exporters=recorder))
    assert recorder.seen == [(11, True)] and found is not None and found.results["global_step"] == 11


def test_only_so_many_batches_are_evaluated_and_a_name_has_its_own_folder(tmp_path: Path) -> None:
    estimator = make(tmp_path)
    found = train_and_evaluate(estimator, TrainSpec(loader, 4), EvalSpec(loader, steps=2, name="some"))
    assert found is not None
    assert found.results == estimator.evaluate(loader, steps=2)
    assert scalars(tmp_path / "eval_some", "loss")


def test_exporters_keep_the_newest_the_best_and_the_last(tmp_path: Path) -> None:
    def folders(name: str) -> list[str]:
        return sorted(path.name for path in (tmp_path / "export" / name).glob("step-*"))

    def larger_step(best: Mapping[str, float], current: Mapping[str, float]) -> bool:
        return current["global_step"] == 8

    exporters = [
        LatestExporter(exports_to_keep=1),
        FinalExporter(),
        BestExporter(compare_fn=larger_step),
        BestExporter("never", compare_fn=lambda best, current: False),
    ]
    found = train_and_evaluate(make(tmp_path), TRAIN, EvalSpec(loader, exporters=exporters))
    assert folders("latest") == folders("final") == ["step-00000011"]
    assert folders("best") == ["step-00000004", "step-00000008"]
    assert folders("never") == ["step-00000004"]
    assert json.loads((tmp_path / "export" / "best" / "best.json").read_text())["global_step"] == 8
    assert found is not None
    assert [str(path.relative_to(tmp_path)) for path in found.exports] == [
        "export/latest/step-00000011",
        "export/final/step-00000011",
    ]
    x, _ = data()[:]
    net = make_net(0.3).eval()
    net.load_state_dict(sg.load_checkpoint(tmp_path / "model.ckpt-00000008", "net"))
    answer = sg.load_model(tmp_path / "export" / "best" / "step-00000008")(x)
    torch.testing.assert_close(answer["logits"], net(x), rtol=1e-6, atol=1e-6)
    # What was the best is known to a later process.
    later = make(tmp_path)
    train_and_evaluate(
        later, TrainSpec(loader, 14), EvalSpec(loader, exporters=BestExporter("never", compare_fn=lambda b, c: False))
    )
    assert folders("never") == ["step-00000004"]


class Told(Estimator):
    def export_model(self, path: Any, *arguments: Any, **named: Any) -> Path:
        Path(path).mkdir(parents=True)
        return Path(path)


def test_the_newest_has_the_largest_step_also_with_a_digit_more(tmp_path: Path) -> None:
    exporter, estimator = LatestExporter(exports_to_keep=1), Told(model_fn, tmp_path)
    for step in (99_999_999, 100_000_000, 100_000_001):
        exporter.export(estimator, tmp_path / "latest", "", {"global_step": step}, False)
        assert [path.name for path in (tmp_path / "latest").iterdir()] == [f"step-{step}"]


def test_the_best_has_the_smallest_loss(tmp_path: Path) -> None:
    exporter, estimator = BestExporter(), Told(model_fn, tmp_path)
    written = [
        exporter.export(estimator, tmp_path / "best", "", {"loss": loss, "global_step": step}, False)
        for step, loss in enumerate([nan, nan, 3.0, 4.0, 2.0, 2.0, nan])
    ]
    assert [path is not None for path in written] == [True, False, True, False, True, False, False]


def test_what_compares_gets_its_arguments_by_the_names_that_tensorflow_gives_them(tmp_path: Path) -> None:
    """In the other order it kept the worst, without a word."""

    def better(current_eval_result: Mapping[str, float], best_eval_result: Mapping[str, float]) -> bool:
        return current_eval_result["loss"] < best_eval_result["loss"]

    exporter, estimator = BestExporter(compare_fn=better), Told(model_fn, tmp_path)
    for step, loss in enumerate([3.0, 4.0, 2.0]):
        exporter.export(estimator, tmp_path / "best", "", {"loss": loss, "global_step": step}, False)
    assert json.loads((tmp_path / "best" / "best.json").read_text())["loss"] == 2


def test_specs_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="each exporter needs a name of its own"):
        EvalSpec(loader, exporters=[LatestExporter(), LatestExporter()])
    with pytest.raises(ConfigurationError, match="expected exporters, got int"):
        EvalSpec(loader, exporters=[1])  # type: ignore[list-item]
    for name in ("", ".", "../elsewhere", "/elsewhere", "latest/"):
        with pytest.raises(ConfigurationError, match="expected an exporter whose name can be that of a folder"):
            EvalSpec(loader, exporters=LatestExporter(name))
    for name in ("../elsewhere", "/elsewhere", "a\0b"):
        with pytest.raises(
            ConfigurationError, match="expected the name of evaluation data that can be that of a folder"
        ):
            EvalSpec(loader, name=name)
        with pytest.raises(
            ConfigurationError, match="expected the name of evaluation data that can be that of a folder"
        ):
            Estimator(model_fn, tmp_path).evaluate(loader, name=name)
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ConfigurationError, match="expected a seed that torch takes"):
            RunConfig(seed=seed)
    assert EvalSpec(loader, exporters=None) == EvalSpec(loader, exporters=())
    with pytest.raises(ConfigurationError, match="expected example_inputs with a tensor"):
        LatestExporter("serving", lambda: None)
    with pytest.raises(ConfigurationError, match="max_steps of at least 1"):
        TrainSpec(loader, max_steps=0)
    with pytest.raises(ConfigurationError, match="expected functions of a SavedStep in saving_listeners="):
        TrainSpec(loader, saving_listeners=[object()])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="start_delay_secs of at least 0"):
        EvalSpec(loader, start_delay_secs=-1)
    with pytest.raises(ConfigurationError, match="steps of at least 1"):
        EvalSpec(loader, steps=0)
    with pytest.raises(ConfigurationError, match="exports_to_keep of at least 1"):
        LatestExporter(exports_to_keep=0)
    estimator, train, evaluate = Estimator(model_fn, tmp_path), TrainSpec(loader, max_steps=1), EvalSpec(loader)
    with pytest.raises(ConfigurationError, match="expected train_spec= TrainSpec, got a EvalSpec"):
        train_and_evaluate(estimator, evaluate, train)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected estimator= Estimator, got a function"):
        train_and_evaluate(model_fn, train, evaluate)  # type: ignore[arg-type]


# -- of sg.Model -------------------------------------------------------------------------------------------------------


def compiled(**arguments: Any) -> sg.Model:
    model = sg.Model(make_net())
    settings: dict[str, Any] = {"loss": "cross_entropy", "metrics": ["accuracy"], **arguments}
    model.compile(lambda parameters: torch.optim.Adam(parameters, 0.01), **settings)
    return model


def test_an_estimator_of_a_model_trains_and_evaluates_like_it(tmp_path: Path) -> None:
    metrics = ["accuracy", torchmetrics.F1Score("multiclass", num_classes=3, average="macro"), "top_2_accuracy"]
    model = compiled(metrics=metrics)
    estimator = model_to_estimator(model, tmp_path, RunConfig(train_distribute=sg.OneDeviceStrategy))
    estimator.train(loader, max_steps=10)
    before = [parameter.clone() for parameter in make_net().parameters()]
    assert all(torch.equal(a, b) for a, b in zip(model.module.parameters(), before, strict=True))
    model.fit(loader(), epochs=2, verbose=0)
    trained = sg.load_checkpoint(str(estimator.latest_checkpoint()), "model")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-6, atol=1e-6)
    theirs = model.evaluate(loader(), verbose=0, return_dict=True)
    assert estimator.evaluate(loader) == pytest.approx({**theirs, "global_step": 10}, rel=1e-6)
    x, _ = data()[:]
    predicted = torch.stack(list(estimator.predict(lambda: [x])))
    torch.testing.assert_close(predicted, model.predict(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{"weight": torch.tensor([1.0, 9.0, 0.1])}, {"ignore_index": 2}], ids=str)
def test_an_estimator_divides_its_loss_by_what_the_model_does(options: dict[str, Any], tmp_path: Path) -> None:
    """Each batch counted by its examples."""
    model = compiled(loss=nn.CrossEntropyLoss(**options))
    estimator = model_to_estimator(model, tmp_path)
    theirs = model.evaluate(loader(), verbose=0, return_dict=True)
    assert estimator.evaluate(loader)["loss"] == pytest.approx(theirs["loss"], rel=1e-6)


def test_probabilities_of_a_model_function_are_told_from_logits(caplog: pytest.LogCaptureFixture) -> None:
    def probabilities(features: Any, labels: Any, mode: Any) -> sg.EstimatorSpec:
        outputs = sg.get_or_create("net", make_net)(features).softmax(1)[:, :1]
        wanted = labels[:, None] == 0
        return sg.EstimatorSpec(mode, loss=outputs.mean(), metrics={"accuracy": ("accuracy", outputs, wanted)})

    sg.Estimator(probabilities).evaluate(loader)
    assert "as probabilities do" in caplog.text


def test_what_compile_was_told_reaches_the_estimator(tmp_path: Path) -> None:
    x = torch.randn(40, 7)
    y = (x[:, 0] > 0).float()
    linear = nn.Linear(7, 1)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[0.1, *[0.0] * 6]]))
        linear.bias.zero_()
    model = sg.Model(nn.Sequential(linear, nn.Sigmoid(), nn.Flatten(0)))
    model.compile(lambda parameters: torch.optim.SGD(parameters, 1.0), "bce", ["accuracy"], clip_norm=1e-3)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    estimator = model_to_estimator(model, tmp_path, RunConfig(train_distribute=sg.OneDeviceStrategy))
    assert estimator.evaluate(lambda: [(x, y)])["accuracy"] == 1.0  # probabilities: positive ones are above a half
    estimator.train(lambda: [(x, y)], steps=1)
    trained = sg.load_checkpoint(str(estimator.latest_checkpoint()), "model")
    change = torch.cat([(trained[name] - value).flatten() for name, value in start.items()])
    assert float(change.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_mixed_precision_reaches_the_estimator(tmp_path: Path) -> None:
    estimator = model_to_estimator(
        compiled(mixed_precision="bf16"), tmp_path, RunConfig(train_distribute=sg.OneDeviceStrategy)
    )
    estimator.train(loader, steps=2)
    assert next(estimator.predict(loader)).dtype is torch.bfloat16
    assert estimator.evaluate(loader)["accuracy"] > 0
    assert sg.load_checkpoint(str(estimator.latest_checkpoint()), "model")["0.weight"].dtype is torch.float32


def test_models_that_make_no_estimator(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs a compiled model"):
        model_to_estimator(sg.Model(make_net()), tmp_path)
    with pytest.raises(ConfigurationError, match="accumulate_steps=1"):
        model_to_estimator(compiled(accumulate_steps=2), tmp_path)
    with sg.OneDeviceStrategy().scope():
        model = compiled()
    with pytest.raises(ConfigurationError, match="in the scope of OneDeviceStrategy"):
        model_to_estimator(model, tmp_path)
    with pytest.raises(ConfigurationError, match=r"expected an sg\.Model"):
        model_to_estimator(make_net(), tmp_path)  # type: ignore[arg-type]
