"""What a model is called with: examples and specs, made into batches."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from stratagem.errors import ConfigurationError
from stratagem.training.export.inputs import TensorSpec, as_arguments, batch_of, growing


def nested() -> Any:
    return ({"x": torch.ones(4, 3), "more": [np.zeros((4, 2), np.int16), torch.tensor(2.5)]}, (3, 4), None, "sum")


def test_a_tuple_is_all_arguments_and_anything_else_the_only_one() -> None:
    x = torch.ones(2, 3)
    assert as_arguments((x, 5)) == (x, 5)
    assert as_arguments([x]) == ([x],)
    (only,) = as_arguments(x)
    assert only is x


@pytest.mark.parametrize("inputs", [(), (5,), TensorSpec((2, 3)), torch.tensor(1.0), {"x": None}])
def test_inputs_without_rows_are_refused(inputs: Any) -> None:
    with pytest.raises(ConfigurationError, match="a tensor whose first dimension is the batch"):
        as_arguments(inputs)


def test_inputs_of_different_lengths_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"share their first dimension.*\{(4, 5|5, 4)\}.*TensorSpec with a fixed shape"
    ):
        as_arguments((torch.ones(4, 3), torch.ones(5)))


def test_only_the_rows_may_vary() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("got [None, None, 3]")):
        TensorSpec((None, None, 3))


@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_rows_of_examples_are_repeated(num_rows: int) -> None:
    x = torch.arange(8.0).reshape(4, 2).requires_grad_()
    (made,) = batch_of((x,), num_rows)
    assert made.tolist() == [x[row % 4].tolist() for row in range(num_rows)]
    assert not made.requires_grad


def test_rows_of_specs_are_made_up_the_same_each_time() -> None:
    specs = tuple(
        TensorSpec((None, 3), dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
    )
    before = torch.get_rng_state()
    made, again = batch_of(specs, 2), batch_of(specs, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert [(tensor.shape, tensor.dtype) for tensor in made] == [((2, 3), spec.dtype) for spec in specs]
    assert all(torch.equal(one, other) for one, other in zip(made, again, strict=True))
    assert made[0].abs().sum() > 0 and not made[3].any() and not made[4].any()


def test_batches_keep_what_is_no_row() -> None:
    fixed = TensorSpec((5, 5))
    first, sizes, nothing, how, square = batch_of((*nested(), fixed), 6)
    assert first["x"].shape == (6, 3) and first["more"][0].dtype == torch.int16 and first["more"][1] == 2.5
    assert (sizes, nothing, how) == ((3, 4), None, "sum") and square.shape == (5, 5)


def test_an_empty_batch_is_as_good_as_its_spec() -> None:
    (made,) = batch_of((torch.ones(0, 3),), 2)
    assert made.shape == (2, 3)


def test_only_rows_grow_with_the_batch() -> None:
    arguments = (*nested(), TensorSpec((6, 5)), TensorSpec((None,)))
    batch = batch_of(arguments, 6)
    assert [id(tensor) for tensor in growing(arguments, batch)] == [
        id(tensor) for tensor in (batch[0]["x"], batch[0]["more"][0], batch[5])
    ]
