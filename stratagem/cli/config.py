"""`stratagem config show`: each value and where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from stratagem.cli.options import configure, print_rows, role_options
from stratagem.cluster.sources import CONFIGS


@click.group("config")
def config_command() -> None:
    """Look at configurations."""


@config_command.group("show")
def show_group() -> None:
    """Print each value of a role's configuration and where it came from."""


def _add_role(role: str) -> None:
    @show_group.command(role, help=f"Print the configuration of the {role} that the same options would start.")
    @role_options(role)
    def show(cluster_file: Path | None, **flags: Any) -> None:
        resolved, _ = configure(role, cluster_file, flags)
        values = resolved.config.model_dump().items()
        print_rows([(name, str(value) or "(empty)", resolved.origins[name]) for name, value in values])


for _role in CONFIGS:
    _add_role(_role)
