"""What goes over NCCL where there are GPUs: which methods of a group of torch are called, with what. Here gloo stands
for NCCL, on the CPU; tests/cluster/test_gpus.py has the real one."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, HashStore, ReduceOptions

from stratagem.distributed.nccl import Nccl, group_of
from stratagem.distributed.process_group import LaneProcessGroup
from stratagem.errors import CollectiveError, ConfigurationError
from tests.contract.distributed.ranks import on_every_rank, process_groups

Groups = Sequence[LaneProcessGroup]
Call = Callable[[LaneProcessGroup, torch.Tensor, torch.Tensor], object]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[Groups]:
    """Two ranks that have agreed on gloo, and take it for every tensor."""
    store = HashStore()

    def made(group: LaneProcessGroup) -> None:
        group.nccl._is_agreed = True
        gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), datetime.timedelta(seconds=20))
        group.nccl._group = group_of(gloo, torch.device("cpu"), store)

    with process_groups(2, "shm") as ranks:
        on_every_rank(ranks, made)
        monkeypatch.setattr("stratagem.distributed.nccl._fits", lambda tensor: True)
        monkeypatch.setattr("stratagem.distributed.nccl._is_elsewhere", lambda tensor: True)
        monkeypatch.setattr("stratagem.distributed.process_group.plain", lambda tensor: None)
        yield ranks


def root(rank: int) -> ReduceOptions:
    options = ReduceOptions()
    options.rootRank = rank
    return options


CALLS: dict[str, Call] = {
    "allreduce": lambda group, whole, own: group.allreduce([whole]),
    "allreduce, told how": lambda group, whole, own: group.allreduce([whole], AllreduceOptions()),
    "allreduce, two": lambda group, whole, own: group.allreduce_coalesced([whole, own]),
    "broadcast": lambda group, whole, own: group.broadcast(whole, 1),
    "reduce": lambda group, whole, own: group.reduce([whole], root(1)),
    "allgather": lambda group, whole, own: group.allgather([list(whole.chunk(2))], [own]),
    "one tensor gathered": lambda group, whole, own: group._allgather_base(whole, own),
    "several": lambda group, whole, own: group.allgather_into_tensor_coalesced([whole], [own]),
    "one tensor scattered": lambda group, whole, own: group._reduce_scatter_base(own, whole),
    "several scattered": lambda group, whole, own: group.reduce_scatter_tensor_coalesced([own], [whole]),
    "reduce_scatter": lambda group, whole, own: group.reduce_scatter([own], [list(whole.chunk(2))]),
    "alltoall_base": lambda group, whole, own: group.alltoall_base(whole, whole.clone(), [], []),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_same_values_as_over_lanes(groups: Groups, name: str) -> None:
    def run(group: LaneProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        whole, own = torch.arange(8.0) + group.rank(), torch.arange(4.0) * (1 + group.rank())
        work = CALLS[name](group, whole, own)
        assert isinstance(work, dist.Work) and work.wait()
        return whole, own

    over_torch = on_every_rank(groups, run)
    before = [group.communicator.position for group in groups]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Nccl, "takes", lambda nccl, given: False)
        over_lanes = on_every_rank(groups, run)
    assert [group.communicator.position for group in groups] != before, "these were not lanes"
    for found, expected in zip(over_torch, over_lanes, strict=True):
        if name != "reduce" or expected is over_lanes[1]:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_reduction_that_nccl_has_not_stays_on_the_lanes(groups: Groups) -> None:
    def run(group: LaneProcessGroup) -> None:
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.BOR  # type: ignore[assignment]
        for given in (options, dist.ReduceOp.BOR):
            tensor = torch.tensor([1 + group.rank()])
            group.allreduce([tensor], given).wait()
            assert int(tensor) == 3

    before = groups[0].communicator.position.ordinal
    on_every_rank(groups, run)
    assert groups[0].communicator.position.ordinal == before + 2


def test_a_group_that_has_ended_says_so(groups: Groups) -> None:
    on_every_rank(groups, LaneProcessGroup.shutdown)
    for call in (LaneProcessGroup.allreduce, LaneProcessGroup.broadcast):
        with pytest.raises(CollectiveError, match="has destroyed its process group"):
            call(groups[0], [torch.ones(1)])


def test_ranks_agree_in_their_first_collective_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.distributed.nccl._fits", lambda tensor: True)
    monkeypatch.setattr("stratagem.distributed.nccl._is_elsewhere", lambda tensor: tensor.numel() > 3)
    monkeypatch.setattr("stratagem.distributed.process_group.plain", lambda tensor: None)
    with process_groups(2) as ranks:

        def run(group: LaneProcessGroup) -> torch.Tensor:
            tensor = torch.ones(5)
            group.allreduce([tensor]).wait()
            return tensor

        assert all(float(total[0]) == 2.0 for total in on_every_rank(ranks, run)), "through the host"
        assert not any(group.nccl.is_taken for group in ranks)
    with process_groups(2) as ranks:

        def differ(group: LaneProcessGroup) -> str:
            with pytest.raises(CollectiveError) as raised:
                group.allreduce([torch.ones(5 if group.rank() else 3)]).wait()
            return str(raised.value)

        assert all("the first collective of tensors on GPUs" in text for text in on_every_rank(ranks, differ))
    with process_groups(2, "nccl") as ranks:

        def refused(group: LaneProcessGroup) -> None:
            group.allreduce([torch.ones(3)]).wait()  # on hosts there is no need of it
            with pytest.raises(ConfigurationError, match="NCCL was asked for, but worker:0, worker:1 computes on no"):
                group.allreduce([torch.ones(5)])

        on_every_rank(ranks, refused)
