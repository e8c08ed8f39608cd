"""`stratagem run`: a local cluster from one command."""

from __future__ import annotations

import itertools
import math
import os
import traceback
import warnings
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from stratagem.cli import roles
from stratagem.cli.options import (
    FILE,
    FOLDER,
    field_options,
    script_arguments,
    variable_option,
    warn_of_late_flags,
)
from stratagem.cluster.choice import ONE_PROCESS, STRATEGIES
from stratagem.cluster.config import ChiefConfig, WorkerConfig
from stratagem.cluster.job_rules import check_healing, no_effect
from stratagem.cluster.sources import CONFIGS, ENV_PREFIX, flag_of, gather, seed_of_job
from stratagem.cluster.spec import split_address
from stratagem.errors import ClusterSpecError, ConfigurationError
from stratagem.launch.local import only_writer, run_local
from stratagem.launch.plan import AUTO, LocalJob, RunFolders, check_size, check_threads, current_folder, plan_launch
from stratagem.rpc.binding import check_binding
from stratagem.rpc.security import security_of

COMMUNICATION = (
    "transport",
    "wire_dtype",
    "bucket_bytes",
    "chunk_bytes",
    "stripes",
    "collective_timeout_s",
    "compression",
    "devices",
)
"""Fields of a worker's configuration that `stratagem run` takes as flags too."""


_SAVES = "; the script itself says where it saves (sg.CheckpointManager, sg.callbacks.BackupAndRestore)"
_OF_A_CLUSTER = {"tls": "", "token_file": "", "checkpoint_dir": _SAVES, "checkpoint_roots": _SAVES}
"""Options that only a cluster reads, and what more there is to say of them in one process."""
_OF_PS = {
    "staleness": "inf is asynchronous, and without parameter servers workers train in step",
    "checkpoint_roots": "is for checkpoints that parameter servers write, and this job has none",
}
"""The same of those that only parameter servers read."""
_WEB = "before the script, write --web=127.0.0.1:0"


def _check_script(job: LocalJob) -> None:
    """Ends with 1, as the script would, where it is no Python: before any process is started."""
    if not job.module and job.script.suffix == ".py" and os.access(job.script, os.R_OK):
        try:
            with warnings.catch_warnings(action="ignore"):  # the workers say them
                compile(job.script.read_bytes(), str(job.script), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:  # ValueError: zeros, in Python 3.11
            click.echo("".join(traceback.format_exception_only(error)) + "stratagem: nothing was started", err=True)
            raise SystemExit(1) from None


def _refuse_replicas(_: click.Context, __: click.Parameter, count: str | None) -> None:
    if count is not None:
        raise click.UsageError(
            f"--replicas {count}: say what the replicas are: --workers {count} (a process each, also under ps), or "
            "--strategy mirrored --devices cuda:0,cuda:1 (a device of one process each; cpu:0,cpu:1 to try it out)"
        )


def _check_web(_: click.Context, __: click.Parameter, bind: str) -> str:
    if bind:
        try:
            split_address(bind)
        except ClusterSpecError as error:  # most likely it is the script
            raise click.UsageError(f"--web: {error}; {_WEB}") from None
    return bind


class _RunCommand(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            for option, script in itertools.pairwise(words):
                if option == "--web" and script.endswith(".py"):  # taken for the address: its flags for ours
                    raise click.UsageError(f"{error.format_message()} {script} follows --web: {_WEB}", ctx) from None
            raise


def _check_tasks(job: LocalJob) -> None:
    """Reads what each task will be told, and its certificate, as it does; what is wrong is said before any starts.
    ConfigurationError: a flag or variable that is unknown, or out of range; a certificate that cannot be used; more
    tasks than this host, or this user, bears; no such device."""
    check_size(job.num_workers, job.num_ps, job.num_threads)
    check_threads(job)
    if not job.servers:
        seed_of_job(os.environ)
    for task in (*job.servers, *job.workers):
        launch = plan_launch(job, task, RunFolders(Path()), os.environ, 1, chief_address="127.0.0.1:1")
        role, *arguments = launch.command[launch.command.index(task.type) :]
        command: click.Command = getattr(roles, f"{role}_command")
        told = command.make_context(role, arguments).params
        config = gather(role, launch.environ, {name: told.get(name) for name in CONFIGS[role].model_fields})[0].config
        if job.servers and job.tls != AUTO:
            security_of(config)
        if isinstance(config, WorkerConfig):
            roles.check_devices(config)
            if job.min_workers:
                check_healing(config.devices.count(",") + 1, config.compression, config.transport == "nccl")
        elif isinstance(config, ChiefConfig) and config.web:
            check_binding(config.web, config.insecure, bool(config.tls))


@click.command("run", cls=_RunCommand, context_settings={"allow_interspersed_args": False, "show_default": True})
@click.option("--workers", "num_workers", default=1, help="Workers, each a process that runs the script.")
@click.option("--replicas", hidden=True, expose_value=False, callback=_refuse_replicas)
@variable_option(
    "--min-workers",
    default=0,
    help="Workers that a ring needs to continue until lost ones are back; 0: a lost worker ends it.",
)
@variable_option(
    "--max-workers",
    default=0,
    help="Most workers that the running job admits (`stratagem worker`); 0: as many as --workers.",
)
@click.option("--chiefs", "num_chiefs", default=1, help="2: a second chief stands by and takes over when one dies.")
@click.option("--ps", "num_ps", default=0, help="Parameter servers.")
@variable_option(
    "--ps-replicas", default=1, help="Copies of what each ps holds; with 2 nothing is lost when a ps dies."
)
@variable_option(
    "--strategy",
    type=click.Choice(STRATEGIES),
    default="auto",
    help="auto: ps when there are any, a ring of several workers, mirrored on several GPUs, else one.",
)
@variable_option("--staleness", type=float, default=math.inf, help="Staleness bound: 0 synchronous, inf asynchronous.")
@click.option("--max-restarts", default=3, help="Restarts of failed tasks, in total (a ring: as a whole).")
@click.option(
    "--threads",
    "num_threads",
    envvar=ENV_PREFIX + "NUM_THREADS",
    default=0,
    help="Threads of each process; 0 shares the cores.",
)
@click.option("--log-dir", type=FOLDER, help="Where each task's output is kept as <type>-<index>.log.")
@click.option("--summary", type=FILE, help="Write the result as JSON.")
@click.option("--state-dir", type=FOLDER, help="Where the run's folder is kept (journal, checkpoints, logs).")
@variable_option(
    "--checkpoint-dir", type=FOLDER, help="Where checkpoints are committed; a folder of the run if not given."
)
@variable_option(
    "--checkpoint-roots",
    default=current_folder,
    show_default="the current folder",
    help="Folders, separated by ':', below which SCRIPT may have ps write its own checkpoints.",
)
@variable_option(
    "--checkpoint-every-s", default=0.0, help="Seconds between checkpoints that the chief takes by itself; 0: none."
)
@click.option(
    "--shutdown-timeout", "shutdown_timeout_s", default=25.0, help="Seconds to shut down before processes are killed."
)
@variable_option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", help="Form of the tasks' log lines."
)
@click.option("--evaluator", is_flag=True, help="Start an evaluator too: SCRIPT, evaluating each new checkpoint.")
@variable_option(
    "--tls",
    is_flag=False,
    flag_value=AUTO,
    default="",
    help="Encrypt: folder of certificates (`stratagem certs` makes them), or auto for throw-away ones.",
)
@variable_option(
    "--token-file",
    type=click.Path(dir_okay=False),
    default="",
    help="File with a token by which tasks authenticate each other.",
)
@click.option(
    "--web",
    is_flag=False,
    flag_value="127.0.0.1:0",
    default="",
    callback=_check_web,
    help="Serve a page that shows the job: host:port, or nothing for a free port of this machine.",
)
@field_options("worker", COMMUNICATION)
@click.option(
    "--preload/--no-preload", default=True, help="Load torch once and fork the tasks, or start each in its own Python."
)
@click.option(
    "--chaos",
    default="",
    metavar="FAULTS",
    help='Inject faults and report what they cost: "kill ps:1@step=200; pause worker:0@20s for=5s; slow worker:1 x4; '
    'cut worker:1-ps:0 for=10s; reset worker:0-chief for=1s; random every=8s seed=3".',
)
@click.option("--verbose", is_flag=True, help="Show the standard output of every worker, not only the lead's.")
@script_arguments
def run_command(**options: Any) -> int:
    """Train SCRIPT with ARGS on a cluster of processes on this machine."""
    chosen = {name: options.pop(name) for name in COMMUNICATION}
    communication = {name: str(value) for name, value in chosen.items() if value is not None}
    job = LocalJob(**options, communication=communication)
    source = click.get_current_context().get_parameter_source
    for name, way_out in _OF_A_CLUSTER.items() if job.chosen_strategy in ONE_PROCESS else ():
        if source(name) is ParameterSource.COMMANDLINE:
            words = no_effect(flag_of(name), job.chosen_strategy) + way_out
            raise ConfigurationError(words)  # a variable may be for all jobs
    for name, what in _OF_PS.items() if not job.num_ps else ():
        if source(name) is ParameterSource.COMMANDLINE and options[name]:  # staleness 0: so they train in any case
            raise ConfigurationError(f"{flag_of(name)} {what}: add --ps 1, or leave it out")
    _check_tasks(job)
    _check_script(job)
    if job.script.is_file():  # and no module
        warn_of_late_flags(run_command, job.script, job.args)
    with only_writer(job.log_dir):
        return run_local(job)
