"""Learning rates of optimizers with several groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.training.callbacks import ReduceLROnPlateau


@pytest.mark.parametrize("as_tensor", [False, True])
def test_each_group_is_lowered_from_its_own_rate(as_tensor: bool) -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)]
    with sg.OneDeviceStrategy().scope():
        model = sg.Model(nn.Sequential(*layers))
    rates = [torch.tensor(rate) if as_tensor else rate for rate in (1e-3, 1e-1, 1e-5)]
    groups = [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(layers, rates, strict=True)]
    model.compile(torch.optim.SGD(groups), "mse")
    plateau = ReduceLROnPlateau("loss", patience=0, min_delta=1e9, min_lr=1e-4)
    history = model.fit(torch.ones(4, 4), torch.ones(4, 1), epochs=3, verbose=0, callbacks=[plateau]).history
    # The first epoch is the best; the second lowers all that may be, the third what is not at its least yet.
    assert history["learning_rate"] == pytest.approx([1e-3, 1e-3, 1e-4])
    assert model.optimizer is not None
    assert [float(group["lr"]) for group in model.optimizer.param_groups] == pytest.approx([1e-4, 1e-3, 1e-5])
