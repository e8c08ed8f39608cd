"""`stratagem trace`: a timeline of a running job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from stratagem.cli.asking import Asking, asking_options
from stratagem.cli.options import FILE
from stratagem.errors import ConfigurationError
from stratagem.launch.trace import events, record
from stratagem.measuring import measures


@click.command("trace")
@asking_options
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Steps of every worker.")
@click.option("--torch", "with_torch", is_flag=True, help="With the workers' operators, by torch.profiler.")
@click.option(
    "-o",
    "--output",
    type=FILE,
    default=Path("trace.json"),
    show_default=True,
    help="File for ui.perfetto.dev or chrome://tracing.",
)
def trace_command(asking: Asking, steps: int, with_torch: bool, output: Path) -> None:
    """Write what every worker and ps of a running job does for some steps, on one clock.

    After --timeout-s seconds (for a slow job: more than the default) what has come is written.
    """
    if not output.parent.is_dir():  # said before anything is traced
        raise ConfigurationError(f"cannot write {output}: there is no folder {output.parent}")
    traces = record(asking.address, steps, asking.timeout_s, asking.security, with_torch)
    try:
        output.write_text(json.dumps(events(traces)))
    except OSError as error:
        raise ConfigurationError(f"cannot write {output}: {error.strerror}") from None
    found: dict[str, dict[str, Any]] = {
        trace.task: {
            **({"steps": round(trace.spent.get(measures.STEPS, 0.0))} if trace.task.startswith("worker:") else {}),
            "spans": len(trace.spans),
            "clock_error_us": trace.error_ns / 1e3,
            "num_dropped": trace.num_dropped,
        }
        for trace in traces
    }
    if asking.as_json:
        click.echo(json.dumps({"output": str(output), "tasks": found}, indent=2))
        return
    for task, one in found.items():
        dropped = f", {one['num_dropped']} more dropped" if one["num_dropped"] else ""
        of = f" of {one['steps']} steps" if "steps" in one else ""
        click.echo(f"{task}: {one['spans']} spans{of}{dropped}; clock accurate to {one['clock_error_us']:.0f} us")
    if (fewest := min((one["steps"] for one in found.values() if "steps" in one), default=steps)) < steps:
        click.echo(f"a worker made {fewest} of {steps} steps in --timeout-s {asking.timeout_s:g}", err=True)
    click.echo(f"{output}: open it at https://ui.perfetto.dev")
