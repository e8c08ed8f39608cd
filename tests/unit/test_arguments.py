"""What is taken for a number, and what is not."""

from __future__ import annotations

import copy
import inspect
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import stratagem as sg
from stratagem.arguments import above_zero, check_kind, checked, whole_number
from stratagem.data.distribute import leasable
from stratagem.distributed.forming import make_process_group
from stratagem.errors import ConfigurationError
from stratagem.tensorflow_names import INSTEAD


@pytest.mark.parametrize("value", [2, np.int32(2), torch.tensor(2)])
def test_whole_numbers_of_every_library(value: Any) -> None:
    found = whole_number("count", value, 2)
    assert found == 2 and type(found) is int


@pytest.mark.parametrize("value", [1, -1, 2.0, "2", True, None, np.float64(2), torch.tensor(2.5), [2]])
def test_what_is_no_whole_number_of_at_least_two(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected count of at least 2, a whole number, got "):
        whole_number("count", value, 2)
    with pytest.raises(ConfigurationError, match=r"expected count of at most \d+, got 1180591620717411303424"):
        whole_number("count", 2**70, 2)


@pytest.mark.parametrize("value", [0, -0.5, float("nan"), "5", True, [1.0], int, torch.ones(2)])
def test_what_is_not_above_zero(value: Any) -> None:
    above_zero(seconds=None, more=np.float32(0.5))
    with pytest.raises(ConfigurationError, match="expected seconds above 0 or None, got "):
        above_zero(seconds=value)


def test_a_dict_is_no_options() -> None:
    check_kind(None, sg.DistributeOptions, NoneType)
    with pytest.raises(ConfigurationError, match="communication_options= CommunicationOptions or None, got a dict"):
        sg.MultiWorkerMirroredStrategy(communication_options={"transport": "tcp"})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected DistributeOptions or None, got dict"):
        sg.OneDeviceStrategy().distribute_dataset([torch.ones(2)], options={"prefetch": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected DistributeOptions or None, got dict"):
        leasable(TensorDataset(torch.ones(4)), 2, {"prefetch": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected CommunicationOptions or None, got dict"):
        make_process_group(None, {"transport": "tcp"})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected a global batch size of at least 1"):
        sg.InputContext().get_per_replica_batch_size("64")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected checkpoint= Checkpoint, got a Linear"):
        sg.CheckpointManager(torch.nn.Linear(1, 1), "x")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"expected a function that gets an InputContext .*, got list"):
        sg.OneDeviceStrategy().distribute_datasets_from_function([torch.ones(2)])  # type: ignore[arg-type]


@checked
def _takes(
    *things: Any,
    count: int = 1,
    rate: float | None = None,
    is_on: bool = False,
    path: str | os.PathLike[str] = "",
    names: Sequence[str] = (),
    table: Mapping[str, int] | None = None,
    act: Callable[[], None] | None = None,
    layer: torch.nn.Module | None = None,
    kind: Literal["a"] | int = "a",
    **numbers: float,
) -> tuple[Any, ...]:
    """What it was given."""
    return things, count, rate, is_on, path, names, table, act, layer, kind, numbers


@pytest.mark.parametrize(
    "given",
    [
        {"count": np.int32(2), "rate": np.float32(2), "is_on": np.bool_(True), "names": ["a"], "kind": 3},
        {"count": torch.tensor(2), "rate": torch.tensor(2.5), "path": os.curdir, "names": ("a",), "kind": "b"},
        {"rate": 2, "table": {}, "act": print, "layer": torch.nn.Linear(1, 1), "more": 1.5, "most": float("inf")},
        {"rate": None, "table": None, "act": None, "layer": None},
    ],
)
def test_what_the_annotations_allow(given: dict[str, Any]) -> None:
    assert _takes(1, "x", **given)[0] == (1, "x")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"count": "3"}, "count= a whole number, got '3'"),
        ({"count": True}, "count= a whole number, got True"),
        ({"count": None}, "count= a whole number, got None"),
        ({"count": torch.ones(2)}, "count= a whole number, got a Tensor"),
        ({"rate": int}, "rate= a number or None, got the class int"),
        ({"rate": False}, "rate= a number or None, got False"),
        ({"is_on": 1}, "is_on= True or False, got 1"),
        ({"path": b"x"}, "path= a path, got a bytes"),
        ({"names": "abc"}, "names= a list, got 'abc'"),
        ({"names": {"a": 1}}, "names= a list, got a dict"),
        ({"table": [1]}, "table= a dict or None, got a list"),
        ({"act": 3.5}, "act= a function or None, got 3.5"),
        ({"layer": torch.nn.Linear}, "layer= Module or None, got the class Linear"),
        ({"kind": None}, "kind= a string or a whole number, got None"),
        ({"more": "x"}, "more= a number, got 'x'"),
    ],
)
def test_what_they_do_not_allow(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        _takes(**given)
    assert str(error.value) == f"expected {expected}"


def test_a_missing_argument_is_pythons_error() -> None:
    with pytest.raises(TypeError, match=r"_two\(\) missing 1 required positional argument: 'second'"):
        checked(_two)(1)  # type: ignore[call-arg]


def _two(first: int, second: int) -> None: ...


X, Y = torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)


def _fit(x: Any = X, y: Any = Y, **given: Any) -> Any:
    model = sg.Model(torch.nn.Linear(4, 2))
    model.compile(optimizer="SGD", loss="cross_entropy")
    return model.fit(x, y, **{"verbose": 0, **given})


def _estimator() -> Any:
    return sg.Estimator(lambda features: None, "nowhere")  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: _fit(x=None), "expected x=, the inputs, got None"),
        (lambda: _fit(x="data.csv"), "expected arrays or tensors of numbers, got str"),
        (lambda: _fit(y=3), "expected arrays .* whose first dimension is the examples, got single numbers"),
        (lambda: _fit(epochs=None), "expected epochs= a whole number, got None"),
        (lambda: _fit(validation_split="0.2"), "expected validation_split= a number, got '0.2'"),
        (lambda: _fit(validation_split=float("nan")), "expected a validation_split between 0 and 1"),
        (lambda: _fit(callbacks="EarlyStopping"), "expected callbacks= Callback or a list or None"),
        (lambda: sg.callbacks.EarlyStopping(baseline="0.5"), "expected baseline= a number or None"),  # type: ignore
        (lambda: sg.callbacks.LearningRateScheduler(0.1), "expected schedule= a function"),  # type: ignore[arg-type]
        (lambda: sg.FileDataset("ab", print), "expected files= a list"),  # type: ignore[arg-type]
        (lambda: sg.TrainSpec(None), "expected input_fn= a function"),  # type: ignore[arg-type]
        (lambda: sg.RunConfig(seed="1"), "expected seed= a whole number or None"),  # type: ignore[arg-type]
        (lambda: sg.MachineConfig(cpu_cores=float("nan")), "cpu_cores and memory_gib of at least 0.001"),
        (lambda: sg.ClusterSpec(worker=None), "expected tuple or list, got NoneType"),  # type: ignore[arg-type]
        (lambda: sg.MirroredStrategy(2), "expected devices= a list or None, got 2"),  # type: ignore[arg-type]
        (lambda: sg.MultiWorkerMirroredStrategy({"worker": []}), "expected ClusterResolver or None, got dict"),  # type: ignore
        (lambda: sg.OneDeviceStrategy().load_once({}), "expected load= a function, got a dict"),  # type: ignore[arg-type]
        (lambda: sg.nn.Embedding("10", 4), "expected num_embeddings= a whole number"),  # type: ignore[arg-type]
        (lambda: sg.nn.Embedding.from_pretrained([[1.0]]), "expected embeddings= Tensor"),  # type: ignore[arg-type]
        (lambda: _estimator().train(list, saving_listeners=print), "expected Sequence or None, got builtin"),
        (lambda: _estimator().predict(list, 3), "expected str or PathLike or None, got int"),
        (lambda: sg.latest_checkpoint(None), "expected directory= a path, got None"),  # type: ignore[arg-type]
    ],
)
def test_public_functions_say_what_they_take(call: Callable[[], Any], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        call()


def test_annotations_of_the_public_names_can_be_resolved() -> None:
    found = 0
    for owner in (getattr(sg, name) for name in sg.__all__):
        members = vars(owner).values() if isinstance(owner, type) else [owner]
        for member in members:
            inner = getattr(getattr(member, "__func__", member), "__wrapped__", None)
            if str(getattr(member, "__module__", "")).startswith("stratagem.") and callable(inner):
                typing.get_type_hints(inner)
                found += 1
    assert found > 30


def _spec(**given: Any) -> Any:
    return sg.EstimatorSpec("train", loss=torch.tensor(1.0), optimizer=torch.optim.SGD([X]), **given)


def _manager() -> Any:
    return sg.CheckpointManager(sg.Checkpoint(number=1), "nowhere")


def _given(call: Any, **given: Any) -> Callable[[], Any]:
    return lambda: call(**given)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (_given(sg.Model(torch.nn.Linear(1, 1)).compile, loss_weights=[1.0]), r"compile\(\) .* 'loss_weights'; give "),
        (_given(sg.Model(torch.nn.Linear(1, 1)).compile, metric="mse"), r"'metric'; did you mean 'metrics'\?"),
        (_given(_fit, workers=4), r"fit\(\) has no argument 'workers'; DataLoader\(\.\.\., num_workers="),
        (_given(_fit, rate=0.1), r"fit\(\) has no argument 'rate'; known: batch_size, "),
        (_given(sg.RunConfig, tf_random_seed=1), r"RunConfig\(\) .* 'tf_random_seed'; its name is seed"),
        (_given(sg.RunConfig, protocol=True), "'protocol'; train_distribute= says"),
        (_given(_spec, train_op=print), r"EstimatorSpec\(\) .* 'train_op'; give optimizer="),
        (_given(_spec, eval_metric_ops={"a": 1}), "'eval_metric_ops'; its name is metrics"),
        (_given(sg.LatestExporter, serving_input_receiver_fn=print), "example_inputs= says"),
        (_given(sg.BestExporter, serving_input_receiver_fn=print), r"BestExporter\(\) .* example_inputs= says"),
        (_given(sg.callbacks.TensorBoard, histogram_freq=1), "'histogram_freq'; a callback of your own"),
        (_given(sg.MinSizePartitioner, min_bytes=1), r"did you mean 'min_shard_bytes'\?"),
        (
            lambda: sg.EvalSpec(list, 100, "n", [], 1, 2, 3),  # type: ignore[call-arg]
            r"EvalSpec\(\) takes input_fn, .*, throttle_secs by position",
        ),
        (_given(_manager().save, checkpoint_number=3), r"save\(\) .* 'checkpoint_number'; its name is step"),
        (_given(sg.CheckpointManager, init_fn=print), "'init_fn'; call it where restore_or_initialize"),
        (_given(sg.PreemptionCheckpointHandler, cluster_resolver=1), "'cluster_resolver'; leave it out"),
        (_given(sg.DistributeOptions, experimental_per_replica_buffer_size=2), "its name is prefetch"),
        (lambda: sg.get_strategy().run(int, options=object()), r"run\(\) .* 'options'; leave it out"),  # type: ignore[call-arg]
        (lambda: sg.get_strategy().distribute_dataset([X], None), r"takes source by position"),  # type: ignore[call-arg]
        (_given(sg.get_strategy().distribute_dataset, dataset=[X]), "'dataset'; its name is source"),
        (_given(sg.get_strategy().reduce, reduce_op="SUM", value=1.0, axis=None), "'reduce_op'; its name is op"),
        (lambda: sg.Model(torch.nn.Linear(1, 1)).summary(80), "expected print_fn= a function, got 80"),  # type: ignore[arg-type]
        (_given(sg.Variable, initial_value=1.0, dtype="float32"), r"'dtype'; give initial_value=torch\.tensor"),
        (_given(sg.Variable(1.0).assign, value=1.0, use_locking=True), "'use_locking'; leave it out"),
        (_given(sg.latest_checkpoint, checkpoint_dir="."), "'checkpoint_dir'; its name is directory"),
        (_given(sg.TFConfigClusterResolver, rpc_layer="http"), "'rpc_layer'; it is gRPC"),
        (lambda: sg.Checkpoint(1, 2), r"Checkpoint\(\) takes model by position"),  # type: ignore[call-arg,arg-type]
        (lambda: sg.Checkpoint(1, model=2), "a model given by position is called 'model'"),
        (lambda: sg.PreemptionCheckpointHandler(None, "d"), "expected checkpoint_or_manager= Checkpoint or"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_only_tensorflow_has_are_refused_with_the_way_out(call: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        call()


def test_arguments_of_tensorflow_that_ask_for_what_is_done_anyway() -> None:
    model = sg.Model(torch.nn.Linear(4, 2))
    done: Any = model.compile
    done("SGD", "cross_entropy", run_eagerly=True, jit_compile=False, steps_per_execution=1, loss_weights=None)
    assert len(_fit(workers=1, use_multiprocessing=False, max_queue_size=10).history["loss"]) == 1
    config: Any = sg.RunConfig
    assert config("runs", session_config=None, keep_checkpoint_every_n_hours=10000) == sg.RunConfig("runs")
    with pytest.raises(ConfigurationError, match="expected seed= a whole number or None, got '1'"):
        config(seed="1", session_config=None)


def test_attributes_that_only_tensorflow_has_say_what_to_write(tmp_path: Path) -> None:
    model: Any = sg.Model(torch.nn.Linear(1, 1))
    strategy: Any = sg.OneDeviceStrategy("cpu")
    dataset: Any = strategy.distribute_dataset([X])
    variable: Any = sg.Variable(1.0)
    estimator: Any = sg.Estimator(lambda features: None, tmp_path)  # type: ignore[arg-type,return-value]
    checkpoint = sg.Checkpoint(model=model.module)
    restored: Any = checkpoint.restore(checkpoint.save(tmp_path / "saved"))
    for owner, name, hint in (
        (model, "fit_generator", "fit takes generators too"),
        (model, "get_weights", "state_dict"),
        (model, "parameters", r"model\.module has parameters\(\)"),
        (estimator, "export_saved_model", "export_model"),
        (estimator, "get_variable_names", "load_checkpoint"),
        (estimator.config, "is_chief", r"sg\.is_lead\(\)"),
        (restored, "expect_partial", r"restore\(\) raises"),
        (model, "compute_metrics", "what fit and evaluate return"),
        (model, "metrics_names", "what fit and evaluate return"),
        (strategy, "extended", r"strategy\.local_devices"),
        (dataset, "element_spec", "leave it out"),
        (dataset, "dataset", "ask the loader that distribute_dataset was given"),
        (iter(dataset), "get_next_as_optional", r"next\(iterator, None\)"),
        (variable, "read_value", r"its name is value\(\)"),
        (sg.CheckpointManager(checkpoint, tmp_path), "checkpoint_interval", r"call save\(\)"),
        (sg.CheckpointManager(checkpoint, tmp_path), "sync", r"checkpoint\.wait\(\)"),
        (strategy, "colocate_vars_with", "leave it out"),
        (variable, "scatter_max", r"assign\(\) takes"),
        (variable, "batch_scatter_update", r"assign\(\) takes"),
        (variable, "initial_value", "leave it out"),
        (dataset, "reduce", "loop over its batches"),
        (sg.TFConfigClusterResolver(environ={}), "num_accelerators", r"strategy\.local_devices"),
        (sg.ClusterSpec(worker=("a:1",)), "as_cluster_def", "job_tasks"),
    ):
        with pytest.raises(AttributeError, match=rf"{type(owner).__name__} has no attribute '{name}': .*{hint}"):
            getattr(owner, name)
    with pytest.raises(AttributeError, match=r"Model has no attribute 'nothing'$"):
        _ = model.nothing
    ours = ("GradientTape", "models", "WarmStartSettings", "NanTensorHook", "BoostedTreesClassifier", "feature_column")
    hooks = ("InMemoryEvaluatorHook", "stop_if_no_decrease_hook", "make_early_stopping_hook", "init_from_checkpoint")
    others = (
        (checkpoint, "read"),
        (sg.errors, "NotFoundError"),
        (sg.callbacks, "ProgbarLogger"),
        (sg.nn, "embedding_lookup_sparse"),
    )
    for room, name in (*others, *((sg, one) for one in (*ours, *hooks, "compat", "Input"))):
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}': \w"):
            getattr(room, name)
    strategy.close()
    assert copy.deepcopy(model).compiled == model.compiled


def test_the_table_names_what_is_there() -> None:
    """Every entry is of something with that name, which does not have the argument."""
    kinds = (sg.Model, sg.Estimator, sg.Strategy, sg.Variable, sg.ReplicaContext, sg.Checkpoint)
    methods = [getattr(kind, name, None) for kind in kinds for name in INSTEAD]
    others = [getattr(room, name, None) for room in (sg, sg.callbacks) for name in INSTEAD]
    found = [one for one in (*methods, *others) if callable(one)]
    assert {getattr(one, "__name__", "") for one in found} == INSTEAD.keys()
    for one in found:
        own = INSTEAD[one.__name__].keys() & inspect.signature(one).parameters.keys()
        assert not own, f"{one.__name__} takes {own}"
