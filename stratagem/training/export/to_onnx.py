"""The exported program as ONNX, where the packages for it are installed (the extra ``onnx``)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch.export import ExportedProgram

from stratagem.errors import ExportError
from stratagem.training.export.program import reason_of

_PACKAGES = ("onnx", "onnxscript")


def missing_packages() -> list[str]:
    """The packages that ONNX needs and that are not installed."""
    return [name for name in _PACKAGES if importlib.util.find_spec(name) is None]


def write_onnx(program: ExportedProgram, path: Path) -> None:
    """Writes ``program`` in ONNX; weights over 2 GB lie in a file beside it.

    Raises:
        ExportError: an operator has no ONNX form; with torch's reason.
    """
    try:
        converted = torch.onnx.export(program, dynamo=True, verbose=False)
        if converted is None:
            raise ExportError("torch.onnx gave no program")
        converted.save(path)
    except (OSError, ExportError):
        raise
    except Exception as error:  # torch.onnx has no common error
        raise ExportError(f"torch.onnx cannot convert the model: {reason_of(error)}") from error
