"""Which frames of gradients are sent, and what it takes to know."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stratagem.worker.push import staging
from stratagem.worker.push.layout import Layout, VariableSpec
from stratagem.worker.push.staging import MIN_EARLY_BYTES, GradientStaging

NUM_FRAMES = 8


def test_a_gradient_of_many_frames_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each frame asked for the sum of all bits of its gradient: a step of 8,000 frames took half a minute."""
    size = NUM_FRAMES * MIN_EARLY_BYTES // 4
    layout = Layout([VariableSpec("w", (size,), torch.float32, 1)], [[(0, 0, size)]], MIN_EARLY_BYTES)
    sent: list[int] = []
    lane = SimpleNamespace(send=lambda kind, transfer, group, offset, *_: sent.append(offset))
    variables: Any = SimpleNamespace(clients=[SimpleNamespace(new_transfer=lambda: 1, lane=lane)], layout=layout)
    looked: list[int] = []

    def look(flat: torch.Tensor) -> int:
        looked.append(flat.numel())
        return 7

    monkeypatch.setattr(staging, "sum_of_bits", look)
    parameter = torch.nn.Parameter(torch.zeros(size))
    made = GradientStaging(variables, [parameter], lambda: None, (), threading.RLock())
    parameter.sum().backward()
    assert len({*sent}) == len(sent) == NUM_FRAMES
    num_before, sent[:] = len(looked), []
    made.complete([0], ())
    assert looked == [size] * len(looked) and num_before <= 2 and len(looked) == num_before + 1 and not sent
