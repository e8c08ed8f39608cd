"""The command ``stratagem``: parse, do, exit code."""

from __future__ import annotations

import sys
import textwrap
from importlib import metadata

import click

from stratagem.cli.certs import certs_group
from stratagem.cli.checkpoint import checkpoint_group
from stratagem.cli.config import config_group
from stratagem.cli.roles import chief_command, evaluator_command, ps_command, worker_command
from stratagem.cli.run import run_command
from stratagem.cli.status import status_command
from stratagem.errors import ConfigurationError, JobStoppedError, StratagemError

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def stratagem() -> None:
    """tf.distribute for PyTorch: train one script on chief, worker and parameter-server processes.

    Exit codes: 0 done; 1 the training script failed; 2 usage or configuration; 42 do not retry;
    143 preempted, checkpoint saved, restart me.
    """


@stratagem.command("version")
def version_command() -> None:
    """Print the version."""
    click.echo(metadata.version("stratagem"))


for _command in (
    run_command,
    chief_command,
    ps_command,
    worker_command,
    evaluator_command,
    status_command,
    config_group,
    checkpoint_group,
    certs_group,
):
    stratagem.add_command(_command)


def exit_code_of(error: StratagemError) -> int:
    """The exit code that DESIGN.md gives an error."""
    if isinstance(error, JobStoppedError):
        return error.exit_code
    return EXIT_USAGE if isinstance(error, ConfigurationError) else EXIT_FAILED


def main() -> None:
    """Entry point. Errors raised on purpose become one paragraph on stderr and an exit code."""
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
    sys.exit(code if isinstance(code, int) else EXIT_DONE)


if __name__ == "__main__":
    main()
