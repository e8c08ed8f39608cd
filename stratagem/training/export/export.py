"""Writes a trained model so that plain PyTorch runs it without Stratagem (docs/protocol.md 31)."""

from __future__ import annotations

import datetime
import importlib.util
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stratagem
from stratagem.arguments import checked
from stratagem.checkpoint.durable import FileForTorch
from stratagem.data.nested import on_cpu
from stratagem.errors import ConfigurationError, ExportError
from stratagem.strategy.default import is_lead
from stratagem.training.export import folder as export_folder
from stratagem.training.export.inputs import as_arguments
from stratagem.training.export.program import bare_copy, check, describe, names_of, reason_of, trace

logger = logging.getLogger(__name__)


@checked
def export_model(
    module: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Any = None,
    metadata: Mapping[str, Any] | None = None,
    onnx: bool | None = None,
) -> Path:
    """Writes a folder with the model as a program, its weights and a description.

    - ``model.pt2``: the program with its weights, in eval mode, for any number of rows. Plain PyTorch runs it:
      ``torch.export.load("…/model.pt2").module()(x)``.
    - ``state_dict.pt``: the weights alone, for ``torch.load(…, weights_only=True)``.
    - ``metadata.json``: names, shapes and dtypes of inputs and outputs, versions, a checksum for each file, and
      ``metadata``.
    - ``model.onnx``, if ONNX is installed.

    The program was compared with the model on batches of one row and of three. Only the lead writes; other workers
    return at once. An earlier export at ``path`` is replaced; the folder appears complete or not at all.

    Args:
        module: plain or prepared; it is not changed. The export is replica 0 as it is now, including buffers.
        path: path of the folder.
        example_inputs: the arguments of ``module``: a tuple of positional arguments, or its only argument. Tensors
            (their first dimension is the batch), or :class:`TensorSpec` in their place, nested in any way.
        metadata: anything JSON can hold; :attr:`LoadedModel.metadata` returns it.
        onnx: True: write ONNX or fail; False: do not; None: if it is installed, and a model without an ONNX form is
            not an error.

    Returns:
        ``path``.

    Raises:
        ConfigurationError: an argument is missing or cannot be used.
        ExportError: the program cannot be made; with torch's reason. The folder exists all the same, with the weights
            and the reason, but without ``model.pt2``. Or the folder cannot be written: then it does not exist.
    """
    target = Path(os.path.abspath(path))
    if example_inputs is None:
        raise ConfigurationError(
            "export needs to know what the model is called with, and it has not been called yet: give example_inputs=, "
            "a batch or sg.TensorSpec((None, 1, 28, 28))"
        )
    arguments = as_arguments(example_inputs)
    try:
        json.dumps(metadata)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"expected metadata that JSON can hold: {error}") from None
    if onnx and (missing := missing_packages()):
        raise ConfigurationError(f"onnx=True needs {' and '.join(missing)}: pip install 'stratagem[onnx]'")
    if not is_lead():
        return Path(path)
    failure: ExportError | None = None
    with export_folder.writing(target) as (folder, description):
        try:
            plain = bare_copy(module)
        except ExportError as error:
            plain, failure = module, error
        _write_state_dict(plain, folder / export_folder.STATE_DICT)
        description |= {
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"stratagem": stratagem.__version__, "torch": torch.__version__},
            "class": type(plain).__name__,
            "metadata": dict(metadata or {}),
        }
        if failure is None:
            try:
                description |= _write_program(plain, arguments, folder)
                _write_onnx(folder, onnx)
            except ExportError as error:
                failure = error
        if failure is not None:
            description["failure"] = str(failure)
    if failure is not None:
        raise ExportError(f"{failure}. What could be written is in {target}") from failure
    return Path(path)


def _write_program(plain: nn.Module, arguments: tuple[Any, ...], folder: Path) -> dict[str, Any]:
    """Writes the program and compares it with the model; returns its description."""
    file = folder / export_folder.PROGRAM
    program = trace(plain, arguments)
    try:
        with FileForTorch(file) as opened:
            try:
                torch.export.save(program, opened)
            except Exception as error:  # torch's serializer has no common error
                raise ExportError(f"torch.export cannot save the program: {type(error).__name__}: {error}") from error
        check(file, plain, arguments)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    return {"arguments": names_of(plain, arguments)} | describe(program)


def missing_packages() -> list[str]:
    """The packages that ONNX needs (the extra ``onnx``) and that are not installed."""
    return [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]


def _write_onnx(folder: Path, wanted: bool | None) -> None:
    """Weights over 2 GB lie in a file beside it."""
    if wanted is False or missing_packages():
        return
    program = torch.export.load(folder / export_folder.PROGRAM)
    try:
        converted = torch.onnx.export(program, dynamo=True, verbose=False)
        assert converted is not None  # it is asked for no file
        converted.save(folder / export_folder.ONNX)
    except OSError:
        raise
    except Exception as error:  # torch.onnx has no common error
        for part in folder.glob(f"{export_folder.ONNX}*"):
            part.unlink()
        reason = f"torch.onnx cannot convert the model: {reason_of(error)}"
        if wanted:
            raise ExportError(reason) from error
        logger.warning("Exported without ONNX: %s", reason)


def _write_state_dict(plain: nn.Module, path: Path) -> None:
    with FileForTorch(path) as file:
        torch.save({name: on_cpu(value) for name, value in plain.state_dict().items()}, file)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if unsafe:
        raise ExportError(
            f"the state_dict holds {', '.join(sorted(unsafe))}, which cannot be loaded without unpickling; keep "
            "tensors, numbers, strings and their containers in get_extra_state()"
        )
