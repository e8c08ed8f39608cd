"""Scopes, replica contexts, and what goes from one to the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import stratagem as sg
from tests.conformance.law import runs_alone, runs_last
from tests.conformance.scenarios.refusals import refusal

LENGTHS = (4, 2, 1, 3)
"""Elements that each replica has of something uneven."""


def here() -> sg.ReplicaContext:
    """The context of the replica that asks."""
    context = sg.get_replica_context()
    assert context is not None
    return context


def number() -> int:
    """Of the replica that asks, among all."""
    return here().replica_id_in_sync_group


def current(strategy: sg.Strategy) -> dict[str, Any]:
    """Which strategy is the current one, where."""
    default = sg.get_strategy()
    found: dict[str, Any] = {"outside": default is not strategy and not sg.has_strategy()}
    found["default_replicas"] = default.num_replicas_in_sync
    found["default_run"] = default.local_results(default.run(lambda x: x + 1, args=(1,)))
    found["default_reduce"] = default.reduce(sg.ReduceOp.SUM, default.run(lambda: torch.tensor(3.0)))
    with strategy.scope() as entered, strategy.scope():
        found["inside"] = entered is strategy and sg.get_strategy() is strategy and sg.has_strategy()
    found["in_run"] = strategy.local_results(strategy.run(lambda: sg.get_strategy() is strategy))
    found["after"] = sg.get_strategy() is default
    return found


def another_scope(strategy: sg.Strategy) -> dict[str, Any]:
    """Entering the scope of a second strategy."""
    other = sg.OneDeviceStrategy("cpu")

    def enter() -> None:
        with other.scope():
            pass

    with strategy.scope():
        inside = refusal(enter)
        still = sg.get_strategy() is strategy
    return {**inside, "still": still, "name": type(strategy).__name__, "outside": refusal(enter)["error"]}


def cross_or_replica(strategy: sg.Strategy) -> dict[str, Any]:
    """Which context is where."""

    def step() -> list[bool]:
        inside = sg.get_replica_context() is not None
        return [inside, here().merge_call(lambda _: sg.in_cross_replica_context())]

    with strategy.scope():
        in_scope = sg.in_cross_replica_context()
        steps = strategy.local_results(strategy.run(step))
    return {"in_scope": in_scope, "steps": steps, "outside": sg.in_cross_replica_context()}


def calls_of_run(strategy: sg.Strategy) -> dict[str, Any]:
    """The step is called once for each local replica, with its part of the arguments."""
    calls: list[int] = []

    def step(plain: int, part: int, *, more: dict[str, Any]) -> dict[str, Any]:
        calls.append(number())
        return {"number": number(), "num": here().num_replicas_in_sync, "seen": [plain, part, more["part"]]}

    parts = strategy.distribute_values_from_function(lambda context: 10 + context.replica_id_in_sync_group)
    result = strategy.run(step, args=(7, parts), kwargs={"more": {"part": parts}})
    return {
        "calls": calls,
        "steps": strategy.local_results(result),
        "is_per_replica": isinstance(result, sg.PerReplica),
        "num_replicas_in_sync": strategy.num_replicas_in_sync,
    }


def has_extended(strategy: sg.Strategy) -> bool:
    """Whether TensorFlow's back door is there."""
    return hasattr(strategy, "extended")


def values_from_function(strategy: sg.Strategy) -> Any:
    """``distribute_values_from_function`` calls once for each replica."""
    made = strategy.distribute_values_from_function(
        lambda context: [context.replica_id_in_sync_group, context.num_replicas_in_sync]
    )
    return strategy.local_results(made)


def replica_all_reduce(strategy: sg.Strategy) -> Any:
    """``all_reduce`` inside a step, with what its gradient is."""

    def step() -> dict[str, Any]:
        context = here()
        mine = torch.tensor([number() + 1.0, 2.0], requires_grad=True)
        summed = context.all_reduce(sg.ReduceOp.SUM, {"a": mine})["a"]
        (summed[0] * (number() + 1)).backward()
        return {
            "sum": summed.detach(),
            "mean": context.all_reduce(sg.ReduceOp.MEAN, mine.detach()),
            "min": context.all_reduce(sg.ReduceOp.MIN, mine.detach()),
            "max": context.all_reduce(sg.ReduceOp.MAX, mine.detach()),
            "gradient": mine.grad,
        }

    return strategy.local_results(strategy.run(step))


def replica_all_gather(strategy: sg.Strategy) -> Any:
    """``all_gather`` of uneven lengths inside a step."""

    def step() -> torch.Tensor:
        gathered: torch.Tensor = here().all_gather(torch.full((1, LENGTHS[number()]), float(number())), axis=1)
        return gathered

    return strategy.local_results(strategy.run(step))


def collective_in_step(strategy: sg.Strategy) -> Any:
    """What a step is told that asks for all replicas' values."""
    every = strategy.run(lambda: refusal(lambda: here().all_reduce(sg.ReduceOp.SUM, 1.0)))
    gathers = strategy.run(lambda: refusal(lambda: here().all_gather(torch.zeros(1), 0)))
    return [*strategy.local_results(every), *strategy.local_results(gathers)]


def merged(strategy: sg.Strategy) -> dict[str, Any]:
    """``merge_call``: the function runs once for the replicas of the process."""
    calls: list[Any] = []

    def merge(strategy: sg.Strategy, values: sg.PerReplica[int], *, named: sg.PerReplica[int]) -> Any:
        calls.append([sg.in_cross_replica_context(), list(strategy.local_results(values))])
        doubled = sg.PerReplica(tuple(2 * value for value in values.values))
        return {"sum": sum(strategy.local_results(named)), "doubled": doubled}

    def step() -> Any:
        return here().merge_call(merge, args=(number(),), kwargs={"named": number() + 1})

    steps = strategy.local_results(strategy.run(step))
    return {"calls": calls, "steps": steps}


def updates_in_merge(strategy: sg.Strategy) -> Any:
    """A prepared model is changed inside the function of ``merge_call``; every replica has the new weights after."""
    model = strategy.prepare(nn.Linear(1, 1, bias=False))

    @torch.no_grad()
    def merge(_: sg.Strategy, value: sg.PerReplica[float]) -> None:
        model.weight.fill_(float(sum(value.values)))

    def step() -> float:
        here().merge_call(merge, args=(1.5,))
        return float(model.weight.detach())

    return strategy.local_results(strategy.run(step))


@runs_last
def early_return(strategy: sg.Strategy) -> dict[str, Any]:
    """One local replica leaves out a ``merge_call`` that the others make."""
    last = len(strategy.local_devices) - 1

    def step() -> None:
        if number() % (last + 1) != last:
            here().merge_call(lambda _: None)

    return refusal(lambda: strategy.run(step))


@runs_last
def different_merges(strategy: sg.Strategy) -> dict[str, Any]:
    """Two local replicas make different ``merge_call``."""
    last = len(strategy.local_devices) - 1

    def one(_: sg.Strategy) -> None: ...

    def other(_: sg.Strategy) -> None: ...

    def step() -> None:
        here().merge_call(other if number() % (last + 1) == last else one)

    return refusal(lambda: strategy.run(step))


@runs_alone
def different_collectives(strategy: sg.Strategy) -> dict[str, Any]:
    """The last replica of all makes another collective than the others."""

    def step() -> None:
        if number() == strategy.num_replicas_in_sync - 1:
            here().all_gather(torch.zeros(1), 0)
        else:
            here().all_reduce(sg.ReduceOp.SUM, torch.zeros(1))

    return refusal(lambda: strategy.run(step))


@runs_last
def error_in_merge(strategy: sg.Strategy) -> dict[str, Any]:
    """The function of ``merge_call`` raises."""

    def broken(_: sg.Strategy) -> None:
        raise sg.CollectiveError("broken on purpose")

    return refusal(lambda: strategy.run(lambda: here().merge_call(broken)))


@runs_last
def error_in_one(strategy: sg.Strategy) -> dict[str, Any]:
    """The last local replica raises while the others wait for it."""
    last = len(strategy.local_devices) - 1
    ended: list[int] = []

    def step() -> None:
        try:
            if number() % (last + 1) == last:
                raise KeyError("lost on purpose")
            here().merge_call(lambda _: None)
        finally:
            ended.append(number())

    try:
        strategy.run(step)
    except KeyError as error:
        return {"text": str(error), "notes": error.__notes__, "ended": sorted(ended)}
    return {"text": "no error"}


def again_after(strategy: sg.Strategy) -> dict[str, Any]:
    """After an error in a step, and after replicas that did not meet, the strategy works."""
    found = [error_in_one(strategy)["text"], early_return(strategy)["error"], error_in_merge(strategy)["error"]]
    total = strategy.local_results(strategy.run(lambda: here().all_reduce(sg.ReduceOp.SUM, 1)))
    return {"errors": found, "total": total}


def reduced(strategy: sg.Strategy) -> dict[str, Any]:
    """``reduce`` across replicas only."""
    values = strategy.run(lambda: {"x": torch.tensor([number() + 1.0, 1.0]), "n": number() + 1})
    return {
        op.name: strategy.reduce(op, values)
        for op in (sg.ReduceOp.SUM, sg.ReduceOp.MEAN, sg.ReduceOp.MIN, sg.ReduceOp.MAX)
    }


def reduced_over_batch(strategy: sg.Strategy) -> dict[str, Any]:
    """``reduce`` with axis 0, of batches of uneven lengths."""
    values = strategy.run(lambda: torch.full((LENGTHS[number()], 2), number() + 1.0))
    return {op.name: strategy.reduce(op, values, axis=0) for op in (sg.ReduceOp.SUM, sg.ReduceOp.MEAN)}


def gathered(strategy: sg.Strategy) -> dict[str, Any]:
    """``gather`` along both axes."""
    rows = strategy.run(lambda: torch.full((LENGTHS[number()], 1), number()))
    columns = strategy.run(lambda: torch.full((1, LENGTHS[number()]), number()))
    return {"rows": strategy.gather(rows, 0), "columns": strategy.gather(columns, 1)}


def no_default_device(strategy: sg.Strategy) -> dict[str, Any]:
    """A scope changes nothing about tensors and random numbers; prepare moves modules."""
    torch.manual_seed(5)
    plain = nn.Linear(3, 2)
    with strategy.scope():
        torch.manual_seed(5)
        model = nn.Linear(3, 2)
        device = str(torch.empty(1).device)
    same = torch.equal(plain.weight, model.weight)
    prepared = strategy.prepare(model)
    places = strategy.local_results(strategy.run(lambda: str(next(prepared.parameters()).device)))
    return {"device": device, "same": same, "places": places, "devices": [str(d) for d in strategy.local_devices]}
