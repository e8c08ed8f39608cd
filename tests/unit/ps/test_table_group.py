"""Tables on a ps: updates against torch's sparse gradients, initial values, what is refused."""

from __future__ import annotations

import dataclasses
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
from tests.unit.ps.tables import beginning_with, packed, table_spec

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
    shards = (ShardSpec("t", (10, 2), 0, 3, 0, rows=initial), ShardSpec("t", (10, 2), 6, 2, 6, rows=initial))
    spec = GroupSpec(1, "SGD", torch.float32, shards)
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


def two_tables(optimizer: str = "SparseAdam") -> GroupSpec:
    """ "a" with rows 0 to 4, "b" with rows 5 to 8 of the flat tensor, the upper rows of a table of 6."""
    shards = (
        ShardSpec("a", (5, WIDTH), 0, 5, 0, rows=InitialRows("normal", 0.0, 1.0, seed=1)),
        ShardSpec("b", (6, WIDTH), 2, 4, 5 * WIDTH, rows=InitialRows("uniform", 0.0, 1.0, seed=2)),
    )
    return GroupSpec(1, optimizer, torch.float32, shards)


def test_tables_of_one_group_begin_and_step_as_each_alone() -> None:
    """The number of updates is each table's own; the bits are those of groups with one table."""
    spec = two_tables()
    check_group(spec)
    group = TableGroup(spec)
    alone = [
        TableGroup(dataclasses.replace(spec, shards=(dataclasses.replace(shard, offset=0),))) for shard in spec.shards
    ]
    for each in (group, *alone):
        each.make_values()
    generator = torch.Generator().manual_seed(3)
    hyper = [{"lr": 0.1}]
    for has_a, has_b in ((1, 1), (1, 0), (1, 1), (0, 1), (1, 1), (0, 1)):
        of_a, of_b = (
            torch.tensor([0, 3, 4][: 3 * has_a], dtype=torch.int64),
            torch.tensor([1, 2][: 2 * has_b], dtype=torch.int64),
        )
        values = torch.randn(len(of_a) + len(of_b), WIDTH, generator=generator)
        update(group, [packed(torch.cat([of_a, of_b + 5]), values)], [bool(has_a), bool(has_b)], hyper)
        for each, numbers, rows in zip(alone, (of_a, of_b), values.split([len(of_a), len(of_b)]), strict=True):
            if len(numbers):
                update(each, [packed(numbers, rows)], [True], hyper)
    assert group.counts == [alone[0].counts[0], alone[1].counts[0]] == [4, 5]
    assert torch.equal(group.weights, torch.cat([each.weights for each in alone]))
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(group.slots[name], torch.cat([each.slots[name] for each in alone]))
    assert {name for name, _ in group.hottest_rows()} <= {
        *(f"a:{n}" for n in range(5)),
        *(f"b:{n}" for n in range(2, 6)),
    }


def test_rows_of_a_table_without_a_gradient_are_refused() -> None:
    group = TableGroup(two_tables())
    group.make_values()
    with pytest.raises(ProtocolError, match="table b has no gradient in this update, but 1 rows came"):
        update(group, [packed(torch.tensor([1, 5]), torch.ones(2, WIDTH))], [True, False], [{"lr": 0.1}])


def test_a_group_of_tables_has_values_when_all_have() -> None:
    spec = two_tables()
    shards = [dataclasses.replace(shard, variable=name) for shard, name in zip(spec.shards, "cd", strict=True)]
    shards = [dataclasses.replace(shard, offset=shard.offset + spec.num_elements) for shard in shards]
    spec = dataclasses.replace(spec, shards=(*spec.shards, *shards))
    made, given = InitialRows("constant", 7.0), InitialRows("assigned")
    group = TableGroup(beginning_with(spec, given, made, given, given))
    group.make_values()
    assert not group.initialized and group.weights[5 * WIDTH : 9 * WIDTH].eq(7.0).all()

    def assign(first_row: int, num_rows: int) -> None:
        parts = [(first_row * WIDTH, torch.zeros(num_rows * WIDTH))]
        group.check_first_values(parts)
        group.take_first_values(parts)

    seen = []
    for first_row, num_rows in ((9, 3), (0, 5), (12, 2), (14, 4)):  # in order within each table
        assign(first_row, num_rows)
        seen.append(group.initialized)
    assert seen == [False, False, False, True]
    for first_row, num_rows, expected in ((13, 1, 14), (9, 6, 9), (18, 1, 0)):
        with pytest.raises(
            ProtocolError, match=f"in order, elements {expected * WIDTH} to .* got {first_row * WIDTH} "
        ):
            group.check_first_values([(first_row * WIDTH, torch.zeros(num_rows * WIDTH))])


def test_step_counts_come_with_values_of_some_shards() -> None:
    group = TableGroup(two_tables())
    group.make_values()
    update(group, [packed(torch.tensor([1, 5]), torch.ones(2, WIDTH))], [True, True], [{"lr": 0.1}])
    assert group.counts_with([9], [(6 * WIDTH, torch.zeros(WIDTH))]) == [1, 9]
    with pytest.raises(ProtocolError, match="expected step counts of 1 shards, got 2"):
        group.counts_with([9, 9], [(0, torch.zeros(WIDTH))])


def test_refuses_specs_that_are_no_table() -> None:
    zero = InitialRows("constant", 0.0)
    whole = ShardSpec("a", (4, 2), 0, 4, 0, rows=zero)
    flat, empty = (ShardSpec("a", shape, 0, 4, 0, rows=zero) for shape in ((4,), (4, 0)))
    others = [
        ShardSpec("b", (2, 4), 0, 2, 8, rows=zero),
        ShardSpec("b", (4, 2), 0, 4, 8),
        ShardSpec("b", (4, 2), 0, 4, 8, 1, zero),
    ]
    for shards in ((flat,), (empty,), *((whole, other) for other in others)):
        with pytest.raises(VariableError, match="rows of tables of two dimensions, one width"):
            check_group(GroupSpec(1, "SGD", torch.float32, shards))
    with pytest.raises(VariableError, match="finite"):
        endless = dataclasses.replace(whole, rows=InitialRows("normal", 0.0, float("nan")))
        check_group(GroupSpec(1, "SGD", torch.float32, (endless,)))


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
    spec = two_tables()
    values = torch.full((3, WIDTH), torch.inf)
    assert facts_of(spec, [packed(torch.tensor([1, 4, 5]), values)], [True, True]).not_finite == ("a", "b")
    spec = table_spec(ROWS, WIDTH, "SGD")
    huge = facts_of(spec, [packed(numbers, torch.full((2, WIDTH), 1e30))], [True])
    assert huge.finite and huge.squared_norm == pytest.approx(2 * WIDTH * 1e60)
