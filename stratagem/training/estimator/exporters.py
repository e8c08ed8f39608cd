"""Exports of evaluated checkpoints, for the users of the model."""

from __future__ import annotations

import inspect
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stratagem.arguments import checked, whole_numbers
from stratagem.checkpoint.durable import replace_text
from stratagem.training.estimator.estimator import Estimator
from stratagem.training.export.inputs import as_arguments

Results = Mapping[str, float]

_NAME = re.compile(r"step-(\d{8,})")


@runtime_checkable
class Exporter(Protocol):
    """Called after every evaluation of ``train_and_evaluate``."""

    @property
    def name(self) -> str:
        """Name of its folder, under ``<model_dir>/export``."""

    def export(
        self,
        estimator: Estimator,
        export_path: Path,
        checkpoint_path: str,
        eval_result: Results,
        is_the_final_export: bool,
    ) -> Path | None:
        """Writes an export, or decides not to.

        Args:
            estimator: the owner of the model; see :meth:`Estimator.export_model`.
            export_path: this exporter's folder, which may not exist yet.
            checkpoint_path: the evaluated checkpoint.
            eval_result: the result of the evaluation.
            is_the_final_export: no other export follows.

        Returns:
            the folder of the export; None: there is none this time.
        """


@checked
class LatestExporter:
    """Exports every evaluated checkpoint and keeps the newest: ``<model_dir>/export/<name>/step-00000100``.

    Args:
        name: name of the folder.
        example_inputs: features that the model is called with, or ``TensorSpec`` in their place; None: those of the
            evaluation.
        exports_to_keep: None: all.
    """

    def __init__(self, name: str = "latest", example_inputs: Any = None, exports_to_keep: int | None = 5) -> None:
        whole_numbers(exports_to_keep=exports_to_keep)
        if example_inputs is not None:
            as_arguments((example_inputs,))
        self.name = name
        self._example_inputs = example_inputs
        self._keep = exports_to_keep

    def export(
        self,
        estimator: Estimator,
        export_path: Path,
        checkpoint_path: str,
        eval_result: Results,
        is_the_final_export: bool,
    ) -> Path | None:
        """See :class:`Exporter`."""
        if not self._is_wanted(export_path, eval_result, is_the_final_export):
            return None
        folder = export_path / f"step-{int(eval_result['global_step']):08d}"
        estimator.export_model(folder, self._example_inputs, checkpoint_path=checkpoint_path)
        numbered = {int(named[1]): path for path in export_path.iterdir() if (named := _NAME.fullmatch(path.name))}
        for _, old in sorted(numbered.items())[: -self._keep] if self._keep else ():
            if old != folder:
                shutil.rmtree(old)
        self._exported(export_path, eval_result)
        return folder

    def _is_wanted(self, export_path: Path, eval_result: Results, is_final: bool) -> bool:
        return True

    def _exported(self, export_path: Path, eval_result: Results) -> None:
        """There is an export of what was evaluated."""


@checked
class FinalExporter(LatestExporter):
    """Exports the last checkpoint of the training.

    Args:
        name: name of the folder.
        example_inputs: see :class:`LatestExporter`.
    """

    def __init__(self, name: str = "final", example_inputs: Any = None) -> None:
        super().__init__(name, example_inputs, None)

    def _is_wanted(self, export_path: Path, eval_result: Results, is_final: bool) -> bool:
        return is_final


def loss_smaller(best: Results, current: Results) -> bool:
    """Whether the loss is smaller than the best one, or that is NaN and this is not."""
    return current["loss"] < best["loss"] or (math.isnan(best["loss"]) and not math.isnan(current["loss"]))


@checked
class BestExporter(LatestExporter):
    """Exports a checkpoint that is better than all before it, including those before this process started.

    Args:
        name: name of the folder; its ``best.json`` holds the best results.
        example_inputs: see :class:`LatestExporter`.
        compare_fn: gets the best results and the current ones (as ``best_eval_result`` and ``current_eval_result``, if
            it has these names), and says whether the current ones are better.
        exports_to_keep: None: all.
    """

    def __init__(
        self,
        name: str = "best",
        example_inputs: Any = None,
        compare_fn: Callable[..., bool] = loss_smaller,
        exports_to_keep: int | None = 5,
    ) -> None:
        super().__init__(name, example_inputs, exports_to_keep)
        self._is_better = compare_fn

    def _is_wanted(self, export_path: Path, eval_result: Results, is_final: bool) -> bool:
        file = export_path / "best.json"
        if not file.exists():
            return True
        best = json.loads(file.read_text())
        named = {"best_eval_result": best, "current_eval_result": eval_result}  # TensorFlow's, in whatever order
        if named.keys() <= inspect.signature(self._is_better).parameters.keys():
            return self._is_better(**named)
        return self._is_better(best, eval_result)

    def _exported(self, export_path: Path, eval_result: Results) -> None:
        replace_text(export_path / "best.json", json.dumps(dict(eval_result)))
