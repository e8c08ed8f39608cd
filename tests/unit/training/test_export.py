"""Exporting: what is written, what it computes, and what is said when it cannot be done."""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any, cast

import pytest
import torch
from torch import nn

from stratagem.errors import ConfigurationError, ExportError
from stratagem.strategy.one_process import OneDeviceStrategy
from stratagem.training.export import export
from stratagem.training.export.export import export_model
from stratagem.training.export.inputs import TensorSpec
from stratagem.training.export.loaded_model import load_model
from stratagem.worker.reduction.batch_norm import convert_batch_norm
from tests.file_sizes import file_size_limit
from tests.unit.strategy.mirrored_replicas import Replicas
from tests.unit.training.exporting import answer_of, exported_reader, reader, words


def test_a_program_gives_the_numbers_of_the_model_on_any_number_of_rows(tmp_path: Path) -> None:
    model = reader()
    assert exported_reader(tmp_path / "out", model) == tmp_path / "out"
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    for num_rows in (1, 2, 3, 17):
        torch.testing.assert_close(program(words(num_rows)), answer_of(model, num_rows))


def test_the_model_stays_as_it_was(tmp_path: Path) -> None:
    model = reader()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    gradient = model.table.weight.grad
    exported_reader(tmp_path / "out", model)
    assert model.training and model.table.sparse and model.table.weight.grad is gradient
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_weights_are_read_without_unpickling_and_fit_the_class(tmp_path: Path) -> None:
    model = reader()
    exported_reader(tmp_path / "out", model)
    other = type(model)()
    other.load_state_dict(torch.load(tmp_path / "out" / "state_dict.pt", weights_only=True))
    torch.testing.assert_close(answer_of(other, 4), answer_of(model, 4))


def test_the_description_names_inputs_and_outputs(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, batch: dict[str, torch.Tensor], factor: float) -> dict[str, Any]:
            x = batch["x"].flatten(1) * factor
            return {"sums": x.sum(1) + batch["ids"].sum(1), "all": torch.cat([x, x])}

    inputs = ({"x": torch.ones(4, 3, 2), "ids": TensorSpec((None, 5), torch.int32)}, 0.5)
    export_model(Two(), tmp_path / "out", inputs, metadata={"classes": ["a", "b"]}, onnx=False)
    said = json.loads((tmp_path / "out" / "metadata.json").read_text())
    assert said["inputs"] == [
        {"name": "batch_x", "shape": ["batch", 3, 2], "dtype": "float32"},
        {"name": "batch_ids", "shape": ["batch", 5], "dtype": "int32"},
    ]
    assert [output["shape"] for output in said["outputs"]] == [["batch"], ["2*batch", 6]]
    assert said["class"] == "Two" and said["metadata"] == {"classes": ["a", "b"]} and "failure" not in said
    assert sorted(said["files"]) == ["model.pt2", "state_dict.pt"]
    assert load_model(tmp_path / "out").metadata == {"classes": ["a", "b"]}


def test_a_prepared_model_is_exported_bare(tmp_path: Path) -> None:
    class Unreachable:
        """Any use of it is an error: in eval mode, statistics are not reduced."""

    strategy = OneDeviceStrategy("cpu")
    model = reader()
    prepared, _ = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    # As prepare(sync_batchnorm=True) does in a ring.
    convert_batch_norm(prepared, cast(Any, Unreachable()), cast(Any, None))
    exported_reader(tmp_path / "out", prepared)
    torch.testing.assert_close(load_model(tmp_path / "out")(words(3)), answer_of(reader(), 3))


def test_of_several_replicas_the_first_is_exported(tmp_path: Path) -> None:
    replicas = Replicas()
    with closing(replicas.replica_threads):
        prepared = replicas.prepare(reader())
        exported_reader(tmp_path / "out", prepared)
        loaded = replicas.prepare(load_model(tmp_path / "out"))
        answers = replicas.run(lambda replica: loaded(words(3)).detach())
    assert len(answers) == 2
    for answer in answers:
        torch.testing.assert_close(answer, answer_of(reader(), 3))


def test_what_the_caller_has_switched_on_is_not_exported(tmp_path: Path) -> None:
    model = reader()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        exported_reader(tmp_path / "out", model)
    (output,) = json.loads((tmp_path / "out" / "metadata.json").read_text())["outputs"]
    assert output["dtype"] == "float32"
    loaded = load_model(tmp_path / "out")
    torch.testing.assert_close(loaded(words(3)), answer_of(model, 3), rtol=0, atol=0)
    loaded(words(3)).sum().backward()
    gradient = loaded.get_parameter("table.weight").grad
    assert gradient is not None and not gradient.is_sparse


def test_a_loaded_model_is_exported_again(tmp_path: Path) -> None:
    exported_reader(tmp_path / "first")
    exported_reader(tmp_path / "second", load_model(tmp_path / "first"))
    torch.testing.assert_close(load_model(tmp_path / "second")(words(3)), answer_of(reader(), 3))


def test_a_compiled_model_keeps_its_names(tmp_path: Path) -> None:
    compiled = cast(nn.Module, torch.compile(reader(), backend="eager"))
    exported_reader(tmp_path / "out", compiled)
    assert "table.weight" in torch.load(tmp_path / "out" / "state_dict.pt", weights_only=True)


def test_tied_weights_are_exported(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 3)
            self.out = nn.Linear(3, 6, bias=False)
            self.out.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.out(self.table(ids))
            return scores

    model = Tied()
    export_model(model, tmp_path / "out", TensorSpec((None, 2), torch.int64), onnx=False)
    ids = torch.tensor([[1, 5], [2, 2], [0, 3]])
    torch.testing.assert_close(load_model(tmp_path / "out")(ids), model(ids))
    assert load_model(tmp_path / "out").state_dict().keys() == model.state_dict().keys()


def test_weights_that_are_computed_anew_in_each_call_are_exported(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = nn.utils.weight_norm(nn.Linear(3, 2))  # keeps the product, which needs gradients, as an attribute
    model(torch.ones(1, 3))
    export_model(model, tmp_path / "out", TensorSpec((None, 3)), onnx=False)
    torch.testing.assert_close(load_model(tmp_path / "out")(torch.ones(2, 3)), model(torch.ones(2, 3)).detach())


def test_a_layer_may_give_the_plain_one_to_export(tmp_path: Path) -> None:
    plain = nn.Embedding(5, 3)

    class Elsewhere(nn.Module):
        """A table that is not in this process."""

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("its server is not here")

        def export_form(self) -> nn.Embedding:
            return plain

    export_model(nn.Sequential(Elsewhere(), nn.Flatten()), tmp_path / "out", TensorSpec((None, 2), torch.int64))
    assert torch.equal(
        load_model(tmp_path / "out")(torch.tensor([[4, 2]])), plain.weight[[4, 2]].reshape(1, 6).detach()
    )
    assert list(torch.load(tmp_path / "out" / "state_dict.pt", weights_only=True)) == ["0.weight"]


def test_without_inputs_it_asks_for_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="example_inputs="):
        export_model(reader(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layer(x) if x.sum() > 0 else x
        return answer


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if x.shape[0] == 1 else x


class TwoRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, -1)


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there can be only one")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Branching(), "torch.export cannot export the model: .*data-dependent expression"),
        (Doubling(), "the exported program differs from the model on a batch of 1 row:"),
        (TwoRows(), "torch.export cannot export the model: "),
        (nn.Linear(4, 2), "calling the model with a batch of 2 rows like example_inputs failed: .*shapes"),
        (Uncopyable(3, 2), "the model cannot be copied: .*there can be only one"),
    ],
)
def test_what_cannot_be_exported_is_named_and_the_weights_are_written(
    model: nn.Module, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=f"(?s){reason}.*What could be written is in "):
        export_model(model, tmp_path / "out", TensorSpec((None, 3)))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["metadata.json", "state_dict.pt"]
    weights = torch.load(tmp_path / "out" / "state_dict.pt", weights_only=True)
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    with pytest.raises(ExportError, match=f"(?s)holds weights but no program, because {reason}"):
        load_model(tmp_path / "out")


def test_a_lazy_model_has_to_be_called_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"parameter weight of a lazy layer .* call the model once"):
        export_model(nn.LazyLinear(2), tmp_path / "out", TensorSpec((None, 3)))
    assert list(tmp_path.iterdir()) == []


def test_state_that_only_unpickling_can_read_is_refused(tmp_path: Path) -> None:
    class Strange(nn.Linear):
        def get_extra_state(self) -> Any:
            return ModuleHolder()

    with pytest.raises(ExportError, match="ModuleHolder"):
        export_model(Strange(3, 2), tmp_path / "out", TensorSpec((None, 3)))
    assert list(tmp_path.iterdir()) == []


class ModuleHolder:
    """An object that a reader of weights knows nothing about."""


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    # 1,000 bytes: before the weights are there; 6,000: between weights and program, where torch would end the process
    for num_bytes in (1000, 6000):
        with file_size_limit(num_bytes), pytest.raises(ExportError, match=r"cannot write .*out: File too large; raise"):
            export_model(nn.Linear(100, 9), tmp_path / "out", TensorSpec((None, 100)), onnx=False)
        assert list(tmp_path.iterdir()) == []


def test_a_program_that_cannot_be_saved_leaves_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(program: Any, file: IO[bytes]) -> None:
        file.write(b"half")
        raise ValueError("an operator without a schema")

    monkeypatch.setattr(torch.export, "save", fail)
    with pytest.raises(ExportError, match=r"torch\.export cannot save the program: ValueError: an operator without"):
        export_model(nn.Linear(3, 2), tmp_path / "out", TensorSpec((None, 3)))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["metadata.json", "state_dict.pt"]


def test_metadata_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="metadata that JSON can hold"):
        export_model(nn.Linear(3, 2), tmp_path / "out", TensorSpec((None, 3)), metadata={"x": torch.ones(1)})


def test_only_the_lead_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "is_lead", lambda: False)
    assert exported_reader(tmp_path / "out") == tmp_path / "out"
    assert list(tmp_path.iterdir()) == []


def test_onnx_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "missing_packages", lambda: ["onnxscript"])
    with pytest.raises(ConfigurationError, match=r"onnx=True needs onnxscript: pip install 'stratagem\[onnx\]'"):
        export_model(nn.Linear(3, 2), tmp_path / "out", TensorSpec((None, 3)), onnx=True)
    assert "onnx" not in sys.modules or isinstance(sys.modules["onnx"], ModuleType)


@pytest.mark.parametrize("wanted", [None, True])
def test_a_model_without_an_onnx_form(
    wanted: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        path.with_name(path.name + ".data").write_text("half")
        raise RuntimeError("no operator")

    monkeypatch.setattr(export, "missing_packages", list)
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: SimpleNamespace(save=fail))
    if wanted:
        with pytest.raises(ExportError, match=r"torch\.onnx cannot convert the model: RuntimeError: no operator"):
            export_model(nn.Linear(3, 2), tmp_path / "out", TensorSpec((None, 3)), onnx=True)
    else:
        export_model(nn.Linear(3, 2), tmp_path / "out", TensorSpec((None, 3)))
        assert "no operator" in caplog.text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["metadata.json", "model.pt2", "state_dict.pt"]
    assert load_model(tmp_path / "out")(torch.ones(1, 3)).shape == (1, 2)
