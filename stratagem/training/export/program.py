"""A model as a program of torch.export that takes any number of rows (docs/protocol.md 31)."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from stratagem.data.nested import leaves
from stratagem.errors import ConfigurationError, ExportError
from stratagem.strategy.replicas.copyable import copied
from stratagem.training.export.inputs import batch_of, growing

_TRACED_ROWS = 2  # torch.export would take 0 and 1 for sizes that never change
_CHECKED_ROWS = (1, 3)
_ASSIGNS_BUFFERS_ONLY = torch.__version__ < "2.10"
"""Whether torch.export refuses a model that keeps a tensor of a call as another attribute."""


@contextlib.contextmanager
def _by_itself() -> Iterator[None]:
    """Without the modes of the caller, which would become part of the program."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


@_by_itself()
def bare_copy(module: nn.Module) -> nn.Module:
    """A copy of one replica's model as plain PyTorch knows it: on the CPU, in eval mode, tables dense. ``module``,
    prepared or not, compiled or not, is not changed.

    A layer whose weights live elsewhere has a method ``export_form()`` that gives the plain layer to put in its place.
    ConfigurationError: a lazy layer has no weights yet. ExportError: the model cannot be copied.
    """
    if isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):  # of torch.compile
        module = inner
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ConfigurationError(
                f"parameter {name} of a lazy layer has no shape yet; call the model once before exporting"
            )
    try:
        forms = ((part, getattr(part, "export_form", None)) for part in module.modules())
        memo: dict[int, Any] = {id(part): form() for part, form in forms if form is not None}
        twin: nn.Module = copied(module, memo).cpu().eval()
    except Exception as error:  # whatever the user's attributes raise
        raise ExportError(f"the model cannot be copied: {reason_of(error)}") from error
    for part in twin.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False
    return twin


@_by_itself()
def trace(module: nn.Module, arguments: tuple[Any, ...]) -> ExportedProgram:
    """Exports what :func:`bare_copy` gave, with a batch of any number of rows like the examples or specs of its
    positional arguments. ExportError: with torch's reason."""
    batch = batch_of(arguments, _TRACED_ROWS)
    before = dict(vars(module))
    try:
        _call(module, batch)
    except Exception as error:  # the user's code
        raise ExportError(
            f"calling the model with a batch of {_TRACED_ROWS} rows like example_inputs failed: {reason_of(error)}"
        ) from error
    for name, value in list(vars(module).items()) if _ASSIGNS_BUFFERS_ONLY else ():
        if isinstance(value, torch.Tensor) and value is not before.get(name):
            delattr(module, name)
            module.register_buffer(name, value, persistent=False)
    rows, shapes = Dim("batch", min=1), ShapesCollection()
    for tensor in growing(arguments, batch):
        shapes[tensor] = {0: rows}
    try:
        # Not strict: the bytecode of the user's Python is not analysed, it is run once.
        with warnings.catch_warnings():
            # Layers that keep something of a call (weight_norm, LSTM) cause it; check() says whether it mattered.
            warnings.filterwarnings("ignore", message=".*assigned during export", category=UserWarning)
            dynamic = shapes.dynamic_shapes(module, batch)
            program = torch.export.export(module, batch, dynamic_shapes=dynamic, strict=False)
    except Exception as error:  # torch.export has no common error
        raise ExportError(f"torch.export cannot export the model: {reason_of(error)}") from error
    _name_guards(program)
    return program


def _name_guards(program: ExportedProgram) -> None:
    """Gives the parts of ``*args`` in a program's guards the names of its inputs, as torch 2.9 does not do itself."""
    inputs = {str(name) for name in program.graph_signature.user_inputs}

    def named(part: re.Match[str]) -> str:
        name = f"{part[1]}_{part[2]}"
        return f"L['{name}']" if name in inputs else part[0]

    if guards := getattr(program, "_guards_code", None):
        program._guards_code = [re.sub(r"L\['(\w+)'\]\[(\d+)\]", named, guard) for guard in guards]


@_by_itself()
def check(path: Path, module: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Compares the program in a file with the model, on one row and on three.

    A model that branches on the number of rows is exported with the branch that two rows take; this finds it.
    ExportError: the program fails, or gives other numbers.
    """
    program = torch.export.load(path).module()
    for num_rows in _CHECKED_ROWS:
        batch = batch_of(arguments, num_rows)
        try:
            expected = leaves(_call(module, batch))
            found = leaves(_call(program, batch))
            torch.testing.assert_close(
                [leaf for leaf in found if isinstance(leaf, torch.Tensor)],
                [leaf for leaf in expected if isinstance(leaf, torch.Tensor)],
                equal_nan=True,
            )
        except Exception as error:  # the user's code, the program's guards, the comparison
            raise ExportError(
                f"the exported program differs from the model on a batch of {num_rows} "
                f"{'row' if num_rows == 1 else 'rows'}: {reason_of(error)}"
            ) from error


def names_of(module: nn.Module, arguments: tuple[Any, ...]) -> list[str] | None:
    """The names that the module's forward has for ``arguments``; None where it takes them without a name."""
    names = list(inspect.signature(module.forward).parameters.values())[: len(arguments)]
    named = len(names) == len(arguments) and all(name.kind is name.POSITIONAL_OR_KEYWORD for name in names)
    return [name.name for name in names] if named else None


def describe(program: ExportedProgram) -> dict[str, list[dict[str, Any]]]:
    """Names, shapes and dtypes of the tensors that go in and come out; the size of the batch is called "batch"."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs = _tensors(program.graph_signature.user_inputs, values)
    outputs = _tensors(program.graph_signature.user_outputs, values)
    symbols = "|".join({str(size) for _, value in inputs for size in value.shape if not isinstance(size, int)})

    def entry(name: str, value: torch.Tensor) -> dict[str, Any]:
        sizes: list[int | torch.SymInt] = [*value.shape]
        shape = [size if isinstance(size, int) else re.sub(rf"\b({symbols})\b", "batch", str(size)) for size in sizes]
        return {"name": name, "shape": shape, "dtype": str(value.dtype).removeprefix("torch.")}

    return {"inputs": [entry(*pair) for pair in inputs], "outputs": [entry(*pair) for pair in outputs]}


def _tensors(names: Iterable[Any], values: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    found = ((name, values.get(name)) for name in names if isinstance(name, str))
    return [(name, value) for name, value in found if isinstance(value, torch.Tensor)]


def _call(module: nn.Module, batch: tuple[Any, ...]) -> Any:
    """The model's answer, the same each time for a model that draws random numbers too."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the CPU's alone
        return module(*batch)


def reason_of(error: Exception) -> str:
    """What an error says, without torch's advice on how to debug it."""
    text = str(error).strip().split("\n\n")[0].strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
