"""A rank dies in a backward, in any of its collectives: the others have the gradient of the examples that are left."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.reduction.same_bits import MAX_PIECES, SameBits
from stratagem.worker.ring.communicator import Communicator
from tests.thorough import all_but_each_third
from tests.unit.reduction.reducing import (
    assert_bit_identical,
    assert_same,
    batch,
    build,
    gradients,
    mean_loss,
    reducing,
    share_of,
)
from tests.unit.ring.healing_ranks import Fate, run_mortal

SHARES = [3, 1, 2]
Gradients = list[torch.Tensor | None]


def weight_of(rank: int) -> Callable[[], Weight]:
    return lambda: Weight(SHARES[rank] / sum(SHARES), is_share=True)


def alone(examples: Sequence[int], seed: int = 0, build_model: Callable[[], Any] = build) -> Gradients:
    """The gradient of one process on some of the examples."""
    model = build_model()
    x, y = batch(seed, sum(SHARES))
    mean_loss(model, x[list(examples)], y[list(examples)]).backward()
    return gradients(model)


WITH, WITHOUT = range(6), [0, 1, 2, 4, 5]


def work(communicator: Communicator, early: bool = True) -> list[Gradients]:
    """Two backwards, and one after the step in which the ring has healed."""
    rank, found = communicator.rank, []
    model = build()
    parameters = list(model.parameters())
    same_bits = SameBits(parameters, ["weight"] * len(parameters), f"worker:{rank}")
    with reducing(model, communicator, weight_of(rank), keep_sources=True, same_bits=same_bits, early=early):
        for seed in range(2):
            communicator.step += 1
            for parameter in model.parameters():
                parameter.grad = None
            x, y = share_of(batch(seed, sum(SHARES)), SHARES, rank)
            mean_loss(model, x, y).backward()
            found.append(gradients(model))
        communicator.barrier()
    return found


NUM_COLLECTIVES = 12
"""Of the group in :func:`work`, before its barrier: 3 of the layout, then 4 buckets and the status in each backward."""


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dies_at", range(1, NUM_COLLECTIVES + 1))
def test_the_gradient_is_of_the_examples_that_are_left(dies_at: int, late: bool) -> None:
    results = run_mortal(3, work, rank1=Fate(dies_at, late))
    assert_bit_identical([result[0] + result[1] for result in results])
    kinds = []
    for seed, found in enumerate(results[0]):
        for kind, examples in enumerate((WITH, WITHOUT)):
            with contextlib.suppress(AssertionError):
                assert_same(found, alone(examples, seed))
                kinds.append(kind)
    assert len(kinds) == 2, f"a gradient of neither: {kinds}"
    assert kinds == sorted(kinds)


@pytest.mark.parametrize("misses_at", all_but_each_third(range(1, NUM_COLLECTIVES + 2)))
@pytest.mark.parametrize("breaks_again", [0, 1, 2, 3])
def test_what_breaks_without_a_loss_is_made_again_with_all(misses_at: int, breaks_again: int) -> None:
    """Each rank looks at its weights once in a backward, however often that is made: here at some after the other."""
    assert len(list(build().parameters())) > MAX_PIECES
    again = Fate(misses_at=misses_at + breaks_again) if breaks_again else Fate()
    results = run_mortal(3, work, rank1=Fate(misses_at=misses_at), rank2=again)
    assert_bit_identical([result[0] + result[1] for result in results])
    for seed, found in enumerate(results[0]):
        assert_same(found, alone(WITH, seed))


@pytest.mark.parametrize("later", [5, 6, 7])
@pytest.mark.parametrize("dies_at", range(3, 9))
def test_a_second_break_in_the_next_step_finds_the_ranks_a_step_apart(dies_at: int, later: int) -> None:
    """They lay the memory of their gradients out anew in the same step, of whichever group each has heard by then."""
    results = run_mortal(3, work, rank0=Fate(misses_at=dies_at + later), rank1=Fate(dies_at))
    assert_bit_identical([result[0] + result[1] for result in results])


@pytest.mark.parametrize("misses_at", [5, 6])
def test_buckets_that_leave_after_the_status_do_so_again(misses_at: int) -> None:
    """Where a rank misses the status, the others have had it, and have sent these buckets."""
    results = run_mortal(3, functools.partial(work, early=False), rank1=Fate(misses_at=misses_at))
    assert_bit_identical([result[0] + result[1] for result in results])
    for seed, found in enumerate(results[0]):
        assert_same(found, alone(WITH, seed))
