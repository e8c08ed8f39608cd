"""What a prepared object is to Python and to torch: the user's own object, on whatever replica it is used."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable, Sized
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from stratagem.strategy.replicas.mirrored import Mirrored
from tests.unit.strategy.mirrored_replicas import Replicas, equal

INPUTS = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """With what modules of users have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("offset", torch.zeros(()))
        self.seen: list[int] = []
        self.scale = 1.0

    def forward(self, inputs: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        outputs: torch.Tensor = self.scale * self.layers[1](self.norm(self.layers[0](inputs))) + self.offset
        return outputs * 2 if twice else outputs

    @property
    def temperature(self) -> float:
        """What ``scale`` is the inverse of."""
        return 1 / self.scale

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.scale = 1 / value

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> nn.Module:
        return self.layers[index]


@pytest.fixture
def own() -> Net:
    torch.manual_seed(0)
    return Net()


def test_to_python_it_is_of_the_class(replicas: Replicas, own: Net) -> None:
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    model, optimizer, scheduler, scaler = replicas.prepare(
        own, optimizer, lr_scheduler.StepLR(optimizer, 1), torch.amp.GradScaler("cpu")
    )
    assert isinstance(model, Net) and isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.SGD) and isinstance(scheduler, lr_scheduler.LRScheduler)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert model.__class__ is Net and type(model).__name__ == "Net" and type(model).__module__ == Net.__module__
    assert isinstance(model, Mirrored) and callable(model) and not callable(optimizer)
    assert repr(model) == repr(own) and str(model) == str(own) and f"{model}" == str(own)
    assert "temperature" in dir(model) and model.__dict__ is own.__dict__ and vars(model) == vars(own)
    assert len(model) == 2 and model[1] is own.layers[1]
    assert weakref.ref(model)() is model
    assert not isinstance(optimizer, Sized)
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'missing'"):
        model.missing  # noqa: B018
    assert getattr(model, "missing", 3) == 3 and not hasattr(optimizer, "forward")


def test_an_empty_container_is_false(replicas: Replicas) -> None:
    model = replicas.prepare(nn.Sequential())
    assert not model and len(model) == 0 and list(model) == []


def test_equality_is_identity(replicas: Replicas, own: Net) -> None:
    other = Net()
    model, second = replicas.prepare(own, other)
    assert model == model and model == own and own == model and model in [other, own]
    assert model != second and model != other and model != 3
    assert hash(model) == hash(own) and {model: 1}[own] == 1


def test_each_replica_has_its_own(replicas: Replicas, own: Net) -> None:
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    model, optimizer = replicas.prepare(own, optimizer)
    first, second = replicas.copies(model)
    assert first is own and second is not own
    inside = replicas.run(lambda _: [id(parameter) for parameter in model.parameters()])
    assert inside == [[id(parameter) for parameter in its.parameters()] for its in (first, second)]
    assert [id(parameter) for parameter in model.parameters()] == inside[0]
    assert replicas.run(lambda _: id(model.layers[0].weight)) == [id(its.layers[0].weight) for its in (first, second)]
    groups = replicas.run(lambda _: [id(parameter) for parameter in optimizer.param_groups[0]["params"]])
    assert groups == inside
    assert replicas.run(lambda _: dict(model.named_parameters()).keys()) == [dict(own.named_parameters()).keys()] * 2


def test_calls(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)
    expected = copy.deepcopy(own)(INPUTS, twice=True)
    uses: list[Callable[[int], torch.Tensor]] = [
        lambda _: model(INPUTS, twice=True),
        lambda _: model.forward(INPUTS, twice=True),
    ]
    for use in uses:
        assert all(torch.equal(output, expected) for output in replicas.run(use))
        assert torch.equal(use(0), expected)
    assert own.norm.num_batches_tracked == 4  # twice inside, twice outside


def test_statistics_are_each_replicas_own(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)
    replicas.run(lambda replica: model(INPUTS + replica))
    first, second = (its.norm.running_mean for its in replicas.copies(model))
    assert not torch.equal(first, second)
    list(model.parameters())  # parameters may be written to; statistics are no reason to be made equal
    kept = second.clone()
    replicas.run(lambda _: None)
    assert torch.equal(replicas.copies(model)[1].norm.running_mean, kept)


def test_deep_copies_are_plain(replicas: Replicas, own: Net) -> None:
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    model, optimizer = replicas.prepare(own, optimizer)
    twin, its = copy.deepcopy((model, optimizer))
    assert type(twin) is Net and type(its) is torch.optim.SGD and equal(twin, own)
    assert its.param_groups[0]["params"][0] is next(twin.parameters())
    assert not any(part._forward_pre_hooks for part in twin.modules())
    assert type(copy.copy(model)) is Net
    replicas.run(lambda _: twin(INPUTS))  # belongs to nobody


def test_pickles_need_nothing_of_ours(replicas: Replicas) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    model, optimizer, scheduler = replicas.prepare(net, optimizer, lr_scheduler.StepLR(optimizer, 1))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        pickled = pickle.dumps((model, optimizer), protocol)
        assert b"stratagem" not in pickled
        twin, its = pickle.loads(pickled)
        assert type(twin) is nn.Sequential and type(its) is torch.optim.SGD and equal(twin, net)
        assert its.param_groups[0]["params"][0] is next(twin.parameters())
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "s": scheduler.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["model"].keys() == net.state_dict().keys() and saved["s"]["last_epoch"] == 0
    twin(INPUTS)  # what is left of the hooks does nothing


def test_torch_functions_take_it(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)

    def step(replica: int) -> tuple[float, float]:
        model(100 * INPUTS).square().sum().backward()
        before = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return float(before), float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))

    for before, after in replicas.run(step):
        assert before > 1 and after == pytest.approx(0.5)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(torch.ones_like(vector), model.parameters())
    assert replicas.run(lambda _: float(model.layers[0].weight.detach().sum())) == [16.0, 16.0]


def test_part_of_a_module_that_is_not_prepared(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)
    whole = nn.Sequential(model, nn.Softmax(1))
    outputs = replicas.run(lambda _: whole(INPUTS))
    assert torch.equal(outputs[0], outputs[1])
    inside = replicas.run(lambda _: [id(parameter) for parameter in whole.parameters()])
    assert inside == [[id(parameter) for parameter in its.parameters()] for its in replicas.copies(model)]
    assert whole.state_dict().keys() == {f"0.{name}" for name in own.state_dict()}
    whole.eval()
    assert replicas.run(lambda _: model.norm.training) == [False, False]


def test_what_returns_itself_returns_the_proxy(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)
    assert model.eval() is model and model.train() is model and model.requires_grad_(False) is model
    assert model.double() is model and model.apply(lambda _: None) is model and model.to(torch.float32) is model
    assert replicas.run(lambda _: model.eval() is model) == [True, True]
    assert replicas.run(lambda _: model.norm.training) == [False, False]


def test_one_line_of_a_step_changes_one_replica(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)

    def step(replica: int) -> None:
        model.scale = 2.0 + replica
        model.seen.append(replica)
        model.offset += replica
        del model.norm.eps
        model.norm.eps = 0.5 + replica

    replicas.run(step)
    replicas.run(lambda _: None)
    first, second = replicas.copies(model)
    assert (first.scale, first.seen, float(first.offset), first.norm.eps) == (2.0, [0], 0.0, 0.5)
    assert (second.scale, second.seen, float(second.offset), second.norm.eps) == (3.0, [1], 1.0, 1.5)


def test_a_list_of_outside_is_replica_0s(replicas: Replicas, own: Net) -> None:
    model = replicas.prepare(own)
    model.seen.append(5)
    assert replicas.run(lambda _: list(model.seen)) == [[5], []]
    model.seen = [7]
    assert replicas.run(lambda _: model.seen) == [[7], [7]]
    replicas.run(lambda replica: model.seen.append(replica))
    assert [its.seen for its in replicas.copies(model)] == [[7, 0], [7, 1]]


def test_schedulers_and_scalers(replicas: Replicas, own: Net) -> None:
    optimizer = torch.optim.SGD(own.parameters(), 0.5)
    plain = lr_scheduler.StepLR(optimizer, 1)
    _, optimizer, scheduler, scaler = replicas.prepare(own, optimizer, plain, torch.amp.GradScaler("cpu"))
    assert scheduler.gamma == 0.1 and scheduler.optimizer is optimizer and scheduler == plain
    scheduler.gamma = 0.5
    assert plain.gamma == 0.5 and replicas.run(lambda _: scheduler.get_last_lr()) == [[0.5], [0.5]]
    assert scaler.is_enabled() and repr(scaler) == repr(replicas.copies(scaler)[0])
    assert repr(optimizer).startswith("SGD (")
    assert optimizer.defaults["lr"] == 0.5


def test_names_of_modules_of_users_may_be_anything(replicas: Replicas) -> None:
    class Odd(nn.Module):
        """With names that a proxy has too."""

        harmless = "mine"

        def __init__(self) -> None:
            super().__init__()
            self.copies = 3
            self.home = "here"

        def __matmul__(self, other: int) -> int:
            return self.copies * other

        def __enter__(self) -> Odd:
            return self

        def __exit__(self, *_: Any) -> None:
            self.home = "left"

    model = replicas.prepare(Odd())
    assert (model.copies, model.home, model @ 2) == (3, "here", 6)
    with model:
        pass
    assert replicas.run(lambda _: model.home) == ["left", "left"]
