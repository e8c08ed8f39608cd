"""What a pass over a distributed dataset draws from random number generators."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset

import stratagem as sg


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


def test_a_generator_of_the_users_draws_on() -> None:
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(Noisy(), batch_size=2, generator=generator)
    dataset = sg.OneDeviceStrategy("cpu").distribute_dataset(loader)
    before = generator.get_state()
    list(dataset)
    assert not torch.equal(generator.get_state(), before)
