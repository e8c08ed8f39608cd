"""Forms that TensorFlow's documents use: accepted, or answered with what to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.errors import ConfigurationError
from stratagem.strategy.devices import parse_devices

CLUSTER = {"worker": ["127.0.0.1:4001"], "ps": ["127.0.0.1:0"], "evaluator": ["127.0.0.1:0"]}
RING = sg.CollectiveCommunication.RING


@pytest.mark.parametrize(
    ("arguments", "named", "implementation"),
    [
        ((), {}, "AUTO"),
        ((RING,), {}, "RING"),
        ((), {"communication": RING}, "RING"),
        ((), {"communication": "nccl"}, "NCCL"),
        ((), {"communication_options": sg.CommunicationOptions(implementation=RING)}, "RING"),
        ((sg.TFConfigClusterResolver(environ={}),), {}, "AUTO"),
    ],
)
def test_several_workers_without_a_cluster_are_one(arguments: Any, named: Any, implementation: str) -> None:
    strategy = sg.MultiWorkerMirroredStrategy(*arguments, **named, devices=["cpu:0", "cpu:1"])
    assert strategy.options.implementation.name == implementation
    assert (strategy.num_replicas_in_sync, strategy.is_lead, str(strategy.task)) == (2, True, "worker:0")
    with strategy.scope():
        model = sg.Model(torch.nn.Linear(2, 1))
        model.compile(optimizer="SGD", loss="mse")
    history = model.fit(torch.ones(8, 2), torch.ones(8, 1), batch_size=4, epochs=2, verbose=0).history
    assert history["loss"][1] < history["loss"][0]
    strategy.close()


def test_an_unknown_communication_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected CommunicationImplementation of AUTO, RING, NCCL"):
        sg.MultiWorkerMirroredStrategy(communication="mpi")


def test_a_variable_is_iterated_as_its_tensor_and_not_reduced() -> None:
    assert [float(each) for each in sg.Variable(torch.tensor([1.0, 2.0]))] == [1.0, 2.0]
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = sg.Variable(torch.tensor(3.0))
    with pytest.raises(TypeError, match="iteration over a 0-d tensor"):
        list(variable)
    with pytest.raises(ConfigurationError, match=r"got Variable; value\(\) is what it has"):
        strategy.reduce("SUM", variable)


@pytest.mark.parametrize("kind", [sg.MultiWorkerMirroredStrategy, sg.ParameterServerStrategy])
def test_a_strategy_built_in_the_evaluator_evaluates_and_does_not_train(kind: Any) -> None:
    strategy: sg.Strategy = kind(sg.SimpleClusterResolver(CLUSTER, "evaluator", 0))
    assert strategy.num_replicas_in_sync == 1 and not isinstance(strategy, sg.ParameterServerStrategy)
    config = sg.RunConfig(train_distribute=strategy)
    assert config.train_distribute == strategy
    model = strategy.prepare(torch.nn.Linear(2, 1))
    assert strategy.local_results(strategy.run(model, args=(torch.ones(3, 2),)))[0].shape == (3, 1)
    with pytest.raises(ConfigurationError, match=r"an evaluator does not train: .* sg.is_evaluator\(\)"):
        strategy.prepare(torch.optim.SGD(model.parameters(), 0.1))


def test_the_evaluator_beside_one_worker_does_not_train_either(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cluster": {"worker": ["127.0.0.1:4001"]}, "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    strategy = sg.strategy_from_environment()
    with strategy.scope():
        model = sg.Model(torch.nn.Linear(2, 1))
        with pytest.raises(ConfigurationError, match="an evaluator does not train"):
            model.compile("SGD", "mse")


def test_names_that_begin_with_experimental() -> None:
    strategy: Any = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    assert strategy.experimental_local_results(strategy.run(lambda: 1)) == (1, 1)
    nested = {"loss": strategy.run(lambda: 1), "others": [strategy.run(lambda: 2), 3]}
    assert strategy.experimental_local_results(nested) == ({"loss": 1, "others": [2, 3]},) * 2
    dataset = strategy.experimental_distribute_dataset([torch.arange(4)])
    assert [part.tolist() for part in strategy.local_results(next(iter(dataset)))] == [[0, 1], [2, 3]]
    with pytest.raises(AttributeError, match="'cluster_resolver': all workers save to one path, and the lead writes"):
        _ = strategy.cluster_resolver
    with pytest.raises(
        AttributeError, match="MirroredStrategy has no attribute 'experimental_run_v2': its name is run"
    ):
        _ = strategy.experimental_run_v2
    strategy.close()
    module: Any = sg
    assert module.experimental_set_strategy is sg.set_strategy
    assert module.distribute.experimental.CommunicationOptions is sg.CommunicationOptions
    assert module.distribute.cluster_resolver.TFConfigClusterResolver is sg.TFConfigClusterResolver
    assert module.train.Checkpoint is sg.Checkpoint
    assert module.estimator.RunConfig is sg.RunConfig
    assert module.keras.callbacks.TensorBoard is sg.callbacks.TensorBoard
    assert sg.nn.compute_average_loss is sg.compute_average_loss
    assert module.distribute.experimental.partitioners.MinSizePartitioner is sg.MinSizePartitioner
    with pytest.raises(AttributeError, match="module 'stratagem' has no attribute 'nothing'"):
        _ = module.experimental.nothing
    with pytest.raises(AttributeError, match=r"no attribute 'coordinator': there is no ClusterCoordinator: "):
        _ = module.distribute.coordinator
    with pytest.raises(AttributeError, match=r"no attribute 'ClusterCoordinator': there is no"):
        _ = module.ClusterCoordinator


def test_iterators_have_get_next() -> None:
    strategy = sg.OneDeviceStrategy("cpu")
    batches = iter(strategy.distribute_dataset([torch.arange(2), torch.arange(3)]))
    assert [batches.get_next().tolist(), next(batches).tolist()] == [[0, 1], [0, 1, 2]]
    with pytest.raises(StopIteration):
        batches.get_next()
    strategy.close()


def test_a_reduced_loss_has_no_gradient_under_one_replica_either() -> None:
    strategy = sg.OneDeviceStrategy("cpu")
    losses = strategy.run(lambda: torch.ones(2, requires_grad=True) * 2)
    for op in ("SUM", "MEAN", "MAX"):
        assert strategy.reduce(op, losses).numpy().tolist() == [2.0, 2.0]
    assert strategy.reduce("SUM", losses, axis=0).numpy() == 4.0
    strategy.close()


def test_the_model_of_a_checkpoint_by_its_place(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    saved = sg.Checkpoint(model).save(tmp_path / "a")
    other = torch.nn.Linear(1, 1)
    sg.Checkpoint(model=other).restore(saved)
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("given", [sg.HierarchicalCopyAllReduce, sg.HierarchicalCopyAllReduce()])
def test_cross_device_ops_may_be_a_class(given: Any) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"], given)
    assert float(strategy.reduce(sg.ReduceOp.SUM, strategy.run(lambda: torch.ones(())))) == 2
    strategy.close()


@pytest.mark.parametrize("given", ["nccl", sg.OneDeviceStrategy])
def test_what_is_no_cross_device_ops_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"expected cross_device_ops like sg\.ReductionToOneDevice"):
        sg.MirroredStrategy(["cpu:0", "cpu:1"], given)


def test_the_synchronization_that_is_the_default() -> None:
    for given in (sg.VariableSynchronization.AUTO, "auto"):
        assert sg.Variable(1.0, synchronization=given).synchronization is sg.VariableSynchronization.ON_WRITE


def test_a_variable_is_compared_by_its_value() -> None:
    step, weights = sg.Variable(0), sg.Variable([1.0, 2.0])
    step.assign_add(3)
    assert step == 3 and torch.tensor(3) == step and bool(step != 3) is False and step != 4 and step == sg.Variable(3)
    assert (weights == torch.tensor([1.0, 3.0])).tolist() == [True, False]
    assert {weights: "w", step: "s"}[step] == "s"
    assert step != None  # noqa: E711


@pytest.mark.parametrize(
    ("losses", "weight"),
    [((3,), (3, 1)), ((3, 1), (3,)), ((3, 3), (3,)), ((3, 2), (3,)), ((3, 2), (3, 1)), ((3,), (3,)), ((3,), ())],
)
def test_sample_weights_go_by_example(losses: tuple[int, ...], weight: tuple[int, ...]) -> None:
    each = torch.arange(1.0, torch.Size(losses).numel() + 1).reshape(losses)
    weights = torch.tensor([1.0, 0.0, 4.0]).reshape(weight) if weight else torch.tensor(2.0)
    by_example = weights.reshape(-1).expand(3) * each.reshape(3, -1).sum(1)
    assert sg.compute_average_loss(each, weights, 3).item() == pytest.approx(by_example.sum().item() / 3)


@pytest.mark.parametrize("weight", [(2,), (4, 3), (1, 4), (4, 1, 1)])
def test_sample_weights_of_another_shape_are_refused(weight: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"sample_weight for each of the losses, of shape \[4\], got"):
        sg.compute_average_loss(torch.ones(4), torch.ones(weight), 4)


@pytest.mark.parametrize("sizes", [{}, {"global_batch_size": 8}, {"sample_weight": torch.ones(4)}])
def test_an_average_loss_is_not_made_of_an_average(sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"a loss for each example, got a number: .* reduction='none'"):
        sg.compute_average_loss(torch.tensor(0.5), **sizes)


def test_a_gpu_beyond_those_that_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(device) for device in parse_devices(["cuda:0", "/gpu:1"])] == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigurationError, match=r"'cuda:7' was asked for, .* 2 CUDA devices here: expected cuda:0 to"):
        parse_devices(["cuda:7"])
