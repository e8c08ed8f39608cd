"""What cannot be copied, and what belongs to another replica, is refused by name."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim import lr_scheduler

import stratagem as sg
from stratagem.errors import ConfigurationError, UnsupportedOptimizerError
from stratagem.strategy.prepared import Preparation
from stratagem.strategy.ps.checks import check_optimizer, check_prepared
from tests.unit.strategy.mirrored_replicas import Replicas, equal, proxies

INPUTS = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))


class Slotted(nn.Linear):
    __slots__ = ("cache",)


def _with(name: str, value: Callable[[nn.Sequential], object]) -> nn.Module:
    model = net()
    setattr(model[1], name, value(model))
    return model


def _over(values: torch.Tensor) -> nn.Linear:
    """A layer whose weight lies where ``values`` do."""
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(values)
    return layer


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), r"0\.weight of Sequential has no shape yet; call the model once"),
    "meta": (lambda: nn.Sequential(nn.Linear(4, 4, device="meta")), r"0\.weight of Sequential is on the meta device"),
    "slots": (lambda: nn.Sequential(Slotted(4, 4)), "Slotted keeps cache in __slots__"),
    "a result": (
        lambda: _with("norm", lambda model: next(model.parameters()).norm()),
        r"1\.norm of Sequential is the result of a computation",
    ),
    "a ScriptModule": (
        lambda: nn.Sequential(torch.jit.trace(nn.Linear(4, 4), INPUTS)),
        "0 is a ScriptModule, .* train the module that it was made from",
    ),
    "one memory": (
        lambda: nn.Sequential(first := nn.Linear(4, 4), _over(first.weight.data.t())),
        r"0\.weight and 1\.weight are two parameters that share memory",
    ),
    "a lock": (lambda: _with("lock", lambda _: threading.Lock()), r"1\.lock of Sequential cannot be copied.*pickle"),
    "a result in a list": (
        lambda: _with("kept", lambda model: [next(model.parameters()) * 2]),
        r"1\.kept of Sequential cannot be copied",
    ),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature", "ignore:.torch.jit.*deprecated")
@pytest.mark.parametrize(("build", "message"), MODELS.values(), ids=MODELS)
def test_models_that_cannot_be_copied(replicas: Replicas, build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        replicas.prepare(build())
    assert proxies(replicas.mirrors) == []


def test_a_second_attempt(replicas: Replicas) -> None:
    own: Any = net()
    own[1].lock = threading.Lock()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"1\.lock"):
            replicas.prepare(own)
    own[1].lock = None
    model = replicas.prepare(own)
    assert equal(*replicas.copies(model)) and proxies(replicas.mirrors) == [own]
    replicas.run(lambda _: model(INPUTS))


def test_optimizers_of_other_tensors(replicas: Replicas) -> None:
    for parameters in (net().parameters(), [torch.zeros(2, requires_grad=True)]):
        with pytest.raises(
            ConfigurationError,
            match=r"group 0 of SGD has a tensor of \[.*\] that no prepared model has.*ParameterList.* the value\(\) of",
        ):
            replicas.prepare(net(), torch.optim.SGD(parameters, 0.1))


def test_an_optimizer_with_a_step_of_its_own(replicas: Replicas) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = optimizer.step
    optimizer.step = lambda *args: step(*args)  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="SGD has a step of its own as an attribute"):
        replicas.prepare(model, optimizer)


def test_a_scheduler_of_another_optimizer(replicas: Replicas) -> None:
    scheduler = lr_scheduler.StepLR(torch.optim.SGD(net().parameters(), 0.1), 1)
    with pytest.raises(ConfigurationError, match="StepLR changes the settings of an optimizer that is not prepared"):
        replicas.prepare(net(), scheduler)


def test_compiling_a_prepared_model(replicas: Replicas) -> None:
    with pytest.raises(ConfigurationError, match="a prepared model cannot be compiled"):
        replicas.prepare(net()).compile()


USES: dict[str, Callable[[Any], object]] = {
    "the model": lambda model: model(INPUTS),
    "a layer": lambda model: model[0](INPUTS),
    "a block": lambda model: model[1](INPUTS),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_original_model_in_another_replica(replicas: Replicas, use: Callable[[Any], object]) -> None:
    own = net()
    model = replicas.prepare(own)
    replicas.run(lambda replica: replica or use(own))  # it is replica 0's
    use(own)
    with pytest.raises(ConfigurationError, match=r"replica 1 called \w+ of replica 0: .* given to strategy.prepare"):
        replicas.run(lambda _: use(own))
    replicas.run(lambda _: use(model))
    block = model[1]
    with pytest.raises(ConfigurationError, match=r"called Sequential of replica 0: .* taken outside of the step"):
        replicas.run(lambda _: block(INPUTS))
    with pytest.raises(ConfigurationError, match=r"replica 0 called .* of replica 1"):
        replicas.run(lambda replica: replica or use(replicas.copies(model)[1]))


def test_the_original_optimizer_in_another_replica(replicas: Replicas) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replicas.prepare(model, optimizer)
    with pytest.raises(ConfigurationError, match="replica 1 stepped the SGD of replica 0"):
        replicas.run(lambda replica: replica and optimizer.step())


def test_the_original_optimizer_where_all_replicas_share_it() -> None:
    strategy = sg.CentralStorageStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _, prepared = strategy.prepare(model, optimizer)
    with pytest.raises(ConfigurationError, match=r"stepped the SGD of all: .* given to strategy.prepare"):
        strategy.run(optimizer.step)
    strategy.run(prepared.step)
    optimizer.step()  # outside of run it is the only one


def test_parameters_between_the_elements_of_others(replicas: Replicas) -> None:
    both = torch.randn(4, 8)
    own = nn.Sequential(_over(both[:, :4]), _over(both[:, 4:]))
    model = replicas.prepare(own)
    assert equal(*replicas.copies(model))


def test_pruned_weights(replicas: Replicas) -> None:
    own = net()
    prune.l1_unstructured(own[0], "weight", 0.5)
    prune.random_unstructured(own[0], "weight", 0.2)
    model, optimizer = replicas.prepare(own, torch.optim.SGD(own.parameters(), 0.1))

    def step(replica: int) -> None:
        model(INPUTS).square().sum().backward()
        optimizer.step()

    replicas.run(step)
    first, second = replicas.copies(model)
    assert equal(first, second) and not first[0].weight.is_leaf
    prune.remove(first[0], "weight")
    assert float((first[0].weight == 0).sum()) >= 8


def test_embeddings_that_change_their_weights() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ConfigurationError, match="max_norm=1 of 0 makes forward change the weights") as refused:
        strategy.prepare(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)))
    x = torch.tensor([[0.0, 0.0], [0.3, 0.4], [3.0, 4.0]], requires_grad=True)  # padding is a row of zeros
    scaled = eval(str(refused.value).rpartition("pooled): ")[2], {"x": x})  # noqa: S307 - what it tells to write
    assert torch.allclose(scaled, torch.renorm(x, 2, 0, 1.0))
    scaled.square().sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()
    sg.OneDeviceStrategy().prepare(nn.Embedding(4, 2, max_norm=1.0))


def test_the_batch_norm_of_torch_distributed() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ConfigurationError, match=r"1 is an nn\.SyncBatchNorm, .* pass sync_batchnorm=True"):
        strategy.prepare(model)
    sg.OneDeviceStrategy().prepare(model)


def test_complex_parameters() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ConfigurationError, match=r"complex64 cannot be reduced, .*torch\.view_as_complex"):
        strategy.prepare(_over(torch.zeros(4, 4, dtype=torch.complex64)))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: nn.Sequential(_over(torch.zeros(4, 4, dtype=torch.complex64))), r"0\.weight .*view_as_complex"),
        (lambda: nn.Sequential(_over(torch.zeros(4, 4, dtype=torch.complex64)).requires_grad_(False)), r"0\.weight"),
        (lambda: _with_buffer(torch.zeros(3, dtype=torch.complex64)), r"angles .* persistent=False"),
        (lambda: _with_buffer(torch.eye(3).to_sparse()), r"angles .* torch\.sparse_coo, .* plain attribute"),
        (lambda: nn.Sequential(first := nn.Linear(4, 4), _over(first.weight.data)), "that share memory"),
        (lambda: nn.Linear(4, 4, device="meta"), "weight of Linear is on the meta device"),
        (lambda: nn.EmbeddingBag(4, 2, max_norm=2.0), "max_norm=2 of EmbeddingBag"),
        (lambda: nn.SyncBatchNorm(2), "the model is an nn.SyncBatchNorm"),
    ],
)
def test_what_parameter_servers_cannot_train(model: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_prepared([model()], Preparation())
    for theirs in (torch.zeros(3, dtype=torch.complex64), torch.eye(3).to_sparse()):
        check_prepared([_with_buffer(theirs, persistent=False)], Preparation())


class Own(torch.optim.SGD):
    """As SGD, but not by its name."""


def test_an_optimizer_of_the_script_is_for_a_ring() -> None:
    with pytest.raises(UnsupportedOptimizerError, match=r"got .*\.Own: .* the workers of a ring can"):
        check_optimizer(Own(net().parameters(), 0.1))


def _with_buffer(values: torch.Tensor, persistent: bool = True) -> nn.Module:
    model = net()
    model.register_buffer("angles", values, persistent=persistent)
    return model


def test_weight_norm_works_in_both_kinds(replicas: Replicas) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = nn.utils.weight_norm(nn.Linear(4, 4))
    old(INPUTS)
    assert not old.weight.is_leaf
    new = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    spectral = nn.utils.spectral_norm(nn.Linear(4, 4))
    spectral(INPUTS)
    own = nn.Sequential(old, new, spectral)
    model, optimizer = replicas.prepare(own, torch.optim.SGD(own.parameters(), 0.1))
    model.eval()  # spectral_norm's power iteration is a statistic of each replica

    def step(replica: int) -> torch.Tensor:
        optimizer.zero_grad()
        output: torch.Tensor = model(INPUTS)
        output.square().sum().backward()
        optimizer.step()
        return output.detach()

    before = replicas.run(step)
    after = replicas.run(step)
    assert torch.equal(before[0], before[1]) and torch.equal(after[0], after[1])
    assert not torch.equal(before[1], after[1]) and equal(*replicas.copies(model))


def test_a_model_that_another_strategy_prepares_meanwhile(strategy: sg.MirroredStrategy) -> None:
    """It was told of a hook that nobody had registered."""
    model = strategy.prepare(plain := net())
    other = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    strategy.run(lambda: model(INPUTS).sum().backward())
    other.prepare(plain)
    with pytest.raises(ConfigurationError, match=r"another strategy has prepared this model since.*copy\.deepcopy"):
        strategy.run(lambda: model(INPUTS).sum().backward())
    other.close()


@pytest.mark.parametrize("other", ["cpu:0", "cpu:0,cpu:1"])
def test_a_model_that_another_strategy_trains(other: str) -> None:
    first, second = (sg.MirroredStrategy(devices.split(",")) for devices in ("cpu:0,cpu:1", other))
    plain = net()

    def trained(strategy: sg.Strategy, net: nn.Module) -> torch.Tensor:
        model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))

        def step() -> None:
            optimizer.zero_grad()
            model(INPUTS).square().mean().backward()
            optimizer.step()

        strategy.run(step)
        return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])

    once = trained(first, plain)
    twin = copy.deepcopy(plain)
    with pytest.raises(ConfigurationError, match=r"another strategy trains the model of this SGD.*copy\.deepcopy"):
        trained(second, plain)
    if len(second.local_devices) == 1:
        second.prepare(plain)  # to evaluate it
    twice = trained(first, plain)
    assert not twice.equal(once)
    torch.testing.assert_close(trained(second, twin), twice)
    for strategy in (first, second):
        strategy.close()


@pytest.mark.parametrize("kind", [sg.MirroredStrategy, sg.CentralStorageStrategy])
def test_a_parameter_that_was_taken_outside_of_the_step(kind: Callable[[list[str]], sg.Strategy]) -> None:
    """Mirrored, the replica to which it belongs waited for the other one, and that for its lock; the only copy of a
    central storage got a gradient that trained nothing."""
    strategy = kind(["cpu:0", "cpu:1"])
    with strategy.scope():
        model: Any = net()
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    weight = model[0].weight

    def step(taken: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        taken().sum().backward()
        optimizer.step()

    with pytest.raises(
        ConfigurationError, match=r"used a parameter of (all|replica 0).* Take it from the model inside"
    ):
        strategy.run(step, args=(lambda: weight,))
    strategy.run(step, args=(lambda: model[0].weight,))
    strategy.close()


def test_after_an_error_in_the_step_of_one_replica_the_others_go_on_with_it() -> None:
    """Each later backward was refused: one replica had begun one more than the other."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model: Any = net()
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def step(fails: bool) -> None:
        optimizer.zero_grad()
        context = sg.get_replica_context()
        assert context is not None
        if fails and context.replica_id_in_sync_group == 1:
            raise LookupError("no such word")
        model(INPUTS).sum().backward()
        optimizer.step()

    with pytest.raises(LookupError, match="no such word"):
        strategy.run(step, args=(True,))
    for _ in range(2):
        strategy.run(step, args=(False,))
    expected = net()
    alone = torch.optim.SGD(expected.parameters(), 0.1)
    for _ in range(2):
        alone.zero_grad()
        expected(INPUTS).sum().backward()
        alone.step()
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    strategy.close()


@pytest.mark.parametrize("place", ["before the step", "after the step"])
@pytest.mark.parametrize("who", [0, 1])
def test_after_an_error_in_one_replica_all_unscale_alike(place: str, who: int) -> None:
    """One had unscaled for the failed step, or not updated after it, did not in the next one, and they parted."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model: Any = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    model, optimizer, scaler = strategy.prepare(model, optimizer, scaler)

    def step(fails: str) -> None:
        context = sg.get_replica_context()
        assert context is not None
        fails = fails if context.replica_id_in_sync_group == who else ""
        optimizer.zero_grad()
        scaler.scale(model(INPUTS).square().mean()).backward()
        if fails == "before the step":
            raise LookupError
        scaler.step(optimizer)
        if fails:
            raise LookupError
        scaler.update()

    with pytest.raises(LookupError):
        strategy.run(step, args=(place,))
    alone = net()
    alone.load_state_dict(model.state_dict())
    own = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(3):
        strategy.run(step, args=("",))
        own.zero_grad()
        alone(INPUTS).square().mean().backward()
        own.step()
    torch.testing.assert_close(model.state_dict(), alone.state_dict())
    strategy.close()
