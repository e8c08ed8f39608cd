"""Training: the numbers of one process, within 2e-6 in float32.

Loss curve and weights of each strategy, against plain PyTorch on the joined batches. Tolerance: 2e-6 relative and
absolute in float32, after 6 to 9 updates; sums of slices associate differently.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tests.conformance import reasons
from tests.conformance.law import cannot, law, only
from tests.conformance.scenarios import normalised, training
from tests.conformance.scenarios.workload import Training, alone
from tests.conformance.slices import run_slices
from tests.conformance.strategies import (
    CENTRAL_2,
    COLUMNS,
    MIRRORED_2,
    MIRRORED_3,
    ONE,
    PARAMETER_SERVERS,
    PS_ASYNC,
    PS_SYNC,
    RING_2,
    RING_2X2,
    TPU,
    Column,
)

TOLERANCE = 2e-6

OWN_PACE = cannot(
    PS_ASYNC, "Each worker's update is its own, of one batch, on the weights of that moment: there is no joined batch."
)


def check(column: Column, results: list[dict[str, Any]], expected: dict[str, Any], buffers: bool = True) -> None:
    """Every worker has the losses, the learning rates and the weights of one process."""
    for one in results:
        assert one["agree"]
        close(one["weights"], expected["weights"])
        if buffers:
            close(one["buffers"], expected["buffers"])
        if column is not PS_SYNC:
            torch.testing.assert_close(one["losses"], expected["losses"], rtol=TOLERANCE, atol=TOLERANCE)
    means = [sum(loss * divisor for loss, divisor in step) / sum(d for _, d in step) for step in all_parts(results)]
    torch.testing.assert_close(means, expected["losses"], rtol=TOLERANCE, atol=TOLERANCE)


def all_parts(results: list[dict[str, Any]]) -> list[list[list[float]]]:
    """By step: loss and divisor of every replica of every worker. A worker of ps without a slice made no step."""
    epochs = zip(*(one["parts"] for one in results), strict=True)
    steps = [step for of_workers in epochs for step in itertools.zip_longest(*of_workers, fillvalue=[])]
    return [[part for parts in step for part in parts] for step in steps]


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal names, and values within the tolerance."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        one, other = torch.tensor(found[name], dtype=torch.float64), torch.tensor(value, dtype=torch.float64)
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{name}: {text}")  # noqa: B023


def trains(text: str, scenario: Training, without: Mapping[Column, str] = OWN_PACE) -> Callable[..., None]:
    """A row of a scenario whose numbers are those of one process."""

    @law(text, scenario, without=without)
    def test(column: Column, results: list[dict[str, Any]]) -> None:
        check(column, results, scenario.alone())

    return test


test_sgd = trains("SGD", training.sgd)


@law("SGD, uneven and empty shares", training.sgd_uneven, without=OWN_PACE)
def test_sgd_uneven(column: Column, results: list[dict[str, Any]]) -> None:
    check(column, results, training.sgd_uneven.alone())
    shares = [divisor for step in all_parts(results) for _, divisor in step]
    assert column is PS_SYNC or (0.0 in shares) == (column.num_replicas > 1)


test_momentum = trains("momentum (Nesterov, weight decay)", training.momentum)
test_momentum_uneven = trains("momentum, uneven and empty shares", training.momentum_uneven)
test_adam = trains("Adam", training.adam)
test_adam_uneven = trains("Adam, uneven and empty shares", training.adam_uneven)
test_adamw = trains("AdamW", training.adamw)
test_adamw_uneven = trains("AdamW, uneven and empty shares", training.adamw_uneven)
test_tied = trains("tied parameters", training.tied)


@law(
    "unused parameters are left alone, including those that only one replica uses in some steps",
    training.unused,
    without=OWN_PACE,
)
def test_unused(column: Column, results: list[dict[str, Any]]) -> None:
    workload = training.unused.workload()
    before = workload.objects[0].never.weight.tolist()
    expected = alone(workload)
    assert expected["weights"]["0.never.weight"] == before
    check(column, results, expected)
    assert all(one["weights"]["0.never.weight"] == before for one in results)


test_clip_norm = trains("`prepare(clip_norm=…)`", training.clip_norm)


@law(
    "a step that clips by itself",
    training.clipped,
    without=OWN_PACE
    | cannot(PS_SYNC, "`.grad` is this worker's own under parameter servers: `prepare(clip_norm=…)` clips the whole."),
)
def test_clipped(column: Column, results: list[dict[str, Any]]) -> None:
    expected = training.clipped.alone()
    close(expected["weights"], training.clip_norm.alone()["weights"])
    check(column, results, expected)


UNEVEN_SUM = cannot(
    PS_SYNC,
    "A worker of parameter servers sends one gradient an update, which has one weight: where its shares of the batches "
    "in it differ, no weight makes that the mean of one process, and the update is refused.",
)


test_accumulated = trains("accumulation over three batches", training.accumulated)
test_accumulated_uneven = trains(
    "accumulation, uneven and empty shares", training.accumulated_uneven, OWN_PACE | UNEVEN_SUM
)
test_no_sync = trains("accumulation in `no_sync`", training.no_sync)
test_no_sync_uneven = trains(
    "accumulation in `no_sync`, uneven and empty shares", training.no_sync_uneven, OWN_PACE | UNEVEN_SUM
)
test_gan = trains("two optimizers, one of them twice a batch (a small GAN)", training.gan)
test_class_weights = trains("class weights, with `set_weight`", training.class_weights)
test_ignore_index = trains(
    "`ignore_index`, with `set_weight`; a replica may have nothing that counts", training.ignore_index
)


@law("schedulers, by step and by epoch", training.scheduled, without=OWN_PACE)
def test_scheduled(column: Column, results: list[dict[str, Any]]) -> None:
    expected = training.scheduled.alone()
    check(column, results, expected)
    for one in results:
        assert one["rates"] == pytest.approx(expected["rates"], rel=1e-12)


@law("schedulers stepped with every update follow those of the whole job", training.paced)
def test_paced(column: Column, results: list[dict[str, Any]]) -> None:
    own = [one["own"] for one in results]
    shares = column is PS_ASYNC
    assert (sum(own) if shares else max(own)) == 40 and min(own) >= 2
    newest = max(results, key=lambda one: one["places"][0])
    assert newest["places"] == [40, 2]
    assert newest["rates"] == pytest.approx([0.1 / 25 / 1e4, 0.05 / 4], rel=1e-6)
    assert all(one["places"][0] >= one["own"] and one["places"][1] == 2 for one in results)
    assert not shares or max(own) < 40


@law(
    "workers that set different learning rates are refused before they use them",
    training.other_rates,
    without=only([RING_2, RING_2X2]),
)
def test_other_rates(column: Column, results: list[list[Any]]) -> None:
    first, last = ("worker:0", "worker:1") if column is RING_2 else ("worker:0, replica 0", "worker:1, replica 2")
    for steps, text in results:
        # Replicas of one worker take over what its first one has, so there the last one's is not used.
        if column is RING_2:
            assert steps == 2 and f"{first} has SGD(lr=0.05, " in text and f"{last} has SGD(lr=0.5, " in text
        else:
            assert (steps, text) == (5, "")


@law(
    "replicas whose weights differ are refused in their next backward",
    training.other_weights,
    without=only([RING_2, RING_2X2, MIRRORED_2, MIRRORED_3]),
)
def test_other_weights(column: Column, results: list[list[Any]]) -> None:
    last = {RING_2: "worker:1", RING_2X2: "worker:1, replica 3", MIRRORED_2: "replica 1"}.get(column, "replica 2")
    for steps, text in results:
        assert steps == 2 and f"the replicas have diverged: 0.weight of {last} has different bits" in text


@law("metrics of torchmetrics, updated in the step and computed over all replicas", training.measured)
def test_measured(column: Column, results: list[list[list[Any]]]) -> None:
    mean, auroc, several = training.metrics()
    expected = [
        mean(training.SCORES).item(),
        auroc(training.SCORES, training.LABELS).tolist(),
        {name: value.item() for name, value in several(training.SCORES, training.LABELS).items()},
    ]
    for of_worker in results:
        for of_epoch in of_worker:
            assert _plain(of_epoch[0]) == pytest.approx(expected[0], abs=1e-6)
            assert _plain(of_epoch[1]) == pytest.approx(expected[1], abs=1e-6)
            assert {name: _plain(value) for name, value in of_epoch[2].items()} == pytest.approx(expected[2], abs=1e-6)


@law(
    '`gradients="sum"` with `compute_average_loss` and `scale_regularization_loss`',
    training.gradients_sum,
    without=OWN_PACE,
)
def test_gradients_sum(column: Column, results: list[dict[str, Any]]) -> None:
    expected = training.gradients_sum.alone()
    sums = [sum(loss for loss, _ in step) for step in all_parts(results)]
    torch.testing.assert_close(sums, expected["losses"], rtol=TOLERANCE, atol=TOLERANCE)
    for one in results:
        close(one["weights"], expected["weights"])


DENSE = OWN_PACE | cannot(TPU, "XLA has no sparse gradients: see below.")
ONE_REPLICA = cannot(
    [column for column in COLUMNS if column.num_replicas == 1],
    reasons.ONE_IN_SYNC,
)


test_sparse_sgd = trains("`sg.nn.Embedding`, sparse: SGD", training.sparse_sgd, DENSE)
test_sparse_adagrad = trains("`sg.nn.Embedding`, sparse: Adagrad", training.sparse_adagrad, DENSE)
test_sparse_adam = trains("`sg.nn.Embedding`, sparse: SparseAdam", training.sparse_adam, DENSE)


@law(
    "`nn.Embedding(sparse=True)` where its gradients cannot travel is refused by `prepare`, with advice",
    training.sparse_refused,
    without=only((*TPU, *PARAMETER_SERVERS)),
)
def test_sparse_refused(column: Column, results: list[str]) -> None:
    for said in results:
        assert "give table sparse=False" in said


@law(
    "BatchNorm: as one process that runs the slices; buffers are averaged for evaluation",
    normalised.batch_norm,
    without=OWN_PACE
    | cannot(TPU, "torch_xla uses the biased variance for `running_var`, where torch uses the unbiased one."),
)
def test_batch_norm(column: Column, results: list[dict[str, Any]]) -> None:
    expected = run_slices(normalised.batch_norm.workload(), column.num_replicas)
    check(column, results, expected, buffers=column is not PS_SYNC)
    if column in (ONE, CENTRAL_2):  # one copy of variables, which is the average at any time
        close(results[0]["own buffers"], expected["buffers"])


@law(
    "BatchNorm: each replica has its own statistics",
    normalised.own_statistics,
    without=ONE_REPLICA | cannot(PS_SYNC, reasons.LENT_BY_NUMBER),
)
def test_own_statistics(column: Column, results: list[list[Any]]) -> None:
    means = [tuple(mean) for found in results for mean in found]
    assert len(set(means)) == len(means) == column.num_replicas


test_sync_batch_norm = trains(
    "`sync_batchnorm=True`: as one process on the joined batch, uneven and empty shares",
    normalised.sync_batch_norm,
    cannot(PARAMETER_SERVERS, "Workers of parameter servers meet only on the servers; `prepare` refuses it."),
)


@law(
    "`memory_format=torch.channels_last`: as one process without it",
    normalised.channels_last,
    without=OWN_PACE | cannot(TPU, "XLA chooses how tensors lie in memory."),
)
def test_channels_last(column: Column, results: list[dict[str, Any]]) -> None:
    check(column, results, alone(normalised.layout_workload(None)))


@law(
    "dropout: as one process that runs the slices with each replica's seed",
    normalised.dropout,
    without=OWN_PACE
    | cannot(PS_SYNC, "A slice goes to the worker that asks first, so no slice has a seed.")
    | cannot(TPU, "XLA draws other random numbers than torch on the CPU, from the same seed."),
)
def test_dropout(column: Column, results: list[dict[str, Any]]) -> None:
    check(column, results, run_slices(normalised.dropout.workload(), column.num_replicas, normalised.SEED))


@law(
    "an empty share: the step is called, and the buffers are what they were",
    normalised.empty_shares,
    without=cannot(PARAMETER_SERVERS, reasons.NO_SHARE),
)
def test_empty_shares(column: Column, results: list[dict[str, Any]]) -> None:
    # Batches of 4, 4 and 1.
    counted = {1: [3], 2: [3, 2], 3: [3, 2, 0], 4: [3, 2, 2, 2]}[column.num_replicas]
    assert [count for one in results for count in one["counted"]] == counted
    for worker, one in enumerate(results):
        mine = range(worker * column.num_local, (worker + 1) * column.num_local)
        assert one["called"] == [replica for replica in mine for _ in range(3)]


@law(
    "an empty share: an error of the step says so, with the way out",
    normalised.steps_without_size_0,
    without=cannot(PARAMETER_SERVERS, reasons.NO_SHARE) | ONE_REPLICA,
)
def test_steps_without_size_0(column: Column, results: list[str]) -> None:
    assert "failed on a batch of size 0" in results[-1]
    for advice in ("drop_last=True", 'on_empty="skip"', "flatten(1)"):
        assert advice in results[-1]
    if column is RING_2:
        assert "worker:1" in results[0]


def test_the_reference_in_slices_is_one_process_where_slices_do_not_matter() -> None:
    workload, same = (training.optimized("momentum", training.EVEN) for _ in range(2))
    found, expected = run_slices(workload, 3), alone(same)
    close(found["weights"], expected["weights"])
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=TOLERANCE, atol=TOLERANCE)


def test_the_comparison_sees_a_difference() -> None:
    with pytest.raises(AssertionError, match="a: "):
        close({"a": [1.0]}, {"a": [1.00001]})


def _plain(value: Any) -> Any:
    """Workers are in this process, or their results come as JSON."""
    return value.tolist() if isinstance(value, torch.Tensor) else value
