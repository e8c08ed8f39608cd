"""Rows of the batch to come, which are asked for together with an update, over real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from stratagem.cluster.communication import Transport
from stratagem.cluster.units import Unit, Update
from stratagem.data.distributed import Ahead
from stratagem.data.nested import tensors
from stratagem.errors import PeerUnavailableError
from stratagem.worker.push.row_reads import MAX_AGE_S, RowsAhead
from tests.contract.ps.test_row_reads import Columns, batch, beside_one_process, build, features, rows_now, trips
from tests.contract.ps.test_tables import Job, start
from tests.unit.nn.test_embedding import Remote

__all__ = ["start", "trips"]
torch.set_num_threads(1)


def train(job: Job, step: Callable[[Any], object], batches: Sequence[Any]) -> None:
    """As a loop over a distributed dataset does, with an update of every optimizer for each batch."""
    for index, each in enumerate(batches):
        job.groups.reads.begin(lambda: [*tensors(each)], lambda: [*tensors(batches[index + 1 : index + 2])])  # noqa: B023
        step(each)
        for ordinal, push in enumerate(job.pushes):
            is_last = ordinal + 1 == len(job.pushes)
            push.push(Update((Unit(1, 0, next(job.units)),), ordinal), None, reads_ahead=is_last)
        job.groups.reads.begin()


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
@pytest.mark.parametrize("in_step", [True, False])
def test_only_the_first_batch_waits_for_its_rows(
    start: Callable[..., Job], trips: list[int], transport: Transport, in_step: bool
) -> None:
    """Features of a dict, and a lookup of ids that are computed; as a function of the strategy runs, and as a loop."""
    job = start(transport, frame_bytes=64)
    compute = beside_one_process(job)
    made = []

    def step(each: Any) -> None:
        if in_step:
            job.groups.reads.within(lambda: [*tensors(((each,), {}))])
        compute(each)
        made.append(trips.copy())
        trips.clear()

    train(job, step, [features(number, 3 if number == 4 else 6) for number in range(6)])
    assert made == [[1, 1, 1, 1, 1], *([[1]] * 5)]


@pytest.fixture
def columns(start: Callable[..., Job]) -> tuple[Job, Columns]:
    job = start()
    model, optimizer = build(Remote())
    job.prepare(model, optimizer)
    train(job, lambda ids: model(ids).sum().backward(), [batch(0), batch(1)])
    return job, model


def test_two_optimizers_read_ahead_once(start: Callable[..., Job], trips: list[int]) -> None:
    job = start()
    with Remote().scope():
        model = Columns()
    job.prepare(model, *(torch.optim.Adagrad(table.parameters(), 0.1) for table in model.tables))
    asked: list[int] = []
    job.groups.reads.ahead = counted(asked, job.groups.reads.ahead)  # type: ignore[method-assign]
    train(job, lambda ids: model(ids).sum().backward(), [batch(number) for number in range(4)])
    assert trips == [1, 1, 1] and len(asked) == 4


def counted(calls: list[int], function: Callable[[], Any]) -> Callable[[], Any]:
    def inner() -> Any:
        calls.append(1)
        return function()

    return inner


def other_batch(job: Job, model: Columns, batches: list[torch.Tensor]) -> None:
    """As a script does that permutes ids, or evaluates first."""
    batches[1].copy_(batch(7))


def wait(job: Job, model: Columns, batches: list[torch.Tensor]) -> None:
    job.groups.reads._ready_until -= MAX_AGE_S


def load(job: Job, model: Columns, batches: list[torch.Tensor]) -> None:
    model.tables[0].remote_table.assign(torch.arange(2.0 * 7).view(7, 2))


def lose(job: Job, model: Columns, batches: list[torch.Tensor]) -> None:
    for store in job.stores:
        store.state.close_lanes(PeerUnavailableError("this ps went back to a checkpoint"))
    model.tables[2].remote_table.chunks()
    model(batch(3))


@pytest.mark.parametrize("change", [other_batch, wait, load, lose])
def test_rows_are_read_anew_where_something_came_between(
    columns: tuple[Job, Columns], trips: list[int], change: Callable[..., None]
) -> None:
    job, model = columns
    batches = [batch(4), batch(5)]
    numbers = iter(range(2))

    def step(ids: torch.Tensor) -> None:
        if next(numbers):
            assert len(job.groups.reads._ready) == 3
            change(job, model, batches)
        trips.clear()
        found = model(ids)
        assert trips, "nothing that had come was used"
        torch.testing.assert_close(found[:, :2], rows_now(model.tables[0], ids[:, 0]))
        found.sum().backward()

    train(job, step, batches)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lane_that_breaks_around_the_request_costs_nothing_but_the_rows(
    columns: tuple[Job, Columns], trips: list[int], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, model = columns
    send = RowsAhead.send

    def broken(ahead: RowsAhead) -> None:
        monkeypatch.setattr(RowsAhead, "send", send)
        if when == "after":
            send(ahead)
        job.clients[1].lane.close("the connection broke")
        if when == "before":
            send(ahead)

    monkeypatch.setattr(RowsAhead, "send", broken)
    made = []

    def step(ids: torch.Tensor) -> None:
        trips.clear()
        found = model(ids)
        made.append(trips.copy())
        torch.testing.assert_close(found[:, 2:4], rows_now(model.tables[1], ids[:, 1]))
        found.sum().backward()

    train(job, step, [batch(number) for number in range(4)])
    assert made == [[3], [3], [], []]
    assert job.num_updates() == {6}


def test_a_batch_that_cannot_be_read_fails_when_it_is_its_turn() -> None:
    def batches() -> Iterator[Any]:
        yield 1
        yield None
        raise ValueError("a file is missing")

    free = [True]
    ahead = Ahead(batches(), lambda: free[0])
    assert next(ahead) == 1 and ahead.following() is None and next(ahead) is None
    free[0] = False
    assert ahead.following() is None
    free[0] = True
    assert ahead.following() is None and ahead.following() is None
    with pytest.raises(ValueError, match="a file is missing"):
        next(ahead)


def test_a_batch_is_looked_at_as_often_as_one_likes() -> None:
    ahead = Ahead(iter([1, 2]), lambda: True)
    assert [ahead.following(), ahead.following(), next(ahead), next(ahead)] == [1, 1, 1, 2]
    assert ahead.following() is None and [*ahead] == []
