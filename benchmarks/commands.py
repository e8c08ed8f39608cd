"""The benchmarks by name: each command turns its options into cases and reports them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

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
    DEFAULT_BLOCKS,
    device_option,
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
from benchmarks.runner import Case
from benchmarks.training.cases import LANES as TRAIN_LANES
from benchmarks.training.cases import fit_cases, ps_cases, step_cases, train_cases
from benchmarks.training.workloads import (
    ALL_REDUCED,
    CHANNELS_LAST,
    CLASSIFIERS,
    EMPTY,
    ON_SERVERS,
    TOWERS,
    WORKLOADS,
    workload_on,
)
from stratagem.cli.options import Number

LINK_SIZES = "4MB,16MB"
Groups = list[list[Case]]
"""Cases that take turns with each other, one group after the other."""
Function = TypeVar("Function", bound=Callable[..., Groups])


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure one thing: systems take turns A B B A, each at least --blocks times; every sample is checked."""


def benchmark(name: str) -> Callable[[Function], Function]:
    """A command that measures the cases which the function makes of its options."""

    def decorate(groups_of: Function) -> Function:
        @main.command(name)
        @functools.wraps(groups_of)
        def command(blocks: int, as_json: bool, **options: Any) -> None:
            report(groups_of(**options), blocks, as_json)

        command.params += [
            click.Option(["--blocks"], type=click.IntRange(min=1), default=DEFAULT_BLOCKS, show_default=True),
            click.Option(["--json", "as_json"], is_flag=True, help="JSON lines on stdout; the table goes to stderr."),
        ]
        return groups_of

    return decorate


@benchmark("allreduce")
@lane_option(ALL_LANES, ALL_LANES)
@sizes_option(DEFAULT_SIZES)
@workers_option
@click.option(
    "--wire", type=click.Choice(WIRES), default="float32", show_default=True, help="Of our tcp and grpc lanes."
)
@click.option("--tls", is_flag=True, help="Measure our tcp lane under TLS 1.3 too.")
@peer_option("gloo", "tf")
@tf_python_option
def allreduce_command(
    lanes: tuple[str, ...],
    sizes: list[int],
    num_workers: int,
    wire: str,
    tls: bool,
    peers: tuple[str, ...],
    tf_python: str | None,
) -> Groups:
    """All-reduce on this machine, a lane each, beside gloo and TensorFlow's RING."""
    python = python_of(TENSORFLOW, peers, tf_python)
    gloo = takes_part("gloo", peers)
    return [allreduce_cases(num_workers, sizes, lanes, wire, tls=tls, gloo=gloo, tf_python=python)]


@benchmark("collectives")
@lane_option(ALL_LANES, ("shm", "tcp"))
@sizes_option("4KB,64KB,1MB,16MB,64MB")
@workers_option
@device_option
@peer_option("gloo", "mpi")
@mpi_python_option
def collectives_command(
    lanes: tuple[str, ...],
    sizes: list[int],
    num_workers: int,
    device: str,
    peers: tuple[str, ...],
    mpi_python: str | None,
) -> Groups:
    """Collectives of torch.distributed with our backend, beside gloo and Open MPI."""
    python, gloo = python_of(MPI, peers, mpi_python), takes_part("gloo", peers)
    return [collectives_cases(num_workers, sizes, lanes, gloo=gloo, mpi_python=python, device=device)]


@benchmark("train")
@workload_option((*ALL_REDUCED, EMPTY.name), ALL_REDUCED)
@lane_option(ALL_LANES, TRAIN_LANES)
@workers_option
@device_option
@peer_option("ddp", "tf")
@tf_python_option
def train_command(
    workloads: tuple[str, ...],
    lanes: tuple[str, ...],
    num_workers: int,
    device: str,
    peers: tuple[str, ...],
    tf_python: str | None,
) -> Groups:
    """Synchronous training with an all-reduce, beside DistributedDataParallel and TensorFlow's RING."""
    python = python_of(TENSORFLOW, peers, tf_python)
    ddp = takes_part("ddp", peers)
    try:
        return [
            train_cases(workload_on(name, device), num_workers, lanes, ddp=ddp, tf_python=python) for name in workloads
        ]
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@benchmark("links")
@click.option("--rates", default="100mbit,1gbit", show_default=True, callback=lambda *given: parse_rates(given[2]))
@lane_option(LINK_LANES, LINK_LANES)
@click.option("--wire", "wires", type=click.Choice(WIRES), multiple=True, default=list(WIRES), show_default=True)
@sizes_option(LINK_SIZES)
@workers_option
@peer_option("gloo")
def links_command(
    rates: list[int],
    lanes: tuple[str, ...],
    wires: tuple[str, ...],
    sizes: list[int],
    num_workers: int,
    peers: tuple[str, ...],
) -> Groups:
    """All-reduce between network namespaces whose links have these rates; needs root, ip and tc."""
    if missing := why_unavailable():
        raise click.ClickException(missing)
    gloo = takes_part("gloo", peers)
    return [link_cases(rate, num_workers, sizes, lanes, wires, gloo=gloo) for rate in rates]


@benchmark("ps")
@workload_option((*ON_SERVERS, CHANNELS_LAST.name), CLASSIFIERS)
@lane_option(ALL_LANES, ALL_LANES)
@device_option
@peer_option("tf")
@tf_python_option
@click.option("--tls", is_flag=True, help="Measure each of our lanes under TLS 1.3 too.")
@click.option(
    "--rtt-ms",
    type=click.FloatRange(0.0),
    default=0.0,
    help="Workers on another host than the others, at this round trip (needs root and ip); no shm, no --tls.",
)
def ps_command(
    workloads: tuple[str, ...],
    lanes: tuple[str, ...],
    device: str,
    peers: tuple[str, ...],
    tf_python: str | None,
    tls: bool,
    rtt_ms: float,
) -> Groups:
    """Training with parameter servers, beside TensorFlow's."""
    python = python_of(TENSORFLOW, peers, tf_python)
    if rtt_ms:
        if missing := why_unavailable():
            raise click.ClickException(missing)
        if tls or device != "cpu":
            raise click.UsageError("--rtt-ms is for workers on the CPU, without --tls")
        lanes = tuple(lane for lane in lanes if lane != "shm")
    return [ps_cases(workload_on(name, device), lanes, python, tls=tls, rtt_s=rtt_ms / 1e3) for name in workloads]


@benchmark("step")
@lane_option(ALL_LANES, ALL_LANES)
@device_option
@click.option("--in-step", is_flag=True, help="Measure two workers at staleness 0 too.")
def step_command(lanes: tuple[str, ...], device: str, in_step: bool) -> Groups:
    """What a step on a parameter server costs beside model and bytes, by role."""
    return [step_cases(lanes, workload_on(EMPTY.name, device), in_step=in_step)]


@benchmark("fit")
@workload_option(CLASSIFIERS, ("cnn",))
def fit_command(workloads: tuple[str, ...]) -> Groups:
    """What Model.fit costs over a plain loop, in one process."""
    return [fit_cases(WORKLOADS[name]) for name in workloads]


@benchmark("pull")
@workload_option(CLASSIFIERS)
def pull_command(workloads: tuple[str, ...]) -> Groups:
    """What it costs to ask for weights that have not changed."""
    return [pull.pull_cases(WORKLOADS[name]) for name in workloads]


@benchmark("apply")
def apply_command() -> Groups:
    """One server-side optimizer update, against what the memory can do."""
    return [apply.apply_cases()]


@benchmark("rows")
def rows_command() -> Groups:
    """Server-side updates of the rows of a table."""
    return [apply_rows.apply_rows_cases()]


@benchmark("memory")
@workload_option(TOWERS)
@lane_option(ALL_LANES, ("shm", "tcp"))
@workers_option
def memory_command(
    workloads: tuple[str, ...], lanes: tuple[str, ...], num_workers: int, blocks: int, as_json: bool
) -> Groups:
    """What each process of a large model has, by ring and by one ps, beside DistributedDataParallel."""
    return [memory.memory_cases(WORKLOADS[name], lanes, num_workers) for name in workloads]


@benchmark("start")
def start_command() -> Groups:
    """From the command to the end of a small job, beside torchrun."""
    return [start.start_cases()]


@benchmark("meter")
@click.option(
    "--pairs", type=click.IntRange(min=2), default=200, show_default=True, help="Of blocks of 5 steps, a job."
)
def meter_command(pairs: int) -> Groups:
    """What it costs a step that its phases are counted: blocks of steps with and without, in one worker."""
    return [[case] for case in meter.meter_cases(pairs)]


@benchmark("chief")
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
def chief_command(counts: tuple[int, ...], rate: float, seconds: float) -> Groups:
    """One chief and many workers that lease units and train nothing."""
    return [chief.chief_cases(counts, rate, seconds)]


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
