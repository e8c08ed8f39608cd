"""States taken apart and put together again."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.checkpoint.tree import StateOnServers, decode, encode
from stratagem.errors import CheckpointError, ConfigurationError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = st.text() | st.integers()
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner), max_leaves=12
)


def again(value: Any) -> Any:
    state = encode(value, "x", copy=False)
    tree = json.loads(json.dumps(state.tree, allow_nan=False))
    return decode(tree, state.tensors, lambda name: torch.tensor(ord(name)))


@given(TREES)
def test_plain_values_come_back(value: Any) -> None:
    assert repr(again(value)) == repr(value)  # NaN is not equal to itself; repr tells -0.0 and list from tuple


def test_what_optimizers_schedulers_and_scalers_keep() -> None:
    value = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(6.0).view(2, 3).t()}},
        "milestones": collections.Counter({2: 1, 5: 2}),
        "betas": (0.9, 0.999),
        "best": math.inf,
        "seen": {1, 2},
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "array": np.arange(3, dtype=np.int32),
        "number": np.float32(0.5),
        "$strange": {"$tensor": "not one"},
    }
    found = again(value)
    assert torch.equal(found["state"][0]["exp_avg"], value["state"][0]["exp_avg"])  # type: ignore[index]
    assert found["array"].dtype == np.int32 and found["array"].tolist() == [0, 1, 2]
    for key in ("milestones", "betas", "best", "seen", "dtype", "device", "number", "$strange"):
        assert found[key] == value[key], key
    assert isinstance(found["milestones"], collections.Counter)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    found = again({"t": tensor})["t"]
    assert found.dtype == dtype and found.shape == shape
    assert torch.equal(found.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


@pytest.mark.parametrize("array", [np.array(3.0), np.arange(3, dtype=">f4"), np.arange(6.0).reshape(2, 3).T[::-1]])
def test_an_array_keeps_its_shape(array: np.ndarray[Any, Any]) -> None:
    found = again(array)
    assert found.shape == array.shape and np.array_equal(found, array)


def test_module_metadata_and_variables_of_servers() -> None:
    state: Any = torch.nn.BatchNorm1d(2).state_dict()
    state["weight"] = StateOnServers("w")
    found = again(state)
    assert found._metadata == state._metadata
    assert found["weight"] == ord("w") and list(found) == list(state)


def test_a_copy_does_not_change_with_its_source() -> None:
    tensor = torch.zeros(2)
    kept, shared = (encode(tensor, "x", copy=copy).tensors["value"] for copy in (True, False))
    tensor.fill_(1)
    assert kept.tolist() == [0, 0] and shared.tolist() == [1, 1]


def test_keys_that_look_alike_stay_apart() -> None:
    found = again({1: torch.zeros(1), "1": torch.ones(1), "a": {"b": torch.ones(1)}, "a/b": torch.zeros(1)})
    assert [found[1].item(), found["1"].item(), found["a"]["b"].item(), found["a/b"].item()] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 0, torch.eye(2).to_sparse(), np.array([object()])],
    ids=["object", "fn", "sparse", "array"],
)
def test_what_would_need_pickle_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"the state of thing holds .* at a/0"):
        encode({"a": [value]}, "thing", copy=False)


def test_an_unknown_tag_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"\$future"):
        decode({"$future": 1}, {})
