"""Tables on a ps: updates against torch's sparse gradients, initial values, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stratagem.cluster.initial_rows import InitialRows
from stratagem.errors import (
    ConfigurationError,
    FrameError,
    LimitError,
    ProtocolError,
    UnsupportedOptimizerError,
    VariableError,
)
from stratagem.ps import row_values
from stratagem.ps.locked_group import LockedGroup
from stratagem.ps.merge import facts_of
from stratagem.ps.row_values import BLOCK_ROWS, fill_rows
from stratagem.ps.rows import merge_rows, unpack
from stratagem.ps.specs import GroupSpec, ShardSpec, check_group
from stratagem.ps.table_group import MAX_ANSWER_BYTES, TableGroup
from tests.unit.ps.driver import ListLane, update
from tests.unit.ps.tables import packed, table_spec

torch.set_num_threads(1)

ROWS, WIDTH = 37, 5

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "maximize": True}),
    ("Adagrad", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.05, "eps": 1e-3, "initial_accumulator_value": 0.1}),
    ("Adagrad", {"lr": 0.1, "maximize": True}),
    ("SparseAdam", {"lr": 0.01}),
    ("SparseAdam", {"lr": 0.01, "betas": [0.7, 0.9], "eps": 1e-4}),
    ("SparseAdam", {"lr": 0.01, "maximize": True}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "hyper"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_equals_torch_with_sparse_gradients(name: str, hyper: dict[str, Any], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    spec = table_spec(ROWS, WIDTH, name, dtype=dtype)
    group = TableGroup(spec)
    group.make_values()
    reference = torch.nn.Parameter(group.weights.view(ROWS, WIDTH).clone())
    kwargs: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in hyper.items()}
    optimizer = getattr(torch.optim, name)([reference], **kwargs)
    for step in range(12):
        rate = optimizer.param_groups[0]["lr"] = kwargs["lr"] * (1 - step / 11)  # to 0, with which none can be made
        numbers = torch.randperm(ROWS, generator=generator)[: step % 4 * 3].sort().values
        values = torch.randn(len(numbers), WIDTH, generator=generator, dtype=dtype)
        scale = 0.5 if step % 3 == 0 else 1.0
        reference.grad = torch.sparse_coo_tensor(
            numbers[None], values * scale, (ROWS, WIDTH), check_invariants=False, is_coalesced=True
        )
        with torch.sparse.check_sparse_tensor_invariants(False):
            optimizer.step()
        half = len(numbers) // 2
        parts = [packed(numbers[half:], values[half:], half), packed(numbers[:half], values[:half])]
        update(group, parts[1:] if half == len(numbers) else parts, [True], [hyper | {"lr": rate}], scale)
    torch.testing.assert_close(group.weights.view(ROWS, WIDTH), reference.detach(), rtol=2e-6, atol=2e-6)
    for slot, flat in group.slots.items():
        torch.testing.assert_close(flat.view(ROWS, WIDTH), optimizer.state[reference][slot], rtol=2e-6, atol=2e-6)
    assert group.counts == [12] and group.num_updates == 12


def rows_of(group: TableGroup, numbers: torch.Tensor) -> torch.Tensor:
    """Rows as a worker is given them."""
    lane = ListLane()
    LockedGroup(group).send_rows(lane, 1, 0, numbers)
    return lane.frames[0].tensor.view(-1, group.spec.row_elements)


def test_rows_without_a_gradient_and_absent_updates_change_nothing() -> None:
    group = TableGroup(table_spec(ROWS, WIDTH, "SparseAdam"))
    group.make_values()
    before = group.weights.view(ROWS, WIDTH).clone()
    update(group, [packed(torch.tensor([3]), torch.ones(1, WIDTH))], [True], [{"lr": 0.1}])
    update(group, [], [False], [{"lr": 0.1}])
    update(group, [packed(torch.tensor([5]), torch.ones(1, WIDTH))], [True], [{"lr": 0.1}])
    changed = (group.weights.view(ROWS, WIDTH) != before).any(1).nonzero().flatten()
    assert changed.tolist() == [3, 5] and group.counts == [2]


@pytest.mark.parametrize("distribution", ["normal", "uniform", "constant"])
def test_initial_values_do_not_depend_on_the_cut(distribution: Any) -> None:
    initial = InitialRows(distribution, -1.0, 2.0, seed=9, zero_row=BLOCK_ROWS + 1)
    whole = torch.empty(3 * BLOCK_ROWS + 7, 3)
    fill_rows(whole, 0, initial)
    for cut in (1, 100, BLOCK_ROWS, BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 500):
        parts = [torch.empty(cut, 3), torch.empty(len(whole) - cut, 3)]
        fill_rows(parts[0], 0, initial)
        fill_rows(parts[1], cut, initial)
        assert torch.equal(torch.cat(parts), whole)
    assert not whole[BLOCK_ROWS + 1].any() and whole[BLOCK_ROWS].all()


def test_no_more_rows_are_drawn_than_a_table_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def block(*args: Any) -> torch.Tensor:
        drawn.append(len(made := draw(*args)))
        return made

    draw = row_values._block
    monkeypatch.setattr(row_values, "_block", block)
    fill_rows(torch.empty(3, 2), BLOCK_ROWS, InitialRows("normal", 0.0, 1.0, seed=9))
    fill_rows(alike := torch.empty(3 * BLOCK_ROWS, 1), 0, InitialRows("constant", 0.5, 0.0, seed=9))
    assert drawn == [3] and (alike == 0.5).all()


def test_initial_values_are_of_their_distribution() -> None:
    rows = torch.empty(20_000, 8)
    fill_rows(rows, 0, InitialRows("normal", 0.5, 2.0, seed=1))
    assert abs(float(rows.mean()) - 0.5) < 0.02 and abs(float(rows.std()) - 2.0) < 0.02
    assert not torch.equal(rows[:BLOCK_ROWS], rows[BLOCK_ROWS : 2 * BLOCK_ROWS])
    fill_rows(rows, 0, InitialRows("uniform", -3.0, -1.0, seed=1))
    assert -3.0 <= float(rows.min()) < -2.99 and -1.01 < float(rows.max()) <= -1.0
    other = torch.empty(20_000, 8)
    fill_rows(other, 0, InitialRows("uniform", -3.0, -1.0, seed=2))
    assert not torch.equal(rows, other)


def test_a_ps_with_two_shards_of_a_table() -> None:
    initial = InitialRows("normal", 0.0, 1.0, seed=3)
    shards = (ShardSpec("t", (10, 2), 0, 3, 0), ShardSpec("t", (10, 2), 6, 2, 6))
    spec = GroupSpec(1, "SGD", torch.float32, shards, initial)
    check_group(spec)
    group = TableGroup(spec)
    group.make_values()
    whole = torch.empty(10, 2)
    fill_rows(whole, 0, initial)
    assert torch.equal(rows_of(group, torch.tensor([0, 2, 3, 4])), whole[[0, 2, 6, 7]])
    for numbers in ([0, 4], [2, 4], [3, 4]):
        gradient = packed(torch.tensor(numbers), torch.ones(2, 2))
        update(group, [gradient], (True, True), [{"lr": 0.1, "maximize": False}])
    found = dict(group.hottest_rows())
    assert found == {"t:7": 0.5, "t:0": pytest.approx(1 / 6), "t:2": pytest.approx(1 / 6), "t:6": pytest.approx(1 / 6)}


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([packed(torch.tensor([2, 2]), torch.ones(2, WIDTH))], "ascending row numbers below 37"),
        ([packed(torch.tensor([5, 2]), torch.ones(2, WIDTH))], "ascending"),
        ([packed(torch.tensor([ROWS]), torch.ones(1, WIDTH))], "below 37, got 37"),
        ([packed(torch.tensor([-1]), torch.ones(1, WIDTH))], "got -1"),
        ([packed(torch.tensor([3]), torch.ones(1, WIDTH), 1)], "expected the rows after the first 0"),
        (
            [packed(torch.tensor([3]), torch.ones(1, WIDTH)), packed(torch.tensor([3]), torch.ones(1, WIDTH), 1)],
            "after 3",
        ),
    ],
)
def test_refuses_rows_that_cannot_be(parts: Any, match: str) -> None:
    group = TableGroup(table_spec(ROWS, WIDTH, "SGD"))
    group.make_values()
    before = group.weights.clone()
    with pytest.raises(ProtocolError, match=match):
        update(group, parts, [True], [{"lr": 0.1}])
    assert torch.equal(group.weights, before) and group.num_updates == 0


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Muon"])
def test_refuses_optimizers_that_change_every_row(name: str) -> None:
    with pytest.raises(UnsupportedOptimizerError, match=f"by {name}: .*SGD, Adagrad, SparseAdam, or all parameters"):
        check_group(table_spec(ROWS, WIDTH, name))


@pytest.mark.parametrize(
    ("name", "hyper"),
    [("SGD", {"momentum": 0.9}), ("SGD", {"weight_decay": 0.1}), ("Adagrad", {"weight_decay": 0.1})],
)
def test_refuses_momentum_and_weight_decay(name: str, hyper: dict[str, Any]) -> None:
    group = TableGroup(table_spec(ROWS, WIDTH, name))
    with pytest.raises(UnsupportedOptimizerError, match=f"{next(iter(hyper))}=0"):
        update(group, [], [True], [{"lr": 0.1, **hyper}])
    with pytest.raises(ConfigurationError, match="refuses"):
        update(group, [], [True], [{"lr": "x"}])
    assert group.num_updates == 0
    update(group, [], [True], [{"lr": 0.1}, {"lr": 0.1, **hyper}])  # of the dense parameters of the same optimizer
    assert group.num_updates == 1


def test_refuses_specs_that_are_no_table() -> None:
    two = (ShardSpec("a", (4, 2), 0, 4, 0), ShardSpec("b", (4, 2), 0, 4, 8))
    for shards in (two, (ShardSpec("a", (4,), 0, 4, 0),), (ShardSpec("a", (4, 0), 0, 4, 0),), ()):
        with pytest.raises(VariableError, match="rows of one table"):
            check_group(GroupSpec(1, "SGD", torch.float32, shards, InitialRows("constant", 0.0)))
    with pytest.raises(VariableError, match="finite"):
        check_group(GroupSpec(1, "SGD", torch.float32, two[:1], InitialRows("normal", 0.0, float("nan"))))


def test_asking_for_rows() -> None:
    group = TableGroup(table_spec(ROWS, WIDTH, "SGD"))
    with pytest.raises(VariableError, match="no values yet"):
        rows_of(group, torch.tensor([1]))
    group.make_values()
    assert rows_of(group, torch.tensor([], dtype=torch.int64)).shape == (0, WIDTH)
    for numbers in (torch.tensor([ROWS]), torch.tensor([-1]), torch.tensor([1.0])):
        with pytest.raises(FrameError, match="expected row numbers"):
            rows_of(group, numbers)
    with pytest.raises(LimitError, match="at most"):
        rows_of(group, torch.zeros(MAX_ANSWER_BYTES // (4 * WIDTH) + 1, dtype=torch.int64))


def test_merging_sums_in_the_order_that_is_given() -> None:
    spec = table_spec(ROWS, WIDTH, "SGD")
    dense, gradients = torch.zeros(ROWS, WIDTH), []
    generator = torch.Generator().manual_seed(1)
    for factor in (0.25, 0.5, 0.125):
        numbers = torch.randperm(ROWS, generator=generator)[:11].sort().values
        values = torch.randn(11, WIDTH, generator=generator)
        dense[numbers] += values * factor
        gradients.append((factor, [packed(numbers, values)]))
    ((numbers, values),) = unpack(spec, merge_rows(spec, gradients))
    assert numbers.tolist() == dense.any(1).nonzero().flatten().tolist()
    assert torch.equal(values, dense[numbers])
    assert merge_rows(spec, []) == [] and merge_rows(spec, [(1.0, [])]) == []


def test_facts_about_rows() -> None:
    spec = table_spec(ROWS, WIDTH, "SGD")
    numbers, values = torch.tensor([1, 4]), torch.ones(2, WIDTH)
    parts = [packed(numbers, values), packed(numbers + 9, values * 2, 2)]
    assert facts_of(spec, parts, [True]).squared_norm == pytest.approx(5 * 2 * WIDTH)
    values[1, 2] = torch.nan
    facts = facts_of(spec, [packed(numbers, values)], [True])
    assert not facts.finite and facts.not_finite == ("t",)
    huge = facts_of(spec, [packed(numbers, torch.full((2, WIDTH), 1e30))], [True])
    assert huge.finite and huge.squared_norm == pytest.approx(2 * WIDTH * 1e60)
