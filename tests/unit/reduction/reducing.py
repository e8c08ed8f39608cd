"""What the tests of the reducer share: a small model, a batch cut into uneven shares, one process to compare with."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.reduction.reducer import GradientReducer
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.step_meter import StepMeter

_BUILDING = threading.Lock()  # the global generator is one for all threads
SHARES = [[2, 2], [3, 1], [4, 0], [1, 2, 1]]


class Net(torch.nn.Module):
    """Three linear layers and a scale that every call uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 16)
        self.second = torch.nn.Linear(16, 16)
        self.last = torch.nn.Linear(16, 3)
        self.scale = torch.nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        out = self.last(torch.tanh(self.second(x)) * self.scale)
        assert isinstance(out, torch.Tensor)
        return out


def build(factory: Callable[[], torch.nn.Module] = Net, seed: int = 0) -> Any:
    """A model with the same weights every time; other threads may build at the same moment."""
    with _BUILDING:
        torch.manual_seed(seed)
        return factory()


def batch(seed: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 5, generator=generator), torch.randint(3, (size,), generator=generator)


def share_of(values: tuple[torch.Tensor, ...], shares: Sequence[int], rank: int) -> tuple[torch.Tensor, ...]:
    start = sum(shares[:rank])
    return tuple(value[start : start + shares[rank]] for value in values)


def mean_loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy; NaN for an empty share, as in any script."""
    return functional.cross_entropy(model(x), y)


def weight_of(shares: Sequence[int], rank: int) -> Callable[[], Weight]:
    return lambda: Weight(shares[rank] / sum(shares))


@contextlib.contextmanager
def reducing(
    parameters: torch.nn.Module | Sequence[torch.nn.Parameter],
    communicator: Communicator,
    weight: Callable[[], Weight],
    **options: Any,
) -> Iterator[GradientReducer]:
    """A reducer with buckets so small that the model has several."""
    if isinstance(parameters, torch.nn.Module):
        parameters = list(parameters.parameters())
    options = {"bucket_bytes": 1024, "first_bytes": 256, **options}
    reducer = GradientReducer(parameters, communicator, meter=StepMeter(), weight=weight, **options)
    try:
        yield reducer
    finally:
        take_off(reducer)


def take_off(reducer: GradientReducer) -> None:
    """Takes the hooks off the parameters, whose gradients stay, and gives back what the device holds."""
    reducer._drain()
    for slot in reducer._slots:
        for handle in slot.handles:
            handle.remove()
        if slot.parameter.grad is not None and not slot.parameter.grad.is_sparse:
            slot.parameter.grad = slot.parameter.grad.clone()
    if reducer._layout is not None:
        reducer._layout.close()


def gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def assert_same(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> None:
    assert [value is None for value in found] == [value is None for value in expected]
    for value, reference in zip(found, expected, strict=True):
        if value is not None and reference is not None:
            torch.testing.assert_close(value, reference, atol=1e-6, rtol=1e-6)


def assert_bit_identical(ranks: Sequence[Sequence[torch.Tensor | None]]) -> None:
    for rank in ranks[1:]:
        for value, first in zip(rank, ranks[0], strict=True):
            assert (value is None) == (first is None)
            assert value is None or first is None or torch.equal(value, first)
