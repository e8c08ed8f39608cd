"""What a communicator moves over every kind of group: also dtypes for which frames have no name."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from stratagem.errors import ConfigurationError
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.group import Group
from tests.contract.ring.groups import in_threads


def communicator_of(group: Group) -> Communicator:
    return Communicator(group, lambda error, position: error)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.float8_e4m3fn, torch.bool])
def test_any_dtype_is_gathered_and_broadcast(groups: Sequence[Group], dtype: torch.dtype) -> None:
    every = [torch.tensor([[rank + 2, 0, 1]]).to(dtype) for rank in range(len(groups))]

    def work(group: Group) -> tuple[list[torch.Tensor], torch.Tensor]:
        communicator = communicator_of(group)
        return communicator.all_gather(every[group.rank]), communicator.broadcast(every[group.rank].clone())

    for gathered, sent in in_threads([functools.partial(work, group) for group in groups]):
        for tensor, expected in zip([*gathered, sent], [*every, every[0]], strict=True):
            assert tensor.dtype is dtype and torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


def test_complex_numbers_are_added_and_conjugated_ones_moved(groups: Sequence[Group]) -> None:
    values = torch.arange(len(groups)) + 1j

    def work(group: Group) -> list[torch.Tensor]:
        communicator, mine = communicator_of(group), values[group.rank].conj()
        reduced = [communicator.all_reduce(mine, op) for op in ("sum", "mean")]
        return [*reduced, torch.stack(communicator.all_gather(mine))]

    for total, mean, gathered in in_threads([functools.partial(work, group) for group in groups]):
        assert total == values.conj().sum() and mean == values.conj().mean()
        assert torch.equal(gathered, values.conj().resolve_conj())


@pytest.mark.parametrize(
    ("dtype", "op"), [(torch.uint16, "sum"), (torch.float8_e4m3fn, "max"), (torch.complex64, "max")], ids=str
)
def test_what_cannot_be_reduced_is_refused_and_the_ring_goes_on(
    groups: Sequence[Group], dtype: torch.dtype, op: str
) -> None:
    def work(group: Group) -> float:
        communicator = communicator_of(group)
        with pytest.raises(ConfigurationError, match=f"{op.upper()} of {dtype} over replicas"):
            communicator.all_reduce(torch.ones(2).to(dtype), op)
        return float(communicator.all_reduce(torch.ones(())))

    assert in_threads([functools.partial(work, group) for group in groups]) == [len(groups)] * len(groups)


def test_a_single_element_may_have_any_stride(groups: Sequence[Group]) -> None:
    def work(group: Group) -> list[torch.Tensor]:
        communicator, mine = communicator_of(group), torch.full((1,), group.rank).as_strided((1, 1), (1, 3))
        return [*communicator.all_gather(mine), communicator.broadcast(mine)]

    for moved in in_threads([functools.partial(work, group) for group in groups]):
        assert [each.tolist() for each in moved] == [[[rank]] for rank in [*range(len(groups)), 0]]
