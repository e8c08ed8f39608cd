"""The timed window of a job: wall time, CPU seconds of all its processes, bytes over the loopback.

Standard library only, because the peers' jobs use it in their own environments. Linux: reads /proc.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Reading:
    """The counters at one moment."""

    time_s: float
    cpu_s: float
    loopback_bytes: int


@dataclasses.dataclass(frozen=True)
class Window:
    """The difference between two readings."""

    elapsed_s: float
    """Wall time, seconds."""
    cpu_s: float
    """CPU seconds, user and system, of every process of the job: both ends of the wire."""
    loopback_bytes: int
    """Bytes received on the loopback interface, headers included: each byte sent counts once."""


def read_counters(root_pid: int, proc: Path = Path("/proc")) -> Reading:
    """The counters of the job whose first process is ``root_pid``."""
    return Reading(time.perf_counter(), family_cpu_s(root_pid, proc), loopback_bytes(proc))


def between(begin: Reading, end: Reading) -> Window:
    """What passed from ``begin`` to ``end``."""
    return Window(end.time_s - begin.time_s, end.cpu_s - begin.cpu_s, end.loopback_bytes - begin.loopback_bytes)


def family_cpu_s(root_pid: int, proc: Path = Path("/proc")) -> float:
    """CPU seconds used so far by ``root_pid`` and its living descendants, waited-for children included."""
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
    family = [pid for pid in parents if _descends(pid, root_pid, parents)]
    return sum(ticks[pid] for pid in family) / os.sysconf("SC_CLK_TCK")


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
