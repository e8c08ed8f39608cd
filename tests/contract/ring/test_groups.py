"""One suite for every kind of group, ranks in threads."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError
from stratagem.worker.ring import host_group
from stratagem.worker.ring.group import Group, Tag
from stratagem.worker.ring.host_group import HostGroup
from stratagem.worker.ring.schedule import cut
from tests.contract.ring.groups import FACTORIES, connected, in_threads, outcomes_of
from tests.polling import until

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
REDUCTIONS: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
LENGTHS = (0, 1, 3, 1000, 10_001)
"""Nothing, fewer elements than ranks, one message, many uneven chunks."""
DEADLINE_S = 10.0


class Rank:
    """A group with the tags of its calls counted."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank, self.size = group.rank, group.size
        self._ordinal = 0

    def tag(self, fingerprint: int = 7) -> Tag:
        self._ordinal += 1
        return Tag(self._ordinal, fingerprint)

    def all_reduce(self, source: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> torch.Tensor:
        out = torch.full_like(source, 77)
        self.group.all_reduce(source, out, op, self.tag())
        return out


def on_every_rank(groups: Sequence[Group], work: Callable[[Rank], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    return in_threads([functools.partial(work, Rank(group)) for group in groups])


def values(rank: int, length: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What a rank contributes: whole numbers whose sums and products are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 4, (length,), generator=generator).to(dtype)


def reduced(size: int, length: int, dtype: torch.dtype, op: ReduceOp, seed: int = 0) -> torch.Tensor:
    return functools.reduce(REDUCTIONS[op], [values(rank, length, dtype, seed) for rank in range(size)])


@pytest.mark.parametrize("op", REDUCTIONS, ids=lambda op: op.value)
def test_all_reduce(groups: Sequence[Group], op: ReduceOp) -> None:
    dtypes = DTYPES if op is ReduceOp.SUM else [torch.float32, torch.bfloat16, torch.int64]
    cases = [(dtype, length) for dtype in dtypes for length in LENGTHS]

    def work(rank: Rank) -> list[torch.Tensor]:
        outs = []
        for dtype, length in cases:
            source = values(rank.rank, length, dtype)
            before = source.clone()
            outs.append(rank.all_reduce(source, op))
            assert torch.equal(source, before), "the source was written to"
        return outs

    for outs in on_every_rank(groups, work):
        for out, (dtype, length) in zip(outs, cases, strict=True):
            assert torch.equal(out, reduced(len(groups), length, dtype, op)), (dtype, length)


def test_a_first_call_in_inference_mode(groups: Sequence[Group]) -> None:
    """What a group keeps serves calls outside of that mode too."""
    lengths = (3, 10_001)

    def work(rank: Rank) -> list[torch.Tensor]:
        outs = []
        for is_inference in (True, False):
            with torch.inference_mode(is_inference):
                outs += [rank.all_reduce(values(rank.rank, length, torch.float32)) for length in lengths]
        return outs

    for outs in on_every_rank(groups, work):
        for out, length in zip(outs, lengths * 2, strict=True):
            assert torch.equal(out, reduced(len(groups), length, torch.float32, ReduceOp.SUM))


def test_every_rank_has_the_same_bits(groups: Sequence[Group]) -> None:
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    sources = torch.randn(len(groups), 9011, generator=torch.Generator().manual_seed(3))

    def work(rank: Rank) -> list[torch.Tensor]:
        return [rank.all_reduce(sources[rank.rank, :length].to(dtype)) for dtype in dtypes for length in (9011, 501)]

    outs_of_ranks = on_every_rank(groups, work)
    for outs in outs_of_ranks:
        assert all(torch.equal(mine, first) for mine, first in zip(outs, outs_of_ranks[0], strict=True))
    for dtype, out in zip(dtypes, outs_of_ranks[0][::2], strict=True):
        expected = sources.to(dtype).double().sum(0)
        # Each of at most N-1 roundings is off by half a unit in the last place of a partial sum.
        bound = len(groups) * torch.finfo(dtype).eps * sources.abs().sum(0)
        assert ((out.double() - expected).abs() <= bound).all(), dtype


def test_ranks_agree_on_the_sign_of_zero(groups: Sequence[Group]) -> None:
    """Which of two equal values a minimum is, and which of two NaN a sum is, depends on their order."""
    negative_nan = torch.tensor([0xFFC00001 - (1 << 32)], dtype=torch.int32).view(torch.float32)

    def work(rank: Rank) -> list[torch.Tensor]:
        outs = []
        for length in (40, 10_000):
            zeros = torch.full((length,), -0.0 if rank.rank % 2 else 0.0)
            nans = negative_nan.repeat(length) if rank.rank % 2 else torch.full((length,), torch.nan)
            outs.extend([rank.all_reduce(zeros, ReduceOp.MIN), rank.all_reduce(zeros, ReduceOp.MAX)])
            outs.append(rank.all_reduce(nans))
        return outs

    bits = [[out.view(torch.int32) for out in outs] for outs in on_every_rank(groups, work)]
    for outs in bits:
        assert all(torch.equal(mine, first) for mine, first in zip(outs, bits[0], strict=True))


def test_out_may_be_the_source(groups: Sequence[Group]) -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        tensors = [values(rank.rank, length, torch.float32) for length in LENGTHS]
        for tensor in tensors:
            rank.group.all_reduce(tensor, tensor, ReduceOp.SUM, rank.tag())
        return tensors

    for tensors in on_every_rank(groups, work):
        for tensor, length in zip(tensors, LENGTHS, strict=True):
            assert torch.equal(tensor, reduced(len(groups), length, torch.float32, ReduceOp.SUM))


def test_a_long_tensor(groups: Sequence[Group]) -> None:
    length = 300_007

    def work(rank: Rank) -> list[torch.Tensor]:
        return [rank.all_reduce(values(rank.rank, length, torch.float32))]

    for (out,) in on_every_rank(groups, work):
        assert torch.equal(out, reduced(len(groups), length, torch.float32, ReduceOp.SUM))


def test_all_reduce_in_an_arena(groups: Sequence[Group]) -> None:
    parts = [(0, 100), (128, 50_000), (50_176, 50_176)]  # elements of float32, at the same places on every rank

    def work(rank: Rank) -> list[torch.Tensor]:
        arena = rank.group.arena(4 * 50_176, rank.tag())
        assert arena.source.dtype is arena.result.dtype is torch.uint8
        assert arena.source.numel() == arena.result.numel() == 4 * 50_176
        source, result = arena.source.view(torch.float32), arena.result.view(torch.float32)
        for number, (start, stop) in enumerate(parts * 2):
            source[start:stop] = values(rank.rank, stop - start, torch.float32, number)
            rank.group.all_reduce(source[start:stop], result[start:stop], ReduceOp.SUM, rank.tag())
            assert torch.equal(source[start:stop], values(rank.rank, stop - start, torch.float32, number))
        return [result[start:stop].clone() for start, stop in parts]

    for outs in on_every_rank(groups, work):
        for number, (out, (start, stop)) in enumerate(zip(outs, parts, strict=True), len(parts)):
            assert torch.equal(out, reduced(len(groups), stop - start, torch.float32, ReduceOp.SUM, number))


def test_all_reduce_in_place_in_an_arena(groups: Sequence[Group]) -> None:
    """Half the memory, the same bits; the last one, too short to be cut, as well as the long one."""
    parts = [(0, 100), (128, 300_007), (300_032, 300_035)]

    def work(rank: Rank) -> list[torch.Tensor]:
        arena = rank.group.arena(4 * 300_035, rank.tag(), in_place=True)
        assert arena.source.data_ptr() == arena.result.data_ptr()
        memory = arena.source.view(torch.float32)
        for number, (start, stop) in enumerate(parts):
            memory[start:stop] = values(rank.rank, stop - start, torch.float32, number)
            rank.group.all_reduce(memory[start:stop], memory[start:stop], ReduceOp.SUM, rank.tag())
        return [memory[start:stop].clone() for start, stop in parts]

    for outs in on_every_rank(groups, work):
        for number, (out, (start, stop)) in enumerate(zip(outs, parts, strict=True)):
            assert torch.equal(out, reduced(len(groups), stop - start, torch.float32, ReduceOp.SUM, number))


@pytest.mark.parametrize("op", REDUCTIONS, ids=lambda op: op.value)
def test_reduce_scatter(groups: Sequence[Group], op: ReduceOp) -> None:
    cases = [(dtype, length) for dtype in (torch.float32, torch.bfloat16, torch.int64) for length in LENGTHS]

    def work(rank: Rank) -> list[torch.Tensor]:
        outs = []
        for dtype, length in cases:
            source = values(rank.rank, length, dtype)
            start, stop = cut(length, rank.size)[rank.rank]
            outs.append(torch.full((stop - start,), 77, dtype=dtype))
            rank.group.reduce_scatter(source, outs[-1], op, rank.tag())
            assert torch.equal(source, values(rank.rank, length, dtype)), "the source was written to"
        return outs

    for number, outs in enumerate(on_every_rank(groups, work)):
        for out, (dtype, length) in zip(outs, cases, strict=True):
            start, stop = cut(length, len(groups))[number]
            assert torch.equal(out, reduced(len(groups), length, dtype, op)[start:stop]), (dtype, length)


@pytest.fixture
def a_quarter_of_the_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_group, "_SLOT_BYTES", 3 << 18)


@pytest.mark.parametrize("elsewhere", ["nowhere", "rank 0 at another place", "the last rank outside"])
def test_reduce_scatter_and_all_gather_in_an_arena(
    a_quarter_of_the_scratch_memory: None, groups: Sequence[Group], elsewhere: str
) -> None:
    """Longer than what passes through scratch memory at once. Where a rank has its tensor somewhere else, all copy."""
    each = 270_003 if isinstance(groups[0], HostGroup) else 25_003  # a ring over lanes has none, and takes long
    length, gap = each * len(groups) + 1, 640

    def work(rank: Rank) -> list[torch.Tensor]:
        memory = rank.group.arena(4 * (length + gap), rank.tag(), in_place=True).source.view(torch.float32)
        begin = gap if elsewhere == "rank 0 at another place" and rank.rank == 0 else 0
        whole = memory[begin : begin + length]
        if elsewhere == "the last rank outside" and rank.rank == rank.size - 1:
            whole = torch.empty(length)
        whole.copy_(values(rank.rank, length, torch.float32))
        slices = [whole[start:stop] for start, stop in cut(length, rank.size)]
        scattered = torch.full_like(slices[rank.rank], 77)
        rank.group.reduce_scatter(whole, scattered, ReduceOp.SUM, rank.tag())
        assert torch.equal(whole, values(rank.rank, length, torch.float32)), "the source was written to"
        whole.fill_(77)
        rank.group.all_gather(scattered, slices, rank.tag())
        first = whole.clone()
        slices[rank.rank].fill_(rank.rank)  # and what is gathered already at its place
        rank.group.all_gather(slices[rank.rank], slices, rank.tag())
        return [first, *slices]

    for first, *slices in on_every_rank(groups, work):
        assert torch.equal(first, reduced(len(groups), length, torch.float32, ReduceOp.SUM))
        assert all(bool((part == number).all()) for number, part in enumerate(slices))


def test_all_gather_of_differing_lengths(groups: Sequence[Group]) -> None:
    lengths_of_ranks = [[5, 0, 3000, 1], [0, 0, 0, 0], [1, 1, 1, 1], [7000, 3, 0, 2000]]
    rounds = [(dtype, lengths) for dtype in DTYPES for lengths in lengths_of_ranks]

    def work(rank: Rank) -> list[torch.Tensor]:
        gathered = []
        for number, (dtype, lengths) in enumerate(rounds):
            outs = [torch.full((length,), 77, dtype=dtype) for length in lengths[: rank.size]]
            source = values(rank.rank, lengths[rank.rank], dtype, number)
            rank.group.all_gather(source, outs, rank.tag())
            gathered.extend(outs)
        return gathered

    expected = [
        values(rank, lengths[rank], dtype, number)
        for number, (dtype, lengths) in enumerate(rounds)
        for rank in range(len(groups))
    ]
    for outs in on_every_rank(groups, work):
        assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))


def test_broadcast_from_every_root(groups: Sequence[Group]) -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        buffers = []
        for root in range(rank.size):
            for length in LENGTHS:
                buffers.append(values(rank.rank, length, torch.float32))
                rank.group.broadcast(buffers[-1], root, rank.tag())
        return buffers

    expected = [values(root, length, torch.float32) for root in range(len(groups)) for length in LENGTHS]
    for buffers in on_every_rank(groups, work):
        assert all(torch.equal(buffer, right) for buffer, right in zip(buffers, expected, strict=True))


def test_all_to_all_of_differing_lengths(groups: Sequence[Group]) -> None:
    def lengths(number: int, sender: int, receiver: int) -> int:
        return [(17 * sender + 5 * receiver) % 7, 3000 * sender * receiver, 0][number]

    def sent(number: int, sender: int, receiver: int) -> torch.Tensor:
        return values(10 * sender + receiver, lengths(number, sender, receiver), torch.int64)

    def work(rank: Rank) -> list[torch.Tensor]:
        received = []
        for number in range(3):
            sources = [sent(number, rank.rank, peer) for peer in range(rank.size)]
            outs = [torch.full((lengths(number, peer, rank.rank),), 77) for peer in range(rank.size)]
            rank.group.all_to_all(sources, outs, rank.tag())
            received.extend(outs)
        return received

    for number, outs in enumerate(on_every_rank(groups, work)):
        expected = [sent(which, peer, number) for which in range(3) for peer in range(len(groups))]
        assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))


def test_nobody_leaves_a_barrier_before_everybody_has_come(groups: Sequence[Group]) -> None:
    here: list[int] = []

    def work(rank: Rank) -> list[torch.Tensor]:
        for number in range(1, 21):
            here.append(rank.rank)
            rank.group.barrier(rank.tag())
            assert here.count((rank.rank + 1) % rank.size) >= number
            assert len(here) >= number * rank.size
        return []

    on_every_rank(groups, work)


def test_two_hundred_collectives(groups: Sequence[Group]) -> None:
    def work(rank: Rank) -> list[torch.Tensor]:
        script = random.Random(5)  # the same on every rank
        results = []
        for number in range(200):
            length = int(script.choice([1, 10, 300, 5000]) * script.random())
            source = values(rank.rank, length, script.choice([torch.float32, torch.int64]), number)
            what = script.choice(["all_reduce", "all_reduce", "gather", "broadcast", "scatter", "barrier"])
            if what == "all_reduce":
                results.append(rank.all_reduce(source, script.choice(list(REDUCTIONS))))
            elif what == "gather":
                outs = [torch.empty_like(source) for _ in range(rank.size)]
                rank.group.all_gather(source, outs, rank.tag())
                results.append(torch.cat(outs))
            elif what == "broadcast":
                rank.group.broadcast(source, script.randrange(rank.size), rank.tag())
                results.append(source)
            elif what == "scatter":
                start, stop = cut(length, rank.size)[rank.rank]
                rank.group.reduce_scatter(source, source.new_empty(stop - start), ReduceOp.SUM, rank.tag())
            else:
                rank.group.barrier(rank.tag())
        return results

    first, *others = on_every_rank(groups, work)
    assert len(first) > 50
    for results in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results, first, strict=True))


# -- failures -------------------------------------------------------------------------------------------------------

several = pytest.mark.parametrize("groups", [(kind, size) for kind in FACTORIES for size in (2, 3)], indirect=True)


def all_reduce(group: Group, tag: Tag, length: int = 20_000) -> None:
    group.all_reduce(torch.ones(length), torch.empty(length), ReduceOp.SUM, tag)


def assert_broken(groups: Sequence[Group], errors: Sequence[BaseException | None]) -> None:
    """Each rank's error is a CollectiveError, and everything it is asked for raises that same error."""
    for group, error in zip(groups, errors, strict=True):
        assert isinstance(error, CollectiveError), error
        for call in (
            lambda group=group: all_reduce(group, Tag(90, 1)),
            lambda group=group: group.barrier(Tag(91, 1)),
            lambda group=group: group.arena(64, Tag(92, 1)),
            lambda group=group: group.broadcast(torch.ones(3), 0, Tag(93, 1)),
        ):
            with pytest.raises(CollectiveError) as again:
                call()
            assert (str(again.value), again.value.rank) == (str(error), error.rank)
        assert group.waiting_on() is None


@several
@pytest.mark.parametrize("length", [10, 20_000])
@pytest.mark.parametrize("odd", [Tag(2, 7), Tag(1, 8)], ids=["ordinal", "fingerprint"])
def test_a_rank_in_another_collective(groups: Sequence[Group], odd: Tag, length: int) -> None:
    tags = [odd, *[Tag(1, 7)] * (len(groups) - 1)]
    outcomes = outcomes_of([functools.partial(all_reduce, *pair, length) for pair in zip(groups, tags, strict=True)])
    assert_broken(groups, [outcome.error for outcome in outcomes])
    if len(groups) == 2:
        assert [getattr(outcome.error, "rank", None) for outcome in outcomes] == [1, 0]


@several
def test_a_rank_that_reduces_something_else(groups: Sequence[Group]) -> None:
    calls = [functools.partial(all_reduce, group, Tag(2, 8), 10_000) for group in groups[1:]]
    outcomes = outcomes_of([functools.partial(all_reduce, groups[0], Tag(1, 7), 20_000), *calls])
    assert_broken(groups, [outcome.error for outcome in outcomes])


@several
def test_a_rank_that_closes(groups: Sequence[Group]) -> None:
    def work(group: Group) -> None:
        all_reduce(group, Tag(1, 7))
        if group.rank == 0:
            group.close("no more")
        all_reduce(group, Tag(2, 7))

    outcomes = outcomes_of([functools.partial(work, group) for group in groups])
    assert_broken(groups, [outcome.error for outcome in outcomes])
    assert str(outcomes[0].error) == "no more"
    if len(groups) == 2:
        assert getattr(outcomes[1].error, "rank", None) == 0


@several
def test_close_wakes_a_call_that_waits(groups: Sequence[Group]) -> None:
    outcomes = []
    waiting = threading.Thread(
        target=lambda: outcomes.extend(outcomes_of([functools.partial(all_reduce, groups[0], Tag(1, 7))]))
    )
    waiting.start()
    until(lambda: groups[0].waiting_on() is not None)
    groups[0].close("the user has had enough")
    waiting.join(DEADLINE_S)
    assert str(outcomes[0].error) == "the user has had enough"


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("length", [10, pytest.param(20_000, marks=pytest.mark.thorough)])
def test_a_rank_that_stands_still(kind: str, length: int) -> None:
    with connected(kind, 3, timeout_s=2.0) as groups:
        seen: set[int] = set()
        outcomes = []
        calls = [functools.partial(all_reduce, group, Tag(1, 7), length) for group in groups[:2]]
        waiting = threading.Thread(target=lambda: outcomes.extend(outcomes_of(calls)))
        waiting.start()

        def silent_rank_is_waited_for() -> bool:
            seen.update(rank for group in groups if (rank := group.waiting_on()) is not None)
            return 2 in seen

        until(silent_rank_is_waited_for)
        waiting.join(DEADLINE_S)
        assert_broken(groups[:2], [outcome.error for outcome in outcomes])
        assert 2 in [getattr(outcome.error, "rank", None) for outcome in outcomes]
