"""``sg.nn.Embedding`` where a table is this process's own, and what a remote one is before it is linked."""

from __future__ import annotations

import copy
import functools
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import stratagem as sg
from stratagem.cluster.initial_rows import InitialRows
from stratagem.errors import ConfigurationError
from stratagem.nn import remote_rows
from stratagem.nn.embedding import RemoteEmbedding
from stratagem.strategy.base import Strategy
from stratagem.strategy.default import DefaultStrategy
from stratagem.strategy.prepared import Preparation
from stratagem.strategy.ps.checks import check_prepared
from stratagem.worker.push import row_reads
from stratagem.worker.push.table_handle import TableGradient


class Remote(DefaultStrategy):
    """As far as tables are concerned, parameter servers."""

    holds_tables = True


@pytest.fixture
def remote() -> Iterator[Strategy]:
    with Remote().scope() as strategy:
        yield strategy


Layer = sg.nn.Embedding | sg.nn.EmbeddingBag
BUILDERS: list[Callable[..., Layer]] = [sg.nn.Embedding, sg.nn.EmbeddingBag]


@pytest.mark.parametrize("build", BUILDERS)
def test_a_plain_sparse_layer_without_parameter_servers(build: Callable[..., Layer]) -> None:
    layer = build(20, 4, padding_idx=-1, init=sg.nn.Normal(std=0.5), seed=3)
    assert layer.sparse and layer.padding_idx == 19
    assert layer.weight.shape == (20, 4) and not layer.weight[19].any()
    again = build(20, 4, padding_idx=19, init=sg.nn.Normal(std=0.5), seed=3)
    assert torch.equal(layer.weight, again.weight)
    assert not torch.equal(layer.weight, build(20, 4, seed=4).weight)
    layer(torch.tensor([[1, 2], [2, 19]])).sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None and gradient.is_sparse
    assert gradient.coalesce().indices()[0].tolist() == [1, 2]
    plain = layer.export_form()
    assert type(plain) in (nn.Embedding, nn.EmbeddingBag) and plain.padding_idx == 19
    assert torch.equal(plain.weight, layer.weight) and plain.weight.data_ptr() != layer.weight.data_ptr()
    assert torch.equal(copy.deepcopy(layer).weight, layer.weight)


def test_one_id_trains_beside_a_padding() -> None:
    layer = sg.nn.Embedding(5, 3, padding_idx=0)
    for number in (2, 0):
        layer(torch.tensor(number)).sum().backward()
    assert layer(torch.tensor(2)).shape == (3,) and layer.weight.grad is not None
    assert layer.weight.grad.to_dense()[:, 0].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("build", BUILDERS)
def test_fx_traces_a_layer_without_parameter_servers(build: Callable[..., Layer]) -> None:
    ids = torch.tensor([[1, 2]])
    layer = build(5, 3)
    assert torch.equal(torch.fx.symbolic_trace(nn.Sequential(layer))(ids), layer(ids))


def test_the_seed_comes_from_torch_when_there_is_none() -> None:
    torch.manual_seed(1)
    first = sg.nn.Embedding(5, 2)
    second = sg.nn.Embedding(5, 2)
    torch.manual_seed(1)
    again = sg.nn.Embedding(5, 2)
    assert torch.equal(first.weight, again.weight) and not torch.equal(first.weight, second.weight)


def test_init_and_dtype() -> None:
    layer = sg.nn.Embedding(50, 2, dtype=torch.float64, init=sg.nn.Uniform(2.0, 3.0))
    assert layer.weight.dtype is torch.float64 and float(layer.weight.detach().min()) >= 2.0
    assert (sg.nn.EmbeddingBag(5, 2, init=sg.nn.Constant(0.5)).weight == 0.5).all()


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("is_remote", [False, True])
def test_numbers_may_be_tensors(build: Callable[..., Layer], is_remote: bool) -> None:
    """Against 2**63 and 2**64 a tensor compares as if they were 0, or raises."""
    given = {"num_embeddings": 20, "embedding_dim": 4, "padding_idx": -1, "seed": 3}
    with (Remote() if is_remote else DefaultStrategy()).scope():
        layer: Any = build(**{name: torch.tensor(number) for name, number in given.items()})
    assert [type(one) for one in (layer.num_embeddings, layer.embedding_dim, layer.padding_idx)] == [int] * 3
    if not is_remote:
        assert torch.equal(layer.weight, build(**given).weight)


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("is_remote", [False, True])
def test_refuses_what_cannot_be(build: Callable[..., Layer], is_remote: bool) -> None:
    strategy = Remote() if is_remote else DefaultStrategy()
    wrong: list[dict[str, Any]] = [
        {"num_embeddings": 0},
        {"embedding_dim": 0},
        {"padding_idx": 20},
        {"init": "normal"},
        {"init": sg.nn.Uniform(1.0, 0.0)},
        {"init": sg.nn.Normal(std=float("inf"))},
        {"seed": -1},
        {"_weight": torch.zeros(20, 4).to_sparse()},
    ]
    with strategy.scope():
        for arguments in wrong:
            with pytest.raises(ConfigurationError, match="expected"):
                build(**{"num_embeddings": 20, "embedding_dim": 4, **arguments})
        with pytest.raises(ConfigurationError, match="'sum' or 'mean'"):
            sg.nn.EmbeddingBag(20, 4, mode="max")  # type: ignore[arg-type]


def test_a_remote_table_has_no_memory(remote: Strategy) -> None:
    layer = sg.nn.Embedding(10**12, 64, padding_idx=0)
    assert isinstance(layer, RemoteEmbedding) and isinstance(layer, sg.nn.Embedding)
    model = nn.Sequential(layer, nn.Linear(64, 2))
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "1.weight", "1.bias"]
    assert sum(p.numel() for p in model.parameters()) == 64 * 10**12 + 130
    assert model.to("cpu") is model
    for optimizer in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam):
        optimizer(layer.parameters(), 0.1)
    assert model.state_dict()["0.weight"].device.type == "meta"


def test_what_a_remote_table_cannot_do_says_what_can_be_done(remote: Strategy) -> None:
    layer = sg.nn.Embedding(20, 4)
    with pytest.raises(ConfigurationError, match=r"export_form\(\).*sg\.Checkpoint"):
        _ = layer.weight[1]
    with pytest.raises(ConfigurationError, match=r"strategy\.prepare"):
        layer(torch.tensor([1]))
    registers: list[Any] = [layer.weight.register_hook, layer.weight.register_post_accumulate_grad_hook]
    for register in registers:
        with pytest.raises(ConfigurationError, match=r"no hook would be called\. .* on what the layer"):
            register(lambda gradient: None)
    with pytest.raises(ConfigurationError, match=r"dtype=torch\.float64"):
        nn.Sequential(layer).double()
    with pytest.raises(RuntimeError, match=r"sg\.Checkpoint"):
        layer.load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({"weight": torch.zeros(3, 4)})
    with pytest.raises(RuntimeError, match=r"got a ndarray; torch\.from_numpy"):
        layer.load_state_dict({"weight": np.zeros((20, 4))})
    with pytest.raises(RuntimeError, match=r"one after the other, got torch\.sparse_coo"):
        layer.load_state_dict({"weight": torch.zeros(20, 4).to_sparse()})
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})
    with pytest.raises(ConfigurationError, match=r"a floating dtype: give another than torch\.int64"):
        sg.nn.Embedding.from_pretrained(torch.arange(6).view(3, 2))


def test_a_weight_in_the_place_of_the_table_is_refused(remote: Strategy) -> None:
    layer, bags = sg.nn.Embedding(20, 4), sg.nn.EmbeddingBag(20, 4)
    for other in (bags.weight, nn.Parameter(torch.ones(20, 4))):
        with pytest.raises(ConfigurationError, match=r"replacing .*to share a table, call one layer twice.*from_pre"):
            layer.weight = other
    assert next(layer.parameters()) is layer.weight
    with pytest.raises(ConfigurationError, match=r"replacing of the weight of a table"):
        torch.func.functional_call(layer, {"weight": torch.ones(20, 4)}, torch.tensor([1]))


def test_a_class_of_ones_own_stays_here(remote: Strategy) -> None:
    class Own(sg.nn.Embedding):
        pass

    layer = Own(20, 4)
    assert not isinstance(layer, RemoteEmbedding) and layer.weight.shape == (20, 4)
    assert not isinstance(copy.deepcopy(layer), RemoteEmbedding)


def remote_model() -> Any:
    with Remote().scope():
        return nn.Sequential(sg.nn.Embedding(10, 4, seed=1), nn.Linear(4, 2))


def test_rows_that_are_not_here_are_neither_saved_nor_copied() -> None:
    model = remote_model()
    weight = model[0].weight
    assert (weight.shape, weight.dtype, sum(each.numel() for each in model.parameters())) == (
        (10, 4),
        torch.float32,
        50,
    )
    calls: list[Callable[[], Any]] = [
        lambda: torch.save(model.state_dict(), io.BytesIO()),
        lambda: torch.save(model, io.BytesIO()),
        lambda: copy.deepcopy(model),
        lambda: torch.optim.swa_utils.AveragedModel(model),
        lambda: {name: value.clone() for name, value in model.state_dict().items()},
        lambda: weight.data.copy_(torch.ones(10, 4)),
        lambda: weight.norm(),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match=r"export_form\(\).*sg.Checkpoint"):
            call()


def test_the_gradient_of_a_table_is_clipped_by_prepare() -> None:
    model = remote_model()
    table = model[0].remote_table
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SparseAdam([table.handle], 0.1)]
    for optimizer, to_none in itertools.product(optimizers, (True, False)):
        table.pending.add(np.arange(2), torch.ones(2, 4))
        for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
            with pytest.raises(ConfigurationError, match=r"strategy.prepare\(..., clip_norm=\)"):
                clip(model.parameters(), 1.0)
        assert table.pending.total() is not None
        optimizer.zero_grad(set_to_none=to_none)
        total = table.pending.total()
        assert total is None if to_none else total is not None and not len(total.numbers)


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        (lambda weight: nn.init.normal_(weight, std=0.5), ("normal", 0.0, 0.5)),
        (lambda weight: weight.data.normal_(1.0, 0.5), ("normal", 1.0, 0.5)),
        (lambda weight: nn.init.uniform_(weight, -2, 3), ("uniform", -2.0, 3.0)),
        (lambda weight: weight.data.uniform_(-2, 3), ("uniform", -2.0, 3.0)),
        (lambda weight: nn.init.xavier_uniform_(weight), ("uniform", -((6 / 14) ** 0.5), (6 / 14) ** 0.5)),
        (lambda weight: nn.init.kaiming_normal_(weight), ("normal", 0.0, 0.5**0.5)),
        (lambda weight: nn.init.constant_(weight, 3), ("constant", 3.0, 0.0)),
        (lambda weight: nn.init.zeros_(weight), ("constant", 0.0, 0.0)),
        (lambda weight: nn.init.ones_(weight), ("constant", 1.0, 0.0)),
    ],
)
def test_functions_of_torch_choose_initial_values(
    choose: Callable[[Any], Any], expected: tuple[str, float, float]
) -> None:
    layer = remote_model()[0]
    choose(layer.weight)
    initial = layer.remote_table.initial
    assert isinstance(initial, InitialRows)
    made = initial.distribution, initial.first, initial.second
    assert made == (expected[0], *map(pytest.approx, expected[1:]))


def test_a_constant_draws_no_random_number() -> None:
    """What a model draws behind it is then the same as without parameter servers."""
    layer, state = remote_model()[0], torch.random.get_rng_state()
    nn.init.zeros_(layer.weight)
    assert torch.equal(torch.random.get_rng_state(), state)
    nn.init.normal_(layer.weight)
    assert not torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("build", BUILDERS)
def test_reset_parameters_keeps_the_padding_at_zero(build: Callable[..., Layer], remote: Strategy) -> None:
    for padding in (None, 3):
        layer: Any = build(10, 4, padding_idx=padding, init=sg.nn.Constant(1.0))
        layer.reset_parameters()
        initial = layer.remote_table.initial
        assert (initial.distribution, initial.first, initial.second) == ("normal", 0.0, 1.0)
        assert initial.zero_row == padding


@pytest.mark.parametrize("function", [nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.kaiming_uniform_])
def test_initial_values_that_a_ps_cannot_make_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"init=sg.nn.Normal\(std=0.02\)"):
        function(remote_model()[0].weight)


@pytest.mark.parametrize("is_remote", [False, True])
def test_arguments_of_torch_s_layers(is_remote: bool) -> None:
    rows, ids = torch.randn(10, 4), torch.tensor([1, 2, 2, 5])
    with (Remote() if is_remote else DefaultStrategy()).scope():
        bag = sg.nn.EmbeddingBag(10, 4, include_last_offset=True, sparse=True, device="cpu", dtype=torch.float64)
        assert bag.include_last_offset and sg.nn.Embedding(10, 4, scale_grad_by_freq=True).scale_grad_by_freq
        for layer in BUILDERS:
            with pytest.raises(ConfigurationError, match="leave sparse= out"):
                layer(10, 4, sparse=False)
            with pytest.raises(ConfigurationError, match=r"less than 2\*\*63 bytes.*at most"):
                layer(2**62, 4)
        with pytest.raises(ConfigurationError, match=r"take sg\.nn\.Embedding .*\.amax\(1\)"):
            sg.nn.EmbeddingBag(10, 4, mode="max")  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"expected rows of shape \[3, 4\], got \[10, 4\]"):
            sg.nn.Embedding(3, 4, _weight=rows)
        if is_remote:
            state = torch.random.get_rng_state()
            given = sg.nn.EmbeddingBag(10, 4, _weight=rows.double())
            assert given.weight.dtype is torch.float64 and torch.equal(torch.random.get_rng_state(), state)
            frozen, bags = sg.nn.Embedding.from_pretrained(rows), sg.nn.EmbeddingBag.from_pretrained(rows, freeze=False)
            assert (frozen.weight.requires_grad, bags.weight.requires_grad) == (False, True)
            with pytest.raises(ConfigurationError, match="expected rows with values"):
                sg.nn.Embedding.from_pretrained(frozen.weight)
            with pytest.raises(ConfigurationError, match="max_norm=1 of 0 makes forward change the weights"):
                check_prepared([nn.Sequential(sg.nn.EmbeddingBag(10, 4, max_norm=1.0))], Preparation())
            return
    table = sg.nn.Embedding.from_pretrained(rows, padding_idx=2, max_norm=1.0)
    assert type(table) is sg.nn.Embedding and table.sparse and not table.weight.requires_grad
    plain = nn.Embedding.from_pretrained(rows.clone(), padding_idx=2, max_norm=1.0)
    assert torch.equal(table(ids), plain(ids)) and torch.equal(table.export_form()(ids), plain(ids))
    bags = sg.nn.EmbeddingBag.from_pretrained(rows, freeze=False, mode="sum", include_last_offset=True)
    flat = nn.EmbeddingBag.from_pretrained(rows, mode="sum", include_last_offset=True)
    offsets = torch.tensor([0, 1, 4])
    assert torch.equal(bags(ids, offsets), flat(ids, offsets)) and bags(ids, offsets).shape == (2, 4)
    assert torch.equal(bags.export_form()(ids, offsets), flat(ids, offsets))


@pytest.mark.parametrize("build", BUILDERS)
def test_gradients_by_frequency_without_parameter_servers(build: Callable[..., Layer]) -> None:
    """torch has no sparse ones: backward failed."""
    layer = build(5, 2, scale_grad_by_freq=True, **{"mode": "sum"} if build is sg.nn.EmbeddingBag else {})
    for trained in (layer, layer.export_form()):
        trained(torch.tensor([[0, 1], [1, 1]])).sum().backward()
        assert trained.weight.grad is not None and trained.weight.grad[:, 0].tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("is_remote", [False, True])
def test_sparse_may_be_given_to_from_pretrained_by_place(is_remote: bool) -> None:
    with (Remote() if is_remote else DefaultStrategy()).scope():
        for build, sparse in itertools.product(BUILDERS, (True, False)):
            made = functools.partial(
                build.from_pretrained,
                torch.ones(3, 2),
                False,
                *((None, 2.0, False, "sum") if build is sg.nn.EmbeddingBag else (None, None, 2.0, False)),
            )
            if sparse:
                assert made(sparse).sparse
            else:
                with pytest.raises(ConfigurationError, match="leave sparse= out"):
                    made(sparse)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("shape", [(6, 5), (1, 1), (40, 1), (3, 70)])
def test_bags_of_one_size_give_the_gradients_of_torch(mode: str, shape: tuple[int, int]) -> None:
    place = torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(3))
    place.view(-1)[: min(7, place.numel())] = torch.arange(min(7, place.numel()))
    values = torch.randn(int(place.max()) + 1, 4)
    weights = torch.randn(shape[0], 4)
    expected, ours = values.clone().requires_grad_(), values.clone().requires_grad_()
    found = row_reads.Occurrences.of(place.view(-1).numpy(), len(values))
    pooled = [functional.embedding_bag(place, expected, mode=mode), remote_rows.pooled(ours, place, mode, found)]
    assert torch.equal(*pooled)
    for each in pooled:
        (each * weights).sum().backward()
    assert expected.grad is not None and ours.grad is not None and not ours.grad.is_sparse
    torch.testing.assert_close(ours.grad, expected.grad)


@pytest.mark.parametrize("num_rows", [3000, 1 << 61], ids=["one word", "too many rows for one word"])
def test_ids_are_sorted_with_their_places(num_rows: int) -> None:
    random = np.random.default_rng(0)
    for size in (0, 1, 2, 2048, 4096):
        ids = random.integers(0, 3000, size) + (num_rows - 3000)
        numbers, found = row_reads.found_in(ids, num_rows)
        expected, place = np.unique(ids, return_inverse=True)
        assert (numbers == expected).all() and (found.place == place).all()
        assert (found.place[found.one] == np.arange(len(numbers))).all()
        assert sorted([*found.one, *found.others]) == list(range(size))


@pytest.mark.parametrize("wrong", [-1, 10, 1 << 55, -(1 << 60), (1 << 63) - 1])
def test_an_id_that_the_table_does_not_have_is_refused(remote: Strategy, wrong: int) -> None:
    layer = sg.nn.EmbeddingBag(10, 4)
    with pytest.raises(IndexError, match=rf"expected ids from 0 to 9, got {min(3, wrong)} to {max(3, wrong)}"):
        layer(torch.tensor([[3, wrong]]))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_a_lookup_under_a_transform_is_refused(remote: Strategy) -> None:
    layer, ids = sg.nn.Embedding(10, 4), torch.tensor([[1], [2]])
    for transform in (torch.vmap, torch.func.grad):
        with pytest.raises(ConfigurationError, match="outside, and give the function the rows"):
            transform(lambda scale: (scale * layer(ids)).sum())(torch.ones(2))
    with torch.no_grad(), pytest.raises(ConfigurationError, match=r"under torch\.jit\.trace.*export_form\(\)"):
        torch.jit.trace(layer, ids)


def test_a_gradient_of_the_scripts_own_is_refused_for_a_table(remote: Strategy) -> None:
    with pytest.raises(ConfigurationError, match="register_hook on what the layer returns"):
        sg.nn.Embedding(10, 4).weight.grad = torch.zeros(10, 4)


def test_what_every_step_asks_of_a_table_takes_no_way_through_python_of_torch(
    remote: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight: Any = sg.nn.Embedding(10, 4).weight
    optimizer = torch.optim.SGD([weight], 0.1)
    mark = torch.empty_like(weight).as_subclass(TableGradient)
    ways: list[Any] = []
    monkeypatch.setattr(type(weight), "__torch_function__", lambda *call, **_: ways.append(call))
    weight.grad = mark
    was_there = weight.grad is mark and weight.requires_grad
    optimizer.zero_grad()
    weight.requires_grad = False
    assert was_there and weight.grad is None and not weight.requires_grad
    assert not ways
