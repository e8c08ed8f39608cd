"""Ranks with a reducer give the gradients and weights of one process on the joined batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stratagem.arguments import warn_once
from stratagem.errors import ConfigurationError
from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.group import Arena, Tag
from tests.unit.reduction.reducing import (
    SHARES,
    Net,
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
from tests.unit.ring.thread_group import run_ranks

EQUAL = [2, 2]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shares", SHARES)
def test_training_with_clipping_equals_one_process(shares: list[int]) -> None:
    def train(model: torch.nn.Module, rank: int | None) -> list[torch.Tensor]:
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        for step in range(5):
            values = batch(step)
            optimizer.zero_grad()
            mean_loss(model, *(values if rank is None else share_of(values, shares, rank))).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    def work(communicator: Communicator) -> list[torch.Tensor]:
        model = build()
        with reducing(model, communicator, weight_of(shares, communicator.rank)) as reducer:
            assert len(reducer.buckets) > 2
            return train(model, communicator.rank)

    ranks = run_ranks(len(shares), work)
    assert_bit_identical(ranks)
    assert_same(ranks[0], train(build(), None))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_several_backwards_add_up(set_to_none: bool) -> None:
    shares = [3, 1]

    def run(model: torch.nn.Module, rank: int | None) -> list[torch.Tensor | None]:
        for step in range(2):
            model.zero_grad(set_to_none=set_to_none)
            for part in range(3):
                values = batch(10 * step + part)
                mean_loss(model, *(values if rank is None else share_of(values, shares, rank))).backward()
        return gradients(model)

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        with reducing(model, communicator, weight_of(shares, communicator.rank)):
            return run(model, communicator.rank)

    ranks = run_ranks(2, work)
    assert_bit_identical(ranks)
    assert_same(ranks[0], run(build(), None))


@pytest.mark.parametrize("shares", [[3, 1], [4, 0]])
def test_gradients_survive_a_backward_of_other_parameters(shares: list[int]) -> None:
    """The second backward reduces zeros for the first layer, in the memory where its gradient lies."""

    def run(model: Any, rank: int | None) -> list[torch.Tensor | None]:
        for step in range(2):
            x, y = batch(step) if rank is None else share_of(batch(step), shares, rank)
            mean_loss(model, x, y).backward()
            model.last(torch.ones(1, 16)).sum().mul(1.0).backward()
        return gradients(model)

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        with reducing(model, communicator, weight_of(shares, communicator.rank)):
            return run(model, communicator.rank)

    ranks = run_ranks(2, work)
    assert_bit_identical(ranks)
    assert_same(ranks[0], run(build(), None))


def test_an_empty_share_counts_as_zeros_even_when_its_gradient_is_nan() -> None:
    def work(communicator: Communicator) -> bool:
        model = build()
        x, y = share_of(batch(0), [4, 0], communicator.rank)
        local = torch.autograd.grad(model.scale.sum() * x.mean(), model.scale)[0]
        with reducing(model, communicator, weight_of([4, 0], communicator.rank)):
            (mean_loss(model, x, y) + model.scale.sum() * x.mean()).backward()
            assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
            return bool(local.isnan().all())

    assert run_ranks(2, work) == [False, True]


class TwoHeads(Net):
    """One head is used on rank 0 only, one nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Linear(16, 3)
        self.never = torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, extra: bool = False) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        return self.extra(x) if extra else self.last(self.second(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("early", [True, False])
def test_parameters_unused_on_some_rank_or_on_all(early: bool) -> None:
    def one_process() -> list[torch.Tensor | None]:
        model = build(TwoHeads)
        x, y = batch(0)
        torch.nn.functional.cross_entropy(torch.cat([model(x[:3], True), model(x[3:])]), y).backward()
        return gradients(model)

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build(TwoHeads)
        with reducing(model, communicator, weight_of([3, 1], communicator.rank), early=early):
            x, y = share_of(batch(0), [3, 1], communicator.rank)
            (model(x, True).sum() + model(x, False).sum()).backward()  # leaves something in every bucket
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(x, communicator.rank == 0), y).backward()
            assert model.never.weight.grad is None
            return gradients(model)

    ranks = run_ranks(2, work)
    assert_bit_identical(ranks)
    assert_same(ranks[0], one_process())


def test_what_only_an_empty_share_uses_gets_no_gradient() -> None:
    def work(communicator: Communicator) -> None:
        model = build(TwoHeads)
        with reducing(model, communicator, weight_of([4, 0], communicator.rank)):
            x, _ = share_of(batch(0), [4, 0], communicator.rank)
            model(x, communicator.rank == 1).sum().backward()
            assert model.extra.weight.grad is None
            assert model.last.weight.grad is not None

    run_ranks(2, work)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = torch.nn.Linear(5, 3, bias=False)
        self.back = torch.nn.Linear(5, 3, bias=False)
        self.back.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(torch.tanh(self.into(x)) @ self.into.weight)  # type: ignore[no-any-return]


def test_tied_weights_and_a_parameter_given_twice() -> None:
    reference = build(Tied)
    mean_loss(reference, *batch(0)).backward()

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build(Tied)
        twice = [model.into.weight, model.back.weight]
        with reducing(twice, communicator, weight_of([3, 1], communicator.rank)) as reducer:
            assert sum(len(bucket.slots) for bucket in reducer.buckets) == 1
            mean_loss(model, *share_of(batch(0), [3, 1], communicator.rank)).backward()
            return gradients(model)

    assert_same(run_ranks(2, work)[0], gradients(reference))


def test_parameters_that_share_memory_keep_their_own_gradients() -> None:
    def run(rank: int | None, communicator: Communicator | None) -> list[torch.Tensor | None]:
        memory = torch.arange(6.0)
        a, b = torch.nn.Parameter(memory[:4]), torch.nn.Parameter(memory[2:])
        x = batch(0)[0][:, :4] if rank is None else share_of((batch(0)[0][:, :4],), [3, 1], rank)[0]

        def backward() -> list[torch.Tensor | None]:
            ((x @ a) * 2 + (x @ b) ** 2).mean().backward()
            return [a.grad, b.grad]

        if communicator is None:
            return backward()
        with reducing([a, b], communicator, weight_of([3, 1], communicator.rank)):
            return backward()

    assert_same(run_ranks(2, lambda c: run(c.rank, c))[1], run(None, None))


def test_retained_graph_twice() -> None:
    def run(model: torch.nn.Module, rank: int | None) -> list[torch.Tensor | None]:
        values = batch(0) if rank is None else share_of(batch(0), EQUAL, rank)
        loss = mean_loss(model, *values)
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)):
            return run(model, communicator.rank)

    assert_same(run_ranks(2, work)[1], run(build(), None))


def test_autograd_grad_is_neither_scaled_nor_reduced_and_loses_nothing() -> None:
    def work(communicator: Communicator) -> None:
        model = build()
        values = share_of(batch(0), EQUAL, communicator.rank)
        parameters = list(model.parameters())
        local = torch.autograd.grad(mean_loss(model, *values), parameters)
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)):
            mean_loss(model, *values).backward()
            before, held = gradients(model), [parameter.grad for parameter in parameters]
            ordinal = communicator.position.ordinal
            again = torch.autograd.grad(mean_loss(model, *values), parameters)
            assert communicator.position.ordinal == ordinal
            assert_same(again, local)
            assert_same(gradients(model), before)
            assert all(now is old for now, old in zip((p.grad for p in parameters), held, strict=True))

    run_ranks(2, work)


def test_gradient_penalty_uses_local_gradients_inside_the_loss() -> None:
    def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        loss = mean_loss(model, x, y)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return loss + slope.pow(2).sum(1).mean()

    reference = build()
    loss_of(reference, *batch(0)).backward()

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        with reducing(model, communicator, weight_of([3, 1], communicator.rank)):
            loss_of(model, *share_of(batch(0), [3, 1], communicator.rank)).backward(create_graph=False)
            return gradients(model)

    assert_same(run_ranks(2, work)[0], gradients(reference))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_create_graph_gives_plain_gradients(caplog: pytest.LogCaptureFixture) -> None:
    def work(communicator: Communicator) -> None:
        model = build()
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)):
            for _ in range(2):
                mean_loss(model, *share_of(batch(0), EQUAL, communicator.rank)).backward(create_graph=True)
            assert all(p.grad is not None and not p.grad.requires_grad for p in model.parameters())

    warn_once.cache_clear()
    run_ranks(2, work)
    # Two threads that are ranks may both be the first; a second backward of one is not.
    assert caplog.text.count("a penalty that is computed from .grad trains nothing") in (1, 2)


def test_a_backward_of_some_inputs_reduces_those() -> None:
    reference = build()
    mean_loss(reference, *batch(0)).backward(inputs=[reference.last.weight])

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)):
            mean_loss(model, *share_of(batch(0), EQUAL, communicator.rank)).backward(inputs=[model.last.weight])
            return gradients(model)

    assert_same(run_ranks(2, work)[0], gradients(reference))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_activations(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Net):
        """Backward meets the newest layer outside of the checkpoint, sends its bucket, and meets it again inside."""

        def __init__(self) -> None:
            super().__init__()
            self.newest = torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.first(x)) * self.scale
            x = checkpoint(lambda h: torch.tanh(self.newest(self.second(h))) * self.scale, x, use_reentrant=reentrant)
            return self.last(self.newest(x) * self.scale)  # type: ignore[no-any-return]

    reference = build(Checkpointed)
    mean_loss(reference, *batch(0)).backward()

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build(Checkpointed)
        with reducing(model, communicator, weight_of([3, 1], communicator.rank)):
            mean_loss(model, *share_of(batch(0), [3, 1], communicator.rank)).backward()
            return gradients(model)

    ranks = run_ranks(2, work)
    assert_bit_identical(ranks)
    assert_same(ranks[0], gradients(reference))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        model.second.to(dtype)
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)) as reducer:
            assert {bucket.area.source.dtype for bucket in reducer.buckets} == {torch.float32, dtype}
            value = torch.full((16,), 2.0 * communicator.rank + 1.0, dtype=dtype)
            (model.second(value).sum() + model.last(torch.ones(16)).sum()).backward()
            return [model.second.weight.grad, model.last.bias.grad]

    ranks = run_ranks(2, work)
    assert_bit_identical(ranks)
    assert torch.equal(ranks[0][0], torch.full((16, 16), 2.0, dtype=dtype))  # type: ignore[arg-type]
    assert torch.equal(ranks[0][1], torch.ones(3))  # type: ignore[arg-type]


def test_gradients_have_the_memory_format_of_their_parameters() -> None:
    def run(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        model(x).square().mean().backward()
        (weight, _) = model.parameters()
        assert weight.grad is not None and weight.grad.stride() == weight.stride() != weight.contiguous().stride()
        return weight.grad

    def conv() -> torch.nn.Module:
        return build(lambda: torch.nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)  # type: ignore[no-any-return]

    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))

    def work(communicator: Communicator) -> torch.Tensor:
        model = conv()
        with reducing(model, communicator, weight_of([3, 1], communicator.rank)):
            return run(model, share_of((x,), [3, 1], communicator.rank)[0])

    assert_same([run_ranks(2, work)[0]], [run(conv(), x)])


def test_a_model_made_double_after_the_reducer() -> None:
    reference = build().double()
    x, y = batch(0)
    mean_loss(reference, x.double(), y).backward()

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)):
            x, y = share_of(batch(0), EQUAL, communicator.rank)
            mean_loss(model, x, y).backward()
            model.double()
            model.zero_grad()
            mean_loss(model, x.double(), y).backward()
            return gradients(model)

    ranks = run_ranks(2, work)
    assert all(value is not None and value.dtype == torch.float64 for value in ranks[0])
    assert_same(ranks[0], gradients(reference))


def test_parameters_frozen_and_unfrozen() -> None:
    def run(model: Any, rank: int | None) -> list[list[torch.Tensor | None]]:
        found = []
        for step in range(3):
            model.first.requires_grad_(step > 0)
            model.last.requires_grad_(step < 2)
            model.zero_grad()
            mean_loss(model, *(batch(step) if rank is None else share_of(batch(step), EQUAL, rank))).backward()
            found.append(gradients(model))
        return found

    def work(communicator: Communicator) -> list[list[torch.Tensor | None]]:
        model = build()
        model.first.requires_grad_(False)
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)):
            return run(model, communicator.rank)

    ranks = run_ranks(2, work)
    for step, expected in enumerate(run(build(), None)):
        assert_same(ranks[0][step], expected)
        assert_bit_identical([rank[step] for rank in ranks])


@pytest.mark.parametrize("arrangement", ["one group", "groups", "two reducers"])
def test_two_optimizers_that_take_turns(arrangement: str) -> None:
    shares = [3, 1]

    def train(judge: Any, forger: Any, rank: int | None) -> list[torch.Tensor | None]:
        judging, forging = (torch.optim.Adam(model.parameters(), 0.02) for model in (judge, forger))
        for step in range(3):
            noise, real = batch(step)[0], batch(100 + step)[0]
            if rank is not None:
                noise, real = share_of((noise, real), shares, rank)
            judging.zero_grad()
            fake = forger(noise)
            (judge(fake.detach()).mean() - judge(real[:, :3]).mean()).backward()
            judging.step()
            forging.zero_grad()
            (-judge(fake).mean()).backward()
            forging.step()
        return [*(p.detach().clone() for m in (judge, forger) for p in m.parameters()), *gradients(judge)]

    def models() -> tuple[Any, Any]:
        return (
            build(lambda: torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)), 1),
            build(lambda: torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)), 2),
        )

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        judge, forger = models()
        weight = weight_of(shares, communicator.rank)
        of_judge, of_forger = list(judge.parameters()), list(forger.parameters())
        if arrangement == "two reducers":
            with reducing(of_judge, communicator, weight), reducing(of_forger, communicator, weight):
                return train(judge, forger, communicator.rank)
        groups = [of_judge, of_forger] if arrangement == "groups" else []
        with reducing(of_judge + of_forger, communicator, weight, groups=groups):
            return train(judge, forger, communicator.rank)

    ranks = run_ranks(2, work)
    assert_bit_identical(ranks)
    assert_same(ranks[0], train(*models(), None))


def test_groups_that_a_backward_does_not_reach_send_nothing() -> None:
    def work(communicator: Communicator) -> tuple[int, int]:
        used, unused = build(seed=1), build(seed=2)
        parameters = [*used.parameters(), *unused.parameters()]
        weight = weight_of(EQUAL, communicator.rank)
        groups = [list(used.parameters()), list(unused.parameters())]
        with reducing(parameters, communicator, weight, groups=groups) as reducer:
            of_used = sum(bucket.group == 0 for bucket in reducer.buckets)
            before = communicator.position.ordinal
            mean_loss(used, *share_of(batch(0), EQUAL, communicator.rank)).backward()
            return communicator.position.ordinal - before, of_used + 1

    assert all(collectives == expected for collectives, expected in run_ranks(2, work))


def test_groups_that_come_together_leave_early_the_next_time() -> None:
    def work(communicator: Communicator) -> tuple[int, int, int]:
        model = build()
        groups = [[*model.last.parameters()], [*model.first.parameters()]]
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank), groups=groups) as reducer:
            early = []
            for step in range(2):
                mean_loss(model, *share_of(batch(step), EQUAL, communicator.rank)).backward()
                early.append(reducer.num_early)
            return early[0], early[1], len(reducer.buckets)

    for first, second, buckets in run_ranks(2, work):
        assert first < second == buckets - 1  # the last one leaves where its sum is waited for


class Gate(torch.autograd.Function):
    """Backward stops here until the event is set."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passed: threading.Event) -> torch.Tensor:
        ctx.passed = passed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert ctx.passed.wait(60), "no bucket was reduced while backward ran"
        return grads[0], None


def test_buckets_are_reduced_while_backward_runs() -> None:
    def work(communicator: Communicator) -> tuple[int, int]:
        model = build()
        reduced = threading.Event()

        def watch(tensor: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
            result = all_reduce(tensor, *rest, **options)
            reduced.set()
            return result

        all_reduce = communicator.all_reduce
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)) as reducer:
            communicator.all_reduce = watch  # type: ignore[method-assign]
            x, y = share_of(batch(0), EQUAL, communicator.rank)
            hidden = Gate.apply(torch.tanh(model.first(x)), reduced)  # type: ignore[no-untyped-call]
            torch.nn.functional.cross_entropy(model.last(model.second(hidden)), y).backward()
            return reducer.num_early, len(reducer.buckets)

    for early, buckets in run_ranks(2, work):
        assert 0 < early < buckets  # scale is unused here, so its bucket and those behind it leave at the end


def test_sources_stay_as_they_are_until_the_next_backward_where_they_are_kept() -> None:
    def work(communicator: Communicator) -> None:
        model = build()
        with reducing(model, communicator, weight_of([3, 1], communicator.rank), keep_sources=True) as reducer:
            values = share_of(batch(0), [3, 1], communicator.rank)
            local = torch.autograd.grad(mean_loss(model, *values), list(model.parameters()))
            mean_loss(model, *values).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            torch.optim.SGD(model.parameters(), 0.1).step()
            weight = [3, 1][communicator.rank] / 4
            sources = {slot.index: slot.source for bucket in reducer.buckets for slot in bucket.slots}
            assert_same([sources[i] for i in range(len(local))], [weight * grad for grad in local])

    run_ranks(2, work)


@pytest.mark.parametrize("keep_sources", [False, True])
def test_gradients_have_one_place_and_a_second_where_sources_are_kept(keep_sources: bool) -> None:
    def work(communicator: Communicator) -> None:
        model = build()
        given: list[int] = []
        make = communicator.group.arena

        def arena(num_bytes: int, tag: Tag, in_place: bool = False) -> Arena:
            arena = make(num_bytes, tag, in_place)
            memories = (arena.source, arena.result)
            given.extend({memory.data_ptr(): memory.nbytes for memory in memories}.values())
            return arena

        communicator.group.arena = arena  # type: ignore[method-assign]
        weight = weight_of(EQUAL, communicator.rank)
        with reducing(model, communicator, weight, keep_sources=keep_sources) as reducer:
            mean_loss(model, *share_of(batch(0), EQUAL, communicator.rank)).backward()
            own = sum(bucket.area.source.nbytes for bucket in reducer.buckets)
            assert sum(given) == (2 if keep_sources else 1) * own
            places = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
            assert places == {reducer.buckets[0].area.result.untyped_storage().data_ptr()}

    run_ranks(2, work)


def test_close_leaves_a_plain_model() -> None:
    def work(communicator: Communicator) -> None:
        model = build()
        values = share_of(batch(0), EQUAL, communicator.rank)
        local = torch.autograd.grad(mean_loss(model, *values), list(model.parameters()))
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)):
            mean_loss(model, *values).backward()
        model.zero_grad()
        ordinal = communicator.position.ordinal
        mean_loss(model, *values).backward()
        assert_same(gradients(model), local)
        assert communicator.position.ordinal == ordinal

    run_ranks(2, work)


def test_gradients_outlive_the_reducer() -> None:
    def work(communicator: Communicator) -> None:
        model = build()
        with reducing(model, communicator, weight_of(EQUAL, communicator.rank)) as reducer:
            mean_loss(model, *share_of(batch(0), EQUAL, communicator.rank)).backward()
            before = gradients(model)
            results = [bucket.area.result for bucket in reducer.buckets]
        for result in results:
            result.fill_(7.0)
        assert_same(gradients(model), before)

    run_ranks(2, work)


def test_ranks_with_different_parameters_are_refused() -> None:
    def work(communicator: Communicator) -> str:
        model = torch.nn.Linear(4 + communicator.rank, 2)
        with (
            pytest.raises(ConfigurationError) as caught,
            reducing(model, communicator, weight_of(EQUAL, communicator.rank)),
        ):
            pass
        return str(caught.value)

    first, second = run_ranks(2, work)
    assert "number 0 differs" in first and "[2, 4]" in first
    assert "number 0 differs" in second and "[2, 5]" in second


def test_dtypes_that_cannot_be_reduced_are_refused() -> None:
    def work(communicator: Communicator) -> None:
        parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        with pytest.raises(ConfigurationError, match="complex64"):
            reducing([parameter], communicator, lambda: Weight(1.0)).__enter__()

    run_ranks(1, work)


def test_no_parameters() -> None:
    def work(communicator: Communicator) -> int:
        with reducing([], communicator, lambda: Weight(1.0)) as reducer:
            return len(reducer.buckets)

    assert run_ranks(2, work) == [0, 0]
