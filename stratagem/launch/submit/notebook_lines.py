"""Notebook lines that are not Python: ``!command`` becomes subprocess; ``%magic`` is refused, except for magics that
only serve the viewer. Pure, no I/O."""

from __future__ import annotations

import ast
import io
import re
import shlex
import tokenize

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
NEEDS = "import subprocess as _subprocess"
"""First line of a script with commands."""


def convert_cell(source: str, cell: int, bound: frozenset[str] = frozenset()) -> str:
    """The cell as plain Python, line for line (a command that goes on over several lines is followed by blank ones). A
    command that fails ends the script with ``CalledProcessError``: nobody watches a job. It runs without a shell,
    unless it is written for one. ``cell``: its number, from 1; ``bound``: names that the notebook's Python code binds.
    ConfigurationError: a magic, help or something that only IPython can do; names cell and line."""
    lines = source.split("\n")
    done: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        special = _SPECIAL.match(line)
        helps = _HELP.match(line)
        if (special is None and helps is None) or _is_inside("\n".join(done)):
            done.append(line)
            at += 1
            continue
        if special is None:
            raise _refused(cell, at + 1, line, "help is for a person at the keyboard; delete the line")
        if _FOR_ONLOOKERS.match(line.strip()):
            done.append(f"{special['indent']}pass  # {line.strip()}")
            at += 1
            continue
        if special["mark"].startswith("%"):
            raise _refused(cell, at + 1, line, "a magic works in IPython only; write Python instead, or delete it")
        first, rest = at, special["rest"]
        while rest.endswith("\\") and at + 1 < len(lines):
            at += 1
            rest = rest[:-1] + lines[at]
        call = _call(rest.strip(), cell, first + 1, bound, wants_lines=bool(special["targets"]))
        targets = f"{special['targets'].strip()} = " if special["targets"] else ""
        done.append(f"{special['indent']}{targets}{call}")
        done += [""] * (at - first)
        at += 1
    text = "\n".join(done)
    if re.search(r"\bget_ipython\s*\(", text):
        number = next(index for index, line in enumerate(lines, 1) if "get_ipython" in line)
        raise _refused(cell, number, lines[number - 1], "there is no IPython in a job; write Python instead")
    return text


def bound_names(sources: list[str]) -> frozenset[str]:
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
        for _ in tokenize.generate_tokens(io.StringIO(before + "\n").readline):
            pass
    except tokenize.TokenError:
        return True
    except (IndentationError, SyntaxError):
        return False  # reported, with its line, when the whole script is compiled
    return False


def _call(command: str, cell: int, line: int, bound: frozenset[str], wants_lines: bool) -> str:
    if not command:
        raise _refused(cell, line, "!", "a command is missing after the '!'")
    parts, end = [], 0
    for found in _VALUE.finditer(command):
        text = found["expression"] or found["name"]
        names = _names_in(text)
        if names and names <= bound:  # else it is the shell's, or awk's
            parts += [repr(command[end : found.start()]), f"str({text})"]
            end = found.end()
        elif names is not None and found["expression"]:
            raise _refused(
                cell, line, f"!{command}", f"IPython would insert the value of {{{text}}}; call subprocess.run"
            )
    for name in _VARIABLE.findall(command):
        if name in bound:
            raise _refused(
                cell, line, f"!{command}", f"IPython would insert the Python variable {name}; call subprocess.run"
            )
    if parts:
        return _run(f"['/bin/sh', '-c', {' + '.join([*parts, repr(command[end:])])}]", wants_lines)
    if _SHELL.search(command):
        argv = ["/bin/sh", "-c", command]
    else:
        try:
            argv = shlex.split(command)
        except ValueError as error:
            raise _refused(cell, line, f"!{command}", f"the command cannot be read: {error}") from None
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
