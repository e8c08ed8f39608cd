"""`stratagem checkpoint inspect | consolidate | verify`: look at checkpoints without the job that wrote them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stratagem.cli.options import print_rows
from stratagem.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    import torch

_CHECKPOINT = click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
SUFFIXES = (".safetensors", ".pt", ".pth")


@click.group("checkpoint")
def checkpoint_command() -> None:
    """Look at checkpoints. PATH is one, or a directory of checkpoints: then the newest complete one."""


@checkpoint_command.command("inspect")
@_CHECKPOINT
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect_command(path: Path, as_json: bool) -> None:
    """Show what a checkpoint holds: when and how it was made, its objects, files and tensors."""
    from stratagem.checkpoint.reading import summarize

    summary = summarize(path)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
        return
    for key in ("path", "step", "created", "bytes"):
        click.echo(f"{key:<8}  {summary[key]:,}" if key == "bytes" else f"{key:<8}  {summary[key]}")
    for key, value in summary["made_by"].items():
        click.echo(f"{key:<8}  {value}")
    _print_rows(("object", "kind"), [(name, kind) for name, kind in summary["objects"].items()])
    _print_rows(("file", "bytes"), [(file["name"], f"{file['bytes']:,}") for file in summary["files"]])
    tensors = [(entry["name"], entry["dtype"], str(entry["shape"]), entry["file"]) for entry in summary["tensors"]]
    _print_rows(("tensor", "dtype", "shape", "file"), tensors)


@checkpoint_command.command("verify")
@_CHECKPOINT
def verify_command(path: Path) -> int:
    """Compare every file of a checkpoint with its checksum. Exit code 1: damaged; the last good one is named.

    In a directory of checkpoints those that are not complete are damaged too.
    """
    from stratagem.checkpoint.catalog import find_damage, incomplete, offer
    from stratagem.checkpoint.reading import find

    found = find(path)
    checked = [*incomplete(path), found] if found != path else [found]
    damage = [line for each in checked for line in find_damage(each, is_certain=True)]
    for line in damage:
        click.echo(f"damaged: {line}")
    click.echo(offer(checked[0]) if damage else f"{found}: every file is as it was written")
    return 1 if damage else 0


@checkpoint_command.command("consolidate")
@_CHECKPOINT
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--object", "name", help="Which object; not needed when there is one model.")
def consolidate_command(path: Path, out: Path, name: str | None) -> None:
    """Write a model's plain state_dict to OUT (.safetensors, or .pt for torch.load), which must not exist."""
    from stratagem.checkpoint.reading import load_checkpoint

    if out.suffix not in SUFFIXES:
        raise ConfigurationError(f"expected a file name that ends in {', '.join(SUFFIXES)}, got {out}")
    if out.exists():
        raise ConfigurationError(f"{out} exists already; name another file, or remove it")
    state = load_checkpoint(path, name)
    draft = out.with_name(f".{out.name}-{secrets.token_hex(4)}{out.suffix}")
    try:
        _write(draft, state)
        out.touch(exist_ok=False)  # never replaces a file; not every file system has hard links
        draft.replace(out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        draft.unlink(missing_ok=True)
    num_bytes = sum(value.nbytes for value in _tensors(state).values())
    click.echo(f"{out}: {len(state)} entries, {num_bytes:,} bytes of tensors")


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    import torch

    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def _write(path: Path, state: dict[str, Any]) -> None:
    import torch

    from stratagem.checkpoint.durable import FileForTorch
    from stratagem.checkpoint.tensor_file import write_tensors

    if path.suffix != ".safetensors":
        with FileForTorch(path) as file:
            torch.save(dict(state), file)
        return
    tensors = _tensors(state)
    if len(tensors) < len(state):
        others = ", ".join(key for key in state if key not in tensors)
        raise ConfigurationError(f"a .safetensors file holds only tensors, but there is {others}: write a .pt file")
    write_tensors(path, {key: value.contiguous() for key, value in tensors.items()})


def _print_rows(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    if rows:
        click.echo("")
        print_rows([columns, *rows])
