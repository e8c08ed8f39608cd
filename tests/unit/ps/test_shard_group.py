"""The ps's updates against torch.optim on the whole tensors."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from stratagem.errors import ConfigurationError, ProtocolError, UnsupportedOptimizerError
from stratagem.ps import optimizers
from stratagem.ps.shard_group import ShardGroup
from stratagem.ps.specs import GroupSpec, ShardSpec
from tests.unit.ps.driver import update

torch.set_num_threads(1)

SHAPES = [(7, 3), (5,), (), (16, 2, 3), (1,), (300,), (11,)]

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"lr": 0.1, "momentum": 0.8, "maximize": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "betas": [0.8, 0.99], "amsgrad": True, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    ("Adamax", {"lr": 0.01, "weight_decay": 0.01}),
    ("Adadelta", {"lr": 0.5, "rho": 0.8}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    ("NAdam", {"lr": 0.01, "momentum_decay": 0.004}),
    ("RAdam", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("Rprop", {"lr": 0.01, "etas": [0.5, 1.2]}),
    ("ASGD", {"lr": 0.01, "t0": 10.0, "lambd": 0.001}),
]


def spec_of(optimizer: str, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> GroupSpec:
    shards, offset = [], 0
    for index, shape in enumerate(shapes):
        shard = ShardSpec(f"v{index}", shape, 0, shape[0] if shape else 1, offset, index % 2)
        shards.append(shard)
        offset = shard.stop
    return GroupSpec(1, optimizer, dtype, tuple(shards))


def pieces_of(flat: torch.Tensor, rng: random.Random) -> list[tuple[int, torch.Tensor]]:
    """Uneven pieces in random order, each a view on a message of its own."""
    cuts = sorted({0, flat.numel(), *(rng.randrange(flat.numel()) for _ in range(6))})
    parts = [
        (start, torch.frombuffer(bytearray(flat[start:stop].numpy().tobytes()), dtype=flat.dtype))
        for start, stop in itertools.pairwise(cuts)
    ]
    rng.shuffle(parts)
    return parts


@pytest.mark.parametrize(("name", "hyper"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_equals_torch_with_uneven_pieces_absent_gradients_and_changing_lr(name: str, hyper: dict[str, Any]) -> None:
    rng = random.Random(name)
    torch.manual_seed(1)
    spec = spec_of(name, SHAPES)
    group = ShardGroup(spec)
    reference = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    for shard, parameter in zip(spec.shards, reference, strict=True):
        group.weights[shard.offset : shard.stop] = parameter.detach().reshape(-1)
    group.touch()
    kwargs = {key: tuple(value) if isinstance(value, list) else value for key, value in hyper.items()}
    optimizer = getattr(torch.optim, name)(
        [{"params": reference[0::2]}, {"params": reference[1::2], "lr": hyper["lr"] / 2}], **kwargs
    )
    fixed_cuts = rng.random()
    for step in range(40):
        lr = hyper["lr"] * (1 - step / 80) if step < 39 else -1e-19  # LinearLR(end_factor=0) may come to just below 0
        groups = [hyper | {"lr": lr}, hyper | {"lr": lr / 2, "initial_lr": 1.0}]
        for target, source in zip(optimizer.param_groups, groups, strict=True):
            target["lr"] = source["lr"]
        present = [step < 5 or step > 25 or rng.random() < 0.7 for _ in SHAPES]
        flat = torch.randn(spec.num_elements)
        for shard, parameter, has_gradient in zip(spec.shards, reference, present, strict=True):
            view = flat[shard.offset : shard.stop].reshape(shard.shape)
            parameter.grad = view.clone() if has_gradient else None
        optimizer.step()
        cuts = random.Random(fixed_cuts) if step % 3 else rng
        scale = 1.0 if step % 2 else 2.0
        update(group, pieces_of(flat / scale, cuts), present, groups, scale)
    for shard, parameter in zip(spec.shards, reference, strict=True):
        came = group.weights[shard.offset : shard.stop].reshape(shard.shape)
        torch.testing.assert_close(came, parameter.detach(), rtol=1e-6, atol=1e-6)
        kept = optimizer.state[parameter]
        for slot, flat in group.slots.items():
            expected = kept[slot]
            torch.testing.assert_close(
                flat[shard.offset : shard.stop].reshape(shard.shape), expected, rtol=1e-5, atol=1e-6
            )
    for index, parameter in enumerate(reference):
        kept = optimizer.state[parameter]
        if "step" in kept:
            assert group.counts[index] == int(kept["step"])
        for scalar, values in group.scalars.items():
            assert values[index] == pytest.approx(float(kept[scalar]), rel=1e-6)
    assert group.num_updates == 40


def test_the_list_is_the_eleven_elementwise_ones() -> None:
    assert sorted(optimizers.SUPPORTED) == sorted(
        ["SGD", "Adam", "AdamW", "Adamax", "Adadelta", "Adagrad", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"]
    )


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS", "SparseAdam", "MyAdam"])
def test_refuses_the_others_with_a_reason(name: str) -> None:
    with pytest.raises(UnsupportedOptimizerError, match=f"cannot run {name}: .*Use one of SGD"):
        optimizers.rule_for(name)


def test_refuses_bad_hyper_parameters_and_changes_nothing() -> None:
    group = ShardGroup(spec_of("Adam", [(4,)]))
    parts = [(0, torch.ones(4))]
    for bad in ({"eps": -1.0}, {"lr": "x"}, {"betas": [2.0, 0.9]}, {"lr": float("nan")}):
        with pytest.raises(ConfigurationError, match="Adam refuses"):
            update(group, parts, [True], [bad])
    with pytest.raises(UnsupportedOptimizerError, match="differentiable"):
        update(group, parts, [True], [{"differentiable": True}])
    with pytest.raises(ProtocolError, match="param_groups"):
        update(group, parts, [True], [])
    assert group.counter == 0 and not group.weights.any() and group.counts == [0]


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([(0, torch.ones(3))], "expected 4 gradient elements of variable v0, got 3"),
        ([(0, torch.ones(3)), (2, torch.ones(2))], "overlap at element 2"),
        ([], "expected 4 gradient elements"),
    ],
)
def test_refuses_pieces_that_do_not_fit(parts: list[tuple[int, torch.Tensor]], match: str) -> None:
    group = ShardGroup(spec_of("SGD", [(4,)]))
    with pytest.raises(ProtocolError, match=match):
        update(group, parts, [True], [{"lr": 0.1}])
    assert group.counter == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", optimizers.SUPPORTED)
def test_runs_in_every_floating_dtype(name: str, dtype: torch.dtype) -> None:
    group = ShardGroup(spec_of(name, [(64,), (3,)], dtype))
    update(group, [(0, torch.ones(67, dtype=dtype))], [True, True], [{"lr": 0.1}, {"lr": 0.1}])
    assert group.weights.isfinite().all() and (group.weights != 0).all()


def test_pieces_are_neither_copied_nor_written() -> None:
    group = ShardGroup(spec_of("Rprop", [(8,)]))
    gradient = torch.tensor([1.0, -1.0] * 4)
    for sign in (1, -1, 1):
        came = gradient * sign
        kept = came.clone()
        update(group, [(0, came)], [True], [{"lr": 0.1}])
        assert torch.equal(came, kept)
    assert group._plan is not None and all(parameter.grad is None for parameter in group._plan.parameters)
