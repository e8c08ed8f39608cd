"""What was exported runs in a Python that has torch and nothing of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from stratagem.worker.reduction.batch_norm import convert_batch_norm
from tests.unit.training.exporting import answer_of, exported_reader, reader, run_python, torch_only_python, words

RUN = """
import importlib.util, json, sys, torch
found = [name for name in ("stratagem", "safetensors", "numpy", "grpc", "pytest") if importlib.util.find_spec(name)]
folder, rows = sys.argv[1], json.loads(sys.argv[2])
program = torch.export.load(f"{folder}/model.pt2").module()
weights = torch.load(f"{folder}/state_dict.pt", weights_only=True)
print(json.dumps({"found": found, "answer": program(torch.tensor(rows)).tolist(), "weights": sorted(weights)}))
"""


@pytest.mark.thorough
def test_torch_alone_runs_it(tmp_path: Path) -> None:
    model = reader()
    # A class of ours inside, as prepare(sync_batchnorm=True) makes.
    convert_batch_norm(model, cast(Any, None), cast(Any, None))
    exported_reader(tmp_path / "out", model)
    python = torch_only_python(tmp_path)
    said = json.loads(run_python(python, RUN, tmp_path / "out", json.dumps(words(3).tolist())))
    assert said["found"] == []
    assert said["answer"] == answer_of(reader(), 3).tolist()
    assert said["weights"] == sorted(model.state_dict())
