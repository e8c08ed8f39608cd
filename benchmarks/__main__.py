"""``python -m benchmarks NAME [OPTIONS]``: a table for people, JSON lines for programs."""

from __future__ import annotations

import click

from benchmarks.commands import COMMANDS


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, commands=list(COMMANDS))
def main() -> None:
    """Measure one thing: systems take turns A B B A, each at least --blocks times; every sample is checked."""


if __name__ == "__main__":
    main()
