"""The command ``stratagem``: parse, do, exit code."""

from __future__ import annotations

import importlib
import signal
import sys
import textwrap
import threading
from collections.abc import Mapping
from importlib import metadata

import click

from stratagem.cli.first_process import stand_by_if_first
from stratagem.errors import ConfigurationError, JobStoppedError, StratagemError

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

_HOMES: Mapping[str, str] = {
    "certs": "stratagem.cli.certs:certs_group",
    "checkpoint": "stratagem.cli.checkpoint:checkpoint_group",
    "chief": "stratagem.cli.roles:chief_command",
    "config": "stratagem.cli.config:config_group",
    "evaluator": "stratagem.cli.roles:evaluator_command",
    "health": "stratagem.cli.health:health_command",
    "jobs": "stratagem.cli.jobs:jobs_group",
    "ps": "stratagem.cli.roles:ps_command",
    "render": "stratagem.cli.render:render_command",
    "run": "stratagem.cli.run:run_command",
    "scale": "stratagem.cli.scale:scale_command",
    "status": "stratagem.cli.status:status_command",
    "submit": "stratagem.cli.submit:submit_command",
    "trace": "stratagem.cli.trace:trace_command",
    "why": "stratagem.cli.why:why_command",
    "worker": "stratagem.cli.roles:worker_command",
}
"""Where each command lives. It is loaded when it is asked for: `stratagem health` runs every few seconds."""


class _Commands(click.Group):
    """A group whose commands are loaded late."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_HOMES})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _HOMES:
            return super().get_command(ctx, cmd_name)
        module, _, name = _HOMES[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def stratagem() -> None:
    """tf.distribute for PyTorch: train one script on chief, worker and parameter-server processes.

    Exit codes: 0 done; 1 the training script failed; 2 usage or configuration; 42 do not retry;
    143 preempted, checkpoint saved, restart me.
    """


@stratagem.command("version")
def version_command() -> None:
    """Print the version."""
    click.echo(metadata.version("stratagem"))


def exit_code_of(error: StratagemError) -> int:
    """The exit code of an error (docs/semantics.md, "Exit codes")."""
    if isinstance(error, JobStoppedError):
        return error.exit_code
    return EXIT_USAGE if isinstance(error, ConfigurationError) else EXIT_FAILED


def main() -> None:
    """Entry point. Errors raised on purpose become one paragraph on stderr and an exit code."""
    stand_by_if_first()
    try:
        code = stratagem.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USAGE)
    except click.Abort:
        sys.exit(130)
    except StratagemError as error:
        width = 100 if sys.stderr.isatty() else 10_000
        click.echo(textwrap.fill(f"stratagem: {error}", width, break_long_words=False), err=True)
        sys.exit(exit_code_of(error))
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # whatever still runs, a traceback of it says nothing
    sys.exit(code if isinstance(code, int) else EXIT_DONE)


if __name__ == "__main__":
    main()
