"""NaN and Inf among gradients, wherever these lie."""

from __future__ import annotations

import math

import pytest
import torch

from stratagem.worker.gradient_guard import SMALL_ELEMENTS, are_finite

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spoiled", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 2, 3])
def test_one_element_of_one_gradient(device: str, spoiled: float | None, where: int) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    gradients = [
        torch.ones(3, device=device),
        torch.full((SMALL_ELEMENTS + 1,), -1e30, device=device),  # the square is no float32
        torch.ones(2, 2, dtype=torch.float16, device=device),
        torch.ones(5, dtype=torch.float64),
    ]
    assert are_finite(gradients)
    if spoiled is not None:
        gradients[where].view(-1)[1] = spoiled
        assert not are_finite(gradients)


def test_no_gradients_are_finite() -> None:
    assert are_finite([])
