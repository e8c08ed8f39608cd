"""Loss scaling.

One law everywhere (SEMANTICS: "Loss scaling"); losses and weights are exact but for rounding in float32, 1e-6.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance import reasons
from tests.conformance.law import cannot, law
from tests.conformance.replicas import LOCAL_GRADIENTS, NO_COLLECTIVES, steps
from tests.conformance.scenarios import scaling
from tests.conformance.strategies import IN_ONE_PROCESS, PARAMETER_SERVERS, PS_ASYNC, PS_SYNC, Column


def check_weights(column: Column, results: list[Any], expected: list[float]) -> None:
    """After each step on every replica, and in the end.

    The updates do not depend on w, so that the end is the same whatever the order of asynchronous ones. A share
    without examples is no step of a worker of parameter servers, and what its last step brings it may be of that one.
    """
    assert [found["final"] for found in results] == [pytest.approx(expected[-1], rel=1e-6)] * column.num_workers
    if column is PS_ASYNC:
        return
    for found in results:
        for number, (weights, weight) in enumerate(zip(found["weights"], expected, strict=column is not PS_SYNC), 1):
            is_last_of_fewer = number == len(found["weights"]) < len(expected)
            later = expected[number:] if is_last_of_fewer else []
            assert any(weights == [pytest.approx(one, rel=1e-6)] * column.num_local for one in (weight, *later))
    assert max(len(found["weights"]) for found in results) == len(expected)


@law("`compute_average_loss`: [2,3] and [4,5] with global batch 4 → 1.25 and 2.25", scaling.average_loss)
def test_average_loss(column: Column, results: list[Any]) -> None:
    num = 2 * column.num_replicas
    for number, (by_default, said, weighted) in steps(column, results):
        first = 2.0 + 2 * number
        assert by_default == said == pytest.approx((2 * first + 1) / num)
        assert weighted == pytest.approx(first / num)
    if column.num_replicas == 2:
        assert [step[0] for _, step in steps(column, results)] == [1.25, 2.25]


@law("SUM of `compute_average_loss` over replicas: 3.5", scaling.summed_average_loss, without=NO_COLLECTIVES)
def test_summed_average_loss(column: Column, results: list[Any]) -> None:
    expected = sum(range(2, 2 + 2 * column.num_replicas)) / (2 * column.num_replicas)
    assert results == [pytest.approx(expected)] * column.num_workers
    assert column.num_replicas != 2 or expected == 3.5


@law("`scale_regularization_loss(x)` = x / `num_replicas_in_sync`", scaling.regularization)
def test_regularization(column: Column, results: list[Any]) -> None:
    expected = pytest.approx(6 / column.num_replicas)
    for found in results:
        assert found == {"inside": [expected] * column.num_local, "several": expected}


@law('`gradients="mean"`: uneven and empty shares equal one process on the joined batch', scaling.mean_of_examples)
def test_mean(column: Column, results: list[Any]) -> None:
    check_weights(column, results, [-3.0, -9.0])


@law(
    "`backward()` leaves the gradient of the global batch in `.grad`", scaling.mean_of_examples, without=LOCAL_GRADIENTS
)
def test_gradient(column: Column, results: list[Any]) -> None:
    for found in results:
        assert found["gradients"] == [[pytest.approx(mean)] * column.num_local for mean in (3.0, 6.0)]


@law("`set_weight`: another denominator than the number of examples", scaling.own_denominator)
def test_own_denominator(column: Column, results: list[Any]) -> None:
    check_weights(column, results, [-55 / 15, -55 / 15 - 6])


@law('`gradients="sum"` with `compute_average_loss`: gradients are summed', scaling.sum_of_losses)
def test_sum(column: Column, results: list[Any]) -> None:
    check_weights(column, results, [-3.0, -3.0 - 6 / 5])


@law(
    '`compute_average_loss` and `scale_regularization_loss` under `gradients="mean"`: refused, with the way out',
    scaling.divided_twice,
    without=cannot([*IN_ONE_PROCESS, PS_ASYNC], reasons.ONE_IN_SYNC),
)
def test_divided_twice(column: Column, results: list[Any]) -> None:
    for found in results:
        for name in ("average", "penalty"):
            assert "divided by the global batch" in found[name] and 'gradients="sum"' in found[name]
            assert "loss.mean()" in found[name]
        assert found["printed"] == pytest.approx(-9.0, rel=1e-6)


@law(
    "plain arguments: each replica counts 1/k",
    scaling.plain_arguments,
    without=cannot(
        PS_SYNC, "At staleness 0 a step is a unit of a dataset, so that the servers know when it is complete."
    )
    | cannot(PS_ASYNC, "The updates of two workers come in any order."),
)
def test_plain_arguments(column: Column, results: list[Any]) -> None:
    assert results == [[-(column.num_replicas + 1) / 2] * column.num_local] * column.num_workers


@law(
    "`reduce_mean`: share-weighted, detached, empty replicas ignored", scaling.mean_of_examples, without=NO_COLLECTIVES
)
def test_reduce_mean(column: Column, results: list[Any]) -> None:
    if column is PS_ASYNC:
        assert sorted(loss for found in results for loss in found["reduce_mean"]) == [3.0, 6.0]
    else:
        assert [found["reduce_mean"] for found in results] == [pytest.approx([3.0, 6.0])] * column.num_workers
    assert not any(found["attached"] for found in results)
    if column.num_local == 1:  # of a step that is called without run
        assert [found["plain"] for found in results] == [found["reduce_mean"] for found in results]


@law("`reduce_mean` weights with what `set_weight` said", scaling.own_denominator, without=NO_COLLECTIVES)
def test_reduce_mean_of_weights(column: Column, results: list[Any]) -> None:
    shares = {1: [[1, 2, 3, 4, 5]], 2: [[1, 2, 3], [4, 5]], 3: [[1, 2], [3, 4], [5]], 4: [[1, 2], [3, 4], [5], []]}
    weighted = [(sum(share), sum(share) / len(share)) for share in shares[column.num_replicas] if share]
    expected = sum(weight * mean for weight, mean in weighted) / 15
    found = [result["reduce_mean"] for result in results]
    if column is PS_ASYNC:
        assert sorted(loss for losses in found for loss in losses) == [3.0, 6.0]
    else:
        assert found == [pytest.approx([expected, 6.0])] * column.num_workers


@law(
    "`reduce(MEAN)` stays TensorFlow's: the mean of the replicas' values",
    scaling.mean_of_examples,
    without=NO_COLLECTIVES | cannot(PS_ASYNC, "A worker has one replica, so there is no other mean."),
)
def test_plain_mean(column: Column, results: list[Any]) -> None:
    expected = {1: 3.0, 2: (2 + 4.5) / 2, 3: (1.5 + 3.5 + 5) / 3, 4: float("nan")}[column.num_replicas]
    assert [found["mean"] for found in results] == [pytest.approx([expected], nan_ok=True)] * column.num_workers


@law("`clip_norm`: the norm of the global gradient is clipped", scaling.clipped)
def test_clipped(column: Column, results: list[Any]) -> None:
    check_weights(column, results, [-2.0, -4.0])


@law('`nan="skip"`: the update is skipped on all', scaling.skipped)
def test_skipped(column: Column, results: list[Any]) -> None:
    check_weights(column, results, [-3.0, -3.0])


@law('`nan="error"`: `NonFiniteGradientError` on all', scaling.not_finite)
def test_not_finite(column: Column, results: list[Any]) -> None:
    errors = [found["error"] for found in results]
    if column is PS_ASYNC:
        assert any("finite" in error for error in errors)
    else:
        assert all("finite" in error for error in errors)


@law("after an error that all replicas raise, the strategy works", scaling.again_after_not_finite)
def test_again_after_not_finite(column: Column, results: list[Any]) -> None:
    check_weights(column, results, [-2.0, -4.0])


@law("`prepare` refuses what it does not know, and says what it expects", scaling.arguments_of_prepare)
def test_arguments_of_prepare(column: Column, results: list[Any]) -> None:
    for found in results:
        assert {one["error"] for one in found.values()} == {"ConfigurationError"}
        assert "'mean' or 'sum'" in found["gradients"]["text"] and "'average'" in found["gradients"]["text"]
        assert "above 0" in found["clip_norm"]["text"]
        assert "'error' or 'skip'" in found["nan"]["text"]
        assert "DataLoader" in found["loader"]["text"] and "distribute_dataset" in found["loader"]["text"]


@law("`prepare` returns what stands for one object, or a tuple of them in the order given", scaling.objects_of_prepare)
def test_objects_of_prepare(column: Column, results: list[Any]) -> None:
    assert results == [{"one": True, "several": [True, True, True]}] * column.num_workers


@law(
    "`prepare` takes models, optimizers and schedulers one by one too",
    scaling.one_by_one,
    without=cannot(
        PARAMETER_SERVERS, "An optimizer runs on the servers, beside its variables: it is prepared with its models."
    ),
)
def test_one_by_one(column: Column, results: list[Any]) -> None:
    assert results == [[-1.0, 0.5]] * column.num_workers
