"""``python -m benchmarks NAME [--peer tf] [--json]``: a table for people, JSON lines for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

import click

from benchmarks import apply, machine, pull
from benchmarks.peers import TF_PYTHON_VARIABLE, PeerMissingError, find_tensorflow
from benchmarks.runner import Case, Row, Sample, run_cases
from benchmarks.table import format_number, format_table
from benchmarks.training.cases import ps_cases
from benchmarks.training.workloads import WORKLOADS

DEFAULT_BLOCKS = 5

BENCHMARKS: dict[str, Callable[[Sequence[str], str | None], list[list[Case]]]] = {
    "ps": lambda workloads, tf_python: [ps_cases(WORKLOADS[name], tf_python) for name in workloads],
    "pull": lambda workloads, tf_python: [pull.pull_cases(WORKLOADS[name]) for name in workloads],
    "apply": lambda workloads, tf_python: [apply.apply_cases()],
}
"""For each name the groups of cases that take turns with each other."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", type=click.Choice(list(BENCHMARKS)))
@click.option("--peer", type=click.Choice(["auto", "tf", "none"]), default="auto", help="auto: whatever is installed.")
@click.option("--tf-python", help=f"Interpreter that has TensorFlow; also from {TF_PYTHON_VARIABLE}.")
@click.option("--workload", "workloads", type=click.Choice(list(WORKLOADS)), multiple=True, help="Default: all.")
@click.option("--blocks", type=click.IntRange(min=1), default=DEFAULT_BLOCKS, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="JSON lines on stdout; the table goes to stderr.")
def main(name: str, peer: str, tf_python: str | None, workloads: tuple[str, ...], blocks: int, as_json: bool) -> None:
    """Measure NAME: systems take turns A B B A, each at least BLOCKS times; every sample is checked."""
    try:
        python = (
            find_tensorflow(tf_python, os.environ, required=peer == "tf") if name == "ps" and peer != "none" else None
        )
    except PeerMissingError as error:
        raise click.UsageError(str(error)) from None
    click.echo(json.dumps(machine.describe_machine()), err=True)
    rows: list[Row] = []
    for cases in BENCHMARKS[name](workloads or tuple(WORKLOADS), python):
        group = run_cases(cases, blocks, _tell)
        rows += group
        if as_json:
            for row in group:
                click.echo(json.dumps(row.as_json()))
            sys.stdout.flush()
    click.echo(format_table(rows), err=as_json)


def _tell(case: Case, sample: Sample) -> None:
    """One line a sample on stderr, so that a long run shows that it lives."""
    identity = " ".join(str(value) for value in case.identity.values() if value is not None)
    values = "  ".join(f"{name} {format_number(value)}" for name, value in sample.items() if value is not None)
    click.echo(f"{identity}: {values}", err=True)


if __name__ == "__main__":
    main()
