"""The timed window of a job: wall time, CPU seconds of all its processes, bytes over the loopback.

Standard library only, because the peers' jobs use it in their own environments. Linux: reads /proc.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path

ROLES = ("worker", "ps", "chief")
_COMMANDS = ("stratagem.cli", "benchmarks.training.bare_job")
"""Modules that are told their role first."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """The counters at one moment."""

    time_s: float
    cpu_s: float
    loopback_bytes: int
    cpu_s_by_role: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Window:
    """The difference between two readings."""

    elapsed_s: float
    """Wall time, seconds."""
    cpu_s: float
    """CPU seconds, user and system, of every process of the job: both ends of the wire."""
    loopback_bytes: int
    """Bytes received on the loopback interface, headers included: each byte sent counts once."""
    cpu_s_by_role: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """CPU seconds of our tasks by role ("chief", "ps", "worker"); other systems have none."""


def read_counters(root_pid: int, proc: Path = Path("/proc")) -> Reading:
    """The counters of the job whose first process is ``root_pid``."""
    family = family_cpu_s(root_pid, proc)
    by_role: dict[str, float] = {}
    for pid, cpu_s in family.items():
        if role := role_of(pid, proc):
            by_role[role] = by_role.get(role, 0.0) + cpu_s
    return Reading(time.perf_counter(), sum(family.values()), loopback_bytes(proc), by_role)


def between(begin: Reading, end: Reading) -> Window:
    """What passed from ``begin`` to ``end``."""
    by_role = {role: cpu_s - begin.cpu_s_by_role.get(role, 0.0) for role, cpu_s in end.cpu_s_by_role.items()}
    return Window(
        end.time_s - begin.time_s, end.cpu_s - begin.cpu_s, end.loopback_bytes - begin.loopback_bytes, by_role
    )


def family_cpu_s(root_pid: int, proc: Path = Path("/proc")) -> dict[int, float]:
    """CPU seconds used so far by ``root_pid`` and each of its living descendants, waited-for children included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:  # it ended while we looked
            continue
        fields = stat[stat.rindex(")") + 2 :].split()
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(int(value) for value in fields[11:15])
    return {pid: ticks[pid] / os.sysconf("SC_CLK_TCK") for pid in parents if _descends(pid, root_pid, parents)}


def role_of(pid: int, proc: Path = Path("/proc")) -> str:
    """The role of one of our tasks, or of a bare job's, by its command line; of any other process nothing."""
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
    except OSError:
        return ""
    roles = [role for module, role in itertools.pairwise(words) if module in _COMMANDS and role in ROLES]
    return roles[0] if roles else ""


def _descends(pid: int, root_pid: int, parents: dict[int, int]) -> bool:
    seen: set[int] = set()
    while pid in parents and pid not in seen:
        if pid == root_pid:
            return True
        seen.add(pid)
        pid = parents[pid]
    return False


def loopback_bytes(proc: Path = Path("/proc")) -> int:
    """Bytes received so far on the loopback interface; other jobs on the machine count too."""
    for line in (proc / "net" / "dev").read_text().splitlines():
        name, colon, counters = line.partition(":")
        if colon and name.strip() == "lo":
            return int(counters.split()[0])
    return 0
