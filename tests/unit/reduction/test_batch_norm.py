"""BatchNorm over all ranks equals BatchNorm of one process on the joined batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stratagem.arguments import warn_once
from stratagem.errors import ConfigurationError
from stratagem.worker.reduction.batch_norm import SyncBatchNorm, average_by_examples, convert_batch_norm
from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.ring.communicator import Communicator
from tests.unit.reduction.reducing import (
    assert_bit_identical,
    assert_same,
    build,
    gradients,
    reducing,
    share_of,
    weight_of,
)
from tests.unit.ring.thread_group import run_ranks

SHARES = [[4, 4], [7, 1], [8, 0], [3, 0, 5]]
LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, (8, 5)),
    "1d of sequences": (nn.BatchNorm1d, (8, 5, 3)),
    "2d": (nn.BatchNorm2d, (8, 5, 4, 3)),
    "3d": (nn.BatchNorm3d, (8, 5, 2, 3, 2)),
}


def whole() -> Weight:
    """Losses that are added."""
    return Weight(1.0)


def inputs(shape: tuple[int, ...]) -> torch.Tensor:
    """Far from zero."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 2 + 30


def layer(kind: str, **options: Any) -> nn.Module:
    made: nn.Module = build(lambda: LAYERS[kind][0](5, **options))
    for parameter in made.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(4))
    return made


CASES: list[tuple[str, list[int], dict[str, Any]]] = [(kind, shares, {}) for kind in LAYERS for shares in SHARES] + [
    ("2d", [7, 1], options) for options in ({"momentum": None}, {"affine": False}, {"track_running_stats": False})
]


@pytest.mark.parametrize(("kind", "shares", "options"), CASES)
def test_forward_backward_and_buffers(kind: str, shares: list[int], options: dict[str, Any]) -> None:
    x = inputs(LAYERS[kind][1]).double()

    def run(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(2):
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            out = module(leaf)
            (out.sin().sum() / 8).backward()
        assert leaf.grad is not None
        return [out.detach(), leaf.grad]

    def work(communicator: Communicator) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        module = layer(kind, **options).double()
        convert_batch_norm(module, communicator, whole)
        local = run(module, share_of((x,), shares, communicator.rank)[0])
        found = [communicator.all_reduce(p.grad) for p in module.parameters() if p.grad is not None]
        return local, [*found, *module.buffers()]

    reference = layer(kind, **options).double()
    out, grad = run(reference, x)
    ranks = run_ranks(len(shares), work)
    assert_bit_identical([shared for _, shared in ranks])
    joined = [torch.cat([local[at] for local, _ in ranks]) for at in range(2)]
    expected = [out, grad, *(p.grad for p in reference.parameters()), *reference.buffers()]
    for value, same in zip([*joined, *ranks[0][1]], expected, strict=True):
        torch.testing.assert_close(value, same, atol=1e-10, rtol=1e-10)


def test_variance_of_large_values_in_float32() -> None:
    """A sum of squares in float32 would have nothing left of it."""
    x = torch.randn((64, 5), generator=torch.Generator().manual_seed(3)) + 3000

    def work(communicator: Communicator) -> torch.Tensor:
        module = nn.BatchNorm1d(5, momentum=1.0)
        convert_batch_norm(module, communicator, whole)
        module(share_of((x,), [40, 24], communicator.rank)[0])
        assert module.running_var is not None
        return module.running_var

    torch.testing.assert_close(run_ranks(2, work)[1], x.double().var(0).float(), rtol=1e-3, atol=0)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.inner = nn.Sequential(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3, momentum=0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.relu(self.norm(self.conv(x)))).mean((2, 3))  # type: ignore[no-any-return]


@pytest.mark.parametrize("weighting", ["by share", "set_weight"])
@pytest.mark.parametrize("shares", SHARES)
def test_training_with_a_reducer(shares: list[int], weighting: str) -> None:
    x = torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    y = torch.randint(3, (8,), generator=torch.Generator().manual_seed(1))

    def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor | None]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return [*(p.detach().clone() for p in model.parameters()), *gradients(model), *model.buffers()]

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build(Conv)
        mine = float(shares[communicator.rank])
        weight = weight_of(shares, communicator.rank)
        if weighting == "set_weight":
            weight = lambda: Weight(mine, mine)  # noqa: E731
        convert_batch_norm(model, communicator, weight)
        with reducing(model, communicator, weight):
            return train(model, *share_of((x, y), shares, communicator.rank))

    ranks = run_ranks(len(shares), work)
    assert_bit_identical(ranks)
    for value, expected in zip(ranks[0], train(build(Conv), x, y), strict=True):
        assert value is not None and expected is not None
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("least", [0.0, 1e-9])
def test_a_rank_with_examples_and_no_weight_is_warned(least: float, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    x = torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def train(model: nn.Module, x: torch.Tensor, share: float) -> list[torch.Tensor | None]:
        (model(x).square().mean() * share).backward()
        return gradients(model)

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model, mine = build(Conv).double(), float(not communicator.rank)
        weight = lambda: Weight(max(mine, least), max(mine, least))  # noqa: E731
        convert_batch_norm(model, communicator, weight)
        with reducing(model, communicator, weight):
            return train(model, x.chunk(2)[communicator.rank], mine)

    model = build(Conv).double()
    model(x)[:4].square().mean().backward()
    pairs = zip(run_ranks(2, work)[0], gradients(model), strict=True)
    are_same = all(torch.allclose(*pair) for pair in pairs)  # type: ignore[arg-type]
    assert (are_same, "set_weight(0)" in caplog.text) == ((False, True) if not least else (True, False))


def test_evaluation_is_that_of_the_layer_it_was_and_needs_no_other_rank() -> None:
    def work(communicator: Communicator) -> None:
        module, plain = layer("2d").eval(), layer("2d").eval()
        convert_batch_norm(module, communicator, whole)
        if communicator.rank == 0:
            x = inputs((8, 5, 4, 3))
            assert torch.equal(module(x), plain(x))

    run_ranks(2, work)


def test_conversion_keeps_objects_state_and_class() -> None:
    def work(communicator: Communicator) -> None:
        model = build(Conv)
        model.register_forward_hook(lambda *_: None)
        norm, parameters, state = model.norm, list(model.parameters()), copy.deepcopy(model.state_dict())
        convert_batch_norm(model, communicator, whole)
        convert_batch_norm(model, communicator, whole)
        assert model.norm is norm and isinstance(norm, SyncBatchNorm) and isinstance(norm, nn.BatchNorm2d)
        assert isinstance(model.inner[1], SyncBatchNorm)
        assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
        assert list(model.state_dict()) == list(state)
        build(Conv).load_state_dict(model.state_dict())
        model.load_state_dict(state)

    run_ranks(1, work)


def test_a_copied_model_reduces_with_the_same_communicator() -> None:
    def work(communicator: Communicator) -> bool:
        model = build(Conv)
        convert_batch_norm(model, communicator, whole)
        copied = copy.deepcopy(model)
        before = communicator.position.ordinal
        copied(torch.ones(2, 2, 6, 6))
        return communicator.position.ordinal > before

    assert run_ranks(2, work) == [True, True]


def test_half_precision_input() -> None:
    x = inputs((8, 5, 4, 3)).bfloat16()

    def work(communicator: Communicator) -> torch.Tensor:
        module = layer("2d")
        convert_batch_norm(module, communicator, whole)
        out = module(share_of((x,), [5, 3], communicator.rank)[0])
        assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16
        out.float().sum().backward()
        return out.detach()

    torch.testing.assert_close(torch.cat(run_ranks(2, work)), layer("2d")(x).detach())


def test_one_value_per_channel_is_refused_on_every_rank() -> None:
    def work(communicator: Communicator) -> None:
        module = layer("1d")
        convert_batch_norm(module, communicator, whole)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            module(torch.ones(1 - communicator.rank, 5))

    run_ranks(2, work)


def test_nothing_anywhere_changes_nothing() -> None:
    def work(communicator: Communicator) -> None:
        module, plain = layer("1d"), layer("1d")
        convert_batch_norm(module, communicator, whole)
        assert module(torch.ones(0, 5)).shape == (0, 5)
        assert_same(list(module.buffers()), list(plain.buffers()))

    run_ranks(2, work)


@pytest.mark.parametrize("shape", [(4, 3), (4, 5, 2, 2)])
def test_input_of_the_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    def work(communicator: Communicator) -> None:
        module = layer("1d")
        convert_batch_norm(module, communicator, whole)
        with pytest.raises(ValueError, match="expected"):
            module(torch.ones(shape))

    run_ranks(1, work)


class Own(nn.BatchNorm1d):
    pass


@pytest.mark.parametrize("module", [Own(3), nn.Sequential(nn.LazyBatchNorm1d())])
def test_layers_that_cannot_be_converted_are_named(module: nn.Module) -> None:
    def work(communicator: Communicator) -> None:
        with pytest.raises(ConfigurationError, match=r"is a (Own|LazyBatchNorm1d)"):
            convert_batch_norm(module, communicator, whole)

    run_ranks(1, work)


# -- buffers ----------------------------------------------------------------------------------------------------------


class Buffers(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((2, 2), value))
        self.register_buffer("low", torch.full((3,), value, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.tensor(int(value)))
        self.register_buffer("seen", torch.tensor([value > 2, False]))


def test_floats_are_averaged_by_share_and_integers_are_the_maximum() -> None:
    def work(communicator: Communicator) -> list[torch.Tensor]:
        module = Buffers([1.0, 5.0, 3.0][communicator.rank])
        if communicator.rank == 2:
            module.get_buffer("mean").fill_(torch.nan)
        average_by_examples([module], [[3, 1, 0][communicator.rank]], communicator)
        return list(module.buffers())

    ranks = run_ranks(3, work)
    assert_bit_identical(ranks)
    mean, low, steps, seen = ranks[0]
    assert torch.equal(mean, torch.full((2, 2), 2.0)) and torch.equal(low, torch.full((3,), 2.0).bfloat16())
    assert int(steps) == 5 and seen.tolist() == [True, False]


def test_before_the_first_batch_all_count_the_same() -> None:
    def work(communicator: Communicator) -> list[torch.Tensor]:
        module = Buffers([1.0, 5.0][communicator.rank])
        average_by_examples([module], [0], communicator)
        return list(module.buffers())

    assert torch.equal(run_ranks(2, work)[1][0], torch.full((2, 2), 3.0))


def test_no_buffers_no_collective_beside_the_count() -> None:
    def work(communicator: Communicator) -> int:
        average_by_examples([nn.Linear(2, 2)], [1], communicator)
        return communicator.position.ordinal

    assert run_ranks(2, work) == [1, 1]


def test_a_gradient_of_a_gradient_is_refused_with_the_way_out() -> None:
    """Torch's own words named none; where the loss is linear in what the layer gives, there was no word at all."""

    def work(communicator: Communicator) -> None:
        module = nn.BatchNorm1d(5)
        convert_batch_norm(module, communicator, whole)
        x = torch.randn(4, 5, requires_grad=True)
        for loss in (module(x)[0].sum(), module(x).square().sum()):
            gradients = torch.autograd.grad(loss, (x, *module.parameters()), create_graph=True)
            for gradient in gradients[:2]:
                with pytest.raises(ConfigurationError, match=r"a gradient of a gradient .* leave sync_batchnorm out"):
                    gradient.square().sum().backward(retain_graph=True)

    run_ranks(2, work)
