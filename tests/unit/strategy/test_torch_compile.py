"""prepare(torch_compile=...): every replica's model is compiled, whole, and the numbers stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem import arguments
from stratagem.errors import ConfigurationError

OPTIONS = {"backend": "aot_eager", "dynamic": True, "fullgraph": True}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def losses(strategy: sg.Strategy, torch_compile: Any) -> list[float]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    model, optimizer = strategy.prepare(model, optimizer, torch_compile=torch_compile)
    x = torch.linspace(-1, 1, 40).view(10, 4)

    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    dataset = strategy.distribute_dataset(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
    return [float(strategy.reduce_mean(strategy.run(step, args=(batch,)))) for batch in dataset]


BUILD: list[Callable[[], sg.Strategy]] = [
    lambda: sg.OneDeviceStrategy("cpu"),
    lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
]


@pytest.mark.parametrize("build", BUILD)
def test_compiled_models_learn_the_same(build: Callable[[], sg.Strategy]) -> None:
    expected = losses(sg.OneDeviceStrategy("cpu"), None)
    assert not torch._dynamo.utils.counters["stats"]
    strategy = build()
    assert losses(strategy, OPTIONS) == pytest.approx(expected, abs=2e-6)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    strategy.close()
    assert graphs >= len(strategy.local_devices) and not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("given", [3, "2", {"mode": "fast"}, {"fast": True}])
def test_nonsense_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="torch_compile"):
        sg.OneDeviceStrategy("cpu").prepare(nn.Linear(1, 1), torch_compile=given)


def test_a_step_of_several_replicas_that_is_compiled_runs_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    """It ended in an error of the compiler's; on a ring with batches of two sizes too."""
    arguments.warn_once.cache_clear()
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    model = nn.Linear(4, 1)
    prepared, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    before = model.bias.item()

    def step() -> None:
        optimizer.zero_grad()
        prepared(torch.ones(2, 4)).mean().backward()
        optimizer.step()

    for _ in range(2):
        strategy.run(torch.compile(step, backend="eager"))
    strategy.close()
    assert model.bias.item() == pytest.approx(before - 0.2, abs=1e-6)
    assert caplog.text.count("strategy.prepare(model, optimizer, torch_compile=True)") == 1


def test_the_step_of_parameter_servers_is_left_out_of_what_is_compiled() -> None:
    """All of an update was compiled, or the compiler failed in it."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], 1.0)
    strategy, compiled, seen = object.__new__(sg.ParameterServerStrategy), [], []
    vars(strategy)["_runtime"] = SimpleNamespace(meter=SimpleNamespace(computes=lambda *_, **__: None))
    vars(strategy)["_commit"] = lambda _: seen.append(float(parameter.detach().sum().cos()))
    strategy._attach(SimpleNamespace(optimizer=optimizer, is_paced=True))  # type: ignore[arg-type]  # what it needs of one

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        compiled.append(graph.code)
        return graph.forward

    torch.compile(lambda: optimizer.step(), backend=backend)()
    assert seen == [1.0] and not any("cos" in code for code in compiled), compiled
