"""Notebooks as scripts: the cells of a file, or those that a running kernel has executed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from stratagem.errors import ConfigurationError
from stratagem.launch.submit.notebook_lines import NEEDS, bound_names, convert_cell

SUFFIX = ".ipynb"


def read_cells(path: Path) -> list[str]:
    """The sources of the code cells of a notebook file, in their order; other cells are empty. ConfigurationError: it
    is no notebook of format 4, or not of Python."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read the notebook {path}: {error}") from None
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        raise ConfigurationError(
            f"expected {path} to be a notebook of format 4 (with cells), save it from Jupyter again"
        )
    language = document.get("metadata", {}).get("kernelspec", {}).get("language", "python")
    if language != "python":
        raise ConfigurationError(f"expected a notebook in Python, but {path} is in {language}")
    return ["".join(cell.get("source", "")) if cell.get("cell_type") == "code" else "" for cell in cells]


def to_script(cells: list[str], name: str) -> str:
    """One script from the cells. The cell that calls `run()` stays: in the job that call returns at once. Empty cells
    are left out; the first line says the ``name`` of the notebook. ConfigurationError: a cell cannot be converted, or
    is not valid Python; names cell and line."""
    bound = bound_names(cells)
    lines = [f'"""Made from {name}."""', NEEDS]
    starts: list[tuple[int, int]] = []
    for number, source in enumerate(cells, 1):
        if source.strip():
            lines += ["", f"# cell {number}"]
            starts.append((len(lines), number))
            lines += convert_cell(source, number, bound).split("\n")
    text = "\n".join(lines) + "\n"
    try:
        compile(text, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        at = error.lineno or 1
        before, cell = next(((start, cell) for start, cell in reversed(starts) if start < at), (0, 1))
        raise ConfigurationError(
            f"cell {cell}, line {at - before} of {name} is not Python: {error.msg}: {(error.text or '').strip()!r}"
        ) from None
    return text


def running_shell() -> Any | None:
    """IPython's shell if this code runs in a cell of one; IPython is never loaded for it."""
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()


def notebook_file(shell: Any) -> Path | None:
    """The file of the running notebook, where the frontend tells it (VS Code, JupyterLab)."""
    for name in (shell.user_ns.get("__vsc_ipynb_file__"), os.environ.get("JPY_SESSION_NAME")):
        if isinstance(name, str) and name.endswith(SUFFIX) and Path(name).is_file():
            return Path(name)
    return None
