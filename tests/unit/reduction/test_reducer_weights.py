"""Loss scaling: "mean", "sum" and ``set_weight`` give what one process gives."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from stratagem.errors import ConfigurationError
from stratagem.worker.reduction.gradient_weight import Weight, WeightSum
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
    weight_of,
)
from tests.unit.ring.thread_group import run_ranks, run_ranks_with_errors

SHARES = [3, 1]


def test_sum_of_losses_that_were_divided_already() -> None:
    reference = build()
    mean_loss(reference, *batch(0)).backward()

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        with reducing(model, communicator, lambda: Weight(1.0)):
            x, y = share_of(batch(0), SHARES, communicator.rank)
            (functional.cross_entropy(model(x), y, reduction="sum") / 4).backward()
            return gradients(model)

    assert_same(run_ranks(2, work)[0], gradients(reference))


@pytest.mark.parametrize("ignored", [(0,), (3,), (0, 1, 2)])
def test_a_denominator_of_ones_own(ignored: tuple[int, ...]) -> None:
    """Labels of -100 do not count; on some rank that may be all there are."""

    def labels() -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch(0)
        y[list(ignored)] = -100
        return x, y

    reference = build()
    mean_loss(reference, *labels()).backward()

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        x, y = share_of(labels(), SHARES, communicator.rank)
        counted = float((y != -100).sum())
        with reducing(model, communicator, lambda: Weight(counted, counted)):
            mean_loss(model, x, y).backward()
            return gradients(model)

    ranks = run_ranks(2, work)
    assert_bit_identical(ranks)
    assert_same(ranks[0], gradients(reference))


def test_nothing_counts_anywhere() -> None:
    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        with reducing(model, communicator, lambda: Weight(0.0, 0.0)):
            mean_loss(model, *share_of(batch(0), SHARES, communicator.rank)).backward()
            return gradients(model)

    for value in run_ranks(2, work)[0]:
        assert value is not None and not value.any()


def test_set_weight_on_one_rank_only_is_an_error_on_all() -> None:
    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        weights = [Weight(3.0, 3.0), Weight(0.25)]
        with reducing(model, communicator, lambda: weights[communicator.rank]):
            with pytest.raises(ConfigurationError, match="set_weight was called on 1 of 2 ranks"):
                mean_loss(model, *share_of(batch(0), SHARES, communicator.rank)).backward()
            return gradients(model)

    assert all(value is None for rank in run_ranks(2, work) for value in rank)


def test_an_empty_share_need_not_set_a_weight() -> None:
    reference = build()
    mean_loss(reference, *batch(0)).backward()

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        weights = [Weight(4.0, 4.0), Weight(0.0)]
        with reducing(model, communicator, lambda: weights[communicator.rank]):
            mean_loss(model, *share_of(batch(0), [4, 0], communicator.rank)).backward()
            return gradients(model)

    assert_same(run_ranks(2, work)[1], gradients(reference))


def test_the_weight_is_asked_once_a_backward_and_not_for_autograd_grad() -> None:
    def work(communicator: Communicator) -> int:
        asked = 0

        def weight() -> Weight:
            nonlocal asked
            asked += 1
            return Weight(0.5)

        model = build()
        with reducing(model, communicator, weight):
            for step in range(2):
                loss = mean_loss(model, *share_of(batch(step), [2, 2], communicator.rank))
                torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                loss.backward()
        return asked

    assert run_ranks(2, work) == [2, 2]


# -- accumulation without reducing --------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_inside_no_sync_equals_one_process(set_to_none: bool) -> None:
    parts = [[3, 1], [2, 2], [4, 0]]

    def train(model: torch.nn.Module, communicator: Communicator | None) -> list[torch.Tensor | None]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        current = parts[0]

        def weight() -> Weight:
            assert communicator is not None
            return weight_of(current, communicator.rank)()

        def backward(step: int, part: int) -> None:
            values = batch(10 * step + part)
            if communicator is not None:
                values = share_of(values, parts[part], communicator.rank)  # type: ignore[assignment]
            mean_loss(model, *values).backward()

        if communicator is None:
            for step in range(3):
                optimizer.zero_grad(set_to_none)
                for part in range(3):
                    backward(step, part)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            return [*(p.detach() for p in model.parameters()), *gradients(model)]

        with reducing(model, communicator, weight) as reducer:
            for step in range(3):
                optimizer.zero_grad(set_to_none)
                before = communicator.position.ordinal
                with reducer.no_sync():
                    for part in range(2):
                        current = parts[part]
                        backward(step, part)
                        assert reducer.has_pending
                assert communicator.position.ordinal == before
                current = parts[2]
                backward(step, 2)
                assert not reducer.has_pending
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            return [*(p.detach().clone() for p in model.parameters()), *gradients(model)]

    ranks = run_ranks(2, lambda communicator: train(build(), communicator))
    assert_bit_identical(ranks)
    assert_same(ranks[0], train(build(), None))


def test_inside_no_sync_a_gradient_is_this_ranks_own() -> None:
    def work(communicator: Communicator) -> None:
        model = build()
        values = share_of(batch(0), SHARES, communicator.rank)
        local = torch.autograd.grad(mean_loss(model, *values), list(model.parameters()))
        with reducing(model, communicator, weight_of(SHARES, communicator.rank)) as reducer, reducer.no_sync():
            for _ in range(2):
                mean_loss(model, *values).backward()
            assert_same(gradients(model), [2 * SHARES[communicator.rank] / 4 * grad for grad in local])

    run_ranks(2, work)


@pytest.mark.parametrize("how", ["none", "zeros", "zeros behind a reduced gradient", "replaced"])
def test_what_becomes_of_pending_gradients_is_up_to_the_script(how: str) -> None:
    def run(model: torch.nn.Module, communicator: Communicator | None) -> list[torch.Tensor | None]:
        def backward(part: int) -> None:
            values = batch(part) if communicator is None else share_of(batch(part), SHARES, communicator.rank)
            mean_loss(model, *values).backward()

        def change() -> None:
            if how == "none":
                model.zero_grad()
            elif how == "replaced":
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad = parameter.grad * 0.5
            else:
                model.zero_grad(set_to_none=False)

        if communicator is None:
            if how == "zeros behind a reduced gradient":
                backward(0)
            backward(1)
            change()
            backward(2)
            return gradients(model)
        with reducing(model, communicator, weight_of(SHARES, communicator.rank)) as reducer:
            if how == "zeros behind a reduced gradient":
                backward(0)
            with reducer.no_sync():
                backward(1)
            change()
            backward(2)
            return gradients(model)

    ranks = run_ranks(2, lambda communicator: run(build(), communicator))
    assert_bit_identical(ranks)
    assert_same(ranks[0], run(build(), None))


def test_reduced_pending_reduced() -> None:
    """A backward that reduces, two that do not, two that do: what was reduced is not reduced again."""

    def run(model: torch.nn.Module, communicator: Communicator | None) -> list[torch.Tensor | None]:
        def backward(part: int) -> None:
            values = batch(part) if communicator is None else share_of(batch(part), SHARES, communicator.rank)
            mean_loss(model, *values).backward()

        if communicator is None:
            for part in range(5):
                backward(part)
            return gradients(model)
        with reducing(model, communicator, weight_of(SHARES, communicator.rank)) as reducer:
            backward(0)
            with reducer.no_sync():
                backward(1)
                backward(2)
            backward(3)
            backward(4)
            return gradients(model)

    ranks = run_ranks(2, lambda communicator: run(build(), communicator))
    assert_bit_identical(ranks)
    assert_same(ranks[0], run(build(), None))


def test_pending_gradients_of_an_empty_share_are_not_taken_for_zeroed_ones() -> None:
    def run(model: torch.nn.Module, communicator: Communicator | None) -> list[torch.Tensor | None]:
        def backward(part: int) -> None:
            values = batch(part) if communicator is None else share_of(batch(part), [4, 0], communicator.rank)
            mean_loss(model, *values).backward()

        if communicator is None:
            for part in range(3):
                backward(part)
            return gradients(model)
        with reducing(model, communicator, weight_of([4, 0], communicator.rank)) as reducer:
            backward(0)
            with reducer.no_sync():
                backward(1)
            backward(2)
            return gradients(model)

    ranks = run_ranks(2, lambda communicator: run(build(), communicator))
    assert_bit_identical(ranks)
    assert_same(ranks[0], run(build(), None))


def test_pending_gradients_are_reduced_by_a_backward_that_does_not_reach_them() -> None:
    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        with reducing(model, communicator, weight_of(SHARES, communicator.rank)) as reducer:
            with reducer.no_sync():
                mean_loss(model, *share_of(batch(0), SHARES, communicator.rank)).backward()
            model.last.bias.sum().backward()
            return gradients(model)

    reference = build()
    mean_loss(reference, *batch(0)).backward()
    reference.last.bias.sum().backward()
    ranks = run_ranks(2, work)
    assert_bit_identical(ranks)
    assert_same(ranks[0], gradients(reference))


def test_set_weight_over_an_accumulation_is_one_mean_over_all_of_it() -> None:
    reference = build()
    x, y = (torch.cat(pair) for pair in zip(batch(0), batch(1, 6), strict=True))
    mean_loss(reference, x, y).backward()

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        count = 0.0
        with reducing(model, communicator, lambda: Weight(count, count)) as reducer:
            with reducer.no_sync():
                count = float([3, 1][communicator.rank])
                mean_loss(model, *share_of(batch(0), [3, 1], communicator.rank)).backward()
            count = float([2, 4][communicator.rank])
            mean_loss(model, *share_of(batch(1, 6), [2, 4], communicator.rank)).backward()
            return gradients(model)

    assert_same(run_ranks(2, work)[0], gradients(reference))


def test_weights_of_dropped_gradients_are_dropped() -> None:
    reference = build()
    mean_loss(reference, *batch(1)).backward()

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        count = float(SHARES[communicator.rank])
        with reducing(model, communicator, lambda: Weight(count, count)) as reducer:
            with reducer.no_sync():
                mean_loss(model, *share_of(batch(0), SHARES, communicator.rank)).backward()
            model.zero_grad()
            mean_loss(model, *share_of(batch(1), SHARES, communicator.rank)).backward()
            return gradients(model)

    assert_same(run_ranks(2, work)[0], gradients(reference))


def test_the_same_accumulation_with_and_without_a_weight_is_an_error() -> None:
    def work(communicator: Communicator) -> None:
        model = build()
        weights = [Weight(0.5), Weight(2.0, 2.0)]
        with reducing(model, communicator, lambda: weights.pop(0)) as reducer:
            with reducer.no_sync():
                mean_loss(model, *share_of(batch(0), [2, 2], communicator.rank)).backward()
            mean_loss(model, *share_of(batch(1), [2, 2], communicator.rank)).backward()

    _, errors = run_ranks_with_errors(2, work)
    assert all(isinstance(error, ConfigurationError) and "set_weight" in str(error) for error in errors)


def test_an_empty_share_has_no_say_in_the_sum_of_weights() -> None:
    weights = WeightSum()
    for weight in (Weight(0.0), Weight(0.0, 0.0), Weight(2.0, 2.0), Weight(0.5)):
        weights.add(weight)
    assert weights == WeightSum(2.0, num_with=2, num_without=1)
