"""Whatever fails, no rank is left with a half-reduced gradient, and no rank waits for one that has given up."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch

from stratagem.errors import CollectiveError
from stratagem.worker.reduction.backward import _EndOfBackward
from stratagem.worker.reduction.gradient_slot import DenseSlot
from stratagem.worker.reduction.reducer import GradientReducer
from stratagem.worker.ring.communicator import Communicator
from tests.unit.reduction.reducing import (
    assert_bit_identical,
    assert_same,
    batch,
    build,
    gradients,
    mean_loss,
    reducing,
    share_of,
    take_off,
    weight_of,
)
from tests.unit.ring.thread_group import run_ranks, run_ranks_with_errors

EQUAL = [2, 2]


class Breaks(torch.autograd.Function):
    """Raises in backward where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, breaks: bool) -> torch.Tensor:
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.breaks:
            raise ArithmeticError("boom")
        return grads[0], None


def backward(model: Any, communicator: Communicator, seed: int, breaks: bool = False) -> None:
    x, y = share_of(batch(seed), EQUAL, communicator.rank)
    hidden = Breaks.apply(torch.tanh(model.first(x)) * model.scale, breaks)  # type: ignore[no-untyped-call]
    torch.nn.functional.cross_entropy(model.last(torch.tanh(model.second(hidden))), y).backward()


@pytest.mark.parametrize("with_stash", [False, True])
def test_a_backward_that_raises_on_one_rank_fails_on_all_and_leaves_what_was_there(with_stash: bool) -> None:
    def work(communicator: Communicator) -> tuple[list[torch.Tensor | None], ...]:
        model = build()
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)) as reducer:
            if with_stash:
                backward(model, communicator, 0)
            before = gradients(model)
            if communicator.rank == 1:
                with pytest.raises(ArithmeticError, match="boom"):
                    backward(model, communicator, 1, breaks=True)
            else:
                with pytest.raises(CollectiveError, match="raised on rank 1") as caught:
                    backward(model, communicator, 1)
                assert caught.value.rank == 1
                assert reducer.num_early > 0  # some buckets were reduced before the failure was known
            after = gradients(model)
            assert_same(after, before)
            assert [value is None for value in after] == [not with_stash] * len(after)
            backward(model, communicator, 2)
            return after, gradients(model)

    (_, first), (_, second) = run_ranks(2, work)
    assert_bit_identical([first, second])
    reference = build()
    for seed in [0, 2] if with_stash else [2]:
        x, y = batch(seed)
        hidden = torch.tanh(reference.first(x)) * reference.scale
        torch.nn.functional.cross_entropy(reference.last(torch.tanh(reference.second(hidden))), y).backward()
    assert_same(first, gradients(reference))


def test_who_fails_raises_without_waiting_for_the_others() -> None:
    raised = threading.Event()

    def work(communicator: Communicator) -> None:
        model = build()
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank), early=False):
            if communicator.rank == 1:
                with pytest.raises(ArithmeticError, match="boom"):
                    backward(model, communicator, 0, breaks=True)
                raised.set()
            else:
                assert raised.wait(60), "the other rank waits for this one"
                with pytest.raises(CollectiveError, match="raised on rank 1"):
                    backward(model, communicator, 0)

    run_ranks(2, work)


def test_a_backward_that_raises_on_all_ranks_can_be_made_again() -> None:
    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)):
            with pytest.raises(ArithmeticError):
                backward(model, communicator, 0, breaks=True)
            assert all(value is None for value in gradients(model))
            backward(model, communicator, 0)
            return gradients(model)

    assert_bit_identical(run_ranks(2, work))


def test_a_failure_inside_no_sync_is_this_ranks_own() -> None:
    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)) as reducer:
            if communicator.rank == 0:
                with reducer.no_sync(), pytest.raises(ArithmeticError):
                    backward(model, communicator, 0, breaks=True)
            backward(model, communicator, 1)
            return gradients(model)

    assert_bit_identical(run_ranks(2, work))


@pytest.mark.parametrize("breaks", ["locally", "on one rank"])
def test_pending_gradients_that_a_failed_backward_has_changed_are_gone(breaks: str) -> None:
    """Not what they were plus a part of the backward that failed; what was reduced before them stays."""

    def work(communicator: Communicator) -> None:
        model = build()
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)) as reducer:
            backward(model, communicator, 0)
            reduced = gradients(model)
            with reducer.no_sync():
                backward(model, communicator, 1)
            assert reducer.has_pending
            if breaks == "locally":
                with reducer.no_sync(), pytest.raises(ArithmeticError):
                    backward(model, communicator, 2, breaks=True)
                changed = {"last.weight", "last.bias", "second.weight", "second.bias"}
            else:
                with pytest.raises((ArithmeticError, CollectiveError)):
                    backward(model, communicator, 2, breaks=communicator.rank == 1)
                changed = {name for name, _ in model.named_parameters()}
            names = [name for name, _ in model.named_parameters()]
            kept = [value for name, value in zip(names, gradients(model), strict=True) if name in changed]
            assert_same(kept, [value for name, value in zip(names, reduced, strict=True) if name in changed])

    run_ranks(2, work)


def test_autograd_grad_that_raises_loses_no_gradient() -> None:
    def work(communicator: Communicator) -> None:
        model = build()
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)):
            backward(model, communicator, 0)
            before = gradients(model)
            x, _ = share_of(batch(1), EQUAL, communicator.rank)
            with pytest.raises(ArithmeticError):
                loss = model.last(Breaks.apply(model.first(x), True)).sum()  # type: ignore[no-untyped-call]
                torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            assert_same(gradients(model), before)

    run_ranks(2, work)


def num_collectives() -> int:
    """Of one backward of the model, counted once without faults."""

    def work(communicator: Communicator) -> int:
        model = build()
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)):
            start = communicator.position.ordinal
            mean_loss(model, *share_of(batch(0), EQUAL, communicator.rank)).backward()
            return communicator.position.ordinal - start

    return run_ranks(2, work)[0]


def start_of_second_backward() -> int:
    def work(communicator: Communicator) -> int:
        model = build()
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)):
            mean_loss(model, *share_of(batch(0), EQUAL, communicator.rank)).backward()
            return communicator.position.ordinal

    return run_ranks(2, work)[0]


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("clear", [True, False])
def test_a_collective_that_fails_leaves_what_was_there(which: int, clear: bool) -> None:
    """The first bucket, the second, the last or the tail fails, in the second of two backwards."""
    start, collectives = start_of_second_backward(), num_collectives()
    assert collectives > 3
    ordinal = start + [1, 2, collectives - 1, collectives][which]

    def work(communicator: Communicator) -> None:
        model = build()
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)):
            mean_loss(model, *share_of(batch(0), EQUAL, communicator.rank)).backward()
            if clear:
                model.zero_grad()
            before = gradients(model)
            with pytest.raises(CollectiveError, match=f"rank 1 broke collective {ordinal}"):
                mean_loss(model, *share_of(batch(1), EQUAL, communicator.rank)).backward()
            assert_same(gradients(model), before)

    run_ranks(2, work, fail_at={1: [ordinal]})


def test_ranks_that_begin_with_different_groups_are_told() -> None:
    """Their buckets are of equal size, so that only the tail can tell them apart."""

    def work(communicator: Communicator) -> None:
        models = [build(seed=0), build(seed=1)]
        groups = [list(model.parameters()) for model in models]
        both = groups[0] + groups[1]
        with reducing(both, communicator, weight_of(EQUAL, communicator.rank), groups=groups):
            with pytest.raises(
                CollectiveError, match=re.escape("expected all 2 ranks in backward 1 of parameter group")
            ):
                mean_loss(models[communicator.rank], *share_of(batch(0), EQUAL, communicator.rank)).backward()
            assert all(value is None for model in models for value in gradients(model))

    run_ranks(2, work)


def test_an_extra_backward_is_an_error_on_every_rank() -> None:
    def work(communicator: Communicator) -> None:
        model = build()
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)):
            for _ in range(1 + communicator.rank):
                mean_loss(model, *share_of(batch(0), EQUAL, communicator.rank)).backward()
            communicator.barrier()

    _, errors = run_ranks_with_errors(2, work)
    assert all(isinstance(error, CollectiveError) for error in errors)


def test_a_weight_that_cannot_be_told_fails_backward() -> None:
    def work(communicator: Communicator) -> None:
        model = build()

        def weight() -> Any:
            raise LookupError("no share")

        with reducing(model, communicator, weight):
            with pytest.raises(LookupError, match="no share"):
                mean_loss(model, *share_of(batch(0), EQUAL, communicator.rank)).backward()
            assert all(value is None for value in gradients(model))

    run_ranks(1, work)


def test_a_sparse_gradient_of_a_dense_parameter_is_refused() -> None:
    def work(communicator: Communicator) -> None:
        table = torch.nn.Embedding(4, 2, sparse=True)
        with (
            reducing(table, communicator, weight_of(EQUAL, communicator.rank)),
            pytest.raises(ValueError, match="sparse=True may be sparse"),
        ):
            table(torch.tensor([1])).sum().backward()

    run_ranks(1, work)


def test_failed_backwards_leave_no_cycle_behind() -> None:
    """The reducer hears of a failure because the engine drops its callback: nothing else may hold it."""
    failed = []

    class Watched(GradientReducer):
        def _abandon(self, backward: Any) -> None:
            failed.append(backward is self._backward)
            super()._abandon(backward)

    def work(communicator: Communicator) -> None:
        from stratagem.worker.step_meter import StepMeter

        model = build()
        reducer = Watched(
            list(model.parameters()), communicator, meter=StepMeter(), weight=weight_of([1], communicator.rank)
        )
        with pytest.raises(ArithmeticError):
            model.last(Breaks.apply(model.first(torch.ones(1, 5)), True)).sum().backward()  # type: ignore[no-untyped-call]
        assert failed == [True]
        take_off(reducer)

    run_ranks(1, work)


def test_what_the_garbage_collector_finds_holds_no_backward_up() -> None:
    """It ran in the thread of the collectives, for which a backward waited with the lock in its hand: for ever."""

    def work(communicator: Communicator) -> None:
        with reducing(build(), communicator, weight_of(EQUAL, communicator.rank)) as reducer:
            garbage = [_EndOfBackward(reducer, reducer._new_backward(0))]
            with reducer._lock:
                communicator.submit(garbage.clear).result(10)

    run_ranks(1, work)


def test_a_slot_that_the_ranks_did_not_agree_on_a_place_for_does_not_fit() -> None:
    """What looked at it next said something about an attribute of ours."""
    assert not DenseSlot(torch.nn.Parameter(torch.ones(2)), 0).fits
