"""``sg.nn.Embedding`` where a table is this process's own, and what a remote one is before it is linked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import ConfigurationError
from stratagem.nn.embedding import RemoteEmbedding
from stratagem.strategy.base import Strategy


class Remote(Strategy):
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
def test_refuses_what_cannot_be(build: Callable[..., Layer], is_remote: bool) -> None:
    strategy = Remote() if is_remote else Strategy()
    wrong: list[dict[str, Any]] = [
        {"num_embeddings": 0},
        {"embedding_dim": 0},
        {"padding_idx": 20},
        {"init": "normal"},
        {"init": sg.nn.Uniform(1.0, 0.0)},
        {"init": sg.nn.Normal(std=float("inf"))},
        {"seed": -1},
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
    assert model.state_dict()["0.weight"].is_meta


def test_what_a_remote_table_cannot_do_says_what_can_be_done(remote: Strategy) -> None:
    layer = sg.nn.Embedding(20, 4)
    with pytest.raises(ConfigurationError, match=r"export_form\(\).*sg\.Checkpoint"):
        _ = layer.weight
    with pytest.raises(ConfigurationError, match=r"strategy\.prepare"):
        layer(torch.tensor([1]))
    with pytest.raises(ConfigurationError, match=r"dtype=torch\.float64"):
        nn.Sequential(layer).double()
    with pytest.raises(RuntimeError, match=r"sg\.Checkpoint"):
        layer.load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({"weight": torch.zeros(3, 4)})
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})


def test_a_class_of_ones_own_stays_here(remote: Strategy) -> None:
    class Own(sg.nn.Embedding):
        pass

    layer = Own(20, 4)
    assert not isinstance(layer, RemoteEmbedding) and layer.weight.shape == (20, 4)
    assert not isinstance(copy.deepcopy(layer), RemoteEmbedding)
