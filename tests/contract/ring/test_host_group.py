"""What only the shared-memory group promises: nothing copied in an arena, hazards of fast ranks, refusals, ends.

What every group promises is in test_groups.py. Sizes are made small here, so that few elements take every path.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError, SegmentError
from stratagem.rpc import socket_lane
from stratagem.rpc.segment import Segment
from stratagem.worker.reduction.compression import GradientCompression, compression_named
from stratagem.worker.ring import host_group, host_signals
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.group import Arena, Reduction, Tag
from stratagem.worker.ring.host_cells import NUM_BYTES, Cells
from stratagem.worker.ring.host_group import HostGroup
from stratagem.worker.ring.host_memory import Scratch
from stratagem.worker.ring.host_signals import Signals
from stratagem.worker.ring.schedule import cut
from tests.contract.ring.groups import Outcome, host_groups, in_threads, outcomes_of
from tests.file_sizes import file_size_limit
from tests.polling import until
from tests.thorough import all_but_each_third
from tests.unit.reduction.reducing import reducing, weight_of
from tests.unit.rpc.test_segment import num_mappings

SHORT, COPIED, SLOT, CHUNK = 1024, 4352, 6144, 512
LENGTHS = (0, 1, 5, 64, 257, 1000, 4001)
"""Elements of float32: nothing, one short round, one piece, several uneven pieces and chunks."""
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DEADLINE_S = 10.0
FUNCTIONS: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_group, "_SHORT_BYTES", SHORT)
    monkeypatch.setattr(host_group, "_COPIED_BYTES", COPIED)
    monkeypatch.setattr(host_group, "_SLOT_BYTES", SLOT)
    monkeypatch.setattr(host_group, "_CHUNK_BYTES", CHUNK)


@contextlib.contextmanager
def connected(size: int, timeout_s: float = 20.0) -> Iterator[list[HostGroup]]:
    with contextlib.ExitStack() as stack:
        groups = host_groups(size, stack, timeout_s)
        for group in groups:
            stack.callback(group.close, "the test is over")
        yield groups


def on_every_rank(groups: Sequence[HostGroup], work: Callable[[HostGroup], object]) -> None:
    in_threads([functools.partial(work, group) for group in groups])


def values(rank: int, length: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(length, generator=generator) * 3).to(dtype)


def reduced(sources: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """In rank order; half precision in float32, rounded once."""
    dtype = sources[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return functools.reduce(FUNCTIONS[op], [source.to(wide) for source in sources]).to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def make_arena(group: HostGroup, num_bytes: int, ordinal: int = 1) -> Arena:
    return group.arena(num_bytes, Tag(ordinal, 1))


# -- every way to reduce gives the same bits ------------------------------------------------------------------------

Place = Callable[[Arena, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _into(memory: torch.Tensor, start: int, value: torch.Tensor) -> torch.Tensor:
    view = memory[start : start + value.numel() * value.itemsize].view(value.dtype)
    view.copy_(value)
    return view


PLACES: dict[str, Place] = {
    "plain": lambda arena, value: (value.clone(), torch.full_like(value, 7)),
    "plain, in place": lambda arena, value: (tensor := value.clone(), tensor),
    "arena": lambda arena, value: (_into(arena.source, 0, value), _into(arena.result, 0, value * 0 + 7)),
    "arena, further on": lambda arena, value: (_into(arena.source, 640, value), _into(arena.result, 640, value * 0)),
    "arena, unequal offsets": lambda arena, value: (_into(arena.source, 8, value), _into(arena.result, 320, value * 0)),
    "arena, in place": lambda arena, value: (tensor := _into(arena.source, 64, value), tensor),
    "arena, both in the result": lambda arena, value: (tensor := _into(arena.result, 64, value), tensor),
    "source in an arena": lambda arena, value: (_into(arena.source, 0, value), torch.full_like(value, 7)),
    "result in an arena": lambda arena, value: (value.clone(), _into(arena.result, 0, value * 0 + 7)),
}
ARENA_BYTES = LENGTHS[-1] * 8 + 640


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("place", all_but_each_third(PLACES))
def test_all_reduce_to_the_bit(size: int, place: str) -> None:
    with connected(size) as groups:

        def work(group: HostGroup) -> None:
            arena = make_arena(group, ARENA_BYTES)
            ordinal = 1
            for dtype in (*FLOATS, torch.int32, torch.uint8):
                for length in LENGTHS:
                    for op in FUNCTIONS if length == 257 else (ReduceOp.SUM,):
                        ordinal += 1
                        inputs = [values(rank, length, dtype) for rank in range(size)]
                        source, out = PLACES[place](arena, inputs[group.rank])
                        group.all_reduce(source, out, op, Tag(ordinal, 1))
                        assert same_bits(out, reduced(inputs, op)), (dtype, length, op)
                        assert source is out or same_bits(source, inputs[group.rank])

        on_every_rank(groups, work)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_may_have_their_tensors_in_different_places(size: int) -> None:
    names = list(PLACES)
    choice = random.Random(3)
    plans = [(choice.choice(LENGTHS), [choice.choice(names) for _ in range(size)]) for _ in range(60)]
    with connected(size) as groups:

        def work(group: HostGroup) -> None:
            arena = make_arena(group, ARENA_BYTES)
            for ordinal, (length, places) in enumerate(plans, 2):
                inputs = [values(rank, length, seed=ordinal) for rank in range(size)]
                source, out = PLACES[places[group.rank]](arena, inputs[group.rank])
                group.all_reduce(source, out, ReduceOp.SUM, Tag(ordinal, 1))
                assert same_bits(out, reduced(inputs, ReduceOp.SUM)), (length, places)

        on_every_rank(groups, work)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("place", ["plain", "plain, in place", "arena", "arena, in place", "result in an arena"])
def test_reduce_to_every_root(size: int, place: str) -> None:
    with connected(size) as groups:

        def work(group: HostGroup) -> None:
            arena = make_arena(group, ARENA_BYTES)
            ordinal = 1
            for root in range(size):
                for dtype in FLOATS:
                    for length in LENGTHS:
                        ordinal += 1
                        inputs = [values(rank, length, dtype) for rank in range(size)]
                        source, out = PLACES[place](arena, inputs[group.rank])
                        is_root = group.rank == root
                        group.reduce(source, out if is_root else None, root, ReduceOp.SUM, Tag(ordinal, 1))
                        if is_root:
                            assert same_bits(out, reduced(inputs, ReduceOp.SUM)), (root, dtype, length)
                        else:
                            assert same_bits(source, inputs[group.rank])
            with pytest.raises(ValueError, match="expected out on rank 0 and nowhere else"):
                group.reduce(source, source if group.rank else None, 0, ReduceOp.SUM, Tag(ordinal + 1, 1))

        on_every_rank(groups, work)


def test_an_arena_is_reduced_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing passes through the scratch memory; ranks that own nothing take part."""
    with connected(4) as groups:
        arenas = in_threads([functools.partial(make_arena, group, 8000) for group in groups])
        rounds: list[int] = []
        monkeypatch.setattr(HostGroup, "_rounds", lambda *_: rounds.append(1))
        monkeypatch.setattr(host_group, "_SHORT_BYTES", 0)
        for length in (3, 2000):
            for rank, arena in enumerate(arenas):
                _into(arena.source, 0, torch.full((length,), float(rank)))

            def work(group: HostGroup, length: int = length) -> None:
                source, out = (memory[: 4 * length].view(torch.float32) for memory in (arena_of(group)))
                group.all_reduce(source, out, ReduceOp.SUM, Tag(length, 1))
                group.broadcast(source, 2, Tag(length + 1, 1)) if 4 * length > SLOT else None
                assert out.tolist() == [6.0] * length

            def arena_of(group: HostGroup) -> tuple[torch.Tensor, torch.Tensor]:
                return arenas[group.rank].source, arenas[group.rank].result

            on_every_rank(groups, work)
        assert not rounds


@pytest.mark.parametrize("compression", [None, compression_named("bf16")])
def test_gradients_laid_out_again_take_no_more_memory(compression: GradientCompression | None) -> None:
    """A model is cast to float64 and back, as for an evaluation; each time its gradients lie elsewhere."""
    mapped: list[int] = []

    def work(group: HostGroup) -> list[float]:
        communicator = Communicator(group, lambda error, position: error)
        weight: Any = torch.nn.Parameter(torch.zeros(4000))
        seen = []
        with reducing([weight], communicator, weight_of([1, 1], group.rank), compression=compression):
            for turn in range(6):
                weight.grad = None
                weight.data = weight.data.to(torch.float32 if turn % 2 else torch.float64)
                (weight.sum() * (group.rank + 1 + turn)).backward()
                seen.append(float(weight.grad[-1]))
                communicator.barrier()
                mapped.append(num_mappings())
                communicator.barrier()
        return seen

    with connected(2) as groups:
        ranks = in_threads([functools.partial(work, group) for group in groups])
    assert ranks == [[1.5 + turn for turn in range(6)]] * 2
    assert mapped[-1] == mapped[3]


@pytest.mark.parametrize("size", [2, 3])
def test_broadcast_of_buffers_in_an_arena_and_elsewhere(size: int) -> None:
    length = 4001
    with connected(size) as groups:

        def work(group: HostGroup) -> None:
            arena = make_arena(group, ARENA_BYTES)
            ordinal = 1
            for root in range(size):
                for in_arena in (range(size), [0], [size - 1], []):
                    ordinal += 1
                    value = values(group.rank, length)
                    buffer = _into(arena.result, 64, value) if group.rank in in_arena else value.clone()
                    group.broadcast(buffer, root, Tag(ordinal, 1))
                    assert same_bits(buffer, values(root, length)), (root, in_arena)

        on_every_rank(groups, work)


def test_lengths_that_need_many_rounds_on_one_rank_only() -> None:
    def lengths(sender: int, receiver: int) -> int:
        return 9000 if (sender, receiver) == (0, 2) else receiver

    with connected(3) as groups:

        def work(group: HostGroup) -> None:
            sources = [values(10 * group.rank + peer, lengths(group.rank, peer)) for peer in range(3)]
            outs = [torch.zeros(lengths(peer, group.rank)) for peer in range(3)]
            group.all_to_all(sources, outs, Tag(1, 1))
            for peer, out in enumerate(outs):
                assert same_bits(out, values(10 * peer + group.rank, lengths(peer, group.rank)))

        on_every_rank(groups, work)


def test_scattered_slices_may_lie_in_the_source() -> None:
    with connected(4) as groups:

        def work(group: HostGroup) -> None:
            inputs = [values(rank, 4001) for rank in range(4)]
            source = inputs[group.rank].clone()
            start, stop = cut(4001, 4)[group.rank]
            group.reduce_scatter(source, source[start:stop], ReduceOp.SUM, Tag(1, 1))
            assert same_bits(source[start:stop], reduced(inputs, ReduceOp.SUM)[start:stop])

        on_every_rank(groups, work)


def test_tensors_made_in_inference_mode_and_outside() -> None:
    with connected(3) as groups:

        def work(group: HostGroup) -> None:
            with torch.inference_mode():
                arena = make_arena(group, ARENA_BYTES)
            ordinal = 1
            for dtype in FLOATS:
                for place in ("arena", "plain", "arena, in place"):
                    for mode in (True, False):
                        for length in LENGTHS:
                            ordinal += 1
                            with torch.inference_mode(mode):
                                inputs = [values(rank, length, dtype) for rank in range(3)]
                                source, out = PLACES[place](arena, inputs[group.rank])
                                group.all_reduce(source, out, ReduceOp.SUM, Tag(ordinal, 1))
                                assert same_bits(out, reduced(inputs, ReduceOp.SUM))

        on_every_rank(groups, work)


# -- a fast rank must not overtake a slow one ----------------------------------------------------------------------


class Gate:
    """Holds a rank after its last exchange of a collective, before it reads anything more, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: HostGroup, ordinal: int) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()
        self._next = ordinal + 1
        exchange = Signals.exchange

        def exchange_and_wait(signals: Signals, more: bool, *numbers: int) -> bool:
            same = exchange(signals, more, *numbers)
            if not more and signals is held._signals and signals._tag.ordinal == ordinal:
                self._reached.set()
                assert self._opened.wait(DEADLINE_S)
            return same

        monkeypatch.setattr(Signals, "exchange", exchange_and_wait)

    def open_when_waited_for(self, fast: HostGroup) -> None:
        """Lets the rank go when ``fast`` is in the next collective and can get no further."""
        assert self._reached.wait(DEADLINE_S)
        until(lambda: fast._signals._tag.ordinal == self._next and fast.waiting_on() is not None)
        self._opened.set()


Case = tuple[str, int]


@pytest.mark.parametrize(
    "case", [("short", 50), ("pieces", 900), ("arena", 900), ("gather", 100)], ids=lambda case: case[0]
)
def test_a_fast_rank_waits_before_it_touches_what_a_slow_one_needs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is one collective ahead while rank 1 has everybody's signals of the last one but has read nothing."""
    kind, length = case
    with connected(2) as groups:
        arenas = in_threads([functools.partial(make_arena, group, 4 * length) for group in groups])
        gate = Gate(monkeypatch, groups[1], ordinal=2)

        def collective(group: HostGroup, ordinal: int) -> torch.Tensor:
            value = torch.full((length,), float(10 * ordinal + group.rank))
            if kind == "gather":
                outs = [torch.zeros(length) for _ in groups]
                group.all_gather(value, outs, Tag(ordinal, 1))
                return outs[0] + outs[1]
            source, out = PLACES["arena" if kind == "arena" else "plain"](arenas[group.rank], value)
            group.all_reduce(source, out, ReduceOp.SUM, Tag(ordinal, 1))
            return out.clone()

        def work(group: HostGroup) -> list[torch.Tensor]:
            return [collective(group, ordinal) for ordinal in (2, 3, 4)]

        results: list[list[torch.Tensor]] = []
        running = threading.Thread(
            target=lambda: results.extend(in_threads([functools.partial(work, g) for g in groups]))
        )
        running.start()
        gate.open_when_waited_for(groups[0])
        running.join(DEADLINE_S)
        for rank, outs in enumerate(results):
            assert [out.unique().tolist() for out in outs] == [[20.0 * n + 1] for n in (2, 3, 4)], rank
        assert len(results) == 2


def test_one_slot_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that the test above can fail: with a single slot rank 1 reads what rank 0 wrote for the next one."""
    monkeypatch.setattr(Scratch, "next_round", lambda scratch: None)
    with connected(2) as groups:
        gate = Gate(monkeypatch, groups[1], ordinal=2)

        def work(group: HostGroup) -> list[float]:
            outs = [torch.zeros(50), torch.zeros(50)]
            for ordinal in (2, 3):
                source = torch.full((50,), float(10 * ordinal + group.rank))
                group.all_reduce(source, outs[ordinal - 2], ReduceOp.SUM, Tag(ordinal, 1))
            return [float(out[0]) for out in outs]

        results: list[list[float]] = []
        running = threading.Thread(
            target=lambda: results.extend(in_threads([functools.partial(work, g) for g in groups]))
        )
        running.start()
        gate.open_when_waited_for(groups[0])
        running.join(DEADLINE_S)
        assert results == [[41.0, 61.0], [51.0, 61.0]]


@pytest.mark.parametrize("size", [2, 3])
def test_random_collectives_with_random_delays(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, delays = Signals.exchange, [random.Random(rank) for rank in range(size)]

    def late(rank: int) -> None:
        if delays[rank].random() < 0.2:
            time.sleep(delays[rank].random() * 0.002)

    def delayed_exchange(signals: Signals, more: bool, *numbers: int) -> bool:
        late(signals.rank)
        same = exchange(signals, more, *numbers)
        late(signals.rank)
        return same

    monkeypatch.setattr(Signals, "exchange", delayed_exchange)
    with connected(size) as groups:

        def work(group: HostGroup) -> None:
            script = random.Random(size)
            arena = make_arena(group, ARENA_BYTES)
            kept: list[tuple[torch.Tensor, torch.Tensor]] = []
            for ordinal in range(2, 202):
                length = script.choice(LENGTHS)
                inputs = [values(rank, length, seed=ordinal) for rank in range(size)]
                what = script.choice(["arena", "arena, further on", "plain", "arena, in place", "gather", "scatter"])
                if what == "gather":
                    outs = [torch.zeros(length) for _ in inputs]
                    group.all_gather(inputs[group.rank].clone(), outs, Tag(ordinal, 1))
                    kept.extend(zip(outs, inputs, strict=True))
                elif what == "scatter":
                    start, stop = cut(length, size)[group.rank]
                    out = torch.zeros(stop - start)
                    group.reduce_scatter(inputs[group.rank].clone(), out, ReduceOp.SUM, Tag(ordinal, 1))
                    kept.append((out, reduced(inputs, ReduceOp.SUM)[start:stop]))
                else:
                    source, out = PLACES[what](arena, inputs[group.rank])
                    group.all_reduce(source, out, ReduceOp.SUM, Tag(ordinal, 1))
                    kept.append((out.clone(), reduced(inputs, ReduceOp.SUM)))
                    source.fill_(-1)  # the caller's again
            assert all(same_bits(out, expected) for out, expected in kept)

        on_every_rank(groups, work)


# -- memory that cannot be had --------------------------------------------------------------------------------------


def test_an_arena_over_the_limit_is_refused_and_the_group_goes_on() -> None:
    with connected(3) as groups:
        with file_size_limit(64 << 20):
            outcomes = outcomes_of([functools.partial(make_arena, group, 40 << 20) for group in groups])
        for outcome in outcomes:
            assert isinstance(outcome.error, SegmentError)
            assert "no shared memory of 83,887,104 bytes: File too large (RLIMIT_FSIZE" in str(outcome.error)
        assert all(in_threads([functools.partial(works, group, 2) for group in groups]))


def works(group: HostGroup, ordinal: int) -> bool:
    out = torch.zeros(1000)
    group.all_reduce(torch.ones(1000), out, ReduceOp.SUM, Tag(ordinal, 1))
    return out.eq(group.size).all().item() is True


@contextlib.contextmanager
def one_refusal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first segment that anybody makes is refused."""
    create, first = Segment.create, threading.Lock()

    def refuse_once(num_bytes: int) -> Segment:
        if first.acquire(blocking=False):
            raise SegmentError(f"no shared memory of {num_bytes:,} bytes: the test wants it so", 12)
        return create(num_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "create", refuse_once)
        yield
        assert first.locked()


def test_when_one_rank_has_no_memory_all_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(3) as groups:
        with one_refusal(monkeypatch):
            outcomes = outcomes_of([functools.partial(make_arena, group, 4096) for group in groups])
        texts = [str(outcome.error) for outcome in outcomes]
        assert all(isinstance(outcome.error, SegmentError) for outcome in outcomes)
        refused = next(rank for rank, text in enumerate(texts) if "the test wants it so" in text)
        for rank, text in enumerate(texts):
            assert (
                rank == refused or text == f"no shared memory of 9,216 bytes for rank {refused}: Cannot allocate memory"
            )
        assert all(in_threads([functools.partial(works, group, 2) for group in groups]))


def test_a_group_without_memory_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_mappings()
    with one_refusal(monkeypatch), contextlib.ExitStack() as stack, pytest.raises(SegmentError):
        host_groups(3, stack, 20.0)
    assert num_mappings() == before


def test_closing_unmaps_everything_that_is_not_held() -> None:
    before = num_mappings()
    with connected(2) as groups:
        arenas = in_threads([functools.partial(make_arena, group, 4096) for group in groups])
        assert all(in_threads([functools.partial(works, group, 2) for group in groups]))
        assert num_mappings() == before + 8  # two ranks map two scratch segments and two of the arena
        held = arenas[0].result[:4]
        arenas.clear()
    assert num_mappings() == before + 1
    held.fill_(1)
    del held
    assert num_mappings() == before


# -- errors and ends ------------------------------------------------------------------------------------------------


def test_another_collective_names_both_places() -> None:
    with connected(2) as groups:
        outcomes = outcomes_of([functools.partial(works, group, 5 + group.rank) for group in groups])
        assert str(outcomes[0].error) == (
            "rank 1 is at collective 6 (fingerprint 00000001, round 0), rank 0 at collective 5 (fingerprint 00000001, "
            "round 0): all ranks have to make the same calls in the same order"
        )
        assert [getattr(outcome.error, "rank", None) for outcome in outcomes] == [1, 0]


def test_who_is_named_is_the_same_everywhere() -> None:
    """Rank 1 hears only from rank 0 that rank 2 stands still."""
    with connected(3, timeout_s=3.0) as groups:
        outcomes = outcomes_of([functools.partial(works, group, 1) for group in groups[:2]])
        for outcome in outcomes:
            assert isinstance(outcome.error, CollectiveError)
            assert outcome.error.rank == 2
            assert "rank 2 was stalled for longer than the timeout of 3 s" in str(outcome.error)
        (late,) = outcomes_of([functools.partial(works, groups[2], 1)])
        assert isinstance(late.error, CollectiveError)
        assert late.error.rank == 2


def test_an_error_inside_a_collective_breaks_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = Reduction.__call__

    def interrupted(reduction: Reduction, sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        if threading.current_thread().name == "rank-1":
            raise KeyboardInterrupt
        reduce(reduction, sources, into)

    with connected(3) as groups:
        monkeypatch.setattr(Reduction, "__call__", interrupted)
        outcomes = outcomes_of([functools.partial(works, group, 4) for group in groups])
        assert isinstance(outcomes[1].error, KeyboardInterrupt)
        for outcome in (outcomes[0], outcomes[2]):
            assert isinstance(outcome.error, CollectiveError)
            assert (str(outcome.error), outcome.error.rank) == ("rank 1 left collective 4: KeyboardInterrupt", 1)
        with pytest.raises(CollectiveError, match="rank 1 left collective 4"):
            groups[1].barrier(Tag(5, 1))


def test_a_closed_group_frees_nothing_under_a_running_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """close() from another thread returns when the call that was running has left."""
    reduce, inside, go_on = Reduction.__call__, threading.Event(), threading.Event()

    def held(reduction: Reduction, sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        if threading.current_thread().name == "rank-0":
            inside.set()
            assert go_on.wait(DEADLINE_S)
        reduce(reduction, sources, into)

    with connected(2) as groups:
        monkeypatch.setattr(Reduction, "__call__", held)
        calls = [functools.partial(works, group, 1) for group in groups]
        outcomes: list[object] = []
        running = threading.Thread(target=lambda: outcomes.extend(outcomes_of(calls)))
        running.start()
        assert inside.wait(DEADLINE_S)
        closing = threading.Thread(target=groups[0].close, args=("enough",))
        closing.start()
        until(lambda: groups[1]._signals._failure is not None)
        assert closing.is_alive()
        go_on.set()
        closing.join(DEADLINE_S)
        running.join(DEADLINE_S)
        texts = [str(getattr(outcome, "error", None)) for outcome in outcomes]
        assert texts == ["enough", "rank 0 closed the group: enough"]


class FarRank:
    """What another rank would do, at the far end of its link to rank 2."""

    def __init__(self, signals: Signals, link: socket.socket, cells: Cells | None) -> None:
        self.link = link
        self._signals, self.cells = signals, cells

    def tell(self, message: bytes) -> None:
        """Gives rank 2 a signal."""
        if self.cells is None:
            self.link.send(message)
        elif self.cells.tell(message):
            self.link.send(host_signals._BELL)

    def hear(self) -> bytes:
        """The first signal of rank 2."""
        cells = self._signals._cells
        if cells is None:
            return self.link.recv(40)
        until(lambda: cells._count == 1)
        return bytes(cells.message(2))


Wires = tuple[Signals, dict[int, FarRank]]


@pytest.fixture(params=["cells", "sockets"])
def wires(request: pytest.FixtureRequest) -> Iterator[Wires]:
    """Rank 2 of three, and the far ends of its links."""
    near, far = {}, {}
    for peer in (0, 1):
        near[peer], far[peer] = socket.socketpair()
    signals = Signals(2, near, 20.0)
    memory = [torch.zeros(NUM_BYTES, dtype=torch.uint8) for _ in range(3)]
    if request.param == "cells":
        signals.use_cells(memory)
    made = {p: Cells(p, memory, 40) if request.param == "cells" else None for p in far}
    yield signals, {peer: FarRank(signals, link, made[peer]) for peer, link in far.items()}
    signals.close("the test is over")
    for link in far.values():
        link.close()


def signal_of(ordinal: int, fingerprint: int = 1, place: int = 0) -> bytes:
    return struct.pack("=QIIQQQ", ordinal, fingerprint, place, 0, 0, 0)


def exchanged(signals: Signals, more: bool) -> bool:
    with signals.collective(Tag(9, 1)):
        return signals.exchange(more)


def test_a_peer_may_end_in_peace_after_its_last_signal(wires: Wires) -> None:
    signals, far = wires
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(exchanged(signals, False)))
    waiting.start()
    assert far[1].hear() == signal_of(9)
    far[1].tell(signal_of(9))
    far[1].link.close()
    until(lambda: signals.waiting_on == 0)
    far[0].tell(signal_of(9))
    waiting.join(DEADLINE_S)
    assert results == [True]


@pytest.mark.parametrize("tells", [False, True], ids=["before its signal", "between two rounds"])
def test_a_peer_that_dies_is_named_while_another_is_awaited(wires: Wires, tells: bool) -> None:
    signals, far = wires
    outcomes: list[Outcome[bool]] = []
    waiting = threading.Thread(target=lambda: outcomes.extend(outcomes_of([lambda: exchanged(signals, True)])))
    waiting.start()
    assert far[1].hear() == far[0].hear() == signal_of(9)
    until(lambda: signals.waiting_on == 0)
    if tells:
        far[1].tell(signal_of(9))
    far[1].link.close()
    waiting.join(DEADLINE_S)
    error = outcomes[0].error
    assert isinstance(error, CollectiveError)
    assert (str(error), error.rank) == ("rank 1 has ended: its socket closed in collective 9", 1)
    assert b"rank 1 has ended" in far[0].link.recv(1000)
    assert far[0].link.recv(1) == b""  # shut


def test_a_peer_that_dies_after_its_signal_is_named_when_more_rounds_follow(wires: Wires) -> None:
    signals, far = wires
    outcomes: list[Outcome[bool]] = []
    waiting = threading.Thread(target=lambda: outcomes.extend(outcomes_of([lambda: exchanged(signals, True)])))
    waiting.start()
    assert far[0].hear() == signal_of(9)
    far[0].tell(signal_of(9))
    until(lambda: signals.waiting_on == 1)
    far[0].link.close()
    waiting.join(DEADLINE_S)
    assert str(outcomes[0].error) == "rank 0 has ended: its socket closed in collective 9"


def test_a_peer_may_end_in_peace_when_it_was_heard_and_another_is_awaited(wires: Wires) -> None:
    signals, far = wires
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(exchanged(signals, False)))
    waiting.start()
    assert far[0].hear() == signal_of(9)
    far[0].tell(signal_of(9))
    far[0].link.close()
    until(lambda: signals.waiting_on == 1)
    far[1].tell(signal_of(9))
    waiting.join(DEADLINE_S)
    assert results == [True]


@pytest.mark.parametrize("wires", ["cells"], indirect=True)
def test_a_peer_may_end_in_peace_before_its_bell(wires: Wires) -> None:
    """It saw the cell just before it would have slept, and made the last collective of its group."""
    signals, far = wires
    assert far[0].cells is not None
    far[0].cells.sleep_for(2)
    for rank in far.values():
        rank.tell(signal_of(9))
    far[0].link.close()
    assert exchanged(signals, False)


@pytest.mark.parametrize("more", [True, False])
def test_the_signals_come_in_any_order(wires: Wires, more: bool) -> None:
    signals, far = wires
    far[1].tell(signal_of(9))
    far[0].tell(signal_of(9))
    assert exchanged(signals, more)


@pytest.mark.parametrize("wires", ["cells"], indirect=True)
def test_a_signal_that_is_there_needs_no_system_call(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    signals, far = wires
    for rank in far.values():
        rank.tell(signal_of(9))
    for name in ("_send", "_receive", "_wait", "_wait_for_cell"):
        monkeypatch.setattr(Signals, name, lambda *_: pytest.fail("nobody had to wait"))
    assert exchanged(signals, False)


@pytest.mark.parametrize("wires", ["cells"], indirect=True)
def test_what_a_peer_said_before_it_broke_off_is_heard_where_its_cell_was_awaited(wires: Wires) -> None:
    signals, far = wires
    far[0].link.send(host_signals._BELL)  # too late for anything
    text = b"rank 5 has ended"
    far[0].link.send(struct.pack("=QIIQQQ", host_signals._ABORT, 5, len(text), 0, 0, 0) + text)
    far[0].link.close()
    with pytest.raises(CollectiveError, match="rank 5 has ended") as caught:
        exchanged(signals, False)
    assert caught.value.rank == 5


def test_a_torn_signal_is_no_signal(wires: Wires) -> None:
    signals, far = wires
    far[0].link.send(signal_of(9)[:17])
    far[0].link.shutdown(socket.SHUT_RDWR)
    with pytest.raises(CollectiveError, match="rank 0 has ended"):
        exchanged(signals, False)


def test_bells_that_come_too_late_harm_nothing() -> None:
    """Neither a wait, nor segments that come behind them, nor a socket that takes no more of them."""
    with connected(2) as groups:
        link = groups[0]._signals._links[1]
        with contextlib.suppress(BlockingIOError):
            for _ in range(10**6):
                link.send(host_signals._BELL, socket.MSG_DONTWAIT)
        barriers = [threading.Thread(target=group.barrier, args=(Tag(1, 1),)) for group in groups]
        barriers[1].start()
        until(lambda: groups[1].waiting_on() == 0)
        barriers[0].start()
        for barrier in barriers:
            barrier.join(DEADLINE_S)
        in_threads([functools.partial(make_arena, group, 4096, 2) for group in groups])  # whatever is left of them
        link.send(host_signals._BELL * 3)
        in_threads([functools.partial(make_arena, group, 4096, 3) for group in groups])
        assert all(in_threads([functools.partial(works, group, 4) for group in groups]))


@pytest.mark.parametrize("num_extra", [0, 1], ids=["no descriptor", "another file"])
@pytest.mark.parametrize("wires", ["sockets"], indirect=True)
def test_a_peer_that_shares_no_memory(wires: Wires, num_extra: int) -> None:
    """A signal that promises a segment and brings none breaks the group; a bad one is refused, and all hear of it."""
    signals, far = wires
    promise = struct.pack("=QIIQQQ", 9, 1, 0, 1, 0, 0)
    for peer in (0, 1):
        socket.send_fds(far[peer].link, [promise], [far[peer].link.fileno()][:num_extra])
        far[peer].tell(signal_of(9, place=1))
    with pytest.raises((SegmentError, CollectiveError)) as caught, signals.collective(Tag(9, 1)):
        signals.share(4096)
    expected = "expected a shared segment of 4,096 bytes" if num_extra else "rank 0 sent no descriptor"
    assert expected in str(caught.value)


def test_a_forked_child_holds_no_link() -> None:
    with connected(2) as groups:
        links = [link for group in groups for link in group._signals._links.values()]
        child = os.fork()
        if child == 0:
            os._exit(sum(link.fileno() != -1 for link in links))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert all(link.fileno() != -1 for link in links)
        assert all(in_threads([functools.partial(works, group, 1) for group in groups]))


def test_links_have_to_reach_everybody() -> None:
    near, far = socket.socketpair()
    with near, far, pytest.raises(ValueError, match="expected links to all 3 ranks but 0"):
        HostGroup(0, 3, {1: near}, timeout_s=1.0)


def test_a_timeout_may_be_without_end() -> None:
    with connected(2, timeout_s=float("inf")) as groups:
        assert all(in_threads([functools.partial(works, group, 1) for group in groups]))


def test_open_links_are_forgotten_when_they_close() -> None:
    with connected(2) as groups:
        links = {link for group in groups for link in group._signals._links.values()}
        assert links <= set(socket_lane._in_children)
