"""What parameter servers refuse when it is prepared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stratagem.errors import ConfigurationError
from stratagem.strategy.ps.checks import grouped_parameters


def test_a_tensor_that_no_model_has_is_refused_with_what_can_hold_it() -> None:
    alone = torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1)
    with pytest.raises(ConfigurationError, match=r"of shape \[2\] that is in none of.*nn\.ParameterList"):
        grouped_parameters(alone, {}, set())
    held = nn.ParameterList([torch.zeros(2)])
    optimizer = torch.optim.SGD(held.parameters(), 0.1)
    assert grouped_parameters(optimizer, {id(held[0]): "0"}, set()) == [(held[0], 0)]
