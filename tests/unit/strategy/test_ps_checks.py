"""What parameter servers refuse when it is prepared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from stratagem.errors import ConfigurationError
from stratagem.strategy.ps.checks import check_asked, grouped_parameters


def test_a_tensor_that_no_model_has_is_refused_with_what_can_hold_it() -> None:
    alone = torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1)
    with pytest.raises(ConfigurationError, match=r"of shape \[2\] that is in none of.*nn\.ParameterList"):
        grouped_parameters(alone, {}, set())
    held = nn.ParameterList([torch.zeros(2)])
    optimizer = torch.optim.SGD(held.parameters(), 0.1)
    assert grouped_parameters(optimizer, {id(held[0]): "0"}, set()) == [(held[0], 0)]


def test_settings_of_many_param_groups_are_said_together(caplog: pytest.LogCaptureFixture) -> None:
    """The chief writes down each thing that it is told: a minute, with a param_group for each of 20,000 parameters."""
    said: dict[int, dict[str, float]] = {}

    def record_logs(group: str, ordinal: int, logs: dict[str, float]) -> dict[str, float]:
        return said.setdefault(ordinal, logs)

    def ask(index: int, *rates: float) -> None:
        chief = SimpleNamespace(new_group=lambda name: name, record_logs=record_logs)
        runtime = cast(Any, SimpleNamespace(chief=chief, task=SimpleNamespace(index=index)))
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
        check_asked(runtime, cast(Any, SimpleNamespace(alike="this")), [torch.optim.SGD(groups)])

    ask(1, *[0.1] * 50, 0.2)
    assert [len(texts) for texts in said.values()] == [1, 2]
    ask(0, *[0.1] * 50, 0.2)
    assert not caplog.records
    ask(0, *[0.1] * 50, 0.3)
    ask(0, *[0.1] * 51)
    assert [record.getMessage().count("from param_group 50 on") for record in caplog.records] == [2, 1]
    assert all(record.getMessage().startswith("worker:1 started with SGD {'lr': 0.2") for record in caplog.records)
