"""What the commands have in common: options, and how rows are shown."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import click
import torch

from benchmarks import machine
from benchmarks.collectives.sizes import parse_sizes
from benchmarks.hosts import HostsUnavailableError
from benchmarks.peers import MPI, TENSORFLOW, Peer, PeerMissingError
from benchmarks.runner import Case, Identity, Row, Sample, run_cases
from benchmarks.table import format_number, format_table

DEFAULT_BLOCKS = 5
Function = TypeVar("Function", bound=Callable[..., Any])

tf_python_option = click.option(
    "--tf-python", help=f"Interpreter that has TensorFlow; also from {TENSORFLOW.variable}."
)
mpi_python_option = click.option("--mpi-python", help=f"Interpreter that has mpi4py; also from {MPI.variable}.")
workers_option = click.option("--workers", "num_workers", type=click.IntRange(min=2), default=2, show_default=True)


def _device_that_is_here(context: click.Context, option: click.Parameter, device: str) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("torch finds no CUDA device on this machine")
    return device


device_option = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    callback=_device_that_is_here,
    help="Of the tensors; peers that have none there are left out.",
)


def workload_option(names: Sequence[str], default: Sequence[str] = ()) -> Callable[[Function], Function]:
    """``--workload``, as often as one likes; without it ``default``, or all."""
    return click.option(
        "--workload",
        "workloads",
        type=click.Choice(names),
        multiple=True,
        default=list(default or names),
        show_default=True,
    )


def lane_option(lanes: Sequence[str], default: Sequence[str]) -> Callable[[Function], Function]:
    """``--lane``, as often as one likes."""
    return click.option(
        "--lane", "lanes", type=click.Choice(list(lanes)), multiple=True, default=list(default), show_default=True
    )


def peer_option(*peers: str) -> Callable[[Function], Function]:
    """``--peer``, as often as one likes: one of ``peers``, auto or none."""
    return click.option(
        "--peer",
        "peers",
        type=click.Choice(["auto", *peers, "none"]),
        multiple=True,
        default=["auto"],
        help="Whom to measure beside; auto: whatever is installed.",
    )


def sizes_option(default: str) -> Callable[[Function], Function]:
    """``--sizes``: bytes of the tensors."""
    return click.option(
        "--sizes",
        default=default,
        show_default=True,
        callback=_parse_sizes,
        help="Tensors of float32, 1KB is 1024 bytes.",
    )


def takes_part(peer: str, peers: Collection[str]) -> bool:
    """Whether a peer that comes with our own environment is measured.

    Raises:
        click.UsageError: "none" stands beside the name of a peer.
    """
    if "none" in peers and len(set(peers)) > 1:
        raise click.UsageError(f"expected --peer none alone or the names of peers, got {', '.join(peers)}")
    return peer in peers or "auto" in peers


def python_of(peer: Peer, peers: Collection[str], python: str | None) -> str | None:
    """The interpreter that has a peer; None: it takes no part.

    Raises:
        click.UsageError: it was asked for and is not there.
    """
    if not takes_part(peer.name, peers):
        return None
    try:
        return peer.find(python, os.environ, required=peer.name in peers)
    except PeerMissingError as error:
        raise click.UsageError(str(error)) from None


def report(groups: Iterable[Sequence[Case]], num_blocks: int, as_json: bool) -> None:
    """Measures groups of cases that take turns with each other, one group after the other, and shows the rows.

    Raises:
        click.ClickException: this machine cannot have the hosts that a benchmark needs.
    """
    click.echo(json.dumps(machine.describe_machine()), err=True)
    rows: list[Row] = []
    for cases in groups:
        try:
            group = run_cases(cases, num_blocks, _tell)
        except HostsUnavailableError as error:
            raise click.ClickException(str(error)) from None
        rows += group
        if as_json:
            for row in group:
                click.echo(json.dumps(row.as_json()))
            sys.stdout.flush()
    click.echo(format_table(rows), err=as_json)


def _tell(identity: Identity, sample: Sample) -> None:
    """One line a sample on stderr, so that a long run shows that it lives."""
    name = " ".join(str(value) for value in identity.values() if value is not None)
    values = "  ".join(f"{name} {format_number(value)}" for name, value in sample.items() if value is not None)
    click.echo(f"{name}: {values}", err=True)


def _parse_sizes(context: click.Context, option: click.Parameter, text: str) -> list[int]:
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
