"""`stratagem jobs`: what has been submitted from here, wherever it runs."""

from __future__ import annotations

import dataclasses
import json

import click

from stratagem.cli.options import pairs_of, print_table
from stratagem.launch.submit import submission
from stratagem.launch.submit.record import JobRecord, JobState, JobStore

_COLUMNS = ("id", "target", "state", "exit", "strategy", "script", "labels", "submitted")


@click.group("jobs")
def jobs_command() -> None:
    """Jobs submitted by `stratagem submit` and sg.run(): list them, read their logs, end them.

    Their records lie in $XDG_STATE_HOME/stratagem/jobs; whether a job runs is asked of its target each time.
    """


@jobs_command.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option(
    "--label", "labels", multiple=True, metavar="KEY=VALUE", help="Only jobs with this label; may be repeated."
)
def list_command(as_json: bool, labels: tuple[str, ...]) -> None:
    """Every job, the oldest first: where it runs, how it stands, its exit code."""
    store = JobStore()
    wanted = pairs_of("--label KEY=VALUE", labels).items()
    records = [one for one in store.all() if wanted <= one.labels.items()]
    found = [(record, submission.state_or_reason(record, store)) for record in records]
    if as_json:
        for record, state in found:
            click.echo(json.dumps({**dataclasses.asdict(record), "state": dataclasses.asdict(state)}))
        return
    print_table(_COLUMNS, [_row(record, state) for record, state in found])


def _row(record: JobRecord, state: JobState) -> tuple[str, ...]:
    words = state.phase + (f" ({state.detail})" if state.detail else "")
    code = "" if state.exit_code is None else str(state.exit_code)
    marks = ",".join(f"{key}={value}" for key, value in record.labels.items())
    script = " ".join(word if word.isprintable() else repr(word) for word in (record.entry_point, *record.args))
    return record.id, record.target, words, code, record.strategy, script, marks, record.created_at[:19]


@jobs_command.command("logs")
@click.argument("job_id", metavar="ID")
@click.option("--follow", is_flag=True, help="Follow the log until the job ends, then exit with its exit code.")
def logs_command(job_id: str, follow: bool) -> int:
    """What a job has written."""
    store = JobStore()
    record = store.load(job_id)
    if not follow:
        for line in submission.logs_of(record, store, follow=False):
            click.echo(line)
        return 0
    state = submission.follow(record, store, click.echo)
    click.echo(f"stratagem: job {job_id} {_words(state)}", err=True)
    return state.exit_code if state.exit_code is not None else 1


@jobs_command.command("cancel")
@click.argument("job_id", metavar="ID")
def cancel_command(job_id: str) -> int:
    """Tell a job to save and end. Its logs and checkpoints stay; `jobs remove` deletes them."""
    state = submission.cancel(job_id, JobStore())
    click.echo(f"stratagem: job {job_id} {_words(state)}", err=True)
    return int(state.phase == "unknown")


@jobs_command.command("remove")
@click.argument("job_id", metavar="ID")
def remove_command(job_id: str) -> None:
    """Forget a job that is over: its record, logs, containers, volume and local image."""
    submission.remove(job_id, JobStore())


def _words(state: JobState) -> str:
    code = "" if state.exit_code is None else f", exit code {state.exit_code}"
    return f"{state.phase}{code}" + (f" ({state.detail})" if state.detail else "")
