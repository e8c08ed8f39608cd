"""``stratagem worker SCRIPT [ARGS…]``: a training script as a worker of its cluster."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from stratagem.checkpoint.ended import note_leaving
from stratagem.cluster.config import EvaluatorConfig, RoleConfig, WorkerConfig
from stratagem.cluster.exit_codes import EXIT_FAILED, EXIT_NO_RETRY, EXIT_PREEMPTED, EXIT_USAGE
from stratagem.cluster.tf_config import placement_from_environment
from stratagem.errors import FencedError, StratagemError
from stratagem.measuring.flight import FLIGHT
from stratagem.rpc.heap import keep_freed_memory
from stratagem.rpc.logs import configure_logging
from stratagem.rpc.security import security_of
from stratagem.rpc.session import SessionClient
from stratagem.worker import background_writes, interrupts, script_runner
from stratagem.worker.runtime import active_runtime
from stratagem.worker.script_runner import Outcome
from stratagem.worker.step_meter import active_meter

REPORT_VARIABLE = "STRATAGEM_REPORT_FILE"
"""Environment variable of `stratagem run`: the file for this worker's report."""

CHIEF_TIMEOUT_S = 10.0
"""Seconds in which a chief must answer a script that has ended."""

THREADS_S = 5.0
"""Seconds that threads of a script may outlive it without a word."""


def run(config: WorkerConfig | EvaluatorConfig, script: str, arguments: Sequence[str], is_module: bool = False) -> int:
    """Runs the script, or a module by its name, and says goodbye to the chief. Returns the exit code.

    The script's traceback goes to stderr first, then one line that names the task.
    """
    configure_logging(config.task, config.log_format)
    torch.set_num_threads(config.num_threads)
    keep_freed_memory()
    interrupts.install()
    num_replicas = 1
    if isinstance(config, WorkerConfig):
        placement = placement_from_environment(os.environ)
        num_workers = 1 if placement is None else placement.cluster.num_workers
        num_replicas = _num_replicas(config, num_workers)
        script_runner.begin_task(num_replicas, num_workers)
    process = os.getpid()
    script_runner.before_sudden_exit(lambda code, words: _leave(config, Outcome(code, words)))
    outcome = script_runner.run_script(script, arguments, is_module)
    _reopen_outputs()
    if os.getpid() != process:
        _end_child(outcome)
    alone = not script_runner.uses_torch_distributed()
    if outcome.exit_code == 0 and num_replicas > 1 and alone and script_runner.awaits_strategy():
        outcome = Outcome(EXIT_USAGE, script_runner.trains_alone(num_replicas, "and has ended"))
    if outcome.exit_code == 0 and (error := background_writes.failure()) is not None:
        outcome = Outcome(EXIT_FAILED, f"{type(error).__name__}: {error}")
    runtime = active_runtime()
    reason = runtime.stop_reason() if runtime is not None else None
    if outcome.exit_code == EXIT_PREEMPTED and isinstance(reason, FencedError):  # by :func:`interrupts.end_soon`
        outcome = Outcome(EXIT_FAILED, str(reason), follows=True)
    if outcome.exit_code == EXIT_FAILED and reason is not None and str(reason) not in outcome.message:
        # The script failed because the job was already over for it: say so.
        outcome = dataclasses.replace(outcome, message=f"{outcome.message} [{reason}]", follows=True)
    if outcome.traceback:
        sys.stderr.write(outcome.traceback)
    if outcome.message:
        print(f"{config.task}: {outcome.message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # It ends with a code of its own. A pod deleted now has done its work; the job that a failure ends stops everybody.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os._exit = script_runner.leave
    if runtime is not None and outcome.exit_code == 0:
        note_leaving(config.checkpoint_dir, config.task, "its script is done")
    exit_code = _leave(config, outcome)
    if exit_code != outcome.exit_code:
        print(f"{config.task}: the job has made no step yet: it ends, and is not restarted", file=sys.stderr)
    if exit_code and not alone:
        _end_at_once(exit_code)
    _watch_threads(config.task)
    return exit_code


def _reopen_outputs() -> None:
    """Those that the script has closed or taken away; their numbers stay open by that."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None or getattr(stream, "closed", False):
            try:
                again = os.fdopen(number, "w", errors="backslashreplace", closefd=False)
            except OSError:  # the script has closed the number too
                again = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
            setattr(sys, name, again)


def _end_child(outcome: Outcome) -> NoReturn:
    """Ends a process that the script has forked and that has left it, by ``sys.exit`` for example: it is no worker, and
    the chief's connection, whose threads it does not have, is not its own."""
    sys.stderr.write(outcome.traceback or (f"{outcome.message}\n" if outcome.message else ""))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(outcome.exit_code)


def _watch_threads(task: str) -> None:
    """Says in a while which threads keep this process, if any do: the job waits for its end."""

    def say() -> None:
        others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
        names = ", ".join(thread.name for thread in others if not thread.daemon)
        print(
            f"{task}: the script has ended, but its threads still run: {names}. End them, or make them daemons",
            file=sys.stderr,
        )

    watch = threading.Timer(THREADS_S, say)
    watch.daemon = True
    watch.start()


def _num_replicas(config: WorkerConfig, num_workers: int) -> int:
    """Replicas that the job was started for: one a worker, or where the strategy has several of them one a device."""
    if config.strategy not in ("mirrored", "central", "ring"):
        return num_workers
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = config.devices.count(",") + 1 if config.devices else torch.cuda.device_count() // on_host
    return num_workers * max(1, own)


def _leave(config: WorkerConfig | EvaluatorConfig, outcome: Outcome) -> int:
    """Tells the launcher and the chief how the script ended; returns the exit code, see :func:`_code`."""
    _write_report(outcome)
    runtime = active_runtime()
    if runtime is not None:
        exit_code = _code(config, outcome, runtime.session)
        runtime.goodbye(exit_code, outcome.message, outcome.follows)
        return exit_code
    if isinstance(config, WorkerConfig) and config.chief and not outcome.is_over:
        return _end_without_strategy(config, outcome)
    return _code(config, outcome)


def _code(config: RoleConfig, outcome: Outcome, session: SessionClient | None = None) -> int:
    """The exit code: 42 for a script that fails by an error of its own (which has a traceback; a peer that is away has
    none) under a supervisor (``run_id``) before anybody in the job has made a step. It has a mistake, and Kubernetes
    would start it 20 times more, Docker 3 times; ``session``: with the chief, None without one."""
    may_be_peer = outcome.follows or not outcome.traceback or script_runner.uses_torch_distributed()
    is_broken = outcome.exit_code == EXIT_FAILED and not (may_be_peer or script_runner.has_stepped())
    has_begun = session is not None and session.job_started
    return EXIT_NO_RETRY if config.run_id and is_broken and not has_begun else outcome.exit_code


def _end_without_strategy(config: WorkerConfig, outcome: Outcome) -> int:
    """Tells the chief, if there is one: the script has never joined its cluster, which would wait for it."""
    exit_code = outcome.exit_code
    if outcome.exit_code == 0 and not script_runner.uses_torch_distributed():
        print(
            f"{config.task}: the script has ended without making its cluster's strategy: it took no part in the work. "
            "`strategy = sg.strategy_from_environment()` makes the one that the cluster was started for",
            file=sys.stderr,
        )
    session = SessionClient(config.chief, config.task, "", security=security_of(config))
    try:
        session.waits_for = "to tell it how the script ended"
        session.start(CHIEF_TIMEOUT_S)
        exit_code = _code(config, outcome, session)
        session.goodbye(exit_code, outcome.message)
    except StratagemError:
        pass  # nobody waits: it is over already, or there is no chief beside the workers
    finally:
        session.close()
    return exit_code


def _end_at_once(exit_code: int) -> None:
    """Ends as Python does, but for tearing down process groups: gloo's would first wait for the collectives that this
    rank has begun, half an hour each, and the other ranks, which see its sockets open, would wait for it."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _write_report(outcome: Outcome) -> None:
    """Leaves the counts of this worker where the launcher asked for them; after a failure what it did last, too."""
    path, meter, runtime = os.environ.get(REPORT_VARIABLE), active_meter(), active_runtime()
    end: dict[str, Any] = {}
    if outcome.exit_code:
        was_fenced = runtime is not None and isinstance(runtime.session.stopped, FencedError)
        end = {"follows": outcome.follows, "has_stepped": script_runner.has_stepped(), "was_fenced": was_fenced}
    if path and (meter is not None or end):
        counts = meter.report() | ({"flight": FLIGHT.lines()} if end else {}) if meter is not None else {}
        try:
            Path(path).write_text(json.dumps(counts | end))
        except OSError as error:  # a full disk under the launcher's folder, which is no failure of the script
            print(f"the summary lacks the counts of this task: {path}: {error.strerror}", file=sys.stderr)
