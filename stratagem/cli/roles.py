"""`stratagem chief | ps | worker | evaluator`: one role in this process."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from stratagem.checkpoint.ended import has_run, note_run, take_away_at_exit
from stratagem.cli.options import configure, role_options, script_arguments
from stratagem.cluster.choice import strategy_in
from stratagem.cluster.config import ChiefConfig, EvaluatorConfig, RoleConfig, WorkerConfig
from stratagem.cluster.job_rules import (
    check_checkpoint_every,
    check_communication,
    check_max_workers,
    no_effect,
    without_effect,
)
from stratagem.cluster.sources import Resolved, variable_of
from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import TaskPlacement, emit_tf_config, torchrun_environment
from stratagem.errors import ClusterSpecError, ConfigurationError
from stratagem.launch.script import check_script
from stratagem.launch.status import ask_for_cluster
from stratagem.launch.streams import lead_nowhere
from stratagem.rpc.logs import configure_logging

logger = logging.getLogger(__name__)

_SCRIPT = {"ignore_unknown_options": False, "allow_interspersed_args": False}


def role_entry(role: str) -> Callable[..., int]:
    """The function ``run`` in the role's ``__main__``; loaded late, because torch takes a second."""
    package = "worker" if role == "evaluator" else role
    run: Callable[..., int] = importlib.import_module(f"stratagem.{package}.__main__").run
    return run


def _refuse_without_chief(config: RoleConfig) -> None:
    if not config.chief:
        raise ClusterSpecError(
            f"{config.task} needs the address of the chief: give --chief host:port, --cluster FILE or TF_CONFIG"
        )


def check_devices(config: WorkerConfig) -> None:
    """ConfigurationError: a device that this machine does not have, or no name of one; NCCL without GPUs."""
    if config.transport == "nccl":
        import torch

        if not torch.cuda.is_available():
            raise ConfigurationError("NCCL was asked for, but torch sees no CUDA device here; take --transport auto")
    if config.devices not in ("", "cpu"):
        from stratagem.strategy.devices import named_devices, parse_devices  # late: torch takes a second

        parse_devices(named_devices(config.devices))


@contextlib.contextmanager
def _hang_up_ends() -> Iterator[None]:
    """A terminal that goes away ends a task in order, as SIGTERM does; under nohup it does not."""
    before = signal.getsignal(signal.SIGHUP)
    terminals = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]

    def end(*_: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # its shell and the system both tell
        for stream in terminals:
            if not stream.isatty():  # what the script prints while it ends is no error of its
                lead_nowhere(stream)
        os.kill(os.getpid(), signal.SIGTERM)

    if before is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGHUP) is end:  # who has been told is told no more, also as it ends
            signal.signal(signal.SIGHUP, before)


def _once(role: str, config: RoleConfig, *arguments: object) -> int:
    """Runs a role, unless it has ended well under this ``run_id`` before: nobody is there any more to meet it again."""
    folder = config.checkpoint_dir
    if has_run(folder, config.task, config.run_id):
        configure_logging(config.task, config.log_format)
        logger.info("%s has already finished successfully in this run, according to %s", config.task, folder)
        return 0
    take_away_at_exit(folder, config.task)
    with _hang_up_ends():
        code = role_entry(role)(config, *arguments)
    if code == 0:
        note_run(folder, config.task, config.run_id)
    return code


def script_environment(
    resolved: Resolved[RoleConfig], placement: TaskPlacement | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """What a training script finds in its environment: TF_CONFIG and torchrun's names; and what flags or a cluster file
    say, as ``STRATAGEM_<FIELD>``, because the script's strategy reads its configuration there."""
    values = resolved.config.model_dump(exclude_defaults=True).items()
    variables = {variable_of(name): str(value) for name, value in values}
    if placement is None or placement.task is None:
        return variables
    variables["TF_CONFIG"] = emit_tf_config(placement.cluster, placement.task)
    told = torchrun_environment(placement.cluster, placement.task)
    port = environ.get("MASTER_PORT", "")  # was compared with the cluster, or is the launcher's
    return variables | told | ({"MASTER_PORT": port} if told and port else {})


@click.command("chief")
@role_options("chief")
def chief_command(cluster_file: Path | None, **flags: Any) -> int:
    """Coordinate a job: sessions, leases, clocks, checkpoints. Runs no user code."""
    config = configure("chief", cluster_file, flags)[0].config
    assert isinstance(config, ChiefConfig)
    # What a variable says may be for jobs of any kind.
    check_checkpoint_every(flags["checkpoint_every_s"] or 0.0, config.num_ps)
    check_max_workers(flags["max_workers"] or 0, config.num_workers, config.min_workers, config.num_ps)
    configure_logging(config.task, config.log_format)
    return _once("chief", config)


@click.command("ps")
@role_options("ps")
def ps_command(cluster_file: Path | None, **flags: Any) -> int:
    """Hold shards of the variables and apply updates to them."""
    resolved, _ = configure("ps", cluster_file, flags)
    _refuse_without_chief(resolved.config)
    configure_logging(resolved.config.task, resolved.config.log_format)
    return _once("ps", resolved.config)


def _run_script(
    role: str, cluster_file: Path | None, module: bool, script: Path, args: tuple[str, ...], **flags: Any
) -> int:
    resolved, placement = configure(role, cluster_file, flags)
    config = resolved.config
    if not config.run_id:  # under a supervisor the chief is told, as of any other end
        check_script(script, module)
    if isinstance(config, WorkerConfig):
        check_devices(config)
    if placement is None and isinstance(config, WorkerConfig | EvaluatorConfig) and config.chief:
        configure_logging(config.task, config.log_format)
        placement = ask_for_cluster(config)
    if isinstance(config, WorkerConfig):
        strategy = strategy_in(placement and placement.cluster, config.strategy, config.devices.count(",") + 1)
        check_communication({name: str(value) for name, value in flags.items() if value is not None}, strategy)
    if placement is not None and isinstance(config, WorkerConfig):
        for name in without_effect(config.model_fields_set, strategy):
            configure_logging(config.task, config.log_format)
            logger.warning(no_effect(f"{name} ({resolved.origins[name]})", strategy))
    if placement is not None or role == "evaluator":
        _refuse_without_chief(config)
    variables = script_environment(resolved, placement, os.environ)
    if placement is not None and placement.task == TaskId("worker", 0) and not placement.cluster.chief:
        chief = configure("chief", cluster_file, {"task": "chief:0"})[0].config  # which this task starts
        told = chief.model_dump(exclude_defaults=True, exclude={"num_workers", "num_ps", *WorkerConfig.model_fields})
        variables |= {variable_of(name): str(value) for name, value in told.items()}
    os.environ.update(variables)
    return _once(role, config, str(script), list(args), module)


def _script_command(role: str, words: str) -> click.Command:
    run = role_options(role)(script_arguments(functools.partial(_run_script, role)))
    return click.command(role, context_settings=_SCRIPT, help=words)(run)


worker_command = _script_command("worker", "Train: run SCRIPT with ARGS as one worker of the cluster.")
evaluator_command = _script_command("evaluator", "Evaluate each new checkpoint: run SCRIPT with ARGS as the evaluator.")
