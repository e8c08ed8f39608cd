"""Jobs as processes of this machine: each a `stratagem run` in the background, with all its files in its folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from stratagem.errors import ConfigurationError, SubmitError
from stratagem.launch.plan import check_size
from stratagem.launch.submit.background import ALIVE, EXIT_CODE, ORDER, OUTPUT, PARTIAL
from stratagem.launch.submit.plan import JobPlan
from stratagem.launch.submit.record import JobRecord, JobState, Record

POLL_S = 0.2
CANCEL_S = 40.0
"""Seconds that a cancelled job gets to save and end; it takes 25 s itself before it kills what is left."""


def show(plan: JobPlan) -> str:
    return shlex.join(["stratagem", "run", *_arguments(plan, Path("JOB"))]) + "\n"


def submit(plan: JobPlan, folder: Path, record: Record) -> None:
    """Starts the job; it no longer depends on this process."""
    if (requirements := plan.request.requirements) is not None:
        check_installed(requirements)
    if plan.entry_point.source is not None:
        (folder / plan.entry_point.path.name).write_text(plan.entry_point.source)
    (folder / ORDER).write_text(json.dumps(_arguments(plan, folder)))
    # Devices that the user has named are meant; a machine configuration only says "the CPU".
    named = {name: os.environ[name] for name in ("STRATAGEM_DEVICES",) if name in os.environ}
    environ = {**os.environ, **plan.environment("", str(folder)), **named}
    if plan.entry_point.source is not None:  # the script stands in the job's folder, its siblings do not
        paths = [str(plan.entry_point.path.parent), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    (folder / OUTPUT).touch(mode=0o600)
    record("", {"host": os.uname().nodename})
    command = [sys.executable, "-P", "-m", "stratagem.launch.submit.background", str(folder)]
    if code := subprocess.run(command, env=environ, cwd=plan.root, stdin=subprocess.DEVNULL).returncode:
        raise SubmitError(f"the process of the job did not start (exit code {code}); its output is above")


def state(record: JobRecord, folder: Path) -> JobState:
    """Where the job stands: its lock says whether it lives."""
    if (host := record.place["host"]) != os.uname().nodename:
        return JobState("unknown", None, f"it runs on {host}; ask there")
    if _pid(folder) is not None:
        return JobState("running", detail="cancelled, saving and ending" if record.cancelled else "")
    with contextlib.suppress(OSError, ValueError):
        return JobState.ended(int((folder / EXIT_CODE).read_text()), record.cancelled)
    if record.cancelled:
        return JobState("cancelled")
    if not (folder / ALIVE).exists():
        return JobState("pending", detail="not started; if the submitting process was killed, it never will be")
    unwritten = (folder / PARTIAL).exists()
    words = "it has ended, and its exit code could not be written" if unwritten else "its launcher was killed"
    return JobState("failed", None, words)


def logs(record: JobRecord, folder: Path, follow: bool) -> Iterator[str]:
    with (folder / OUTPUT).open(encoding="utf-8", errors="replace") as log:
        rest = ""
        while True:
            lives = _pid(folder) is not None  # asked before reading: what comes later is read in the next turn
            *lines, rest = (rest + log.read()).split("\n")
            yield from lines
            if not follow or not lives:
                break
            time.sleep(POLL_S)
        if rest:
            yield rest


def cancel(record: JobRecord, folder: Path) -> None:
    """Tells the job to save and end, and waits for it."""
    deadline = time.monotonic() + CANCEL_S
    if (pid := _pid(folder)) is not None:
        _send(pid, signal.SIGTERM)
    while (pid := _pid(folder)) is not None:
        if time.monotonic() > deadline:
            _send(pid, signal.SIGKILL)  # its processes end with it
        time.sleep(POLL_S)


def remove(record: JobRecord, folder: Path) -> None:
    """Nothing is left of a job that is over but its folder."""


def _arguments(plan: JobPlan, folder: Path) -> list[str]:
    request = plan.request
    check_size(request.num_workers, request.ps_count)
    script = plan.entry_point.path if plan.entry_point.source is None else folder / plan.entry_point.path.name
    flags: dict[str, object] = {"workers": request.num_workers, "ps": request.ps_count}
    flags["strategy"] = request.strategy_of_tasks
    if request.ps_count:  # without any it has no effect, and `stratagem run` refuses it
        flags["staleness"] = request.staleness
    flags |= {"state-dir": folder / "run", "log-dir": folder / "logs", "summary": folder / "summary.json"}
    options = [f"--{name}={value}" for name, value in flags.items()]
    if request.evaluator:
        options.append("--evaluator")
    return [*options, str(script), *request.args]


def _pid(folder: Path) -> int | None:
    """Process id of a job that lives; None when nobody holds its lock."""
    try:
        fd = os.open(folder / ALIVE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            if text := os.pread(fd, 32, 0):
                return int(text)
            time.sleep(0.01)  # the child writes its id right after it has been forked
    finally:
        os.close(fd)


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(pid, signum)


def check_installed(requirements: str) -> None:
    """Refuses requirements (the text of a file) that this Python does not meet, as a local job installs nothing; the
    ConfigurationError names them."""
    missing = []
    for line in requirements.splitlines():
        text = line.split(" #")[0].strip()
        if not text or text.startswith(("#", "-")):
            continue
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # a path or an address: pip knows
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(text)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{text} (installed: {version})")
    if missing:
        raise ConfigurationError(
            f"a local job runs in this Python, which lacks {', '.join(missing)}: install it with pip first"
        )
