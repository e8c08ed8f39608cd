"""The benchmarks by name: each command turns its options into cases and reports them."""

from __future__ import annotations

import re

import click

from benchmarks import apply, apply_rows, chief, memory, meter, pull, start
from benchmarks.collectives.cases import LANES as ALL_LANES
from benchmarks.collectives.cases import allreduce_cases
from benchmarks.collectives.sizes import DEFAULT_SIZES
from benchmarks.collectives.torch_cases import collectives_cases
from benchmarks.hosts import why_unavailable
from benchmarks.links.cases import LANES as LINK_LANES
from benchmarks.links.cases import WIRES, link_cases
from benchmarks.options import (
    blocks_option,
    json_option,
    lane_option,
    mpi_python_option,
    peer_option,
    python_of,
    report,
    sizes_option,
    takes_part,
    tf_python_option,
    workers_option,
    workload_option,
)
from benchmarks.peers import MPI, TENSORFLOW
from benchmarks.training.cases import LANES as TRAIN_LANES
from benchmarks.training.cases import fit_cases, ps_cases, step_cases, train_cases
from benchmarks.training.workloads import ALL_REDUCED, CHANNELS_LAST, CLASSIFIERS, ON_SERVERS, TOWERS, WORKLOADS
from stratagem.cli.options import Number

LINK_SIZES = "4MB,16MB"


@click.command("allreduce")
@lane_option(ALL_LANES, ALL_LANES)
@sizes_option(DEFAULT_SIZES)
@workers_option
@click.option(
    "--wire", type=click.Choice(WIRES), default="float32", show_default=True, help="Of our tcp and grpc lanes."
)
@click.option("--tls", is_flag=True, help="Measure our tcp lane under TLS 1.3 too.")
@peer_option("gloo", "tf")
@tf_python_option
@blocks_option
@json_option
def allreduce_command(
    lanes: tuple[str, ...],
    sizes: list[int],
    num_workers: int,
    wire: str,
    tls: bool,
    peers: tuple[str, ...],
    tf_python: str | None,
    blocks: int,
    as_json: bool,
) -> None:
    """All-reduce on this machine, a lane each, beside gloo and TensorFlow's RING."""
    python = python_of(TENSORFLOW, peers, tf_python)
    gloo = takes_part("gloo", peers)
    cases = allreduce_cases(num_workers, sizes, lanes, wire, tls=tls, gloo=gloo, tf_python=python)
    report([cases], blocks, as_json)


@click.command("collectives")
@lane_option(ALL_LANES, ("shm", "tcp"))
@sizes_option("4KB,64KB,1MB,16MB,64MB")
@workers_option
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Of the tensors.")
@peer_option("gloo", "mpi")
@mpi_python_option
@blocks_option
@json_option
def collectives_command(
    lanes: tuple[str, ...],
    sizes: list[int],
    num_workers: int,
    device: str,
    peers: tuple[str, ...],
    mpi_python: str | None,
    blocks: int,
    as_json: bool,
) -> None:
    """Collectives of torch.distributed with our backend, beside gloo and Open MPI."""
    python, gloo = python_of(MPI, peers, mpi_python), takes_part("gloo", peers)
    report([collectives_cases(num_workers, sizes, lanes, gloo=gloo, mpi_python=python, device=device)], blocks, as_json)


@click.command("train")
@workload_option(ALL_REDUCED)
@lane_option(ALL_LANES, TRAIN_LANES)
@workers_option
@peer_option("ddp", "tf")
@tf_python_option
@blocks_option
@json_option
def train_command(
    workloads: tuple[str, ...],
    lanes: tuple[str, ...],
    num_workers: int,
    peers: tuple[str, ...],
    tf_python: str | None,
    blocks: int,
    as_json: bool,
) -> None:
    """Synchronous training with an all-reduce, beside DistributedDataParallel and TensorFlow's RING."""
    python = python_of(TENSORFLOW, peers, tf_python)
    chosen = [WORKLOADS[name] for name in workloads or ALL_REDUCED]
    try:
        groups = [
            train_cases(workload, num_workers, lanes, ddp=takes_part("ddp", peers), tf_python=python)
            for workload in chosen
        ]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    report(groups, blocks, as_json)


@click.command("links")
@click.option("--rates", default="100mbit,1gbit", show_default=True, callback=lambda *given: parse_rates(given[2]))
@lane_option(LINK_LANES, LINK_LANES)
@click.option("--wire", "wires", type=click.Choice(WIRES), multiple=True, default=list(WIRES), show_default=True)
@sizes_option(LINK_SIZES)
@workers_option
@peer_option("gloo")
@blocks_option
@json_option
def links_command(
    rates: list[int],
    lanes: tuple[str, ...],
    wires: tuple[str, ...],
    sizes: list[int],
    num_workers: int,
    peers: tuple[str, ...],
    blocks: int,
    as_json: bool,
) -> None:
    """All-reduce between network namespaces whose links have these rates; needs root, ip and tc."""
    if missing := why_unavailable():
        raise click.ClickException(missing)
    gloo = takes_part("gloo", peers)
    report([link_cases(rate, num_workers, sizes, lanes, wires, gloo=gloo) for rate in rates], blocks, as_json)


@click.command("ps")
@workload_option((*ON_SERVERS, CHANNELS_LAST.name))
@lane_option(ALL_LANES, ALL_LANES)
@peer_option("tf")
@tf_python_option
@click.option("--tls", is_flag=True, help="Measure each of our lanes under TLS 1.3 too.")
@blocks_option
@json_option
def ps_command(
    workloads: tuple[str, ...],
    lanes: tuple[str, ...],
    peers: tuple[str, ...],
    tf_python: str | None,
    tls: bool,
    blocks: int,
    as_json: bool,
) -> None:
    """Training with parameter servers, beside TensorFlow's."""
    python = python_of(TENSORFLOW, peers, tf_python)
    report([ps_cases(WORKLOADS[name], lanes, python, tls=tls) for name in workloads or CLASSIFIERS], blocks, as_json)


@click.command("step")
@lane_option(ALL_LANES, ALL_LANES)
@blocks_option
@json_option
def step_command(lanes: tuple[str, ...], blocks: int, as_json: bool) -> None:
    """What a step on a parameter server costs beside model and bytes, by role."""
    report([step_cases(lanes)], blocks, as_json)


@click.command("fit")
@workload_option(CLASSIFIERS)
@blocks_option
@json_option
def fit_command(workloads: tuple[str, ...], blocks: int, as_json: bool) -> None:
    """What Model.fit costs over a plain loop, in one process."""
    report([fit_cases(WORKLOADS[name]) for name in workloads or ("cnn",)], blocks, as_json)


@click.command("pull")
@workload_option(CLASSIFIERS)
@blocks_option
@json_option
def pull_command(workloads: tuple[str, ...], blocks: int, as_json: bool) -> None:
    """What it costs to ask for weights that have not changed."""
    report([pull.pull_cases(WORKLOADS[name]) for name in workloads or CLASSIFIERS], blocks, as_json)


@click.command("apply")
@blocks_option
@json_option
def apply_command(blocks: int, as_json: bool) -> None:
    """One server-side optimizer update, against what the memory can do."""
    report([apply.apply_cases()], blocks, as_json)


@click.command("rows")
@blocks_option
@json_option
def rows_command(blocks: int, as_json: bool) -> None:
    """Server-side updates of the rows of a table."""
    report([apply_rows.apply_rows_cases()], blocks, as_json)


@click.command("memory")
@workload_option(TOWERS)
@lane_option(ALL_LANES, ("shm", "tcp"))
@workers_option
@blocks_option
@json_option
def memory_command(
    workloads: tuple[str, ...], lanes: tuple[str, ...], num_workers: int, blocks: int, as_json: bool
) -> None:
    """What each process of a large model has, by ring and by one ps, beside DistributedDataParallel."""
    cases = [memory.memory_cases(WORKLOADS[name], lanes, num_workers) for name in workloads or TOWERS]
    report(cases, blocks, as_json)


@click.command("start")
@blocks_option
@json_option
def start_command(blocks: int, as_json: bool) -> None:
    """From the command to the end of a small job, beside torchrun."""
    report([start.start_cases()], blocks, as_json)


@click.command("meter")
@click.option(
    "--pairs", type=click.IntRange(min=2), default=200, show_default=True, help="Of blocks of 5 steps, a job."
)
@blocks_option
@json_option
def meter_command(pairs: int, blocks: int, as_json: bool) -> None:
    """What it costs a step that its phases are counted: blocks of steps with and without, in one worker."""
    report([[case] for case in meter.meter_cases(pairs)], blocks, as_json)


@click.command("chief")
@click.option(
    "--workers", "counts", type=click.IntRange(min=1), multiple=True, default=(10, 100, 1000), show_default=True
)
@click.option(
    "--rate",
    type=Number(0, min_open=True),
    default=20.0,
    show_default=True,
    help="Units a second that each worker trains.",
)
@click.option("--seconds", type=Number(0.1, 240), default=10.0, show_default=True, help="Length of the window.")
@blocks_option
@json_option
def chief_command(counts: tuple[int, ...], rate: float, seconds: float, blocks: int, as_json: bool) -> None:
    """One chief and many workers that lease units and train nothing."""
    report([chief.chief_cases(counts, rate, seconds)], blocks, as_json)


def parse_rates(text: str) -> list[int]:
    """Mbit/s of each rate of a list like "100mbit,1gbit"; for an option's callback.

    Raises:
        click.BadParameter: a rate is none.
    """
    rates = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)\s*(mbit|gbit)\s*", part, re.IGNORECASE)
        if match is None:
            raise click.BadParameter(f"expected rates like 100mbit,1gbit, got {part!r}")
        rates.append(int(match[1]) * (1000 if match[2].lower() == "gbit" else 1))
    return rates


COMMANDS = (
    allreduce_command,
    collectives_command,
    train_command,
    links_command,
    ps_command,
    step_command,
    fit_command,
    pull_command,
    apply_command,
    rows_command,
    meter_command,
    chief_command,
    start_command,
    memory_command,
)
