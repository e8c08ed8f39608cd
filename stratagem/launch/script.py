"""Whether there is what a job is to run: said before anything starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from stratagem.errors import ConfigurationError

_MOVES_MODULES = (b"__path__", b"sys.modules", b"meta_path", b"declare_namespace")
"""A package that has one of these words may say itself where its modules are."""


def check_script(script: Path, is_module: bool) -> None:
    """Raises ConfigurationError: there is no such file, or no module of that name."""
    if is_module:
        if _is_missing(str(script)):
            raise ConfigurationError(
                f"expected the name of a module after -m, but Python finds no {script}: the current folder is "
                f"{os.getcwd()}"
            )
    elif not script.is_file():
        main = script / "__main__.py"  # what Python itself would run
        what = f"{script} is a folder: give {main}" if main.is_file() else f"there is no file {script}"
        raise ConfigurationError(f"expected a training script, but {what}")


def _is_missing(module: str) -> bool:
    """Whether Python would certainly find no such module; its packages, which may do anything, are not imported."""
    name = ""
    try:
        paths: tuple[list[str] | None, ...] = ([os.getcwd(), *sys.path], None)  # None: what Python itself gives finders
        for part in module.split("."):
            name = f"{name}.{part}".lstrip(".")
            specs = (finder.find_spec(name, path) for path in paths for finder in sys.meta_path)
            spec = next(filter(None, specs), None)
            if spec is None:
                return True
            content = Path(spec.origin).read_bytes() if spec.origin else b""
            if any(word in content for word in _MOVES_MODULES):
                return False
            paths = (list(spec.submodule_search_locations or ()),)
    except Exception:  # a finder of the user's, an archive, a removed folder: there is no telling
        return False
    return False
