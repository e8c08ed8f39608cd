"""`stratagem scale`: another number of workers or parameter servers while training runs."""

from __future__ import annotations

import json
import time

import click

from stratagem.cli.asking import Asking, asking_options
from stratagem.cli.options import Number
from stratagem.errors import ClusterTimeoutError, ConfigurationError, PeerUnavailableError
from stratagem.launch.status import ask_to_scale, fetch_status
from stratagem.rpc.status_view import StatusView

POLL_S = 0.2
AWAY_S = 15.0
"""Seconds for a chief that is started again; one that is away for longer has probably ended with its job."""


def lacking(status: StatusView, num_workers: int, num_ps: int) -> str:
    """What the job has not yet of what it is to have; empty: nothing. 0: any number is right."""
    live = {task.task for task in status.workers if task.state == "live"}
    late = [f"worker:{index}" for index in range(num_workers) if f"worker:{index}" not in live]
    over = [task for task in sorted(live) if num_workers and int(task.partition(":")[2]) >= num_workers]
    parts = [f"waiting for {', '.join(late)} to join"] if late else []
    parts += [f"waiting for {', '.join(over)} to end"] if over else []
    if num_ps and status.num_ps != num_ps:
        parts.append(status.scaling or f"going from {status.num_ps} to {num_ps} ps")
    wanted = {*late, *(f"ps:{index}" for index in range(num_ps))}
    told = {task.task: task for task in status.tasks if task.task in wanted and task.incarnation}
    ended = [name for name, task in told.items() if task.state == "done" and name.startswith("ps:")]
    # A worker without an address is awaited by a new chief: it runs.
    ended += [name for name, task in told.items() if task.state == "waiting" and task.address]
    if ended:
        way_out = "start it again (Kubernetes: delete its Job, apply it)"
        parts.append(f"{', '.join(ended)} ended while not wanted: {way_out}")
    return "; ".join(parts)


def asked_since(status: StatusView, num_workers: int, num_ps: int) -> str:
    """Which other number the job is to have by a later request; empty: none. 0: it is not about them."""
    asked = ((status.wanted_workers, num_workers, "workers"), (status.wanted_ps, num_ps, "ps"))
    parts = [f"{wanted} {what}" for wanted, number, what in asked if number and wanted not in (0, number)]
    return f"someone has requested {' and '.join(parts)}" if parts else ""


@click.command("scale")
@asking_options
@click.option("--workers", "num_workers", type=click.IntRange(1, 4096), help="Target number of workers.")
@click.option("--ps", "num_ps", type=click.IntRange(1, 1024), help="Target number of parameter servers.")
@click.option(
    "--wait-s",
    type=Number(0),
    default=60.0,
    show_default=True,
    help="Seconds to wait until that number is reached; 0: only request it.",
)
def scale_command(asking: Asking, num_workers: int | None, num_ps: int | None, wait_s: float) -> None:
    """Give a running job another number of workers or parameter servers, without a restart of anything.

    `stratagem run` starts what is lacking; elsewhere somebody does (`stratagem worker`, `stratagem ps`). Workers with
    the highest indices end after the batch they work on, parameter servers when others have what they held.
    """
    workers, ps = num_workers or 0, num_ps or 0
    if not workers and not ps:
        raise ConfigurationError("how many tasks are wanted? Give --workers N, or --ps N, or both")
    address, security = asking.address, asking.security
    deadline = time.monotonic() + wait_s
    status, left, later, heard_at = StatusView(), "the chief to answer", "", time.monotonic()
    is_told = False
    while True:
        try:
            if not is_told:
                ask_to_scale(address, workers, ps, asking.timeout_s, security)
                is_told, heard_at = True, time.monotonic()
            status = fetch_status(address, asking.timeout_s, security)
        except PeerUnavailableError as error:  # what was asked for is in its journal
            if not is_told and time.monotonic() >= min(deadline, heard_at + AWAY_S):
                raise
            if is_told and wait_s and not status.stop_reason and time.monotonic() >= heard_at + AWAY_S:
                words = "asked for, but the job has ended since, or its chief is away (the next one goes on with it)"
                raise PeerUnavailableError(f"{words}: {error}") from None
        else:
            heard_at, left, later = time.monotonic(), lacking(status, workers, ps), asked_since(status, workers, ps)
        if is_told and (not left or later or status.stop_reason or time.monotonic() >= deadline):
            break
        time.sleep(POLL_S)
    if left and wait_s and not status.stop_reason:
        why = f"{later} since" if later else f"not complete after {wait_s:.0f} s: {left}"
        raise ClusterTimeoutError(f"requested, but {why}")
    live = sum(task.state == "live" for task in status.workers)
    if asking.as_json:
        click.echo(json.dumps({"workers": live, "ps": status.num_ps, "lacking": left, "ended": status.stop_reason}))
    else:
        ended = f"; the job has ended: {status.stop_reason}" if status.stop_reason else ""
        click.echo(f"{live} workers, {status.num_ps} ps" + (f"; {left}" if left else "") + ended)
