"""Which script a job runs: a file, a notebook, or the caller of `run()`."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from stratagem.errors import ConfigurationError
from stratagem.launch.submit.notebook import read_cells, to_script

SUFFIX = ".ipynb"
CELLS = "notebook_cells.py"
"""Script made of the cells that a kernel has executed."""


@dataclasses.dataclass(frozen=True)
class EntryPoint:
    path: Path
    """Of the script; absolute. Where ``source`` is given there is no such file: that is where it would stand."""
    source: str | None = None
    """Text of a script made from a notebook; None: the file as it is."""
    note: str = ""
    """What a person should know about where it came from."""

    @property
    def stem(self) -> str:
        return self.path.name.split(".")[0]


def path_inside(path: Path, root: Path, what: str) -> str:
    """The path of a file below the project folder, with "/"; a ConfigurationError when it stands elsewhere."""
    try:
        return Path(os.path.abspath(path)).relative_to(os.path.abspath(root)).as_posix()
    except ValueError:
        raise ConfigurationError(
            f"expected {what} to be in the working directory {root}, whose files go into the image, got {path}; "
            "change to the project's folder first"
        ) from None


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


def find_entry_point(entry_point: str | Path | None) -> EntryPoint:
    """The script that is meant: a path of a script or a notebook; None: the running notebook (its file where the
    frontend tells which, else the cells executed so far), or the running script. ConfigurationError: there is no such
    file, or nothing runs that could be meant."""
    if callable(entry_point):
        raise ConfigurationError(
            f"expected entry_point to be the path of a script or a notebook, got the function "
            f"{getattr(entry_point, '__name__', entry_point)}: run() takes all of the running script or notebook (give "
            "no entry_point), in which the function is called after it"
        )
    if entry_point is not None:
        return _from_file(Path(entry_point))
    shell = running_shell()
    if shell is None:
        if (script := getattr(sys.modules["__main__"], "__file__", None)) in (None, "<stdin>"):
            raise ConfigurationError("no script calls run() here: give entry_point='train.py'")
        return _from_file(Path(script))
    if (file := notebook_file(shell)) is not None:
        note = f"took the notebook {file} as it was last saved"
        return dataclasses.replace(_from_file(file), note=note)
    history = shell.history_manager
    # IPython keeps the errors from version 9 on. What was interrupted may be the training that is to run elsewhere.
    raised = [at for at, error in getattr(history, "exceptions", {}).items() if error["ename"] != "KeyboardInterrupt"]
    cells = ["" if at in raised else str(cell) for at, cell in enumerate(history.input_hist_raw)][1:]  # with this one
    but = f" but what raised an error (cell {', '.join(map(str, raised))})" if raised else ""
    note = f"took all {len(cells)} cells that this kernel has executed so far{but}; entry_point= names a file instead"
    return EntryPoint(Path.cwd() / CELLS, to_script(cells, "the running notebook"), note)


def _from_file(path: Path) -> EntryPoint:
    if not path.is_file():
        raise ConfigurationError(
            f"expected entry_point to be a script or a notebook, but there is no file {path}; the working directory is "
            f"{Path.cwd()}"
        )
    path = Path(os.path.abspath(path))
    if path.suffix == SUFFIX:
        # A name of its own: the project may well have a script of the same name.
        return EntryPoint(path.with_name(path.name + ".py"), to_script(read_cells(path), path.name))
    if path.suffix != ".py":
        raise ConfigurationError(f"expected entry_point to end in .py or .ipynb, got {path.name!r}")
    return EntryPoint(path)
