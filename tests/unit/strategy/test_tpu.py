"""TPUStrategy on a stand-in for torch_xla: the same numbers as one process on the joined batch, and clear refusals."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem.cluster.communication import ReduceOp
from stratagem.cluster.resolvers import SimpleClusterResolver
from stratagem.data.values import PerReplica
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.strategy.replicas.context import get_replica_context
from stratagem.strategy.replicas.variable import Variable, VariableAggregation, VariableSynchronization
from stratagem.strategy.tpu import TPUStrategy
from tests.unit.strategy.fake_torch_xla import FakeXla


class Net(nn.Module):
    """Has a parameter that is never used."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.norm(self.first(x))))
        return out


def net(norm: bool = False) -> Net:
    """Always with the same weights, also when replicas (threads) build it at once."""
    model, generator = Net(norm), torch.Generator().manual_seed(3)
    for linear in (model.first, model.second):
        for parameter in linear.parameters():
            nn.init.uniform_(parameter, -0.7, 0.7, generator=generator)
    return model


def loader(num: int = 7, batch: int = 4) -> DataLoader[tuple[torch.Tensor, ...]]:
    x = torch.arange(2.0 * num).view(num, 2) / num
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=batch)


def optimizer_of(model: Net) -> torch.optim.Optimizer:
    """Adam, but not behind a norm, where the gradient of a bias is rounding noise that Adam would blow up."""
    if isinstance(model.norm, nn.BatchNorm1d):
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return torch.optim.Adam(model.parameters(), 0.05)


def with_strategy(work: Callable[[TPUStrategy], Any], **arguments: Any) -> Callable[[int], Any]:
    def run(rank: int) -> Any:
        strategy = TPUStrategy(**arguments)
        try:
            return work(strategy)
        finally:
            strategy.communicator.close()

    return run


def train(strategy: TPUStrategy, model: Net, **preparation: Any) -> dict[str, torch.Tensor]:
    optimizer = optimizer_of(model)
    strategy.prepare(model, optimizer, **preparation)
    for _ in range(2):
        for x, y in strategy.distribute_dataset(loader()):

            def step(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                return loss.detach()

            strategy.reduce_mean(strategy.run(step))
    assert strategy.replicas_agree(model)
    return model.state_dict()


def reference(model: Net, clip: float | None = None) -> dict[str, torch.Tensor]:
    optimizer = optimizer_of(model)
    for _ in range(2):
        for x, y in loader():
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_replicas_equal_one_process_on_the_joined_batch(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    fake = FakeXla(monkeypatch, size)
    expected = reference(net())

    def work(strategy: TPUStrategy) -> dict[str, torch.Tensor]:
        model = net()
        if not strategy.is_lead:  # the lead's weights count
            nn.init.zeros_(model.first.weight)
        assert strategy.num_replicas_in_sync == size
        return train(strategy, model)

    for found in fake.launch(with_strategy(work)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert fake.num_syncs == [4] * size
    assert (fake.num_reduced_in_place > 0) == (size > 1)


def test_moving_replaces_parameters_on_the_stand_in_as_on_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeXla(monkeypatch, 1)
    model = net()
    before = list(model.parameters())
    model.to("cpu")
    assert not any(one is other for one, other in zip(model.parameters(), before, strict=True))


def test_an_optimizer_that_has_stepped_goes_on_after_the_move(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeXla(monkeypatch, 1)
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]])

    def step(model: Net, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (model(x) + model.unused).square().mean().backward()
        optimizer.step()

    def work(strategy: TPUStrategy | None) -> dict[str, torch.Tensor]:
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model = net()
        model.unused = model.second.bias  # two names
        before, optimizer = dict(model.named_parameters()), torch.optim.Adam(model.parameters(), 0.05)
        step(model, optimizer)
        if strategy is not None:
            strategy.prepare(model, optimizer)
        step(model, optimizer)
        assert model.unused is model.second.bias and before == dict(model.named_parameters())
        return model.state_dict()

    torch.testing.assert_close(fake.launch(with_strategy(work))[0], work(None))


def test_what_holds_on_to_parameters_while_they_move_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeXla(monkeypatch, 1)
    model = net()
    watched = weakref.ref(model.first.weight)
    message = r"Net cannot be moved to cpu \(Cannot swap t1 because it has weakref.*call prepare before"
    with pytest.raises(ConfigurationError, match=message):
        fake.launch(with_strategy(lambda strategy: strategy.prepare(model)))
    assert watched() is model.first.weight


def test_clipping_and_sync_batchnorm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeXla(monkeypatch, 2)
    clipped, normed = reference(net(), clip=0.01), reference(net(norm=True))
    for found in fake.launch(with_strategy(lambda strategy: train(strategy, net(), clip_norm=0.01))):
        torch.testing.assert_close(found, clipped, rtol=1e-5, atol=1e-6)
    for found in fake.launch(with_strategy(lambda strategy: train(strategy, net(norm=True), sync_batchnorm=True))):
        torch.testing.assert_close(found, normed, rtol=1e-4, atol=1e-5)


def test_gradients_after_backward_are_global_and_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeXla(monkeypatch, 2)
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]])

    def work(strategy: TPUStrategy) -> list[torch.Tensor | None]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        strategy.prepare(model, optimizer, gradients="sum")
        mine = x[0 if strategy.is_lead else 1]
        model(mine).sum().backward()
        with strategy.no_sync():
            model(2 * mine).sum().backward()
        with pytest.raises(ConfigurationError, match="no_sync"):
            optimizer.step()
        model(3 * mine).sum().backward()
        torch.autograd.grad(model(mine).sum(), list(model.first.parameters()))
        assert model.unused.grad is None
        return [parameter.grad for parameter in model.parameters()]

    model = net()
    for factor in (1, 2, 3):
        model(factor * x).sum().backward()
    for found in fake.launch(with_strategy(work)):
        for ours, parameter in zip(found, model.parameters(), strict=True):
            if parameter.grad is None:
                assert ours is None
            else:
                torch.testing.assert_close(ours, parameter.grad)


def test_gradients_dropped_after_no_sync_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeXla(monkeypatch, 2)

    def work(strategy: TPUStrategy, to_none: bool) -> torch.Tensor | None:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        strategy.prepare(model, optimizer, gradients="sum")
        model(torch.ones(1, 1)).sum().backward()
        with strategy.no_sync():
            model(torch.ones(1, 1)).sum().backward()
        optimizer.zero_grad(set_to_none=to_none)
        model(torch.full((1, 1), 5.0)).sum().backward()
        return model.weight.grad

    for to_none in (True, False):
        for gradient in fake.launch(with_strategy(functools.partial(work, to_none=to_none))):
            assert gradient.tolist() == [[10.0]]


def test_set_weight_is_the_denominator(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeXla(monkeypatch, 2)

    def work(strategy: TPUStrategy) -> torch.Tensor | None:
        model = nn.Linear(1, 1, bias=False)
        strategy.prepare(model)
        tokens = [1.0, 3.0][0 if strategy.is_lead else 1]
        strategy.set_weight(tokens)
        model(torch.full((1, 1), tokens)).mean().backward()
        return model.weight.grad

    for gradient in fake.launch(with_strategy(work)):
        assert gradient.tolist() == [[(1.0 * 1 + 3.0 * 3) / 4]]


def test_set_weight_counts_the_backwards_inside_no_sync_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeXla(monkeypatch, 2)

    def work(strategy: TPUStrategy) -> torch.Tensor | None:
        model = nn.Linear(1, 1, bias=False)
        strategy.prepare(model)
        strategy.set_weight(2.0)
        with strategy.no_sync():
            model(torch.full((1, 1), 5.0)).mean().backward()
        strategy.set_weight(1.0 if strategy.is_lead else 3.0)
        model(torch.full((1, 1), 2.0)).mean().backward()
        return model.weight.grad

    for gradient in fake.launch(with_strategy(work)):
        assert gradient.tolist() == [[(2 * 5 + 2 * 5 + 1 * 2 + 3 * 2) / 8]]


def test_what_only_an_empty_share_reaches_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeXla(monkeypatch, 2)

    def work(strategy: TPUStrategy) -> tuple[int, nn.Module]:
        model = net()
        strategy.prepare(model)
        ((x, y),) = list(strategy.distribute_dataset(loader(num=1)))

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            loss = nn.functional.mse_loss(model(x), y)  # NaN for an empty share
            (loss if len(x) else loss * model.unused.sum()).backward()

        strategy.run(step, args=(x, y))
        return len(x), model

    expected = net()
    ((x, y),) = list(loader(num=1))
    nn.functional.mse_loss(expected(x), y).backward()
    results = fake.launch(with_strategy(work))
    assert [size for size, _ in results] == [1, 0]
    for _, model in results:
        for ours, parameter in zip(model.parameters(), expected.parameters(), strict=True):
            if parameter.grad is None:
                assert ours.grad is None
            else:
                torch.testing.assert_close(ours.grad, parameter.grad)


def test_a_backward_that_raises_is_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeXla(monkeypatch, 2)

    class Break(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("broken on purpose")

    def work(strategy: TPUStrategy) -> str:
        model = net()
        strategy.prepare(model)
        hidden = model.first(torch.ones(2, 2))
        hidden = hidden if strategy.is_lead else Break.apply(hidden)  # type: ignore[no-untyped-call]
        with pytest.raises((ArithmeticError, CollectiveError)) as raised:
            model.second(hidden).sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        return str(raised.value)

    lead, other = fake.launch(with_strategy(work))
    assert "backward() raised on rank 1" in lead and other == "broken on purpose"


def test_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeXla(monkeypatch, 2)

    def work(strategy: TPUStrategy) -> list[Any]:
        rank = strategy.communicator.rank
        mine = torch.arange(4.0 if rank == 0 else 2.0)
        ones = torch.full((3,), rank + 2.0)
        gathered = strategy.communicator.all_gather(mine)
        scattered, scatter = torch.empty(2 - rank), strategy.communicator.group.reduce_scatter
        strategy.communicator.collective("scatter", lambda tag: scatter(ones, scattered, ReduceOp.SUM, tag))
        swapped = strategy.communicator.all_to_all([mine[:1], mine[1:]])
        strategy.communicator.barrier()
        return [
            float(strategy.reduce(ReduceOp.SUM, PerReplica((float(rank),)))),
            float(strategy.reduce(ReduceOp.MEAN, mine, axis=0)),
            float(strategy.reduce_mean(PerReplica((torch.tensor(float(rank)),), (1.0 + 2 * rank,)))),
            *(strategy.communicator.all_reduce(ones, op)[0].item() for op in ReduceOp),
            strategy.communicator.all_reduce(ones.half(), ReduceOp.PRODUCT)[0].item(),
            [part.tolist() for part in gathered],
            scattered.tolist(),
            [part.tolist() for part in swapped],
        ]

    first, second = fake.launch(with_strategy(work))
    assert first[:-3] == pytest.approx([1.0, 7 / 6, 0.75, 5.0, 2.5, 2.0, 3.0, 6.0, 6.0])
    assert first[-3] == [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0]]
    assert second[:-2] == first[:-2]
    assert (first[-2], second[-2]) == ([5.0, 5.0], [5.0])
    assert (first[-1], second[-1]) == ([[0.0], [0.0]], [[1.0, 2.0, 3.0], [1.0]])


def test_replica_context_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeXla(monkeypatch, 2)

    def work(strategy: TPUStrategy) -> list[Any]:
        with strategy.scope():
            total = Variable(1.0 if strategy.is_lead else 5.0, VariableAggregation.SUM)
            metric = Variable(0.0, VariableAggregation.MEAN, VariableSynchronization.ON_READ)

        def step() -> list[Any]:
            context = get_replica_context()
            assert context is not None and context.strategy is strategy
            own = context.replica_id_in_sync_group
            total.assign_add(float(own + 1))
            metric.assign_add(float(own))
            gathered = context.all_gather(torch.full((own + 1,), float(own)), 0)
            return [float(context.all_reduce(ReduceOp.SUM, own + 1)), gathered.tolist()]

        return [*strategy.local_results(strategy.run(step))[0], float(total), float(metric)]

    assert fake.launch(with_strategy(work)) == [[3.0, [0.0, 1.0, 1.0], 4.0, 0.5]] * 2


def test_replicas_at_different_collectives_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeXla(monkeypatch, 2)

    def work(strategy: TPUStrategy) -> str:
        with pytest.raises(CollectiveError) as raised:
            if strategy.is_lead:
                strategy.communicator.barrier()
            else:
                strategy.communicator.all_reduce(torch.ones(3))
        return str(raised.value)

    lead, other = fake.launch(with_strategy(work))
    assert "replica 1 is at collective 1" in lead and "barrier" in lead
    assert "all_reduce sum of 3 float32" in other


def test_a_step_that_cannot_take_an_empty_share_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeXla(monkeypatch, 3)

    def work(strategy: TPUStrategy) -> str:
        for (x, _), _once in zip(strategy.distribute_dataset(loader(num=2)), range(1), strict=False):
            if len(x):
                return ""
            with pytest.raises(ConfigurationError) as raised:
                strategy.run(lambda x: x.view(0, -1), args=(x,))
            return str(raised.value)
        return "no batch"

    *others, empty = fake.launch(with_strategy(work))
    assert others == ["", ""] and "batch of size 0" in empty and "3 replicas" in empty


def test_sparse_embeddings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeXla(monkeypatch, 1)
    with pytest.raises(ConfigurationError, match="sparse=False"):
        fake.launch(with_strategy(lambda strategy: strategy.prepare(nn.Embedding(3, 2, sparse=True))))


def test_the_cluster_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeXla(monkeypatch, 4)
    two = SimpleClusterResolver({"worker": ["a:1", "b:1"]}, "worker", 0)
    TPUStrategy(two).communicator.close()
    with pytest.raises(ConfigurationError, match=r"3 workers.*4 replicas"):
        TPUStrategy(SimpleClusterResolver({"worker": ["a:1", "b:1", "c:1"]}, "worker", 0))
    with pytest.raises(ConfigurationError, match="1 ps"):
        TPUStrategy(SimpleClusterResolver({"worker": ["a:1"], "ps": ["b:1"]}, "worker", 0))


def test_a_version_that_does_not_match_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeXla(monkeypatch, 1, version="1.13.0+libtpu")
    with pytest.raises(ConfigurationError) as raised:
        TPUStrategy()
    assert "torch_xla 1.13.0+libtpu" in str(raised.value) and f"torch {torch.__version__}" in str(raised.value)


def test_the_version_of_an_installed_torch_xla_is_looked_up_before_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One that was built for another torch fails to load, with words that say nothing.
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"torch_xla": "2.1.0"}[name])
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(ConfigurationError, match=r"torch_xla 2\.1\.0 does not match"):
        TPUStrategy()


def test_absence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeXla(monkeypatch, 1)
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    series = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    with pytest.raises(ConfigurationError) as raised:
        TPUStrategy()
    assert f"pip install 'torch_xla[tpu]~={series}.0'" in str(raised.value)


def test_it_says_that_it_was_not_exercised_on_hardware() -> None:
    assert "NOT EXERCISED ON HARDWARE" in (TPUStrategy.__doc__ or "")
