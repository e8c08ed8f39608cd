"""Tables that are looked up together, over real servers: one round trip for the rows of a batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.cluster.communication import Transport
from stratagem.data.nested import tensors
from stratagem.errors import PeerUnavailableError
from stratagem.strategy.default import DefaultStrategy
from stratagem.worker.push import row_reads
from tests.contract.ps.test_tables import Job, start
from tests.unit.nn.test_embedding import Remote

__all__ = ["start"]
torch.set_num_threads(1)

SIZES = (7, 11, 5)


class Columns(nn.Module):
    """A table for each column of the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: Any = nn.ModuleList(sg.nn.Embedding(size, 2, seed=size) for size in SIZES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(ids[:, column]) for column, table in enumerate(self.tables)], 1)


def build(strategy: Any) -> tuple[Columns, torch.optim.Optimizer]:
    with strategy.scope():
        model = Columns()
    return model, torch.optim.Adagrad(model.parameters(), 0.1)


def batch(step: int, size: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.stack([torch.randint(0, rows, (size,), generator=generator) for rows in SIZES], 1)


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each round trip: tables."""
    made: list[int] = []
    read = row_reads._read

    def counted(wanted: Any) -> None:
        made.append(len(wanted))
        read(wanted)

    monkeypatch.setattr(row_reads, "_read", counted)
    return made


@pytest.fixture
def pair(start: Callable[..., Job]) -> tuple[Job, Columns]:
    """A job of one worker whose tables were looked up together once."""
    job = start()
    model, optimizer = build(Remote())
    job.prepare(model, optimizer)
    model(batch(0))
    return job, model


def rows_now(table: Any, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = table.export_form().weight[ids]
    return found


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_columns_of_ids_are_read_together_and_train_as_in_one_process(
    start: Callable[..., Job], trips: list[int], transport: Transport
) -> None:
    job = start(transport, frame_bytes=64)  # of a few rows
    model, optimizer = build(Remote())
    job.prepare(model, optimizer)
    alone, optimizer_alone = build(DefaultStrategy())
    for step in range(5):
        ids = batch(step, 4 if step == 3 else 6)  # as the last of an epoch
        for one, its in ((model, optimizer), (alone, optimizer_alone)):
            its.zero_grad()
            one(ids).square().sum().backward()
        job.step()
        with torch.sparse.check_sparse_tensor_invariants(False):
            optimizer_alone.step()
    assert trips == [1, 1, 1, 3, 3, 3, 3]
    with torch.no_grad():
        torch.testing.assert_close(model(batch(9)), alone(batch(9)), rtol=2e-6, atol=2e-6)
    assert trips[-1] == 3


def test_slices_of_one_tensor_are_batches(pair: tuple[Job, Columns], trips: list[int]) -> None:
    _, model = pair
    every = torch.cat([batch(step) for step in range(4)])
    for ids in every.split(6):
        torch.testing.assert_close(model(ids)[:, :2], rows_now(model.tables[0], ids[:, 0]))
    assert trips.count(3) == 4
    assert len(model.tables[0].remote_table.link.reads.guesses._companions) == 1


def test_a_table_that_is_left_out_is_read_by_itself_from_then_on(pair: tuple[Job, Columns], trips: list[int]) -> None:
    _, model = pair
    first, second, third = model.tables
    made = []
    for step in range(1, 12):
        ids = batch(step)
        first(ids[:, 0])
        made.append(trips[-1])
        if step % 2:
            torch.testing.assert_close(second(ids[:, 1]), rows_now(second, ids[:, 1]))
        torch.testing.assert_close(third(ids[:, 2]), rows_now(third, ids[:, 2]))
    assert [step for step, many in enumerate(made, 1) if many == 3] == [1, 2, 6], "one in vain takes four that are not"


def test_memory_that_other_ids_have_by_now_gives_no_rows(pair: tuple[Job, Columns]) -> None:
    _, model = pair
    ids = batch(1)
    model.tables[0](ids[:, 0])
    ids[:, 1] = (ids[:, 1] + 1) % SIZES[1]
    torch.testing.assert_close(model.tables[1](ids[:, 1]), rows_now(model.tables[1], ids[:, 1]))


def test_ids_that_lie_alone_are_looked_up_alone(pair: tuple[Job, Columns], trips: list[int]) -> None:
    _, model = pair
    ids = batch(1)
    for column, table in enumerate(model.tables):
        torch.testing.assert_close(table(ids[:, column].clone()), rows_now(table, ids[:, column]))
    assert 3 not in trips and 2 not in trips


def test_ids_that_a_table_does_not_have_are_its_own_error(pair: tuple[Job, Columns]) -> None:
    _, model = pair
    ids = batch(1)
    ids[0, 1] = SIZES[1]
    model.tables[0](ids[:, 0])
    with pytest.raises(IndexError, match=f"expected ids from 0 to {SIZES[1] - 1}"):
        model.tables[1](ids[:, 1])
    torch.testing.assert_close(model.tables[2](ids[:, 2]), rows_now(model.tables[2], ids[:, 2]))


def test_rows_that_came_in_inference_mode_train_outside_of_it(pair: tuple[Job, Columns], trips: list[int]) -> None:
    _, model = pair
    first, second, _ = model.tables
    ids = batch(1)
    with torch.inference_mode():
        first(ids[:, 0])
    second(ids[:, 1]).sum().backward()
    assert trips == [3] and second.remote_table.pending.total() is not None


def test_after_a_commit_another_batch_begins_whose_ids_may_lie_where_others_did(
    pair: tuple[Job, Columns], trips: list[int]
) -> None:
    """As in a pinned buffer; the table that was looked up first is not any more."""
    job, model = pair
    _, second, third = model.tables
    ids = batch(1)
    model(ids)
    for step in range(3):
        (second(ids[:, 1]) + third(ids[:, 2])).sum().backward()
        job.step()
        ids.copy_(batch(step))
    assert trips == [3, 1, 1, 1, 1, 2]
    column = ids[:, 1]
    second(column).sum().backward()
    is_held = weakref.ref(column)
    del column
    assert is_held() is not None
    job.step()
    assert is_held() is None


def test_no_more_than_some_bytes_are_read_together(
    pair: tuple[Job, Columns], trips: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = pair
    ids = batch(1)
    num_rows = sum(len(ids[:, column].unique()) for column in (0, 1))
    monkeypatch.setattr(row_reads, "MAX_BYTES", num_rows * 2 * 4)
    model(ids)
    assert trips == [2, 1]


def update(job: Job, model: Columns, ids: torch.Tensor) -> None:
    job.step()


def load(job: Job, model: Columns, ids: torch.Tensor) -> None:
    weight = torch.arange(2.0 * SIZES[1]).view(SIZES[1], 2)
    model.tables[1].remote_table.assign(weight)


def lose(job: Job, model: Columns, ids: torch.Tensor) -> None:
    """All ps went back to a checkpoint, say; this worker hears it in its next request."""
    for store in job.stores:
        store.state.close_lanes(PeerUnavailableError("this ps went back to a checkpoint"))
    model.tables[2].remote_table.rows(np.arange(1))


def wait(job: Job, model: Columns, ids: torch.Tensor) -> None:
    model.tables[1].remote_table.link.reads._ready_until -= row_reads.MAX_AGE_S


def pull(job: Job, model: Columns, ids: torch.Tensor) -> None:
    """As a worker that is not the lead, when the lead has loaded tables."""
    job.groups.pull()


@pytest.mark.parametrize("change", [update, load, lose, wait, pull])
def test_rows_are_read_again_where_they_may_have_changed(
    pair: tuple[Job, Columns], trips: list[int], change: Callable[[Job, Columns, torch.Tensor], None]
) -> None:
    job, model = pair
    ids = batch(1)
    model(ids).square().sum().backward()
    model.tables[0](ids[:, 0])
    before = rows_now(model.tables[1], ids[:, 1])
    trips.clear()
    change(job, model, ids)
    trips.clear()
    found = model.tables[1](ids[:, 1])
    assert trips == [1]
    torch.testing.assert_close(found, rows_now(model.tables[1], ids[:, 1]))
    assert torch.equal(found, before) == (change in (lose, wait, pull))


class Features(nn.Module):
    """A table for each feature, by name; those of "b" are looked up twice, of a bag of other ids too."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: Any = nn.ModuleDict({name: sg.nn.Embedding(9, 2, seed=at) for at, name in enumerate("abc")})

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        found = [self.tables[name](batch["of"][name]) for name in "abc"]
        again = self.tables["a"](batch["seen"]).sum(1)
        return torch.cat([*found, again, self.tables["b"](batch["of"]["b"] % 4)], 1)


def features(step: int, size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    ids = {name: torch.randint(0, 9, (size,), generator=generator) for name in "abc"}
    return {"of": ids, "labels": torch.zeros(size), "seen": torch.randint(0, 9, (size, 3), generator=generator)}


def beside_one_process(job: Job) -> Callable[[dict[str, Any]], None]:
    """Prepares a model for the job. Gives what trains it on a batch up to its update, and the same one in one process,
    whose outputs are equal."""
    with Remote().scope():
        model = Features()
    job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with DefaultStrategy().scope():
        alone = Features()
    optimizer_alone = torch.optim.SGD(alone.parameters(), 0.1)

    def step(batch: dict[str, Any]) -> None:
        model.zero_grad()
        found = model(batch)
        found.square().sum().backward()
        optimizer_alone.zero_grad()
        expected = alone(batch)
        expected.square().sum().backward()
        with torch.sparse.check_sparse_tensor_invariants(False):
            optimizer_alone.step()
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)

    return step


def test_ids_in_any_tensor_of_a_step_are_read_together(start: Callable[..., Job], trips: list[int]) -> None:
    """As the features of a batch in a dict, each in memory of its own; those that are computed go alone."""
    job = start()
    step = beside_one_process(job)
    made = []
    for number in range(6):
        batch = features(number, 3 if number == 4 else 6)
        job.groups.reads.within(lambda: [*tensors(batch)])  # noqa: B023 - called in this turn
        step(batch)
        job.step()
        job.groups.reads.within(None)
        made.append(trips.copy())
        trips.clear()
    assert made == [[1, 1, 1, 1, 1], *([[4, 1]] * 5)]


def test_whatever_a_step_is_given_tables_are_read(pair: tuple[Job, Columns]) -> None:
    """Sparse and nested tensors, other views of the ids' memory, tensors without elements or dimensions."""
    job, model = pair
    for step in range(3):
        ids = batch(step)
        nothing = [torch.empty(0), torch.empty(0, dtype=torch.int64), torch.tensor(step), torch.empty(2, device="meta")]
        sparse = torch.eye(2, dtype=torch.int64).to_sparse()
        nested = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
        arguments = [ids, *nothing, sparse, nested, ids.view(torch.float64), ids.view(torch.int32)]
        job.groups.reads.within(lambda: arguments)  # noqa: B023 - called in this turn
        torch.testing.assert_close(model(ids)[:, 2:4], rows_now(model.tables[1], ids[:, 1]))
        assert model.tables[0](ids[:0, 0]).shape == (0, 2) and model.tables[1](ids[step, 1]).shape == (2,)
        job.groups.reads.within(None)
