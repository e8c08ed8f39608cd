"""Reading ahead, and copies to the devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from stratagem.data.distribute import distribute
from stratagem.data.options import DistributeOptions
from stratagem.data.placement import InputPlacement
from stratagem.data.values import local_values
from tests.unit.data.reading import CPU, batches, steps_of

META = torch.device("meta")


class Counting:
    """Counts the batches that were asked for."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self.asked = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in batches(4 * self.num_batches, 4):
            self.asked += 1
            yield {"x": batch}


@pytest.mark.parametrize(
    ("devices", "prefetch", "ahead"),
    [
        ((META,), None, 1),
        ((META, META), None, 2),  # as many as replicas
        ((META, META, META), None, 3),
        ((META, META), 0, 0),
        ((CPU, CPU), None, 0),  # nothing to copy
        ((CPU, CPU), 4, 4),
    ],
)
def test_steps_read_ahead(devices: tuple[torch.device, ...], prefetch: int | None, ahead: int) -> None:
    source = Counting(6)
    dataset = distribute(source, placement=InputPlacement(devices), options=DistributeOptions(prefetch=prefetch))
    seen = []
    for number, item in enumerate(dataset):
        assert source.asked == min(number + 1 + ahead, 6)
        parts = local_values(item)
        assert [part["x"].device for part in parts] == list(devices)
        seen.append(sum(len(part["x"]) for part in parts))
    assert seen == [4] * 6


def test_reading_ahead_changes_nothing() -> None:
    placement = InputPlacement((CPU, CPU))
    loader = DataLoader(TensorDataset(torch.arange(22)), batch_size=4, shuffle=True)
    plain, ahead = (
        distribute(loader, placement=placement, options=DistributeOptions(prefetch=prefetch)) for prefetch in (0, 3)
    )
    for _ in range(2):
        assert steps_of(plain) == steps_of(ahead)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pin_memory", [False, True])
def test_copies_to_a_gpu_are_complete_when_they_are_used(pin_memory: bool) -> None:
    device = torch.device("cuda", 0)
    data = torch.arange(64.0).repeat_interleave(1 << 16).view(64, -1)
    loader = DataLoader(TensorDataset(data), batch_size=4, pin_memory=pin_memory)
    sums = []
    for (x,) in distribute(loader, placement=InputPlacement((device,))):
        busy = torch.ones(2048, 2048, device=device)
        for _ in range(8):
            busy = busy @ busy / 2048
        sums.append(x.mean(1) * busy[0, 0])
        del x  # its memory must not be reused while the work above is queued
    assert torch.cat(sums).tolist() == pytest.approx(list(range(64)))
