"""prepare(memory_format=...): what convolutions compute with lies in memory as was asked for; the rest stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import ConfigurationError


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))


def test_only_weights_of_convolutions_move_and_stay_the_same_objects() -> None:
    model = net()
    before = {name: (parameter, parameter.clone()) for name, parameter in model[0].named_parameters()}
    strategy = sg.OneDeviceStrategy("cpu")
    prepared = strategy.prepare(model, memory_format=torch.channels_last)
    weight = prepared[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    for name, parameter in prepared[0].named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])
    outputs = prepared[:2](torch.randn(2, 3, 8, 8))
    assert outputs.is_contiguous(memory_format=torch.channels_last)
    strategy.close()


def test_replicas_have_the_format_of_the_first() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    model = strategy.prepare(nn.Conv2d(3, 4, 3), memory_format=torch.channels_last)
    kinds = strategy.local_results(strategy.run(lambda: model.weight.is_contiguous(memory_format=torch.channels_last)))
    assert list(kinds) == [True, True]
    strategy.close()


def test_convolutions_in_space() -> None:
    model = sg.OneDeviceStrategy("cpu").prepare(nn.Conv3d(3, 4, 3), memory_format=torch.channels_last_3d)
    assert model.weight.is_contiguous(memory_format=torch.channels_last_3d)


def test_without_it_nothing_moves() -> None:
    assert sg.OneDeviceStrategy("cpu").prepare(nn.Conv2d(3, 4, 3)).weight.is_contiguous()


def test_anything_else_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"expected memory_format=torch\.channels_last or .*, or None, got"):
        sg.OneDeviceStrategy("cpu").prepare(nn.Conv2d(3, 4, 3), memory_format=torch.contiguous_format)
