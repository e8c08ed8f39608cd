"""A model read back from its export, as a module that any strategy takes."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stratagem.arguments import checked
from stratagem.errors import ConfigurationError, ExportError
from stratagem.training.export import folder as export_folder

NOT_TRAINED = (
    "a loaded model is a program in eval mode and cannot be trained; build the model from its class and load its "
    f"weights: module.load_state_dict(torch.load(folder / '{export_folder.STATE_DICT}')), then sg.Model(module)"
)


class LoadedModel(nn.Module):
    """An exported program. Parameters and buffers keep the names they had in the model.

    It computes what the model computed in eval mode, for any number of rows, and moves between devices like any module.
    It cannot be trained: it no longer contains dropout and the like.

    Args:
        program: ``torch.export.load(…).module()``; ``metadata`` and ``arguments`` belong to it.
    """

    def __init__(
        self, program: torch.fx.GraphModule, metadata: dict[str, Any], arguments: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self.arguments = None if arguments is None else tuple(arguments)
        """Names of the arguments, in order; None where they have none."""
        self.metadata = metadata
        """What ``export_model`` was given as ``metadata``."""
        # The tensors are the program's; sharing the tables gives them their own names here, without a prefix.
        self._parameters, self._buffers, self._modules = program._parameters, program._buffers, program._modules
        self._non_persistent_buffers_set = program._non_persistent_buffers_set
        self.__dict__["_program"] = program  # no submodule: its parts are ours already
        super().train(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for these arguments. Arguments that the model was exported without cannot be passed.

        Raises:
            TypeError: the arguments differ from those the model was exported with.
            AssertionError: an input's shape differs from the one the model was exported with; says which input.
        """
        if kwargs:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            known = inspect.Signature([inspect.Parameter(name, kind) for name in self.arguments or ()])
            args = known.bind(*args, **kwargs).args
        return self.__dict__["_program"](*args)

    def __getattr__(self, name: str) -> Any:
        if name in ("fit", "evaluate", "predict", "summary"):
            raise AttributeError(
                f"a loaded model is a module and has no {name}; sg.Model(loaded) has everything except fit"
            )
        return super().__getattr__(name)

    def train(self, mode: bool = True) -> LoadedModel:
        """Stays in eval mode.

        Raises:
            ConfigurationError: for ``mode=True``.
        """
        if mode:
            raise ConfigurationError(NOT_TRAINED)
        super().train(False)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LoadedModel:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        program: torch.fx.GraphModule = self.__dict__["_program"]
        for name, value in list(vars(program).items()):
            if isinstance(value, torch.Tensor):  # constants of the program
                setattr(program, name, fn(value))
        # Tensors that the program makes itself are made on a device that is written in it.
        for node in program.graph.nodes:
            device = node.kwargs.get("device")
            if device is not None:
                node.update_kwarg("device", fn(torch.empty(0, device=device)).device)
            elif node.target is torch.ops.aten.to.device:
                node.update_arg(1, fn(torch.empty(0, device=node.args[1])).device)
        program.recompile()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedModel:
        with warnings.catch_warnings():
            # torch copies the description of a program's inputs in a way that it has deprecated itself.
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            program = copy.deepcopy(self.__dict__["_program"], memo)
        memo[id(self)] = twin = LoadedModel(program, copy.deepcopy(self.metadata, memo), self.arguments)
        for parameter, own in zip(twin.parameters(), self.parameters(), strict=True):
            parameter.requires_grad_(own.requires_grad)
        return twin


@checked
def load_model(path: str | os.PathLike[str]) -> LoadedModel:
    """Reads the folder that :func:`export_model` wrote, on the CPU; every file is checked first.

    Raises:
        ExportError: it is not such a folder, a file is damaged (named), or the export has no program (with the reason).
    """
    folder = Path(path)
    description = export_folder.read(folder)
    if export_folder.PROGRAM not in description["files"]:
        raise ExportError(
            f"{folder} holds weights but no program, because {description.get('failure', 'none was written')}. Build "
            f"the model from its class and load_state_dict(torch.load('{folder / export_folder.STATE_DICT}'))"
        )
    program = torch.export.load(folder / export_folder.PROGRAM).module()
    assert isinstance(program, torch.fx.GraphModule)
    return LoadedModel(program, description.get("metadata", {}), description.get("arguments"))
