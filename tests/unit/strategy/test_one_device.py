"""OneDeviceStrategy: plain PyTorch, with the plan's order of examples, clipping and the NaN policy."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import stratagem as sg
from stratagem.data.index_batches import epoch_order
from stratagem.errors import ConfigurationError, NonFiniteGradientError


def loader(num: int = 10, batch: int = 4, **arguments: object) -> DataLoader[tuple[torch.Tensor, ...]]:
    data = torch.arange(float(num)).view(num, 1)
    return DataLoader(TensorDataset(data, data * 2), batch_size=batch, **arguments)  # type: ignore[arg-type]


def test_batches_follow_the_plan() -> None:
    dataset = sg.OneDeviceStrategy("cpu").distribute_dataset(loader(shuffle=True))
    for epoch in range(2):
        seen = torch.cat([batch[0] for batch in dataset]).view(-1).long()
        assert torch.equal(seen, epoch_order(10, True, 0, 1, epoch))
    assert len(dataset) == 3


def test_an_empty_variable_names_no_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_STRATEGY", "")
    assert isinstance(sg.strategy_from_environment(devices="cpu"), sg.OneDeviceStrategy)


def test_order_without_shuffling_and_drop_last() -> None:
    dataset = sg.OneDeviceStrategy("cpu").distribute_dataset(loader(drop_last=True))
    assert [batch[0].view(-1).tolist() for batch in dataset] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_epochs_differ_and_seeds_differ() -> None:
    orders = [epoch_order(50, True, seed, 1, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_the_seed_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that a chief reads, for a job that has none."""

    def first_epoch(strategy: sg.Strategy) -> list[float]:
        batches = strategy.distribute_dataset(loader(shuffle=True))
        return torch.cat([part[0] for batch in batches for part in strategy.local_results(batch)]).view(-1).tolist()

    monkeypatch.setenv("STRATAGEM_SEED", "5")
    expected = epoch_order(10, True, 5, 1, 0).tolist()
    devices = ["cpu:0", "cpu:1"]
    for strategy in (sg.strategy_from_environment("one", devices="cpu"), sg.MirroredStrategy(devices)):
        assert first_epoch(strategy) == expected
    assert first_epoch(sg.MultiWorkerMirroredStrategy(devices="cpu")) == expected
    assert first_epoch(sg.OneDeviceStrategy(seed=0)) == epoch_order(10, True, 0, 1, 0).tolist()
    monkeypatch.setenv("STRATAGEM_SEED", "-1")
    with pytest.raises(sg.ConfigurationError, match="seed from environment STRATAGEM_SEED"):
        sg.OneDeviceStrategy().distribute_dataset(loader(shuffle=True))


def test_collate_and_dict_batches_are_carried() -> None:
    def collate(rows: list[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
        return {"x": torch.stack([row[0] for row in rows])}

    dataset = sg.OneDeviceStrategy("cpu").distribute_dataset(loader(collate_fn=collate))
    assert [sorted(batch) for batch in dataset] == [["x"]] * 3


def test_a_loop_that_is_left_starts_the_next_epoch() -> None:
    dataset = sg.OneDeviceStrategy("cpu").distribute_dataset(loader())
    for _ in dataset:
        break
    assert sum(len(batch[0]) for batch in dataset) == 10


def test_streams_and_lists_of_batches_are_taken_and_nonsense_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> object:  # type: ignore[override]
            return iter([1, 2, 3])

    strategy = sg.OneDeviceStrategy("cpu")
    assert [batch.tolist() for batch in strategy.distribute_dataset(DataLoader(Stream(), batch_size=2))] == [
        [1, 2],
        [3],
    ]
    assert [batch.tolist() for batch in strategy.distribute_dataset([torch.ones(2)])] == [[1.0, 1.0]]
    with pytest.raises(ConfigurationError, match="expected a batch"):
        list(strategy.distribute_dataset([1, 2]))
    with pytest.raises(ConfigurationError, match="got int"):
        strategy.distribute_dataset(7)  # type: ignore[arg-type]


def test_clipping_equals_torch() -> None:
    expected, ours = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    ours.load_state_dict(expected.state_dict())
    reference = torch.optim.Adam(expected.parameters(), 1e-2)
    optimizer = torch.optim.Adam(ours.parameters(), 1e-2)
    sg.OneDeviceStrategy("cpu").prepare(ours, optimizer, clip_norm=0.1)
    for step in range(5):
        for model, chosen in ((expected, reference), (ours, optimizer)):
            chosen.zero_grad()
            model(torch.full((2, 3), float(step))).square().sum().backward()
            if model is expected:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            chosen.step()
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), ours.parameters(), strict=True))


def test_gradients_of_float16_are_clipped_whose_norm_float16_cannot_hold() -> None:
    model = torch.nn.Linear(300, 300, bias=False, dtype=torch.float16)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    sg.get_strategy().prepare(model, optimizer, clip_norm=300.0)
    model.weight.grad = torch.full_like(model.weight, 250.0)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.full_like(model.weight, -1.0))


def test_the_pass_through_does_what_prepare_is_asked_for() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    sg.get_strategy().prepare(model, optimizer, clip_norm=0.5)
    (model(torch.tensor([[30.0, 40.0]]))).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[-0.3, -0.4]]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients(bad: float) -> None:
    for policy in ("error", "skip"):
        model = torch.nn.Linear(2, 1)
        before = [parameter.clone() for parameter in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sg.OneDeviceStrategy("cpu").prepare(model, optimizer, nan=policy)
        (model(torch.ones(1, 2)) * bad).sum().backward()
        if policy == "error":
            with pytest.raises(NonFiniteGradientError, match="nothing was applied"):
                optimizer.step()
        else:
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_devices_in_both_spellings() -> None:
    assert sg.OneDeviceStrategy("/cpu:0").device == torch.device("cpu")
    with pytest.raises(ConfigurationError, match="abc"):
        sg.OneDeviceStrategy("abc")


WRONG: dict[str, list[Any]] = {
    "devices": [2, True, [], "", torch.tensor(2), torch.tensor([1.0, 2.0])],
    "compression": [2, False, [], torch.tensor([1.0, 2.0])],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_arguments_of_a_ring_are_refused_in_a_process_of_its_own_too(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        sg.MultiWorkerMirroredStrategy(**{name: value})


def test_a_tensor_that_is_a_number_is_no_dataset() -> None:
    with pytest.raises(ConfigurationError, match="or an iterable of batches, got Tensor"):
        sg.OneDeviceStrategy("cpu").distribute_dataset(torch.tensor(2))


def test_wrong_arguments_of_prepare_are_named() -> None:
    strategy = sg.OneDeviceStrategy("cpu")
    with pytest.raises(ConfigurationError, match="list"):
        strategy.prepare([1])
    with pytest.raises(ConfigurationError, match="clip_norm"):
        strategy.prepare(torch.nn.Linear(1, 1), clip_norm=-1)
    with pytest.raises(ConfigurationError, match="nan="):
        strategy.prepare(torch.nn.Linear(1, 1), nan="ignore")  # type: ignore[arg-type]


def test_run_and_reduce() -> None:
    strategy = sg.OneDeviceStrategy("cpu")
    value = strategy.run(lambda a, b: torch.tensor([a, b, 6.0]), args=(1.0,), kwargs={"b": 2.0})
    assert strategy.local_results(value)[0].tolist() == [1.0, 2.0, 6.0]
    assert strategy.reduce(sg.ReduceOp.SUM, value).tolist() == [1.0, 2.0, 6.0]
    assert float(strategy.reduce(sg.ReduceOp.MEAN, value, axis=0)) == 3.0
    assert float(strategy.reduce(sg.ReduceOp.SUM, value, axis=0)) == 9.0
    assert not strategy.reduce_mean(value).requires_grad


def test_scopes() -> None:
    outer, inner = sg.OneDeviceStrategy("cpu"), sg.OneDeviceStrategy("cpu")
    assert not sg.has_strategy()
    with outer.scope():
        assert sg.get_strategy() is outer
        with pytest.raises(ConfigurationError, match="OneDeviceStrategy"), inner.scope():
            pass
    assert sg.get_strategy().num_replicas_in_sync == 1
    assert sg.get_strategy() is not outer


def test_a_scope_is_entered_again_and_left_in_any_order() -> None:
    strategy = sg.OneDeviceStrategy("cpu")
    outer, inner = strategy.scope(), strategy.scope()
    for first in (outer, inner):
        outer.__enter__(), outer.__enter__(), inner.__enter__()
        first.__exit__(None, None, None)
        outer.__exit__(None, None, None)
        assert sg.get_strategy() is strategy
        inner.__exit__(None, None, None)
        assert not sg.has_strategy()


def test_a_scope_is_left_in_the_thread_that_entered_it() -> None:
    with sg.OneDeviceStrategy("cpu").scope() as strategy:
        leaving = contextvars.Context().run
        with pytest.raises(ConfigurationError, match="leave it in the thread that entered it"):
            leaving(strategy.scope().__exit__, None, None, None)
    assert not sg.has_strategy()


@pytest.mark.parametrize("make", [sg.get_strategy, lambda: sg.OneDeviceStrategy("cpu")])
def test_an_optimizer_of_what_no_prepared_model_has_is_refused(make: Callable[[], sg.Strategy]) -> None:
    strategy = make()
    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 3)
    strategy.prepare(first)
    strategy.prepare(torch.optim.SGD(first.parameters(), 0.1))
    message = r"group 0 of SGD has a tensor of \[3, 2\] \(weight\) that no prepared model has; prepare the model with"
    with pytest.raises(ConfigurationError, match=message):
        strategy.prepare(torch.optim.SGD(second.named_parameters(), 0.1))
    with strategy.scope():
        factor = sg.Variable(1.0, trainable=True)
    strategy.prepare(torch.optim.SGD([factor.value()], 0.1))


class Lookahead(torch.optim.Optimizer):
    """As wrappers of optimizers are often written."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state = base, base.param_groups, base.state


def test_an_optimizer_without_the_init_of_torch_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ConfigurationError, match=r"Lookahead does not call .*super\(\).__init__\(params, defaults\)"):
        sg.OneDeviceStrategy("cpu").prepare(model, optimizer)


class NewParameters(torch.nn.Linear):
    """Moves as modules do on devices whose tensors cannot take the place of others."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> NewParameters:
        self.weight = torch.nn.Parameter(fn(self.weight).detach().clone())
        return self


def test_parameters_that_placing_has_replaced_are_noticed() -> None:
    model = NewParameters(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConfigurationError, match=r"group 0 of SGD has a tensor of \[1, 2\] that no prepared model has"):
        sg.OneDeviceStrategy("cpu").prepare(model, optimizer)


def test_a_variable_that_nobody_knows_is_refused_without_a_cluster_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_DEVICE", "cpu:0,cpu:1")
    with pytest.raises(ConfigurationError, match="did you mean 'STRATAGEM_DEVICES'"):
        sg.strategy_from_environment()


@pytest.mark.parametrize("is_said_first", [True, False])
def test_weights_of_gradients_that_are_added_are_refused(is_said_first: bool) -> None:
    """They did nothing, and several replicas make a mean."""
    strategy = sg.OneDeviceStrategy()
    model = torch.nn.Linear(2, 1)
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def add(weight: float | None) -> None:
        if weight is not None:
            strategy.set_weight(weight)
        with strategy.no_sync():
            model(torch.ones(4, 2)).sum().backward()

    def step(weight: float | None) -> None:
        if weight is not None:
            strategy.set_weight(weight)
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()

    for one, other in ((None, None), (None, 2.0)):
        strategy.run(step, args=(other,))
        strategy.run(add, args=(one,))
        strategy.run(step, args=(None,))
    with pytest.raises(ConfigurationError, match=r"no_sync\(\) together form one mean .* a single replica"):
        strategy.run(add, args=(2.0 if is_said_first else None,))
        strategy.run(step, args=(2.0,))


@pytest.mark.parametrize("devices", [None, ["cpu"], ["cpu:0", "cpu:1"]], ids=["no strategy", "one", "two"])
def test_a_run_inside_a_run_is_refused_whatever_the_number_of_replicas(devices: list[str] | None) -> None:
    """As by TensorFlow: a script that is written on one device works on several."""
    strategy = sg.get_strategy() if devices is None else sg.MirroredStrategy(devices)
    refused = pytest.raises(ConfigurationError, match=r"strategy\.run inside strategy\.run")
    with refused:
        strategy.run(lambda: strategy.run(lambda: 1))

    def merging() -> None:
        context = sg.get_replica_context()
        assert context is not None
        context.merge_call(lambda strategy: strategy.run(lambda: 1))

    with refused:
        strategy.run(merging)
    assert strategy.local_results(strategy.run(lambda: 1)) == (1,) * len(strategy.local_devices)
    strategy.close()
