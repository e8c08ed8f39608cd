"""An export read back: a module for any strategy, on any device, in eval mode."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from stratagem.errors import ConfigurationError, ExportError
from stratagem.strategy.one_process import OneDeviceStrategy
from stratagem.training.export.export import export_model
from stratagem.training.export.loaded_model import load_model
from tests.unit.training.exporting import answer_of, exported_reader, reader, words


def test_the_same_loss_inside_and_outside_a_scope(tmp_path: Path) -> None:
    exported_reader(tmp_path / "out")
    targets = torch.arange(12) % 2
    expected = torch.nn.functional.cross_entropy(answer_of(reader(), 12), targets)
    outside = load_model(tmp_path / "out")
    strategy = OneDeviceStrategy("cpu")
    with strategy.scope():
        inside = strategy.prepare(load_model(tmp_path / "out"))
    for model in (outside, inside):
        loss = torch.nn.functional.cross_entropy(model(words(12)), targets)
        torch.testing.assert_close(loss, expected)


def test_names_are_those_of_the_model(tmp_path: Path) -> None:
    model = reader()
    loaded = load_model(exported_reader(tmp_path / "out", model))
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert dict(loaded.named_parameters()).keys() == dict(model.named_parameters()).keys()
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    loaded.load_state_dict(zeros)
    assert not loaded(words(2)).any()


def test_it_cannot_be_trained_but_moves_between_modes_as_evaluation_does(tmp_path: Path) -> None:
    loaded = load_model(exported_reader(tmp_path / "out"))
    assert not loaded.training and not any(part.training for part in loaded.modules())
    assert loaded.eval() is loaded and loaded.train(False) is loaded
    with pytest.raises(ConfigurationError, match=r"cannot be trained; .*state_dict\.pt"):
        loaded.train()
    with pytest.raises(AttributeError, match=r"has no predict; sg\.Model\(loaded\) has"):
        _ = loaded.predict


def test_a_copy_is_its_own(tmp_path: Path) -> None:
    loaded = load_model(exported_reader(tmp_path / "out"))
    loaded.get_parameter("out.bias").requires_grad_(False)
    expected = loaded(words(3))
    twin = copy.deepcopy(loaded)
    assert [each.requires_grad for each in twin.parameters()] == [each.requires_grad for each in loaded.parameters()]
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    assert not loaded(words(3)).any()
    torch.testing.assert_close(twin(words(3)), expected)
    assert twin.metadata == loaded.metadata and twin.metadata is not loaded.metadata


def test_everything_moves_to_another_device(tmp_path: Path) -> None:
    # Places are made on a device that is written in the program, and the scale is a constant of it.
    loaded = load_model(exported_reader(tmp_path / "out")).to("meta")
    assert loaded(words(3).to("meta")).device.type == "meta"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_it_runs_on_a_gpu_and_back(tmp_path: Path) -> None:
    loaded = load_model(exported_reader(tmp_path / "out")).to("cuda")
    expected = answer_of(reader(), 3)
    torch.testing.assert_close(loaded(words(3).cuda()).cpu(), expected)
    torch.testing.assert_close(loaded.to("cpu")(words(3)), expected)


class Affine(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        return x * scale[:, None] + shift


def test_arguments_have_their_names(tmp_path: Path) -> None:
    x, scale = torch.ones(2, 3), torch.tensor([2.0, 3.0])
    loaded = load_model(export_model(Affine(), tmp_path / "out", (x, scale), onnx=False))
    for each in (loaded, copy.deepcopy(loaded)):
        assert each.arguments == ("x", "scale")
        assert each(x, scale).tolist() == each(scale=scale, x=x).tolist() == each(x, scale=scale).tolist()
        with pytest.raises(TypeError, match="unexpected keyword argument 'shift'"):
            each(x, scale, shift=1.0)
    again = load_model(export_model(loaded, tmp_path / "again", (x, scale), onnx=False))  # forward(*args, **kwargs)
    assert again.arguments is None and again(x, scale).tolist() == loaded(x, scale).tolist()


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    loaded = load_model(exported_reader(tmp_path / "out"))
    with pytest.raises(AssertionError, match=r"words\.size\(\)\[1\] == 5"):
        loaded(words(3)[:, :4])


def test_a_damaged_program_is_refused(tmp_path: Path) -> None:
    file = exported_reader(tmp_path / "out") / "model.pt2"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ExportError, match=r"model\.pt2 is damaged"):
        load_model(tmp_path / "out")
