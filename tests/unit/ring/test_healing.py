"""A rank dies in any collective, at any moment: the others have one result of each, and no result is of two kinds."""

from __future__ import annotations

import pytest
import torch

from stratagem.errors import CollectiveError, SegmentError
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.group import Arena, Tag
from stratagem.worker.ring.healing import KEPT_BYTES, LostMembers
from tests.unit.ring.healing_ranks import Fate, MortalGroup, run_mortal

LARGE = KEPT_BYTES // 4 + 1
NUM_PARTS = 14
"""Collectives of the group in :func:`every_kind` that have a result."""


def every_kind(communicator: Communicator) -> list[list[float]]:
    """Each rank adds powers of 2, so that a sum says whose parts it has."""
    mine = float(2 ** int(communicator.healing.me[-1])) if communicator.healing else 0.0
    small, large = torch.full((3,), mine), torch.full((LARGE,), mine)
    results = []
    for tensor in (small, large):
        communicator.step += 1
        results.append(communicator.all_reduce(tensor)[:2].tolist())
        results.append([float(part[0]) for part in communicator.all_gather(tensor)])
        results.append(communicator.broadcast(torch.full_like(tensor, results[0][0] + results[1][0]))[:2].tolist())
    communicator.barrier()
    results.append(communicator.all_reduce(torch.tensor(mine), "mean").view(1).tolist())
    communicator.barrier()  # nobody leaves while another may need what it has
    return results


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dies_at", range(1, NUM_PARTS + 1))
def test_survivors_have_the_same_results(dies_at: int, late: bool) -> None:
    results = run_mortal(4, every_kind, rank1=Fate(dies_at, late))
    assert results[0] == results[1] == results[2]
    sums = [results[0][0][0], sum(results[0][1]), results[0][3][0], sum(results[0][4])]
    assert set(sums) <= {15.0, 13.0} and sums == sorted(sums, reverse=True), "once lost, it is in no result any more"
    if dies_at == NUM_PARTS:
        assert results[0][-1] == [pytest.approx(15.0 / 4 if late else 13.0 / 3)]


@pytest.mark.parametrize("misses_at", range(1, NUM_PARTS + 1))
def test_who_did_not_hear_the_end_takes_over_what_the_others_have(misses_at: int) -> None:
    # Rank 1 gives its part and dies; rank 2 does not hear the end of that collective, ranks 0 and 3 do.
    results = run_mortal(4, every_kind, rank1=Fate(misses_at, late=True), rank2=Fate(misses_at=misses_at))
    assert results[0] == results[1] == results[2]
    if misses_at == 1:
        assert results[1][0] == [15.0, 15.0], "the others had it, with the part of the dead one"


def test_what_only_the_lost_one_had_is_lost_by_name() -> None:
    def work(communicator: Communicator) -> str:
        with pytest.raises(CollectiveError) as caught:
            communicator.broadcast(torch.full((3,), float(communicator.rank)), root=1)
        communicator.barrier()
        return str(caught.value)

    for said in run_mortal(3, work, rank1=Fate(1)):
        assert said == "worker:1 is lost, and what it was about to send with it; start the job again"


def test_the_sender_keeps_its_name_when_ranks_move_up() -> None:
    def work(communicator: Communicator) -> float:
        mine = torch.full((3,), float(communicator.rank))
        return float(communicator.broadcast(mine, root=2)[0])

    assert run_mortal(4, work, rank1=Fate(1)) == [2.0] * 3


def test_the_books_say_whose_examples_were_lost() -> None:
    def work(communicator: Communicator) -> tuple[list[LostMembers], list[tuple[str, ...]]]:
        healing = communicator.healing
        assert healing is not None
        for _ in range(4):
            communicator.step += 1
            communicator.atomic(communicator.confirm, is_training=True)
        return healing.losses, [healing.placement(step).members for step in (0, 3, 4)]

    # Two barriers a step. The end of step 2 reaches ranks 0 and 2, which go on to step 3, and not rank 3.
    for losses, placements in run_mortal(4, work, rank1=Fate(4, late=True), rank3=Fate(misses_at=4)):
        assert losses == [(frozenset({"worker:1"}), 2, 3)]
        everybody = tuple(f"worker:{rank}" for rank in range(4))
        assert placements == [everybody, everybody, (*everybody[:1], *everybody[2:])]


NUM_TO_JOIN = 6
"""Collectives of each rank in :func:`grow` until all have what the newcomers lacked, and one more."""


def grow(communicator: Communicator) -> tuple[float, float, int, tuple[str, ...]]:
    """Two ranks train and take a third and a fourth in; what each has then, and what they do together."""
    healing = communicator.healing
    assert healing is not None
    mine = float(2 ** int(healing.me[-1]))
    state = torch.zeros(3)
    if not healing.is_new:
        communicator.step += 5
        state += 7.0

    def give() -> None:
        for row in state:  # in pieces, of which a retry begins with the first
            communicator.broadcast(row.view(1), healing.donor)

    healing.take_in(communicator, give)
    assert not healing.is_new and not healing.newcomers
    communicator.step += 1
    total = float(communicator.all_reduce(torch.tensor([mine])))
    communicator.barrier()
    return total, float(state.mean()), communicator.step, healing.placement(communicator.step).members


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dies_at", range(1, NUM_TO_JOIN + 1))
@pytest.mark.parametrize("who", ["rank0", "rank1", "rank2", "rank3"])
def test_newcomers_get_the_state_whoever_dies_meanwhile(who: str, dies_at: int, late: bool) -> None:
    results = run_mortal(4, grow, num_newcomers=2, **{who: Fate(dies_at, late)})
    left = tuple(f"worker:{rank}" for rank in range(4) if who != f"rank{rank}")
    assert len(set(results)) == 1
    total, state, step, members = results[0]
    assert total in (15.0, 15.0 - 2 ** int(who[-1])) and state == 7.0 and step == 6
    assert members in (left, ("worker:0", "worker:1", "worker:2", "worker:3"))
    assert total < 15.0 or (late and dies_at == NUM_TO_JOIN)


@pytest.mark.parametrize("misses_at", range(1, 7))
def test_who_had_taken_in_before_a_loss_meets_for_the_next_newcomer(misses_at: int) -> None:
    """One who did not hear the end of it was taken for one that takes in now: the others waited in other places."""

    def work(communicator: Communicator) -> list[float]:
        totals = []
        for _ in range(3):
            assert communicator.healing is not None
            communicator.healing.take_in(communicator, lambda: None)
            totals.append(float(communicator.all_reduce(torch.ones(1))))
        communicator.barrier()
        return totals

    assert run_mortal(3, work, rank1=Fate(misses_at=misses_at)) == [[3.0] * 3] * 3


def test_newcomers_without_anybody_who_has_the_state_say_so() -> None:
    def work(communicator: Communicator) -> str:
        with pytest.raises(CollectiveError) as caught:
            grow(communicator)
        return str(caught.value)

    assert run_mortal(2, work, num_newcomers=1, rank0=Fate(3)) == [
        "no worker is left that has the state of the training; start the job again"
    ]


def test_a_newcomer_leaves_when_only_ranks_are_left_that_have_yet_to_admit_it() -> None:
    """It gave its part to a collective that it knew nothing of, and the ring ended: the ranks were out of step."""

    def work(communicator: Communicator) -> int:
        healing = communicator.healing
        assert healing is not None
        if healing.is_new:
            with pytest.raises(CollectiveError, match="admitting this one are lost: start it again"):
                healing.take_in(communicator, lambda: None)
            communicator.group._die()  # type: ignore[attr-defined]
        # Rank 0 hears the end of it, meets the newcomer and dies; rank 1 has it to repeat.
        communicator.atomic(communicator.confirm, is_training=True)
        healing.take_in(communicator, lambda: None)
        return communicator.size

    assert run_mortal(3, work, 1, rank0=Fate(3), rank1=Fate(misses_at=2), rank2=Fate(99)) == [1]


def test_a_host_without_memory_to_share_meets_the_others_behind_an_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    has = MortalGroup.arena

    def arena(self: MortalGroup, num_bytes: int, tag: Tag, in_place: bool = False) -> Arena:
        made = has(self, num_bytes, tag, in_place)
        if self.rank == 1:
            raise SegmentError("no shared memory: none is left")
        return made

    monkeypatch.setattr(MortalGroup, "arena", arena)

    def work(communicator: Communicator) -> float:
        arena = communicator.arena(64)
        arena.source.fill_(communicator.rank + 1)
        return float(communicator.all_reduce(arena.source, out=arena.result)[0])

    assert run_mortal(3, work) == [6.0] * 3
