"""`stratagem status`: every task of a running job."""

from __future__ import annotations

import click

from stratagem.cli.asking import Asking, asking_options
from stratagem.cli.options import print_table
from stratagem.errors import StratagemError
from stratagem.launch.status import fetch_stack, fetch_status
from stratagem.rpc.plain_json import to_json
from stratagem.rpc.security import Security
from stratagem.rpc.status_view import StatusView, TaskState

COLUMNS = (
    *("task", "state", "incarnation", "step", "version", "epoch"),
    *("loss", "exposed", "units", "waiting on", "backup", "address"),
)


def row(task: TaskState) -> tuple[str, ...]:
    """One line of the table, in the order of :data:`COLUMNS`."""
    is_ps, is_worker = task.task.startswith("ps:"), task.task.startswith("worker:")
    return (
        task.task,
        task.state_words,
        str(task.incarnation or "-"),
        str(task.step),
        f"{task.store_epoch}.{task.step}" if is_ps else "-",
        str(task.epoch) if is_worker else "-",
        "-" if task.loss is None else f"{task.loss:.4f}",
        f"{task.exposed_s / task.step_s:.0%}" if task.step_s > 0 else "-",
        str(task.units_held) if is_worker else "-",
        f"{task.waiting_on} ({task.waiting_s:.1f} s)" if task.waiting_on else "-",
        task.backup or "-",
        task.address or "-",
    )


def summary_line(status: StatusView) -> str:
    if status.stop_reason:
        state = f"ending: {status.stop_reason}"
    elif status.ready:
        state = "running"
    else:
        state = f"waiting for {', '.join(status.waiting_for) or 'the cluster'}"
    parts = [state, f"lead {status.lead or '-'}", f"epoch {status.epoch}"]
    parts += status.units_words
    parts.append(f"examples {status.examples}")
    parts.append(f"checkpoint {status.checkpoint or '-'}")
    if status.standby:
        parts.append(f"standby chief: {status.standby}")
    if status.updates_lost:
        parts.append(f"updates lost {status.updates_lost}")
    return " | ".join(parts)


def _stacks(status: StatusView, timeout_s: float, security: Security) -> dict[str, list[str]]:
    found = {}
    for task in status.tasks:
        if task.task.startswith(("worker:", "ps:")) and task.state == "live" and task.address:
            try:
                found[task.task] = list(fetch_stack(task.address, task.task, timeout_s, security))
            except StratagemError as error:
                found[task.task] = [str(error)]
    return found


@click.command("status")
@asking_options
@click.option("--stacks", is_flag=True, help="Print the threads' stacks of workers and ps, and what they did last.")
def status_command(asking: Asking, stacks: bool) -> None:
    """Show every task of a running job: incarnation, step, version, and whom it waits for."""
    security = asking.security
    status = fetch_status(asking.address, asking.timeout_s, security)
    found = _stacks(status, asking.timeout_s, security) if stacks else {}
    if asking.as_json:
        click.echo(to_json(vars(status) | ({"stacks": found} if stacks else {}), indent=2))
        return
    click.echo(summary_line(status))
    print_table(COLUMNS, [row(task) for task in status.tasks])
    for task, threads in found.items():
        click.echo(f"\n{task}")
        for thread in threads:
            click.echo(thread)
