"""The ``memory`` benchmark: what each process of a training job has at most, beside what the formula says it needs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.runner import Case, Sample
from benchmarks.training import jobs
from benchmarks.training.cases import identity_of
from benchmarks.training.result import JobResult
from benchmarks.training.workloads import Workload
from benchmarks.window import ROLES, family_cpu_s, role_of
from stratagem.rpc import heap

POLL_S = 0.1
MIB = 1 << 20
BASE_MIB = {"worker": 260, "ps": 230, "chief": 60}
"""What a process has that holds no tensor: Python, torch with its compiler in a worker, grpc."""
_GIVES_BACK = {name: str(128 << 10) if name.startswith("MALLOC_") else "" for name in heap.ENVIRONMENT}
"""What glibc begins with: freed memory of this size goes back. All systems are started with `heap.ENVIRONMENT`."""


@dataclasses.dataclass
class Peak:
    """The most that one process had at once."""

    pss_bytes: int = 0
    """Proportional set size: a page that k processes have mapped counts 1/k."""
    shared_bytes: int = 0
    """The part of it in shared memory, named in /dev/shm or not."""
    history: list[int] = dataclasses.field(default_factory=list)

    @property
    def usual_bytes(self) -> float:
        """The middle of what it had while it had more than half of its most: while it trained."""
        return statistics.median(size for size in self.history if 2 * size > self.pss_bytes)


class Watch:
    """Looks at all descendants of a process until the block ends.

    Args:
        root_pid: the process.
        role_of: says a descendant's role by its pid, or nothing.
    """

    def __init__(self, root_pid: int, role_of: Callable[[int], str]) -> None:
        self._root_pid, self._role_of = root_pid, role_of
        self._peaks: dict[int, tuple[str, Peak]] = {}
        self._ended = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Polls in a thread of its own, because what peaks is soon over."""
        thread = threading.Thread(target=self._poll, name="watch")
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def of(self, role: str) -> Peak | None:
        """The largest process of a role; None: there was no such process."""
        peaks = [peak for its, peak in self._peaks.values() if its == role]
        if not peaks:
            return None
        return max(peaks, key=lambda peak: peak.pss_bytes)

    def _poll(self) -> None:
        while not self._ended.wait(POLL_S):
            for pid in family_cpu_s(self._root_pid):
                if role := self._role_of(pid):
                    with contextlib.suppress(OSError):  # it has ended
                        now = read_pss(Path(f"/proc/{pid}/smaps_rollup").read_text())
                        _, peak = self._peaks.setdefault(pid, (role, Peak()))
                        peak.pss_bytes = max(peak.pss_bytes, now.pss_bytes)
                        peak.history.append(now.pss_bytes)
                        peak.shared_bytes = max(peak.shared_bytes, now.shared_bytes)


def read_pss(rollup: str) -> Peak:
    """What a ``smaps_rollup`` of the kernel says."""
    fields = dict(line.split(":", 1) for line in rollup.splitlines()[1:])
    pss, shared = (int(fields[name].split()[0]) << 10 for name in ("Pss", "Pss_Shmem"))
    return Peak(pss, shared)


def formula_mib(workload: Workload, role: str, num_ps: int) -> float | None:
    """Docs/guides/performance.md: what a process of the workload should have at most; None: nothing is promised."""
    weights = workload.num_parameters * 4 / MIB
    slots = weights  # of momentum
    if role == "worker":
        gradients, largest = weights, workload.example_shape[0] ** 2 * 4 / MIB
        return BASE_MIB[role] + weights + gradients + (0 if num_ps else slots) + largest
    if role == "ps":
        return BASE_MIB[role] + 4 * weights / num_ps
    return float(BASE_MIB[role])


def memory_cases(workload: Workload, lanes: Sequence[str], num_workers: int) -> list[Case]:
    """Rings and parameter servers over the lanes, and DDP."""
    ring = [("stratagem", lane, 0, functools.partial(jobs.run_ring, workload, num_workers, lane)) for lane in lanes]
    ps = [("stratagem", lane, 1, functools.partial(jobs.run_ps, workload, num_workers, 1, lane)) for lane in lanes]
    ddp = functools.partial(jobs.run_ddp, workload, num_workers)
    peers = [("ddp", "gloo", 0, ddp), ("ddp, glibc's malloc as it is", "gloo", 0, functools.partial(ddp, _GIVES_BACK))]
    return [
        _case(workload, system, lane, num_workers, num_ps, run) for system, lane, num_ps, run in (*ring, *peers, *ps)
    ]


def _case(
    workload: Workload, system: str, lane: str, num_workers: int, num_ps: int, run: Callable[[], JobResult]
) -> Case:
    def measure() -> Sample:
        # A process of DDP is no task of ours; the launcher and the fork server hold no tensors and are no role.
        watch = Watch(os.getpid(), _ddp_role if system.startswith("ddp") else role_of)
        with watch.running():
            result = run()
        result.check(workload.timed_steps)
        sample: dict[str, float | None] = {}
        for role in ROLES:
            peak = watch.of(role)
            sample[f"{role}_mib"] = None if peak is None else peak.pss_bytes / MIB
            sample[f"{role}_usual_mib"] = None if peak is None else peak.usual_bytes / MIB
            sample[f"{role}_shared_mib"] = None if peak is None else peak.shared_bytes / MIB
            sample[f"{role}_formula_mib"] = (
                None if peak is None or system.startswith("ddp") else formula_mib(workload, role, num_ps)
            )
        return sample

    return Case.of_ours(identity_of("memory", workload, system, lane, num_workers, num_ps), measure)


def _ddp_role(pid: int) -> str:
    try:
        return "worker" if b"ddp_job" in Path(f"/proc/{pid}/cmdline").read_bytes() else ""
    except OSError:
        return ""
