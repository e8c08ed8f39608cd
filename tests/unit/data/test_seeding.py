"""What a pass over a distributed dataset draws from random number generators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stratagem as sg
from stratagem.data.distribute import distribute
from stratagem.data.files import FileDataset
from stratagem.data.split_dataset import SplitDataset
from tests.unit.data.reading import on_workers


class Noisy(Dataset[torch.Tensor]):
    """Draws in the process that reads it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)


def test_a_pass_leaves_torchs_own_generator_alone() -> None:
    dataset = sg.OneDeviceStrategy("cpu").distribute_dataset(DataLoader(torch.arange(4), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    before = torch.get_rng_state()
    assert len(list(dataset)) == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_processes_of_the_loader_draw_anew_in_each_epoch_and_the_same_in_another_run() -> None:
    def epochs(seed: int) -> list[list[float]]:
        loader = DataLoader(Noisy(), batch_size=2, num_workers=1, multiprocessing_context="fork")
        dataset = sg.OneDeviceStrategy("cpu", seed=seed).distribute_dataset(loader)
        return [torch.cat(list(dataset)).view(-1).tolist() for _ in range(2)]

    torch.manual_seed(1)
    first, second = epochs(0)
    assert first != second
    torch.manual_seed(2)
    assert epochs(0) == [first, second]
    assert epochs(1)[0] != first


def noise(dataset: SplitDataset, num_epochs: int = 1) -> list[float]:
    return [number for _ in range(num_epochs) for batch in dataset for number in batch.view(-1).tolist()]


def loader_of(source: Dataset[torch.Tensor]) -> DataLoader[torch.Tensor]:
    """Seeded, as all workers seed theirs."""
    generator = torch.Generator().manual_seed(5)
    return DataLoader(source, batch_size=2, num_workers=1, multiprocessing_context="fork", generator=generator)


def read_noise(_: object) -> Iterator[torch.Tensor]:
    return (torch.rand(1) for _ in range(2))


@pytest.mark.parametrize("source", [Noisy(), FileDataset(["a", "b"], read_noise)], ids=["map-style", "files"])
def test_workers_whose_loaders_have_one_generator_draw_other_numbers(source: Dataset[torch.Tensor]) -> None:
    each = on_workers(2, lambda placement: noise(distribute(loader_of(source), placement=placement)))
    assert len({number for numbers in each for number in numbers}) == 4


def test_a_stream_that_goes_on_draws_what_it_would_have_drawn() -> None:
    loader = loader_of(FileDataset(["a", "b"], read_noise))
    strategy = sg.OneDeviceStrategy("cpu")
    dataset, again = strategy.distribute_dataset(loader), strategy.distribute_dataset(loader)
    numbers = noise(dataset, 2)
    assert len(set(numbers)) == 8
    again.load_state_dict(dataset.state_dict() | {"epoch": 1, "step": 1})
    assert noise(again) == numbers[6:]
