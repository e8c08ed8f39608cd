"""Leased data in parts of so many batches: pieces of one pass behind the other, each batch once."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import stratagem as sg
from stratagem.chief.leasing.lease_book import LeaseBook
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Lease, Plan
from stratagem.data.distribute import leasable
from stratagem.data.distributed import DistributedDataset
from stratagem.data.index_batches import epoch_order
from stratagem.errors import ConfigurationError
from tests.conformance.scenarios.examples import Numbers
from tests.unit.data.reading import CPU, Epochs

WORKER = Incarnation("worker:0", 1)


class OneWorker:
    """A UnitSource of the chief's book itself."""

    def __init__(self, plan: Plan) -> None:
        self.lending = LeaseBook()
        self.lending.open_dataset(1, plan)
        self._place = (0, 0)

    def start_epoch(self, epoch: int, stop: int) -> None:
        self._place = (epoch, stop)

    def next(self, wait: bool) -> Lease | None:
        epoch, stop = self._place
        granted = self.lending.ask(WORKER, 1, epoch, [*self.lending.epoch(1, epoch).held_by(WORKER)], 1, [WORKER], stop)
        return granted.granted[0] if granted.granted else None

    def has_next(self) -> bool:
        return False

    def holds(self, lease: Lease) -> bool:
        return True

    def begin(self, lease: Lease, batch: Any, following: object) -> None:
        """The batch is trained on."""

    def done(self, lease: Lease) -> None:
        self.lending.accept(WORKER, 1, lease.unit.epoch, [lease.unit.index])

    def end_epoch(self) -> None:
        assert not self.lending.held(WORKER)

    def leave(self) -> None:
        self.lending.give_back(self.lending.leave(WORKER, 1, self._place[0]).returned)


def leased(num_examples: int, batch_size: int, shuffle: bool = False) -> tuple[DistributedDataset, OneWorker]:
    plan = Plan(num_examples, batch_size, shuffle=shuffle, seed=7)
    source = OneWorker(plan)
    loader = DataLoader(Numbers(num_examples), batch_size)
    return DistributedDataset(loader, plan, 1, source, CPU), source


@given(
    num_examples=st.integers(0, 12), batch_size=st.integers(1, 5), num_batches=st.integers(1, 9), shuffle=st.booleans()
)
def test_parts_are_pieces_of_passes(num_examples: int, batch_size: int, num_batches: int, shuffle: bool) -> None:
    dataset, source = leased(num_examples, batch_size, shuffle)
    found = [[batch.tolist() for batch in part] for part in itertools.islice(dataset.parts(num_batches), 4)]
    orders = (epoch_order(num_examples, shuffle, 7, 1, epoch) for epoch in itertools.count())
    passes = (batch.tolist() for order in orders for batch in order.split(batch_size))
    if num_examples:
        assert found == [list(itertools.islice(passes, num_batches)) for _ in range(4)]
        assert source.lending.examples_accepted == sum(len(batch) for part in found for batch in part)
    else:
        assert found == [[]] * 4


def test_what_is_distributed_already_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="got the result of distribute_dataset"):
        leasable(leased(8, 2)[0])


def test_a_process_that_is_told_to_end_while_it_waits_for_the_chief_asks_it_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With peer_timeout_s=inf it waited to give its units back to a chief that was gone, and heard no SIGTERM."""
    dataset, source = leased(8, 2)
    monkeypatch.setattr(source, "next", lambda wait: sys.exit(143))
    calls: list[str] = []
    monkeypatch.setattr(source, "leave", lambda: calls.append("leave"))
    with pytest.raises(SystemExit):
        next(iter(dataset))
    assert not calls
    with pytest.raises(SystemExit):  # a script that goes on gives them back then
        next(iter(dataset))
    assert calls == ["leave"]


def test_what_is_held_goes_back_when_a_loop_is_left_in_whatever_way() -> None:
    dataset, source = leased(8, 2)
    closed = iter(dataset)
    next(closed)
    assert len(source.lending.held(WORKER)) == 1
    closed.close()
    assert not source.lending.held(WORKER)
    older = iter(dataset)
    next(older)
    part = next(dataset.parts(3))
    assert next(part).tolist() == [0, 1]
    assert [str(unit) for unit in source.lending.held(WORKER)] == ["unit 1/2/0"]
    with pytest.raises(ConfigurationError, match="newer iter"):
        next(older)
    assert [batch.tolist() for batch in part] == [[2, 3], [4, 5]]
    with contextlib.suppress(RuntimeError):
        for _ in dataset:
            raise RuntimeError
    assert not source.lending.held(WORKER)
    assert torch.equal(dataset.first_example(), torch.tensor([0]))


SOURCES = {
    "leased": "dataset, source = leased(8, 2)\nsource.leave = lambda: print('left')\n",
    "split": "dataset = sg.OneDeviceStrategy('cpu').distribute_dataset(torch.utils.data.DataLoader(range(8), 2))\n"
    "dataset._listener.end_epoch = lambda complete: print('left')\n",
}


@pytest.mark.parametrize("source", SOURCES)
def test_an_iterator_that_a_script_keeps_to_its_end_is_not_left_once_python_ends(source: str) -> None:
    """Its last words were an ImportError of numpy, or that there is no "open"; a job that failed was told by them."""
    program = (
        "import torch, stratagem as sg\n"
        "from tests.unit.data.test_leased_parts import leased\n"
        f"{SOURCES[source]}batches = iter(dataset)\n"
        "print(next(batches).tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0, 1]\n" and "Exception ignored" not in done.stderr


def test_a_dataset_hears_of_epochs() -> None:
    _, source = leased(2, 2)
    dataset = DistributedDataset(DataLoader(Epochs(2), 2), Plan(2, 2, shuffle=False, seed=7), 1, source, CPU)
    assert [[batch.tolist() for batch in dataset] for _ in range(2)] == [[[0, 0]], [[1, 1]]]


def test_a_checkpoint_knows_how_many_passes_are_over(tmp_path: Path) -> None:
    before, _ = leased(8, 2, shuffle=True)
    for _ in range(2):
        assert len(list(before)) == 4
    under_way = iter(before)
    next(under_way)
    saved = sg.Checkpoint(batches=before).save(tmp_path / "step")
    again, source = leased(8, 2, shuffle=True)
    sg.Checkpoint(batches=again).restore(saved)
    assert again.epoch == 2
    assert [batch.tolist() for batch in again] == epoch_order(8, True, 7, 1, 2).view(4, 2).tolist()
    assert (
        again.epoch == 3 and source.lending.epoch(1, 2).num_accepted == 4 and not source.lending.epoch(1, 1).has_begun
    )
    sg.Checkpoint(batches=again).restore(saved)  # what this process has gone through counts
    assert again.epoch == 3


def test_another_ordinal_gives_the_order_of_that_dataset() -> None:
    dataset, _ = leased(9, 2, shuffle=True)
    dataset.reorder(3)
    assert torch.cat(list(dataset)).tolist() == epoch_order(9, True, 7, 3, 0).tolist()
