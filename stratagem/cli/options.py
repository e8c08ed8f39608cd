"""Command-line options of the roles, derived from their configurations in one place."""

from __future__ import annotations

import math
import os
import re
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import pydantic.fields
import yaml
from pydantic_core import PydanticUndefined

from stratagem.cluster.config import RoleConfig
from stratagem.cluster.sources import CONFIGS, ENV_PREFIX, Resolved, flag_of, gather
from stratagem.cluster.tf_config import TaskPlacement
from stratagem.errors import ConfigurationError
from stratagem.launch.replica import own_environment

Command = TypeVar("Command", bound=Callable[..., Any])
_READS_ARGUMENTS = re.compile(r"argv|[Aa]rg_?[Pp]arse|parse_|click|typer|fire|hydra|absl|docopt")


class Number(click.FloatRange):
    """As click's, and NaN, which is neither below nor above anything, is in no range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


class _Place(click.Path):
    """By its name: an empty one (of a variable that is not set, "$UNSET") is not the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            what, hint = ("folder", " ('.' is the current one)") if self.dir_okay else ("file", "")
            self.fail(f"expected the name of a {what}, but it is empty{hint}.", param, ctx)
        return super().convert(value, param, ctx)


FOLDER, FILE = _Place(file_okay=False, path_type=Path), _Place(dir_okay=False, path_type=Path)
UNREAD = {"chief": "chief", "evaluator": "bind"}
"""Fields that sources for all tasks have for a role too, which looks for no chief, or serves nothing."""
_FOLDERS = ("checkpoint_dir", "state_dir")
SECONDS = Number(0, 86400, min_open=True)
"""How long to wait for an answer; a call of gRPC takes neither 0 nor inf."""


def _option(name: str, field: pydantic.fields.FieldInfo) -> Callable[[Command], Command]:
    annotation: Any = field.annotation
    needed = field.default is PydanticUndefined
    default = "" if needed or field.default == "" else f" [default: {field.default}]"
    text = " ".join((field.description or "").split()) + default
    if annotation is bool:
        return click.option(f"{flag_of(name)}/{flag_of(f'no_{name}')}", name, default=None, help=text)
    if typing.get_origin(annotation) is typing.Literal:
        return click.option(flag_of(name), name, type=click.Choice(list(typing.get_args(annotation))), help=text)
    return click.option(flag_of(name), name, type=annotation, help=text)


def role_options(role: str) -> Callable[[Command], Command]:
    """One option for each field of a role's configuration that it reads, and ``--cluster``."""
    of_fields = field_options(role, [name for name in CONFIGS[role].model_fields if name != UNREAD.get(role)])
    return lambda command: cluster_option(of_fields(command))


def field_options(role: str, names: Sequence[str]) -> Callable[[Command], Command]:
    """One option for each of these fields of a role's configuration; not given, they are None."""

    def decorate(command: Command) -> Command:
        for name in reversed(names):
            command = _option(name, CONFIGS[role].model_fields[name])(command)
        return command

    return decorate


def variable_option(name: str, **attributes: Any) -> Callable[[Command], Command]:
    """One that, not given, the variable of its name gives: ``--log-format`` is STRATAGEM_LOG_FORMAT."""
    return click.option(name, envvar=ENV_PREFIX + name.strip("-").replace("-", "_").upper(), **attributes)


def script_arguments(command: Command) -> Command:
    """The script, its arguments, and whether it is named as a module."""
    command = click.argument("args", nargs=-1, type=click.UNPROCESSED)(command)
    command = click.argument("script", type=click.Path(path_type=Path))(command)
    words = "SCRIPT is the name of a module, as for python -m."
    return click.option("-m", "--module", is_flag=True, help=words)(command)


cluster_option = click.option(
    "--cluster",
    "cluster_file",
    type=FILE,
    help="YAML file that describes the cluster ('cluster:') and configures roles ('defaults:', 'ps:', …).",
)


def warn_of_late_flags(command: click.Command, script: Path, args: Sequence[str]) -> None:
    """What follows the script is the script's: of one that seems to read nothing, or is not here, it was perhaps meant
    for ``command``."""
    ours = {name for option in command.params for name in option.opts if name.startswith("--")} | {"--help"}
    late = [word for word in args if word.partition("=")[0] in ours]
    if late and not (script.is_file() and _READS_ARGUMENTS.search(script.read_text(errors="replace"))):
        click.echo(
            f"stratagem: {late[0]} comes after {script}, so it goes to the script: if it is meant for stratagem "
            f"{command.name}, write it before the script",
            err=True,
        )


def pairs_of(form: str, texts: Sequence[str]) -> dict[str, str]:
    """What a repeated option of a ``form`` like "--env NAME=VALUE" says, by name. ConfigurationError: a text is no
    pair, or two have one name."""
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigurationError(f"expected {form}, got {text!r}")
        if key in pairs:
            raise ConfigurationError(f"expected {form} once for {key}, got {key}={pairs[key]} and {text}")
        pairs[key] = value
    return pairs


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """On a terminal as wide as that is, elsewhere with a line for each row."""
    if not sys.stdout.isatty():
        print_rows([columns, *rows])
        return
    from rich.console import Console  # late: `stratagem health` prints none, and runs every few seconds
    from rich.table import Table

    table = Table(*columns, box=None, header_style="bold")
    for cells in rows:
        table.add_row(*cells)
    Console(markup=False, emoji=False).print(table)


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Prints a table whose columns are as wide as their widest cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


class _Loader(yaml.SafeLoader):
    """As the safe one, which takes the last of two equal keys and forgets what the first says."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if str(key.value) in keys:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            keys.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_cluster_file(path: Path | None) -> dict[str, Any]:
    """The parsed cluster file; empty without one. ConfigurationError: it cannot be read, or is not a YAML mapping."""
    if path is None:
        return {}
    try:
        document = _Loader(path.read_text()).get_single_data()
    except OSError as error:
        raise ConfigurationError(f"cannot read the cluster file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the cluster file {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ConfigurationError(
            f"expected sections like 'cluster:' and 'defaults:' in {path}, got {type(document).__name__}"
        )
    return document


def configure(
    role: str | None, cluster_file: Path | None, flags: dict[str, Any]
) -> tuple[Resolved[RoleConfig], TaskPlacement | None]:
    """The configuration of a role from flags, the environment of this process and the cluster file, as
    :func:`gather`. ConfigurationError: also a file where a folder is named."""
    document = read_cluster_file(cluster_file)
    resolved, placement = gather(role, own_environment(os.environ), flags, document, str(cluster_file))
    for name in _FOLDERS:
        if folder := getattr(resolved.config, name, ""):
            path = Path(folder)
            there = next(each for each in (path, *path.parents, Path()) if os.path.lexists(each))
            if not os.path.isdir(there):
                raise ConfigurationError(
                    f"{name} from {resolved.origins[name]}: expected a folder, or the name of one to be made, got "
                    f"{folder!r}, and {there} is a file"
                )
    return resolved, placement
