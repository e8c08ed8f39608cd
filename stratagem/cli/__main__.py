"""The command ``stratagem``: parse, do, exit code."""

from __future__ import annotations

import sys

try:
    import contextlib
    import errno
    import importlib
    import io
    import os
    import signal
    import textwrap
    import threading
    from importlib import metadata

    import click

    from stratagem.cli.first_process import stand_by_if_first
    from stratagem.cluster.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_USAGE
    from stratagem.errors import ConfigurationError, JobStoppedError, StratagemError
    from stratagem.launch.streams import lead_nowhere
except KeyboardInterrupt:  # in the first moment
    sys.exit(130)

_ROLES = ("chief", "evaluator", "ps", "worker")
_COMMANDS = (
    *_ROLES,
    *("certs", "checkpoint", "config", "health", "jobs", "render", "run", "scale", "status", "submit", "trace", "why"),
)
"""Each is ``<name>_command`` in the module of its name, a role's in ``roles``, which is loaded when it is asked for:
`stratagem health` runs every few seconds."""


class _Commands(click.Group):
    """A group whose commands are loaded late."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(f"stratagem.cli.{'roles' if cmd_name in _ROLES else cmd_name}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stratagem", message="%(version)s")
@click.pass_context
def stratagem(context: click.Context) -> None:
    """tf.distribute for PyTorch: train one script on chief, worker and parameter-server processes.

    Exit codes: 0 done; 1 the training script failed; 2 usage or configuration; 42 do not retry;
    130 interrupted; 131 killed by Ctrl-\\; 143 preempted, checkpoint saved, restart me.
    """
    if context.invoked_subcommand not in _ROLES and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: we show what others wrote


@stratagem.command("version")
def version_command() -> None:
    """Print the version."""
    click.echo(metadata.version("stratagem"))


def exit_code_of(error: StratagemError) -> int:
    """The exit code of an error (docs/semantics.md, "Exit codes")."""
    if isinstance(error, JobStoppedError):
        return error.exit_code
    return EXIT_USAGE if isinstance(error, ConfigurationError) else EXIT_FAILED


def _open_standard_streams() -> None:
    """Those that are closed lead nowhere: else a connection takes the number, and what libraries print goes into it."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))


def main() -> None:
    """Entry point. Errors raised on purpose become one paragraph on stderr and an exit code."""
    _open_standard_streams()
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
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        where = "install it, or take an image that deploy/Dockerfile has built"
        click.echo(f"stratagem: there is no torch for {sys.executable}: {where}", err=True)
        sys.exit(EXIT_USAGE)
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        lead_nowhere(sys.stdout)  # Python writes what is left of it once more as it ends
        path = error.filename or "the output"  # the former has been named by the user
        with contextlib.suppress(OSError):
            click.echo(f"stratagem: {path}: {error.strerror}", err=True)
        sys.exit(EXIT_FAILED)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # whatever still runs, a traceback of it says nothing
    sys.exit(code if isinstance(code, int) else EXIT_DONE)


if __name__ == "__main__":
    main()
