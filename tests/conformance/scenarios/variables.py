"""``sg.Variable`` in and outside of replicas."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import stratagem as sg
from tests.conformance.scenarios.contexts import number
from tests.conformance.scenarios.refusals import refusal

NONE, SUM, MEAN, FIRST = (
    sg.VariableAggregation.NONE,
    sg.VariableAggregation.SUM,
    sg.VariableAggregation.MEAN,
    sg.VariableAggregation.ONLY_FIRST_REPLICA,
)
AGGREGATIONS = (SUM, MEAN, FIRST)
ON_READ = sg.VariableSynchronization.ON_READ


def unaggregated(strategy: sg.Strategy) -> dict[str, Any]:
    """A variable without aggregation that a step assigns to, and the value after."""
    with strategy.scope():
        plain = sg.Variable(1.0, name="plain")
    return {**refusal(lambda: strategy.run(lambda: plain.assign(2.0))), "value": float(plain)}


def written(strategy: sg.Strategy) -> Any:
    """What assign, assign_add and assign_sub in a step make of 10.0, in the step and after it."""
    found: dict[str, Any] = {}
    for aggregation in AGGREGATIONS:
        for method in ("assign", "assign_add", "assign_sub"):
            with strategy.scope():
                variable = sg.Variable(10.0, aggregation)

            def step(own: sg.Variable = variable, method: str = method) -> float:
                getattr(own, method)(number() + 1.0)
                return float(own)

            inside = strategy.local_results(strategy.run(step))
            found[f"{aggregation.name} {method}"] = {"inside": inside, "after": float(variable)}
    return found


def on_read(strategy: sg.Strategy) -> Any:
    """A value of each replica's own, which is aggregated when it is read outside of replicas."""
    found: dict[str, Any] = {}
    for aggregation in AGGREGATIONS:
        with strategy.scope():
            variable = sg.Variable(0.0, aggregation, ON_READ)

        def step(own: sg.Variable = variable) -> float:
            own.assign_add(number() + 1.0)
            return float(own)

        inside = strategy.local_results(strategy.run(step))
        found[aggregation.name] = {"inside": inside, "after": float(variable)}
    return found


def on_read_unaggregated(strategy: sg.Strategy) -> dict[str, Any]:
    """Reading an ON_READ variable without aggregation outside of replicas."""
    with strategy.scope():
        variable = sg.Variable(0.0, synchronization=ON_READ, name="own")
    return refusal(variable.value)


def assigned_outside(strategy: sg.Strategy) -> dict[str, Any]:
    """What replicas see of assignments outside of them."""
    with strategy.scope():
        same, own, summed = sg.Variable(0.0, SUM), sg.Variable(0.0, MEAN, ON_READ), sg.Variable(0.0, SUM, ON_READ)
    same.assign(3.0)
    own.assign(strategy.distribute_values_from_function(lambda context: 1.0 + context.replica_id_in_sync_group))
    summed.assign(12.0)
    inside = strategy.local_results(strategy.run(lambda: [float(same), float(own)]))
    return {"inside": inside, "after": [float(same), float(own), float(summed)]}


def step_counter(strategy: sg.Strategy) -> Any:
    """ONLY_FIRST_REPLICA, for a counter: three steps of all replicas count three."""
    with strategy.scope():
        counter = sg.Variable(torch.zeros((), dtype=torch.int64), FIRST)
    for _ in range(3):
        strategy.run(lambda: counter.assign_add(1))
    return int(counter)


def initial_values(strategy: sg.Strategy) -> Any:
    """Every worker gives another initial value; see :func:`own_number`."""
    mine = 100.0 + own_number(strategy)
    with strategy.scope():
        variables = sg.Variable(mine, SUM), sg.Variable(mine, MEAN, ON_READ)
    inside = strategy.local_results(strategy.run(lambda: [float(one) for one in variables]))
    return {"mine": mine, "inside": inside}


def initial_weights(strategy: sg.Strategy) -> Any:
    """Every worker makes a model of other weights."""
    mine = 100.0 + own_number(strategy)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, mine)
    prepared = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))[0]
    inside = strategy.local_results(strategy.run(lambda: float(prepared.weight.detach())))
    return {"mine": mine, "inside": inside}


def own_number(strategy: sg.Strategy) -> int:
    """Of this worker."""
    return 0 if strategy.is_lead else 1


def in_step(strategy: sg.Strategy) -> dict[str, Any]:
    """A variable is created inside a step."""

    def step() -> dict[str, str]:
        return refusal(lambda: sg.Variable(1.0, name="late"))

    found: dict[str, Any] = strategy.local_results(strategy.run(step))[0]
    return found


def trainable(strategy: sg.Strategy) -> Any:
    """A trainable variable beside a model: both are stepped with the gradient of all replicas."""
    with strategy.scope():
        scale = sg.Variable(2.0, MEAN, name="scale", trainable=True)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD([*model.parameters(), scale.value()], 1.0)
    model, optimizer = strategy.prepare(model, optimizer)

    def step() -> list[float]:
        optimizer.zero_grad()
        (model(torch.full((1, 1), number() + 1.0, device=model.weight.device)) * scale).sum().backward()
        optimizer.step()
        return [float(model.weight.detach()), float(scale)]

    return strategy.local_results(strategy.run(step))


def created(strategy: sg.Strategy) -> dict[str, Any]:
    """A variable is created in the scope."""
    with strategy.scope():
        return refusal(lambda: sg.Variable(1.0, SUM, name="metric"))
