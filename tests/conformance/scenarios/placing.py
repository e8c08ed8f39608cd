"""Where strategies put things, and how often they update them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.conformance.scenarios.contexts import number


def memory(strategy: sg.Strategy) -> dict[str, Any]:
    """Which memory replicas' parameters and variables are in, and how often three steps updated them."""
    model = nn.Linear(2, 1)
    model, optimizer = strategy.prepare(model, torch.optim.Adam(model.parameters(), 0.1))
    with strategy.scope():
        variable = sg.Variable(torch.zeros(2), sg.VariableAggregation.SUM)

    def step() -> dict[str, Any]:
        optimizer.zero_grad()
        model(torch.full((3, 2), 1.0 + number())).mean().backward()
        optimizer.step()
        return {"parameter": model.weight.data_ptr(), "variable": variable.value().data_ptr()}

    for _ in range(3):
        places = strategy.local_results(strategy.run(step))
    states = list(optimizer.state_dict()["state"].values())
    return {
        "parameters": len({place["parameter"] for place in places}),
        "variables": len({place["variable"] for place in places}),
        "updates": sorted({float(state["step"]) for state in states}),
        "states": len(states),
        "is_mine": places[0]["parameter"] == model.weight.data_ptr(),
        "parameter_device": str(strategy.parameter_device),
    }


def devices(strategy: sg.Strategy) -> dict[str, Any]:
    """Where the batch, the weights and the outputs of a step are."""
    model = strategy.prepare(nn.Linear(1, 1))
    found: list[list[str]] = []

    def step(batch: list[torch.Tensor]) -> None:
        found.append([str(batch[0].device), str(model.weight.device), str(model(batch[0]).device)])

    for batch in strategy.distribute_dataset(DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)):
        strategy.run(step, args=(batch,))
    return {"steps": found, "local_devices": [str(device) for device in strategy.local_devices]}


def sparse_gradient(strategy: sg.Strategy, **preparation: Any) -> Any:
    """The gradient of a sparse table of which replica i has read row 0 and row i + 1."""
    table = nn.Embedding(6, 2, sparse=True)
    nn.init.ones_(table.weight)
    table, optimizer = strategy.prepare(table, torch.optim.SGD(table.parameters(), 1.0), gradients="sum", **preparation)

    def step() -> dict[str, Any]:
        optimizer.zero_grad()
        (table(torch.tensor([0, 1 + number()])).sum() * (1.0 + number())).backward()
        gradient = table.weight.grad
        assert gradient is not None
        found: dict[str, Any] = {"sparse": gradient.is_sparse}
        if gradient.is_sparse:
            whole = gradient.coalesce()
            found |= {"rows": whole.indices()[0].tolist(), "values": whole.values()[:, 0].tolist()}
        optimizer.step()
        return {**found, "after": table.weight.detach()[:, 1].tolist()}

    return strategy.local_results(strategy.run(step))


def sparse_clipped(strategy: sg.Strategy) -> Any:
    """:func:`sparse_gradient` with a limit for the norm."""
    return sparse_gradient(strategy, clip_norm=0.5)


def devices_of_ring(strategy: sg.Strategy) -> dict[str, Any]:
    """Workers and replicas."""
    assert isinstance(strategy, sg.MultiWorkerMirroredStrategy)
    return {
        "rank": strategy.communicator.rank,
        "size": strategy.communicator.size,
        "local": len(strategy.local_devices),
        "in_sync": strategy.num_replicas_in_sync,
    }
