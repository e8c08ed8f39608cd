"""Every collective of a process group, on every kind of lane, against what torch says it is."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    _make_nccl_premul_sum,
)

from stratagem.distributed import messages
from stratagem.distributed import work as handles
from stratagem.distributed.comm_memory import MIN_BYTES, CommMemory
from stratagem.distributed.process_group import LaneProcessGroup
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.worker.ring.communicator import name_of
from tests.contract.distributed.ranks import on_every_rank, process_groups

Groups = Sequence[LaneProcessGroup]
CASES: list[Any] = [("shm", 1), ("shm", 3), ("tcp", 2), ("grpc", 2)]
CASES += [pytest.param(case, marks=pytest.mark.thorough) for case in (("shm", 2), ("tcp", 3))]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}, {case[1]}", scope="module")
def groups(request: pytest.FixtureRequest) -> Iterator[Groups]:
    """The ranks of one group."""
    transport, size = request.param
    with process_groups(size, transport) as made:
        on_every_rank(made, use_everything)  # threads and lanes are made when they are first needed
        yield made


def use_everything(group: LaneProcessGroup) -> None:
    """A collective in the group's thread, and a message between any two ranks."""
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    sent = [group.send([torch.zeros(100_000)], rank, 0) for rank in others]
    for work in [group.recv([torch.zeros(100_000)], rank, 0) for rank in others] + sent:
        work.wait()
    group.barrier().wait()


def values(rank: int, length: int = 1000, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, other ones for each rank: sums are exact in every dtype."""
    return ((torch.arange(length) * 7 + rank * 3) % 5 - 2).to(dtype)


def reducing(op: object, is_async: bool = True) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]
    options.asyncOp = is_async
    return options


@pytest.mark.parametrize("length", [0, 1, 1000, 200_000])
@pytest.mark.parametrize("is_async", [True, False, None], ids=["async", "waits", "bare"])
def test_all_reduce(groups: Groups, length: int, is_async: bool | None) -> None:
    def run(group: LaneProcessGroup) -> torch.Tensor:
        tensor = values(group.rank(), length)
        op = dist.ReduceOp.SUM
        work = group.allreduce([tensor], op if is_async is None else reducing(op, is_async))
        assert work.wait() and work.is_completed() and work.is_success()
        assert work.result()[0] is tensor
        return tensor

    expected = torch.stack([values(rank, length) for rank in range(len(groups))]).sum(0)
    for result in on_every_rank(groups, run):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_all_reduce_of_sparse_tensors(groups: Groups, op: str) -> None:
    def rows_of(rank: int) -> torch.Tensor:
        """Some that several ranks have, one twice, and none at all on rank 1."""
        rows = torch.tensor([2 * rank, 7, 7, 20]) if rank != 1 else torch.empty(0, dtype=torch.int64)
        return torch.sparse_coo_tensor(
            rows[None], values(rank, len(rows) * 3).view(-1, 3), (50, 3), check_invariants=True
        )

    def run(group: LaneProcessGroup) -> torch.Tensor:
        tensor = rows_of(group.rank())
        work = group.allreduce([tensor], reducing(getattr(dist.ReduceOp, op)))
        assert work.wait() and work.result()[0] is tensor
        return tensor

    expected = torch.stack([rows_of(rank).to_dense() for rank in range(len(groups))]).sum(0)
    for result in on_every_rank(groups, run):
        assert result.is_sparse and torch.equal(result.to_dense(), expected / (len(groups) if op == "AVG" else 1))


def test_sparse_tensors_elsewhere(groups: Groups) -> None:
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(ConfigurationError, match=r"float32 \[3, 3\] is sparse, and only all_reduce takes those"):
        groups[0].broadcast([sparse], BroadcastOptions())
    with pytest.raises(ConfigurationError, match="sparse tensors are summed or averaged, not reduced by MAX"):
        groups[0].allreduce([sparse], reducing(dist.ReduceOp.MAX))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_whose_memory_is_not_their_numbers_are_refused(groups: Groups) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    for tensor, words in ((quantized, r"quint8 .3. is quantized"), (torch.ones(3, device="meta"), "without values")):
        with pytest.raises(ConfigurationError, match=words):
            groups[0].broadcast([tensor], BroadcastOptions())
        with pytest.raises(ConfigurationError, match=words):
            groups[0].allgather([[tensor for _ in groups]], [tensor])


OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda stacked: stacked.sum(0),
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
    "PRODUCT": lambda stacked: stacked.prod(0),
    "AVG": lambda stacked: stacked.sum(0).div(
        len(stacked), rounding_mode=None if stacked.is_floating_point() else "trunc"
    ),
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "waits"])
def test_every_reduction_of_every_dtype(groups: Groups, dtype: torch.dtype, is_async: bool) -> None:
    def run(group: LaneProcessGroup) -> dict[str, torch.Tensor]:
        results = {}
        for name in OPS:
            results[name] = values(group.rank(), 40_000, dtype)
            group.allreduce([results[name]], reducing(getattr(dist.ReduceOp, name), is_async)).wait()
        return results

    stacked = torch.stack([values(rank, 40_000, dtype) for rank in range(len(groups))])
    wide = stacked.to(torch.float32) if dtype.is_floating_point else stacked.to(torch.int64)
    for results in on_every_rank(groups, run):
        for name, reduce in OPS.items():
            assert torch.allclose(results[name], reduce(wide).to(dtype), rtol=1e-3 if dtype.itemsize > 2 else 8e-3), (
                name
            )


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 4e4), (torch.int32, 2**30), (torch.uint8, 200)], ids=str)
def test_a_mean_is_right_where_the_sum_is_too_large(groups: Groups, dtype: torch.dtype, value: float) -> None:
    def run(group: LaneProcessGroup) -> list[torch.Tensor]:
        dense = torch.full((len(groups),), value, dtype=dtype)
        sparse = torch.full((2,), value, dtype=dtype).to_sparse()
        part = torch.empty(1, dtype=dtype)
        group.allreduce([dense], reducing(dist.ReduceOp.AVG)).wait()
        group.allreduce([sparse], reducing(dist.ReduceOp.AVG)).wait()
        options = ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
        group._reduce_scatter_base(part, dense, options).wait()
        return [dense, sparse.to_dense(), part]

    for results in on_every_rank(groups, run):
        for result in results:
            assert result.dtype is dtype and result.tolist() == [value] * len(result)


def test_bfloat16_is_summed_in_float32(groups: Groups) -> None:
    """1 and many halves of its last place: added in bfloat16 one after the other they would all be lost."""

    def run(group: LaneProcessGroup) -> torch.Tensor:
        tensor = torch.full((64,), 256.0 if group.rank() == 0 else 1.0, dtype=torch.bfloat16)
        group.allreduce([tensor]).wait()
        return tensor

    if groups[0].communicator.group.name == "shm":
        expected = torch.tensor(256.0 + len(groups) - 1).to(torch.bfloat16)
        for result in on_every_rank(groups, run):
            assert torch.equal(result, expected.expand(64))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint16], ids=name_of)
@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_bitwise_reductions(groups: Groups, op: str, dtype: torch.dtype) -> None:
    """Also of a dtype that the wire lacks."""

    def run(group: LaneProcessGroup) -> torch.Tensor:
        tensor = torch.tensor([0b1100 + group.rank(), 0b1010, group.rank()], dtype=dtype)
        group.allreduce([tensor], reducing(getattr(dist.ReduceOp, op))).wait()
        return tensor

    function = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op]
    expected = torch.tensor([0b1100, 0b1010, 0])
    for rank in range(1, len(groups)):
        expected = function(expected, torch.tensor([0b1100 + rank, 0b1010, rank]))
    assert all(torch.equal(result, expected.to(dtype)) for result in on_every_rank(groups, run))


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_a_sum_of_scaled_values(groups: Groups, factor: float | torch.Tensor) -> None:
    def run(group: LaneProcessGroup) -> torch.Tensor:
        tensor = torch.full((5,), float(group.rank()))
        group.allreduce([tensor], reducing(_make_nccl_premul_sum(factor))).wait()
        return tensor

    expected = torch.full((5,), 0.5 * sum(range(len(groups))))
    assert all(torch.equal(result, expected) for result in on_every_rank(groups, run))


def test_complex_numbers_are_summed(groups: Groups) -> None:
    def run(group: LaneProcessGroup) -> torch.Tensor:
        tensor = torch.full((3,), complex(1, group.rank()))
        group.allreduce([tensor]).wait()
        return tensor

    expected = torch.full((3,), complex(len(groups), sum(range(len(groups)))))
    assert all(torch.equal(result, expected) for result in on_every_rank(groups, run))


def test_what_cannot_be_reduced_says_so(groups: Groups) -> None:
    with pytest.raises(ConfigurationError, match="there is no BAND of float32: convert the tensor"):
        groups[0].allreduce([torch.ones(1)], reducing(dist.ReduceOp.BAND))
    with pytest.raises(ConfigurationError, match="there is no SUM of float8_e4m3fn"):
        groups[0].allreduce([torch.ones(1).to(torch.float8_e4m3fn)])
    with pytest.raises(ConfigurationError, match="there is no AVG of bool"):
        groups[0].allreduce([torch.ones(1, dtype=torch.bool)], reducing(dist.ReduceOp.AVG))


def test_tensors_that_are_not_contiguous(groups: Groups) -> None:
    def run(group: LaneProcessGroup) -> torch.Tensor:
        tensor = values(group.rank(), 12).view(3, 4).t()
        group.allreduce([tensor]).wait()
        return tensor

    expected = torch.stack([values(rank, 12).view(3, 4).t() for rank in range(len(groups))]).sum(0)
    assert all(torch.equal(result, expected) for result in on_every_rank(groups, run))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bool, torch.complex64, torch.uint16, torch.float8_e5m2], ids=str
)
def test_what_is_only_moved_may_have_any_dtype(groups: Groups, dtype: torch.dtype) -> None:
    size = len(groups)

    def run(group: LaneProcessGroup) -> None:
        def own(rank: int) -> torch.Tensor:
            return values(rank, 6).abs().to(dtype)

        def same(one: torch.Tensor, other: torch.Tensor) -> bool:
            return torch.equal(one.view(torch.uint8), other.view(torch.uint8))

        outs = [torch.zeros(6, dtype=dtype) for _ in range(size)]
        group.allgather([outs], [own(group.rank())]).wait()
        assert all(same(out, own(rank)) for rank, out in enumerate(outs))
        joined = torch.zeros(6 * size, dtype=dtype)
        group._allgather_base(joined, own(group.rank())).wait()
        assert same(joined, torch.cat([own(rank) for rank in range(size)]))
        nothing = [torch.zeros(2 * size, dtype=dtype)[:0:2] for _ in range(size + 1)]  # torch refuses to view its bytes
        group.allgather([nothing[:-1]], nothing[-1:]).wait()
        tensor, options = own(group.rank()), BroadcastOptions()
        options.rootRank = size - 1
        group.broadcast([tensor], options).wait()
        assert same(tensor, own(size - 1))

    on_every_rank(groups, run)


def test_gathers_of_other_lengths(groups: Groups) -> None:
    def run(group: LaneProcessGroup) -> None:
        outs = [torch.zeros(rank, 2) for rank in range(len(groups))]
        group.allgather([outs], [torch.full((group.rank(), 2), float(group.rank()))]).wait()
        assert all(torch.equal(out, torch.full((rank, 2), float(rank))) for rank, out in enumerate(outs))

    on_every_rank(groups, run)


@pytest.mark.parametrize("name", ["SUM", "AVG", "MAX"])
def test_reduce_scatter(groups: Groups, name: str) -> None:
    size = len(groups)
    options = ReduceScatterOptions()
    options.reduceOp = getattr(dist.ReduceOp, name)

    def run(group: LaneProcessGroup) -> None:
        rank = group.rank()
        reduced = OPS[name](torch.stack([values(each, 30_000 * size) for each in range(size)]))
        out = torch.zeros(30_000)
        group._reduce_scatter_base(out, values(rank, 30_000 * size), options).wait()
        assert torch.allclose(out, reduced[rank * 30_000 : (rank + 1) * 30_000])
        starts = [each * (each + 1) // 2 for each in range(size + 1)]  # rank r gets r + 1 elements
        parts = [values(rank, starts[-1])[start : start + each + 1] for each, start in enumerate(starts[:-1])]
        out = torch.zeros(rank + 1)
        group.reduce_scatter([out], [parts], options).wait()
        reduced = OPS[name](torch.stack([values(each, starts[-1]) for each in range(size)]))
        assert torch.allclose(out, reduced[starts[rank] : starts[rank + 1]])

    on_every_rank(groups, run)


def test_reduce_gather_and_scatter_have_a_root(groups: Groups) -> None:
    size = len(groups)
    root = size - 1

    def run(group: LaneProcessGroup) -> None:
        rank = group.rank()
        tensor, reduce = torch.full((4,), float(rank)), ReduceOptions()
        reduce.rootRank = root
        assert group.reduce([tensor], reduce).get_future().wait()[0] is tensor
        assert torch.equal(tensor, torch.full((4,), float(sum(range(size)) if rank == root else rank)))
        outs, gather = [torch.zeros(3) for _ in range(size)], GatherOptions()
        gather.rootRank = root
        group.gather([outs] if rank == root else [], [torch.full((3,), float(rank))], gather).wait()
        assert [float(out[2]) for out in outs] == (
            [float(each) for each in range(size)] if rank == root else [0.0] * size
        )
        out, scatter = torch.zeros(2), ScatterOptions()
        scatter.rootRank = root
        parts = [torch.full((2,), float(each * 10)) for each in range(size)]
        group.scatter([out], [parts] if rank == root else [], scatter).wait()
        assert out.tolist() == [rank * 10.0] * 2

    on_every_rank(groups, run)


def test_all_to_all(groups: Groups) -> None:
    size = len(groups)

    def run(group: LaneProcessGroup) -> None:
        rank = group.rank()
        out = torch.zeros(size * 2, 3)
        group.all_to_all_single(
            out, (torch.arange(size * 2.0) + 100 * rank).repeat_interleave(3).view(-1, 3), [], []
        ).wait()
        assert out[:, 1].tolist() == [100.0 * each + 2 * rank + place for each in range(size) for place in (0, 1)]
        # Rank r sends r + 1 rows to each even rank and none to an odd one.
        takes = rank % 2 == 0
        rows = [rank + 1 if each % 2 == 0 else 0 for each in range(size)]
        out = torch.zeros(sum(range(1, size + 1)) if takes else 0, 2)
        group.alltoall_base(
            out, torch.full((sum(rows), 2), float(rank)), [each + 1 if takes else 0 for each in range(size)], rows
        ).wait()
        assert out[:, 0].tolist() == [float(each) for each in range(size) for _ in range(each + 1) if takes]
        outs = [torch.zeros(each + 1) for each in range(size)]
        group.alltoall(outs, [torch.full((rank + 1,), float(rank)) for _ in range(size)]).wait()
        assert all(torch.equal(each, torch.full((place + 1,), float(place))) for place, each in enumerate(outs))

    on_every_rank(groups, run)


@pytest.mark.parametrize("length", [2, 300_000])
def test_an_all_to_all_may_have_its_result_where_its_input_is(groups: Groups, length: int) -> None:
    def run(group: LaneProcessGroup) -> None:
        ranks = torch.arange(float(group.size()))
        whole, parts = [torch.full((group.size() * length,), float(group.rank())) for _ in range(2)]
        group.all_to_all_single(whole, whole, [], []).wait()
        assert torch.equal(whole, ranks.repeat_interleave(length))
        turned = list(parts.split(length))
        group.alltoall(turned[::-1], turned).wait()
        assert torch.equal(parts, ranks.flip(0).repeat_interleave(length))

    on_every_rank(groups, run)


def test_coalesced_collectives(groups: Groups) -> None:
    size = len(groups)

    def run(group: LaneProcessGroup) -> None:
        tensors = [torch.full((length,), float(group.rank() + 1)) for length in (1, 5, 3)]
        group.allreduce_coalesced(tensors).wait()
        assert all(float(tensor[0]) == sum(range(1, size + 1)) for tensor in tensors)
        outs = [torch.zeros(size), torch.zeros(size * 2)]
        group.all_gather_single_coalesced(outs, [torch.full((n,), float(group.rank())) for n in (1, 2)]).wait()
        assert outs[1].tolist() == [float(rank) for rank in range(size) for _ in range(2)]
        halves = [torch.zeros(1), torch.zeros(2)]
        group.reduce_scatter_single_coalesced(halves, [torch.ones(size), torch.ones(size * 2)]).wait()
        assert [half.tolist() for half in halves] == [[float(size)], [float(size)] * 2]

    on_every_rank(groups, run)


def test_collectives_run_in_the_order_of_the_calls(groups: Groups) -> None:
    def run(group: LaneProcessGroup) -> None:
        tensors = [torch.full((10,), float(number)) for number in range(50)]
        works = [group.allreduce([tensor]) for tensor in tensors]
        group.barrier().wait()
        assert all(work.is_completed() for work in works)
        assert [float(tensor[0]) for tensor in tensors] == [float(number * len(groups)) for number in range(50)]

    on_every_rank(groups, run)


def test_the_future_has_the_tensors(groups: Groups) -> None:
    def run(group: LaneProcessGroup) -> None:
        tensor = torch.ones(4)
        doubled = group.allreduce([tensor]).get_future().then(lambda future: future.value()[0] * 2)
        assert torch.equal(doubled.wait(), torch.full((4,), 2.0 * len(groups)))

    on_every_rank(groups, run)


def test_tensors_that_were_sent_may_be_resized(groups: Groups) -> None:
    """As FSDP1 does with its shards, and PowerSGD with a bucket."""

    def run(group: LaneProcessGroup) -> None:
        total, whole = torch.ones(100), torch.ones(100 * len(groups))
        group.allreduce([total]).wait()
        group.all_gather_single(whole, total).wait()
        for tensor in (total, whole):
            tensor.resize_(100_000)

    on_every_rank(groups, run)


def test_outputs_that_become_those_of_an_autograd_function_meanwhile(groups: Groups) -> None:
    """As those of torch's functional collectives with a gradient do, which return before they are waited for."""
    size = len(groups)

    def run(group: LaneProcessGroup) -> None:
        may_begin = threading.Event()
        group.communicator.submit(lambda: may_begin.wait(60.0))
        with torch.no_grad():
            gathered, total, strided = torch.zeros(2 * size), torch.ones(2), torch.ones(3, 2).t()
            works = [group.all_gather_single(gathered, total.clone()), group.allreduce([total, strided])]
        for output in (gathered, total, strided):
            output.requires_grad_()
        may_begin.set()
        assert all(work.wait() for work in works)
        assert gathered.tolist() == [1.0] * 2 * size and total.tolist() == [size] * 2
        assert strided.tolist() == [[size] * 3] * 2 and gathered.is_leaf and total.is_leaf and strided.is_leaf

    on_every_rank(groups, run)


def test_what_is_chained_to_a_future_may_call_collectives(groups: Groups) -> None:
    """As PowerSGD's hook does, in the thread that completes the future, where a later call may be queued by now."""

    def run(group: LaneProcessGroup) -> None:
        total, more, later, may_end = torch.ones(2), torch.ones(2), torch.ones(2), threading.Event()

        def chained(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            group.allreduce([more], reducing(dist.ReduceOp.SUM, is_async=False)).wait()
            again: torch.Tensor = group.allreduce([future.value()[0].clone()]).get_future().wait()[0]
            return again + more

        group.communicator.submit(lambda: may_end.wait(60.0))
        ends = group.allreduce([total]).get_future().then(chained)
        work = group.allreduce([later])
        may_end.set()
        size = group.size()
        assert ends.wait().tolist() == [size * size + size] * 2
        work.wait()
        assert later.tolist() == [size] * 2

    on_every_rank(groups, run)


def test_what_does_not_fit_is_refused_before_anything_is_sent(groups: Groups) -> None:
    size = len(groups)
    with pytest.raises(
        ConfigurationError, match=rf"expected {size} × float32 .2. in all_gather of {size} ranks, got float32 .1."
    ):
        groups[0].all_gather_single(torch.zeros(1), torch.zeros(2))
    with pytest.raises(ConfigurationError, match=f"expected {size} outputs, one for each rank, got 7"):
        groups[0].allgather([[torch.zeros(1)] * 7], [torch.zeros(1)])
    with pytest.raises(ConfigurationError, match="expected split sizes that add up to 3 rows"):
        groups[0].all_to_all_single(torch.zeros(3), torch.zeros(3), [1] * size, [2] * size)
    for length in (0, 3 * size):  # one element for each rank would be repeated to fill three
        with pytest.raises(ConfigurationError, match=rf"expected tensors of float32 .{size}., got one of .*{length}"):
            groups[0].all_to_all_single(torch.zeros(length), torch.zeros(size), [], [])


def test_a_rank_that_is_not_there_is_refused_and_the_group_goes_on(groups: Groups) -> None:
    broadcasting, reduction, gathering, scattering = (
        BroadcastOptions(),
        ReduceOptions(),
        GatherOptions(),
        ScatterOptions(),
    )
    broadcasting.rootRank = reduction.rootRank = gathering.rootRank = scattering.rootRank = 7
    one = torch.ones(1)
    calls: list[Callable[[], object]] = [
        lambda: groups[0].broadcast([one], broadcasting),
        lambda: groups[0].reduce([one], reduction),
        lambda: groups[0].gather([], [one], gathering),
        lambda: groups[0].scatter([one], [], scattering),
        lambda: groups[0].send([one], 7, 0),
        lambda: groups[0].recv([one], -1, 0),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match=f"it has the ranks 0 to {len(groups) - 1}"):
            call()
    with pytest.raises(ConfigurationError, match="rank 0 cannot send to or receive from itself"):
        groups[0].send([one], 0, 0)
    if len(groups) == 1:
        with pytest.raises(ConfigurationError, match="there is no other to receive from"):
            groups[0].recv_anysource([one], 0)
    on_every_rank(groups, lambda group: group.barrier().wait())


@pytest.mark.parametrize("tag", [-2, 1 << 31, 1.5])
def test_a_tag_that_cannot_travel_is_refused(groups: Groups, tag: int) -> None:
    with pytest.raises(ConfigurationError, match=f"expected a tag from 0 to 2,147,483,647, got {tag}"):
        groups[0].recv_anysource([torch.ones(1)], tag)
    if len(groups) > 1:
        with pytest.raises(ConfigurationError, match="expected a tag"):
            groups[0].send([torch.ones(1)], 1, tag)


def test_messages(groups: Groups) -> None:
    size = len(groups)
    if size == 1:
        pytest.skip("nobody to send to")

    def run(group: LaneProcessGroup) -> None:
        rank = group.rank()
        after, before = (rank + 1) % size, (rank - 1) % size
        # Large ones both ways at once; by tag, not in the order in which they were sent.
        big, small = torch.zeros(300_000), torch.zeros(2, dtype=torch.int64)
        works = [
            group.send([torch.full((300_000,), float(rank))], after, 3),
            group.send([torch.tensor([rank, 7])], after, 4),
            group.recv([small], before, 4),
            group.recv([big], before, 3),
        ]
        assert all(work.wait() for work in works)
        assert small.tolist() == [before, 7] and torch.equal(big, torch.full((300_000,), float(before)))
        if rank == 0:
            got = torch.zeros(1)
            sources = []
            for _ in range(1, size):
                work = group.recv_anysource([got], 5)
                work.wait()
                sources.append(work.source_rank())
                assert float(got) == sources[-1]
            assert sorted(sources) == list(range(1, size))
        else:
            group.send([torch.tensor([float(rank)])], 0, 5).wait()

    on_every_rank(groups, run)


def test_a_message_of_another_length_names_both(groups: Groups) -> None:
    if len(groups) == 1:
        pytest.skip("nobody to send to")
    groups[0].send([torch.zeros(3)], 1, 9).wait()
    with pytest.raises(CollectiveError, match=r"^rank 0 sent float32 .3. with tag 9, rank 1 expects float32 .5."):
        groups[1].recv([torch.zeros(5)], 0, 9).wait()


@pytest.mark.parametrize("is_early", [True, False])
def test_a_message_of_another_dtype_of_as_many_bytes_is_refused(groups: Groups, is_early: bool) -> None:
    """Also of dtypes that travel as their bytes."""
    if len(groups) == 1:
        pytest.skip("nobody to send to")
    sent, into = torch.tensor([1.0, 2.0]), torch.zeros(2)
    for of, wanted in ((torch.float8_e5m2, torch.float8_e4m3fn), (torch.float8_e5m2, torch.uint8)):
        receive = None if is_early else groups[1].recv([into.to(wanted)], 0, 8)
        groups[0].send([sent.to(of)], 1, 8).wait()
        groups[0].send([sent.to(of)], 1, 9).wait()
        same = into.to(of)
        groups[1].recv([same], 0, 9).wait()
        assert torch.equal(same.float(), sent)  # and the one before has arrived
        with pytest.raises(
            CollectiveError, match=f"sent float8_e5m2 .2. with tag 8, rank 1 expects {name_of(wanted)} "
        ):
            (receive or groups[1].recv([into.to(wanted)], 0, 8)).wait()


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.uint8])
def test_a_message_may_have_several_frames(
    groups: Groups, dtype: torch.dtype, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(groups) == 1:
        pytest.skip("nobody to send to")
    monkeypatch.setattr(messages, "_FRAME_BYTES", 1000)
    sent, into = torch.arange(3000).to(dtype), torch.zeros(3000, dtype=dtype)
    receive = None if is_early else groups[1].recv([into], 0, 8)
    work = groups[0].send([sent], 1, 8)
    (receive or groups[1].recv([into], 0, 8)).wait()
    work.wait()
    assert torch.equal(into, sent)


def test_memory_of_the_group(groups: Groups) -> None:
    """As FSDP2 uses it: taken, filled, gathered, let go; also where one rank holds on to what it has."""
    length, device = 200_000, torch.device("cpu")

    def run(group: LaneProcessGroup) -> None:
        size, rank = group.size(), group.rank()
        held, places = [], set()
        for turn in range(9):
            whole = group.allocate_tensor(size * length, dtype=torch.float32, device=device)
            own = whole.view(size, length)[rank]
            own.fill_(turn + rank)
            group.all_gather_single(whole, own).wait()
            assert torch.equal(whole, torch.arange(turn, turn + float(size)).repeat_interleave(length))
            group.reduce_scatter_single(out := torch.empty(length), whole).wait()
            assert bool((out == (turn + rank) * size).all())
            places.add(whole.data_ptr())
            if turn == 4 and rank == 0:
                held.append(whole)
            del whole, own
        assert group.supports_tensor_alloc(device) and len(places) <= 5
        assert not held or torch.equal(held[0][:length], torch.full((length,), 4.0))
        assert group.allocate_tensor(3, dtype=torch.bfloat16, device=device).shape == (3,)

    on_every_rank(groups, run)


def test_memory_goes_with_its_group_though_that_holds_some_of_it() -> None:
    """As it does by the error of an operation, whose traceback has the tensors."""
    memory = CommMemory(lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
    vars(memory)["error"] = memory.allocate(MIN_BYTES, torch.uint8)
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "waits"])
@pytest.mark.parametrize("mode", [True, False], ids=["inside", "outside"])
def test_inference_tensors(groups: Groups, mode: bool, is_async: bool) -> None:
    size = len(groups)

    def run(group: LaneProcessGroup) -> None:
        rank = group.rank()
        with torch.inference_mode():
            tensor, before = torch.ones(5), group.allreduce([torch.ones(100_000)])
            strided, came = torch.ones(3, 2).t(), torch.zeros(200_000)
        with torch.inference_mode(mode):
            for each in (tensor, strided):
                group.allreduce([each], reducing(dist.ReduceOp.SUM, is_async)).wait()
            before.wait()
            if size > 1:
                # Another thread writes it, as the message comes or when it is asked for.
                receives = [group.recv([part], (rank - 1) % size, 11) for part in came.split(100_000)]
                sent = [group.send([torch.full((100_000,), number)], (rank + 1) % size, 11) for number in (1.0, 2.0)]
                assert all(work.wait() for work in receives + sent)
                assert torch.equal(came, torch.tensor([1.0, 2.0]).repeat_interleave(100_000))
            group.monitored_barrier()
        assert tensor.tolist() == [size] * 5 and strided.tolist() == [[size] * 3] * 2

    on_every_rank(groups, run)


def test_a_tensor_that_shares_memory_with_itself_is_refused_as_a_result(groups: Groups) -> None:
    size, expanded = len(groups), torch.ones(1).expand(3)
    with pytest.raises(ConfigurationError, match=r"float32 .3. share memory.*give tensor.contiguous"):
        groups[0].allreduce([expanded])
    if size > 1:
        with pytest.raises(ConfigurationError, match=r"float32 .3. share memory"):
            groups[0].recv([expanded], 1, 12)
    outs = [[torch.zeros(3) for _ in groups] for _ in groups]
    on_every_rank(groups, lambda group: group.allgather([outs[group.rank()]], [expanded]).wait())
    assert all(out.tolist() == [1.0] * 3 for own in outs for out in own)


def test_a_tensor_whose_memory_has_other_numbers(groups: Groups) -> None:
    """Of a negated view, as the imaginary part of a conjugate is one."""

    def run(group: LaneProcessGroup) -> None:
        tensor = torch._neg_view(torch.ones(3))
        outs = [torch.zeros(3) for _ in groups]
        group.allgather([outs], [tensor]).wait()
        assert all(out.tolist() == [-1.0] * 3 for out in outs)
        group.allreduce([tensor]).wait()
        assert tensor.tolist() == [-float(len(groups))] * 3
        conjugate = torch.complex(torch.ones(3), torch.ones(3)).conj()
        group.allreduce([conjugate]).wait()
        assert conjugate.tolist() == [complex(len(groups), -len(groups))] * 3

    on_every_rank(groups, run)


def test_a_part_of_a_group(groups: Groups) -> None:
    """Beside the group itself, whose collectives go on."""
    if len(groups) != 3:
        pytest.skip("a part of three")

    def run(group: LaneProcessGroup) -> None:
        tensor, part = torch.ones(2), group.split_group([0, 2], group_name="ends")
        work = group.allreduce([tensor])
        if part is not None:
            total = torch.tensor(float(group.rank()))
            part.allreduce([total]).wait()
            assert (
                float(total) == 2.0
                and part.group_name == "ends"
                and (part.rank(), part.size()) == (group.rank() // 2, 2)
            )
            part.shutdown()
        work.wait()
        assert (part is None) == (group.rank() == 1) and float(tensor[0]) == 3.0

    on_every_rank(groups, run)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_profile_shows_every_operation_of_its_thread(groups: Groups, is_async: bool) -> None:
    def run(group: LaneProcessGroup) -> None:
        group.allreduce([torch.ones(10)], reducing(dist.ReduceOp.SUM, is_async)).wait()
        group.allgather([[torch.ones(2) for _ in range(group.size())]], [torch.ones(2)]).wait()
        if group.size() > 1:
            sent = group.send([torch.ones(3)], (group.rank() + 1) % group.size(), 5)
            group.recv([torch.ones(3)], (group.rank() - 1) % group.size(), 5).wait()
            sent.wait()

    def observed(group: LaneProcessGroup) -> list[str]:
        if group.rank() != 0:  # one profiler at a time in a process
            run(group)
            return []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run(group)
        return sorted(event.name for event in profile.events() if event.name.startswith("stratagem:"))

    names = ["all_gather", "all_reduce", "recv", "send"][: 4 if len(groups) > 1 else 2]
    assert on_every_rank(groups, observed)[0] == [f"stratagem:{name}" for name in names]


def test_an_event_ends_before_anybody_hears_of_it_and_before_its_profiler(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end was written into memory that the profiler had given back: the process crashed some time later."""
    if len(groups) == 1:
        pytest.skip("nothing is under way")
    still_under_way: list[int] = []
    end = handles._end

    def late(*events: torch.futures.Future[None]) -> None:
        time.sleep(0.05)
        end(*events)

    monkeypatch.setattr(handles, "_end", late)

    def run(group: LaneProcessGroup) -> None:
        if group.rank() == 0:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                group.allreduce([torch.ones(10)], reducing(dist.ReduceOp.SUM, True)).wait()
                still_under_way.append(len(handles._under_way))
                coming = group.recv([torch.ones(3)], 1, 5)
                still_under_way.append(len(handles._under_way))
            still_under_way.append(len(handles._under_way))
            group.barrier().wait()
            coming.wait()
        else:
            group.allreduce([torch.ones(10)], reducing(dist.ReduceOp.SUM, True)).wait()
            group.barrier().wait()
            if group.rank() == 1:
                group.send([torch.ones(3)], 0, 5).wait()

    on_every_rank(groups, run)
    assert still_under_way == [0, 1, 0]
