"""Notebooks as scripts: their cells, of which lines may not be Python: ``!command`` becomes subprocess; ``%magic`` is
refused, except for magics that only serve the viewer."""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import shlex
import tokenize
from pathlib import Path
from typing import Any

from stratagem.errors import ConfigurationError

_SPECIAL = re.compile(
    r"^(?P<indent>\s*)(?:(?P<targets>[A-Za-z_][\w.,\s\[\]'\"]*?)\s*=\s*)?(?P<mark>!!?|%%?)(?P<rest>.*)$"
)
_HELP = re.compile(r"^\s*(\?{1,2}\s*[\w.*]+|[\w.]+\s*\?{1,2})\s*$")
_SHELL = re.compile(r"[|&;<>()$`*?\[\]#~\n]|^\s*\w+=")
"""What only a shell understands."""
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)")
_VALUE = re.compile(r"(?<![$\\{])\{(?P<expression>[^{}]+)\}|(?<!\$)\$(?P<name>[A-Za-z_]\w*)")
"""Where IPython puts the value of Python code into a command."""
_FOR_ONLOOKERS = re.compile(r"%(matplotlib|config|autoreload|(re)?load_ext\s+(autoreload|tensorboard)|tensorboard)\b")
"""Magics that change what a person sees, and no result."""
_NEEDS = "import subprocess as _subprocess"
"""First line of a script with commands."""


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
    bound = _bound_names(cells)
    lines = [f'"""Made from {name}."""', _NEEDS]
    starts: list[tuple[int, int]] = []
    for number, source in enumerate(cells, 1):
        if source.strip():
            lines += ["", f"# cell {number}"]
            starts.append((len(lines), number))
            lines += _convert_cell(source, number, bound).split("\n")
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


def _convert_cell(source: str, cell: int, bound: frozenset[str]) -> str:
    """The cell as plain Python, line for line (a command that goes on over several lines is followed by blank ones). A
    command that fails ends the script with ``CalledProcessError``: nobody watches a job. It runs without a shell,
    unless it is written for one. ``cell``: its number, from 1; ``bound``: names that the notebook's Python code binds.
    ConfigurationError: a magic, help or something that only IPython can do; names cell and line."""
    lines = source.split("\n")
    done: list[str] = []
    at = 0
    while at < len(lines):
        first, line = at, lines[at]
        at += 1
        special = _SPECIAL.match(line)
        if (special is None and not _HELP.match(line)) or _is_inside("\n".join(done)):
            done.append(line)
        elif special is None:
            raise _refused(cell, at, line, "help is for a person at the keyboard; delete the line")
        elif _FOR_ONLOOKERS.match(line.strip()):
            done.append(f"{special['indent']}pass  # {line.strip()}")
        elif special["mark"].startswith("%"):
            raise _refused(cell, at, line, "a magic works in IPython only; write Python instead, or delete it")
        else:
            rest = special["rest"]
            while rest.endswith("\\") and at < len(lines):
                rest = rest[:-1] + lines[at]
                at += 1
            call = _call(rest.strip(), cell, first + 1, bound, wants_lines=bool(special["targets"]))
            targets = f"{special['targets'].strip()} = " if special["targets"] else ""
            done += [f"{special['indent']}{targets}{call}", *[""] * (at - first - 1)]
    text = "\n".join(done)
    if re.search(r"\bget_ipython\s*\(", text):
        number = next(index for index, line in enumerate(lines, 1) if "get_ipython" in line)
        raise _refused(cell, number, lines[number - 1], "there is no IPython in a job; write Python instead")
    return text


def _bound_names(sources: list[str]) -> frozenset[str]:
    """Names that the Python code of these cells binds, as far as it can be parsed."""
    found: set[str] = set()
    for source in sources:
        python = "\n".join("" if _SPECIAL.match(line) else line for line in source.split("\n"))
        try:
            tree = ast.parse(python)
        except SyntaxError:
            continue  # reported, with its line, when the whole script is compiled
        found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        found |= {
            (node.asname or node.name).partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.alias)
        }
    return frozenset(found)


def _is_inside(before: str) -> bool:
    """Whether what follows ``before`` is inside a string or a bracket, or goes on a line."""
    if before.endswith("\\"):
        return True
    try:
        list(tokenize.generate_tokens(io.StringIO(before + "\n").readline))
    except tokenize.TokenError:
        return True
    except SyntaxError:
        pass  # reported, with its line, when the whole script is compiled
    return False


def _call(command: str, cell: int, line: int, bound: frozenset[str], wants_lines: bool) -> str:
    refused = functools.partial(_refused, cell, line, f"!{command}")
    if not command:
        raise refused("a command is missing after the '!'")
    parts, end = [], 0
    for found in _VALUE.finditer(command):
        text = found["expression"] or found["name"]
        names = _names_in(text)
        if names and names <= bound:  # else it is the shell's, or awk's
            parts += [repr(command[end : found.start()]), f"str({text})"]
            end = found.end()
        elif names is not None and found["expression"]:
            raise refused(f"IPython would insert the value of {{{text}}}; call subprocess.run")
    for name in _VARIABLE.findall(command):
        if name in bound:
            raise refused(f"IPython would insert the Python variable {name}; call subprocess.run")
    if parts:
        return _run(f"['/bin/sh', '-c', {' + '.join([*parts, repr(command[end:])])}]", wants_lines)
    if _SHELL.search(command):
        argv = ["/bin/sh", "-c", command]
    else:
        try:
            argv = shlex.split(command)
        except ValueError as error:
            raise refused(f"the command cannot be read: {error}") from None
    return _run(repr(argv), wants_lines)


def _run(argv: str, wants_lines: bool) -> str:
    if wants_lines:
        return f"_subprocess.run({argv}, check=True, stdout=_subprocess.PIPE, text=True).stdout.splitlines()"
    return f"_subprocess.run({argv}, check=True)"


def _names_in(text: str) -> set[str] | None:
    """Names in an expression; None: it is none."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return None
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _refused(cell: int, line: int, text: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"cell {cell}, line {line} of the notebook cannot run in a job: {text.strip()!r}: {why}")
