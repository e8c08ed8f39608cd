"""`stratagem why`: what makes a job slow, in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import click

from stratagem.chief.monitoring.why.reading import Reading, reading_of
from stratagem.chief.monitoring.why.verdict import judge
from stratagem.cli.asking import Asking, asking_options
from stratagem.cli.options import FILE
from stratagem.errors import ConfigurationError, PeerUnavailableError
from stratagem.launch.status import fetch_status
from stratagem.launch.summary import reading_of_summary


@click.command("why")
@asking_options
@click.option(
    "--summary",
    type=FILE,
    help="Judge a finished run from its summary (stratagem run --summary FILE) instead of asking a chief.",
)
def why_command(asking: Asking, summary: Path | None) -> None:
    """Say what makes a job slow: one sentence, the evidence, what to do, how sure.

    About a running job it looks at the last 15 seconds, also while nothing moves; with --summary at the whole run.
    """
    if summary is not None:
        if asking.chief is not None or asking.cluster_file is not None:
            raise ConfigurationError("expected --summary, or a chief to ask (--chief, --cluster), got both")
        reading = reading_of_summary(summary)
    else:
        try:
            reading = reading_of(fetch_status(asking.address, asking.timeout_s, asking.security))
        except PeerUnavailableError as error:
            reading = Reading(
                problem=f"the chief does not answer; tasks that wait for it longer than peer_timeout_s end: {error}"
            )
    verdict = judge(reading)
    click.echo(json.dumps(verdict.as_json(), indent=2) if asking.as_json else verdict.text())
