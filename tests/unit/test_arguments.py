"""What is taken for a number, and what is not."""

from __future__ import annotations

from types import NoneType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import stratagem as sg
from stratagem.arguments import above_zero, check_kind, whole_number
from stratagem.data.distribute import leasable
from stratagem.errors import ConfigurationError


@pytest.mark.parametrize("value", [2, np.int32(2), torch.tensor(2)])
def test_whole_numbers_of_every_library(value: Any) -> None:
    found = whole_number("count", value, 2)
    assert found == 2 and type(found) is int


@pytest.mark.parametrize("value", [1, -1, 2.0, "2", True, None, np.float64(2), torch.tensor(2.5), [2]])
def test_what_is_no_whole_number_of_at_least_two(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected count of at least 2, a whole number, got "):
        whole_number("count", value, 2)


@pytest.mark.parametrize("value", [0, -0.5, float("nan"), "5", True, [1.0]])
def test_what_is_not_above_zero(value: Any) -> None:
    above_zero(seconds=None, more=np.float32(0.5))
    with pytest.raises(ConfigurationError, match="expected seconds above 0 or None, got "):
        above_zero(seconds=value)


def test_a_dict_is_no_options() -> None:
    check_kind(None, sg.DistributeOptions, NoneType)
    with pytest.raises(ConfigurationError, match="expected CommunicationOptions or None, got dict"):
        sg.MultiWorkerMirroredStrategy(communication_options={"transport": "tcp"})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected DistributeOptions or None, got dict"):
        sg.OneDeviceStrategy().distribute_dataset([torch.ones(2)], options={"prefetch": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected DistributeOptions or None, got dict"):
        leasable(TensorDataset(torch.ones(4)), 2, {"prefetch": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected a global batch size of at least 1"):
        sg.InputContext().get_per_replica_batch_size("64")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected Checkpoint, got Linear"):
        sg.CheckpointManager(torch.nn.Linear(1, 1), "x")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"expected a function that gets an InputContext .*, got list"):
        sg.OneDeviceStrategy().distribute_datasets_from_function([torch.ones(2)])  # type: ignore[arg-type]
