"""The ONNX form computes the same; needs the extra ``onnx``."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from stratagem.training.export.export import export_model, missing_packages
from tests.unit.training.exporting import answer_of, reader, words

pytestmark = [
    pytest.mark.skipif(bool(missing_packages()), reason="the extra onnx is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),  # of the converter itself
]


def test_another_runtime_gives_the_same_numbers(tmp_path: Path) -> None:
    export_model(reader(), tmp_path / "out", words(2), onnx=True)
    assert "model.onnx" in json.loads((tmp_path / "out" / "metadata.json").read_text())["files"]
    runtime = importlib.import_module("onnx.reference").ReferenceEvaluator(str(tmp_path / "out" / "model.onnx"))
    for num_rows in (1, 3):
        (answer,) = runtime.run(None, {"words": words(num_rows).numpy()})
        torch.testing.assert_close(torch.from_numpy(answer), answer_of(reader(), num_rows))
