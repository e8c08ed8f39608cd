"""The ``collectives`` benchmark: our backend of ``torch.distributed``, lane by lane, beside gloo."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.collectives.jobs import sizes_argument, torch_environment
from benchmarks.collectives.torch_job import COLLECTIVES
from benchmarks.job_files import rank_path
from benchmarks.jobs import Task, free_addresses, python_module, run_job
from benchmarks.runner import Case, Identity, Sample

Ranks = list[dict[str, list[float]]]
"""What every rank measured: collective and size to median seconds and CPU seconds of a call."""


def collectives_cases(num_workers: int, sizes: Sequence[int], lanes: Sequence[str], *, gloo: bool) -> list[Case]:
    """The systems that take turns; each measures all collectives and sizes in one job.

    Args:
        num_workers: ranks, each a process on this machine.
        sizes: bytes of the whole tensor: of what is reduced, scattered or exchanged, and of what a gather ends with.
        lanes: lanes of ours.
        gloo: whether the peer gloo takes part.
    """
    cases = [_case(num_workers, sizes, "stratagem", lane) for lane in lanes]
    return [*cases, _case(num_workers, sizes, "gloo", "tcp")] if gloo else cases


def _case(num_workers: int, sizes: Sequence[int], system: str, lane: str) -> Case:
    places = [(name, num_bytes) for name in COLLECTIVES for num_bytes in sizes]
    identities: list[Identity] = [
        {
            "benchmark": "collectives",
            "collective": name,
            "system": system,
            "lane": lane,
            "n": num_workers,
            "bytes": size,
        }
        for name, size in places
    ]

    def measure() -> tuple[Sequence[Sample], Mapping[str, str]]:
        ranks, versions = run(num_workers, sizes, system, lane)
        return [_sample([rank[f"{name} {size}"] for rank in ranks]) for name, size in places], versions

    return Case(identities, measure)


def run(num_workers: int, sizes: Sequence[int], system: str, lane: str) -> tuple[Ranks, Mapping[str, str]]:
    """One job of a system."""
    host, port = free_addresses(1)[0].split(":")
    command = python_module("collectives.torch_job", system, sizes_argument(sizes))
    tasks = [
        Task(command, torch_environment(rank, num_workers, host, int(port)) | {"STRATAGEM_TRANSPORT": lane})
        for rank in range(num_workers)
    ]
    return run_job(tasks, functools.partial(_read, num_ranks=num_workers), num_members=num_workers)


def _read(result: Path, num_ranks: int) -> tuple[Ranks, Mapping[str, str]]:
    found = [json.loads(rank_path(result, rank).read_text()) for rank in range(num_ranks)]
    return [each["seconds"] for each in found], found[0]["versions"]


def _sample(ranks: Sequence[Sequence[float]]) -> Sample:
    """The slowest rank's time; the CPU of all ranks together."""
    return {"median_us": max(median for median, _ in ranks) * 1e6, "cpu_us": sum(cpu for _, cpu in ranks) * 1e6}
