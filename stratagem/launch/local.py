"""`stratagem run`: a cluster of real processes on this machine, supervised."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

from stratagem.checkpoint.catalog import newest
from stratagem.checkpoint.durable import way_out
from stratagem.chief.journal.lock import JournalLock
from stratagem.cluster.exit_codes import EXIT_PREEMPTED
from stratagem.cluster.task import TaskId
from stratagem.errors import ConfigurationError
from stratagem.launch.chaos.events import STANDBY
from stratagem.launch.chaos.injector import ChaosInjector, chaos_words
from stratagem.launch.cluster import LaunchFor, LocalCluster
from stratagem.launch.display import make_display
from stratagem.launch.output import OutputRouter
from stratagem.launch.plan import AUTO, Launch, LocalJob, RunFolders, certificates_of, plan_launch
from stratagem.launch.signals import signal_pipe
from stratagem.launch.streams import LastingStream
from stratagem.launch.summary import build_summary, failure_words, last_status, read_report, write_summary
from stratagem.launch.supervisor import Policy, Supervisor
from stratagem.rpc.binding import free_port
from stratagem.rpc.security import OPEN, operator_security

_INTERRUPTED = (130, 131, EXIT_PREEMPTED)


def run_local(
    job: LocalJob,
    *,
    launch_for: LaunchFor | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """Runs the job until every process has ended. ``launch_for``: other command lines than the job's own; ``stdout``
    gets the lead's standard output, ``stderr`` everything else, if not ours. Returns the exit code: 0, that of the
    first failure (1 if a signal killed it), or 128 plus the signal that interrupted the launcher."""
    streams = LastingStream(stdout or sys.stdout), LastingStream(stderr or sys.stderr)
    out, err = (cast(TextIO, stream) for stream in streams)
    num_cores = len(os.sched_getaffinity(0))
    master_port = free_port()
    folders = _make_folders(job)
    if job.web.endswith(":0"):  # known here, so that the next chief serves the page at the same place
        job = dataclasses.replace(job, web=f"{job.web[:-2]}:{free_port()}")

    display = make_display(out, err)
    colour = err.isatty() and not os.environ.get("NO_COLOR")
    output = OutputRouter(display.show, job.log_dir or folders.logs, verbose=job.verbose, colour=colour)
    chaos = None
    if job.chaos:
        chaos = ChaosInjector(job.chaos, (*job.servers, *job.workers), output.say, job.ps_replicas > 1)
    certified: Callable[[str], None] | None = None

    def launch(task: TaskId, chief_address: str) -> Launch:
        chief = folders.chief_file if job.num_chiefs > 1 else chief_address
        relayed = ("", "")
        if certified is not None and task not in (*job.servers, *job.workers):
            certified(str(task))
        if chaos is not None and task.type != "chief":
            chief, relayed = chaos.chief_address(chief), chaos.bind(task)
        return plan_launch(job, task, folders, os.environ, num_cores, chief_address, master_port, relayed, chief)

    policy = Policy(
        max_restarts=job.max_restarts,
        restart_workers=job.chosen_strategy != "ring",
        has_copies=job.ps_replicas > 1,
        min_workers=job.min_workers,
        shutdown_timeout_s=job.shutdown_timeout_s,
    )
    supervisor = Supervisor(job.workers, job.servers, policy)
    with signal_pipe() as signals_fd:  # to the last word: a signal that comes then has nothing left to end
        try:
            if job.tls == AUTO and job.servers:
                from stratagem.launch.certificates import make_throw_away  # needs a package of the extra tls

                tasks = [task for task in (*job.servers, *job.workers) if task != STANDBY]  # chief:0 to the others
                certified = make_throw_away(folders.certificates, map(str, tasks))
            started_at = time.monotonic()
            cluster = LocalCluster(
                supervisor=supervisor,
                launch_for=launch_for or launch,
                output=output,
                on_status=display.update,
                signals_fd=signals_fd,
                security=operator_security(certificates_of(job, folders), job.token_file) if job.servers else OPEN,
                folders=folders,
                preload=job.preload and launch_for is None,  # commands of others are not ours to run in a fork
                chaos=chaos,
                streams=streams,
            )
            exit_code = cluster.run()
            duration_s = time.monotonic() - started_at
            display.close()
            if (error := streams[0].error) is not None:
                output.say(f"the standard output is incomplete: {error.strerror}")
                exit_code = exit_code or 1
            return _report(job, folders, cluster, exit_code, duration_s)
        finally:
            if chaos is not None:
                chaos.close()
            display.close()
            output.close()
            shutil.rmtree(folders.certificates, ignore_errors=True)
            if not _is_kept(job, supervisor):
                shutil.rmtree(folders.root, ignore_errors=True)


@contextlib.contextmanager
def only_writer(log_dir: Path | None) -> Iterator[None]:
    """Inside, no other launcher keeps its logs there, unless locks cannot be had. ConfigurationError: another does."""
    lock, is_ours = None, True
    with contextlib.suppress(OSError):  # a folder that cannot be written is refused by :func:`run_local`
        if log_dir is not None:
            lock = JournalLock(str(log_dir), ".run.lock")
            is_ours = lock.acquire()
    try:
        if lock is not None and not is_ours:
            raise ConfigurationError(
                f"--log-dir: another `stratagem run` ({lock.holder}) keeps its logs in {log_dir}; give this one "
                "another folder, or wait until that one ends"
            )
        yield
    finally:
        if lock is not None:
            lock.release()


def _is_kept(job: LocalJob, supervisor: Supervisor) -> bool:
    """Whether the run folder stays: where the user asked for it, or after a failure, for its logs."""
    return job.state_dir is not None or supervisor.failure is not None


def _report(job: LocalJob, folders: RunFolders, cluster: LocalCluster, exit_code: int, duration_s: float) -> int:
    """Says what came of a run, and writes its summary; the run's exit code, 1 if all but the summary went well."""
    supervisor, chaos, output, tail = cluster.supervisor, cluster.chaos, cluster.output, cluster.failure_tail
    reports = {task: report for task in supervisor.workers if (report := read_report(folders.report(task)))}
    stays = job.checkpoint_dir or (folders.checkpoints if _is_kept(job, supervisor) else None)
    checkpoint = str(newest(stays) or "") if stays is not None else ""
    status, num_units, in_part = last_status(cluster.status, folders.journal)
    lived_s = {str(task): seconds for task, seconds in cluster.lived_s.items()}
    lived_s["chief:0"] = cluster.lived_s.get(cluster.chief, 0.0)  # a status calls the one that serves so
    summary = build_summary(
        job, supervisor, status, reports, exit_code, duration_s, tail, checkpoint, lived_s, num_units, in_part
    )
    if job.num_chiefs > 1:
        standby = TaskId("chief", 1 - cluster.chief.index)
        summary["chief"] = {"serves": str(cluster.chief), "stands_by": str(standby), "takeovers": cluster.takeovers}
    if chaos is not None:
        summary["chaos"] = chaos.records(status.updates_lost)
        output.say(chaos_words(summary["chaos"]))
    if job.summary is not None:
        try:
            write_summary(job.summary, summary)
        except OSError as error:
            output.say(f"the summary cannot be written to {job.summary}: {error.strerror}")
            exit_code = exit_code or 1
    output.say(_last_words(exit_code, summary, duration_s))
    if supervisor.failure is not None:
        output.say(failure_words(supervisor.failure, tail))
        output.say(f"logs: {output.log_file(supervisor.failure.task).parent}")
    return exit_code


def _last_words(exit_code: int, summary: Mapping[str, Any], duration_s: float) -> str:
    how = "done" if exit_code == 0 else "interrupted" if exit_code in _INTERRUPTED else f"failed, exit code {exit_code}"
    words = [f"{how} after {duration_s:.1f} s"]
    restarts, lost, undone = (summary[name] for name in ("restarts", "updates_lost", "updates_undone"))
    if num_gone := len(summary["workers_lost"]):
        words.append(f"{num_gone} worker{'s' if num_gone != 1 else ''} lost, and the ring continued")
    if restarts:
        words.append(f"{restarts} restart{'s' if restarts != 1 else ''}")
    if restarts or lost:
        words.append(f"{lost} update{'s' if lost != 1 else ''} lost")
    if in_part := summary["updates_in_part"]:
        words.append(f"{in_part} update{'s' if in_part != 1 else ''} of partial batches, unlike in a single process")
    if undone:
        words.append(f"{undone} update{'s' if undone != 1 else ''} of damaged checkpoints recomputed")
    return ", ".join(words)


def _make_folders(job: LocalJob) -> RunFolders:
    summaries = job.summary.parent if job.summary is not None else None
    for option, folder in (
        ("--state-dir", job.state_dir),
        ("--checkpoint-dir", job.checkpoint_dir),
        ("--log-dir", job.log_dir),
        ("--summary", summaries),
    ):
        if folder is None:
            continue
        try:  # that nothing can be written there is said before a job, not after it
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            is_file = isinstance(error, FileExistsError | NotADirectoryError)
            reason = "it, or one above it, is a file; name another" if is_file else error.strerror
            raise ConfigurationError(f"{option}: cannot write to the folder {folder}: {reason}") from None
    root = ""
    try:
        root = tempfile.mkdtemp(prefix="stratagem-run-", dir=job.state_dir)
        folders = RunFolders(Path(root).resolve())
        for folder in (folders.journal, job.checkpoint_dir or folders.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        shutil.rmtree(root, ignore_errors=True)
        elsewhere = "set TMPDIR to a writable folder with free space (in a container: --tmpfs /tmp)"
        raise ConfigurationError(
            f"cannot create {error.filename or 'a folder'} for the job's own files: {error.strerror}; "
            f"{way_out(error, elsewhere)}"
        ) from None
    return folders
