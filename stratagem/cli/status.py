"""`stratagem status`: every task of a running job."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from stratagem.cli.options import cluster_option, read_cluster_file
from stratagem.cluster.spec import ClusterSpec, split_address
from stratagem.cluster.tf_config import placement_from_environment
from stratagem.errors import ClusterSpecError, PeerUnavailableError, SecurityError
from stratagem.launch.status import StatusView, TaskState, fetch_stack, fetch_status
from stratagem.rpc.security import Security, operator_security

COLUMNS = (
    *("task", "state", "incarnation", "step", "version", "epoch"),
    *("loss", "exposed", "units", "waiting on", "address"),
)


def chief_address(chief: str | None, cluster_file: Path | None) -> str:
    """The chief's address from the flag, the environment or the cluster file.

    Raises:
        ClusterSpecError: nobody names it.
    """
    if chief:
        split_address(chief)
        return chief
    if (placement := placement_from_environment(os.environ)) is not None:
        return placement.cluster.chief_address
    if "STRATAGEM_CHIEF" in os.environ:
        return os.environ["STRATAGEM_CHIEF"]
    document = read_cluster_file(cluster_file)
    if document.get("cluster"):
        return ClusterSpec.from_mapping(document["cluster"]).chief_address
    raise ClusterSpecError("which job? Name its chief: --chief host:port, --cluster FILE or TF_CONFIG")


def row(task: TaskState) -> tuple[str, ...]:
    """One line of the table, in the order of :data:`COLUMNS`."""
    is_ps, is_worker = task.task.startswith("ps:"), task.task.startswith("worker:")
    return (
        task.task,
        task.state,
        str(task.incarnation or "-"),
        str(task.step),
        f"{task.store_epoch}.{task.step}" if is_ps else "-",
        str(task.epoch) if is_worker else "-",
        "-" if task.loss is None else f"{task.loss:.4f}",
        f"{task.exposed_s / task.step_s:.0%}" if task.step_s > 0 else "-",
        str(task.units_held) if is_worker else "-",
        f"{task.waiting_on} ({task.waiting_s:.1f} s)" if task.waiting_on else "-",
        task.address or "-",
    )


def summary_line(status: StatusView) -> str:
    """The job in one line."""
    if status.stop_reason:
        state = f"ending: {status.stop_reason}"
    elif status.ready:
        state = "running"
    else:
        state = f"waiting for {', '.join(status.waiting_for) or 'the cluster'}"
    parts = [state, f"lead {status.lead or '-'}", f"epoch {status.epoch}"]
    parts.append(f"units {status.units_accepted}/{status.units_planned}")
    parts.append(f"examples {status.examples}")
    parts.append(f"checkpoint {status.checkpoint or '-'}")
    if status.updates_lost:
        parts.append(f"updates lost {status.updates_lost}")
    return " | ".join(parts)


def _print_table(status: StatusView) -> None:
    rows = [row(task) for task in status.tasks]
    click.echo(summary_line(status))
    if sys.stdout.isatty():
        table = Table(*COLUMNS, box=None, header_style="bold")
        for cells in rows:
            table.add_row(*cells)
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    for cells in [COLUMNS, *rows]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def _stacks(status: StatusView, timeout_s: float, security: Security) -> dict[str, list[str]]:
    found = {}
    for task in status.workers:
        if task.state == "live" and task.address:
            try:
                found[task.task] = list(fetch_stack(task.address, task.task, timeout_s, security))
            except (PeerUnavailableError, SecurityError) as error:
                found[task.task] = [str(error)]
    return found


@click.command("status")
@click.option("--chief", help="host:port of the chief.")
@cluster_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--stacks", is_flag=True, help="Print where each worker's threads stand.")
@click.option("--timeout-s", default=5.0, show_default=True, help="Seconds to wait for an answer.")
@click.option("--tls", default="", envvar="STRATAGEM_TLS", help="Folder with ca.crt and the operator's certificate.")
@click.option("--token-file", default="", envvar="STRATAGEM_TOKEN_FILE", help="File with the token of the job.")
@click.option(
    "--insecure", is_flag=True, envvar="STRATAGEM_INSECURE", help="Send the token beyond this machine in the clear."
)
def status_command(
    chief: str | None,
    cluster_file: Path | None,
    as_json: bool,
    stacks: bool,
    timeout_s: float,
    tls: str,
    token_file: str,
    insecure: bool,
) -> None:
    """Show every task of a running job: incarnation, step, version, and whom it waits for."""
    defaults = read_cluster_file(cluster_file).get("defaults") or {}
    security = operator_security(
        tls or defaults.get("tls", ""),
        token_file or defaults.get("token_file", ""),
        insecure or bool(defaults.get("insecure")),
    )
    status = fetch_status(chief_address(chief, cluster_file), timeout_s, security)
    found = _stacks(status, timeout_s, security) if stacks else {}
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(status) | ({"stacks": found} if stacks else {}), indent=2))
        return
    _print_table(status)
    for task, threads in found.items():
        click.echo(f"\n{task}")
        for thread in threads:
            click.echo(thread)
