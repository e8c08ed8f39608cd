"""What the first process of a container must do: give signals an effect, and reap orphans.

The kernel spares process 1 the default action of every signal: a SIGTERM that comes before a role has its own handler
would be ignored. And every orphan becomes a child of process 1, where it stays a zombie until it is reaped. So process
1 does these two things and nothing else; its child does the work.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_FORWARDED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2})

_CGROUP = Path("/sys/fs/cgroup")
# What has been counted, and its limit: version 2, version 1.
_MEMORY = (("memory.events", "memory.max"), ("memory/memory.oom_control", "memory/memory.limit_in_bytes"))
_PIDS = (("pids.events", "pids.max"), ("pids/pids.events", "pids/pids.max"))


def stand_by_if_first() -> None:
    """In process 1: forks, returns in the child alone, and ends with the child's exit code. Elsewhere: nothing. To be
    called before anything starts a thread."""
    if os.getpid() == 1:
        fork_and_stand_by()


def fork_and_stand_by() -> None:
    """As :func:`stand_by_if_first`, whatever process this is. A child killed by signal n gives exit code 128 + n."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})  # none may come in between
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while (code := _reap(child)) is None:
        came = signal.sigwaitinfo({*_FORWARDED, signal.SIGCHLD})
        # What the terminal sends (si_code > 0) the child has got already: it is in the same process group.
        if came.si_signo in _FORWARDED and came.si_code <= 0:
            os.kill(child, came.si_signo)
    if limit := _exceeded_limit(code):
        cause = "the kernel killed this task, because" if code == 128 + signal.SIGKILL else "before this task ended,"
        os.write(2, f"stratagem: {cause} its container reached its {limit}; give it more\n".encode())
    os._exit(code)


def _reap(child: int) -> int | None:
    """Waits for all that has ended; returns the exit code of ``child`` once it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):  # nobody is left
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == child:
                ended = os.waitstatus_to_exitcode(found[1])
                code = ended if ended >= 0 else 128 - ended
    return code


def _exceeded_limit(code: int) -> str:
    """The limit of this control group for which the kernel has killed, or refused a thread, before the task ended with
    ``code``; else empty."""
    if code == 128 + signal.SIGKILL:
        what, count, files = "memory limit", "oom_kill", _MEMORY
    elif code not in (0, 128 + signal.SIGTERM):
        what, count, files = "limit of processes and threads (pids limit)", "max", _PIDS
    else:
        return ""
    for events, limit in files:
        try:
            counts = dict(line.split() for line in (_CGROUP / events).read_text().splitlines())
            text = (_CGROUP / limit).read_text().strip()
        except (OSError, ValueError):
            continue
        if int(counts.get(count, 0)) and text.isdigit():
            return f"{what} of {int(text) / (1 << 20):,.0f} MiB" if files is _MEMORY else f"{what}: {text}"
    return ""
