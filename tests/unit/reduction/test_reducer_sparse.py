"""Sparse gradients: rows of all ranks are gathered, and nothing else moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stratagem.errors import ConfigurationError
from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.ring.communicator import Communicator
from tests.unit.reduction.reducing import assert_same, build, reducing, weight_of
from tests.unit.ring.thread_group import run_ranks

ROWS = 50
IDS = torch.tensor([[1, 1, 7], [3, 7, 7], [9, 1, 0], [2, 2, 2]])


class Bag(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, 4, sparse=True)
        self.unused = torch.nn.Embedding(ROWS, 4, sparse=True)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).sum(1)).pow(2)  # type: ignore[no-any-return]


def tables(model: Any) -> list[torch.nn.Parameter]:
    return [model.table.weight, model.unused.weight]


def dense(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.to_dense() for p in model.parameters()]


def ids_of(shares: list[int], rank: int) -> torch.Tensor:
    start = sum(shares[:rank])
    return IDS[start : start + shares[rank]]


@pytest.mark.parametrize("shares", [[2, 2], [3, 1], [4, 0], [1, 2, 1]])
def test_training_equals_one_process(shares: list[int]) -> None:
    def train(model: Any, rank: int | None) -> list[torch.Tensor | None]:
        sparse = torch.optim.SparseAdam([model.table.weight], 0.1)
        rest = torch.optim.SGD(model.head.parameters(), 0.1)
        for _ in range(3):
            for optimizer in (sparse, rest):
                optimizer.zero_grad()
            model(IDS if rank is None else ids_of(shares, rank)).mean().backward()
            assert model.unused.weight.grad is None
            sparse.step()
            rest.step()
        return [*dense(model), *(parameter.detach().clone() for parameter in model.parameters())]

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build(Bag)
        with reducing(model, communicator, weight_of(shares, communicator.rank), sparse=tables(model)) as reducer:
            assert sum(len(bucket.slots) for bucket in reducer.buckets) == 2
            found = train(model, communicator.rank)
            assert model.table.weight.grad.is_sparse and model.table.weight.grad.is_coalesced()
            return found

    ranks = run_ranks(len(shares), work)
    for rank in ranks[1:]:
        assert all(a is None or torch.equal(a, b) for a, b in zip(rank, ranks[0], strict=True))  # type: ignore[arg-type]
    assert_same(ranks[0], train(build(Bag), None))


def test_accumulation_with_and_without_reducing() -> None:
    def run(model: Any, communicator: Communicator | None) -> list[torch.Tensor | None]:
        if communicator is None:
            for _ in range(4):
                model(IDS).mean().backward()
            return dense(model)
        shares = [3, 1]
        weight = weight_of(shares, communicator.rank)
        with reducing(model, communicator, weight, sparse=tables(model)) as reducer:
            ids = ids_of(shares, communicator.rank)
            model(ids).mean().backward()
            with reducer.no_sync():
                model(ids).mean().backward()
                model(ids).mean().backward()
                assert reducer.has_pending
            model(ids).mean().backward()
            return dense(model)

    assert_same(run_ranks(2, lambda c: run(build(Bag), c))[1], run(build(Bag), None))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_pending_rows_can_be_dropped(set_to_none: bool) -> None:
    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build(Bag)
        with reducing(model, communicator, weight_of([2, 2], communicator.rank), sparse=tables(model)) as reducer:
            ids = ids_of([2, 2], communicator.rank)
            model(ids).mean().backward()
            with reducer.no_sync():
                model(ids).mean().backward()
            model.zero_grad(set_to_none)
            model(ids).mean().backward()
            return dense(model)

    reference = build(Bag)
    reference(IDS).mean().backward()
    assert_same(run_ranks(2, work)[0], dense(reference))


def test_set_weight_divides_rows_too() -> None:
    reference = build(Bag)
    reference(IDS).mean().backward()

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build(Bag)
        count = float([3, 1][communicator.rank])
        with reducing(model, communicator, lambda: Weight(count, count), sparse=tables(model)):
            model(ids_of([3, 1], communicator.rank)).mean().backward()
            return dense(model)

    assert_same(run_ranks(2, work)[0], dense(reference))


def test_a_table_used_on_one_rank_only() -> None:
    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build(Bag)
        with reducing(model, communicator, weight_of([2, 2], communicator.rank), sparse=tables(model)):
            loss = model.head(torch.ones(4)).sum()
            if communicator.rank == 1:
                loss = loss + model.table(torch.tensor([5])).sum()
            loss.backward()
            return dense(model)

    for rank in run_ranks(2, work):
        expected = torch.zeros(ROWS, 4)
        expected[5] = 0.5
        assert rank[0] is not None and torch.equal(rank[0], expected)
        assert rank[1] is None


def test_only_rows_in_use_move() -> None:
    def work(communicator: Communicator) -> int:
        model = build(Bag)
        group: Any = communicator.group
        with reducing(model, communicator, weight_of([2, 2], communicator.rank), sparse=tables(model)):
            before = group.sent_bytes
            model(ids_of([2, 2], communicator.rank)).mean().backward()
            return int(group.sent_bytes - before)

    assert max(run_ranks(2, work)) < ROWS * 4 * 4  # less than one table


class Tables(torch.nn.Module):
    """Of a recommender, where each feature has a table; rows of odd sizes and of several dtypes."""

    def __init__(self, num: int) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.bfloat16, torch.float64]
        made = (torch.nn.Embedding(ROWS, 1 + at % 3, sparse=True, dtype=dtypes[at % 3]) for at in range(num))
        self.tables = torch.nn.ModuleList(made)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([table((ids + at) % ROWS).double() for at, table in enumerate(self.tables)], -1).exp()


def test_many_tables_take_the_round_trips_of_one() -> None:
    def run(num: int, communicator: Communicator | None) -> tuple[int, list[torch.Tensor | None]]:
        model = build(lambda: Tables(num))
        if communicator is None:
            model(IDS).mean().backward()
            return 0, dense(model)
        every = [*model.parameters()]
        with reducing(model, communicator, weight_of([3, 1], communicator.rank), sparse=every):
            before = communicator.position.ordinal
            model(ids_of([3, 1], communicator.rank)).mean().backward()
            return communicator.position.ordinal - before, dense(model)

    [(one, _), *_] = run_ranks(2, lambda communicator: run(1, communicator))
    ranks = run_ranks(2, lambda communicator: run(26, communicator))
    assert {trips for trips, _ in ranks} == {one}
    for found, expected in zip(ranks[1][1], run(26, None)[1], strict=True):
        assert found is not None and expected is not None
        torch.testing.assert_close(found, expected)


def test_a_sparse_table_with_a_dense_gradient_is_refused() -> None:
    def work(communicator: Communicator) -> None:
        model = build(Bag)
        with (
            reducing(model, communicator, weight_of([1], communicator.rank), sparse=tables(model)),
            pytest.raises(ConfigurationError, match="declared sparse but got a dense gradient"),
        ):
            model.table.weight.sum().backward()

    run_ranks(1, work)
