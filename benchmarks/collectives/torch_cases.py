"""The ``collectives`` benchmark: our backend of ``torch.distributed``, lane by lane, beside gloo and Open MPI."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.collectives.calls import COLLECTIVES
from benchmarks.collectives.jobs import sizes_argument, torch_environment
from benchmarks.job_files import rank_path
from benchmarks.jobs import Task, free_addresses, gpus, python_module, run_job
from benchmarks.runner import Case, Identity, Sample

Ranks = list[dict[str, list[float]]]
"""What every rank measured: collective and size to median seconds and CPU seconds of a call."""


MPI_OPTIONS: Mapping[str, Sequence[str]] = {"shm": (), "tcp": ("--mca", "btl", "self,tcp")}
"""What makes Open MPI take a lane; shared memory is what it takes by itself on one host."""


def collectives_cases(
    num_workers: int,
    sizes: Sequence[int],
    lanes: Sequence[str],
    *,
    gloo: bool,
    mpi_python: str | None = None,
    device: str = "cpu",
) -> list[Case]:
    """The systems that take turns; each measures all collectives and sizes in one job.

    Args:
        num_workers: ranks, each a process on this machine.
        sizes: bytes of the whole tensor: of what is reduced, scattered or exchanged, and of what a gather ends with.
        lanes: lanes of ours.
        gloo: whether the peer gloo takes part.
        device: of the tensors, "cpu" or "cuda", where ranks share the GPUs there are; torch's own NCCL takes part too.
        mpi_python: interpreter of an environment with mpi4py, beside Open MPI; None leaves the peer out.
    """
    case = functools.partial(_case, num_workers, sizes, device)
    if device == "cuda":
        lanes = [*lanes, "nccl"]
    systems = [("stratagem", lane) for lane in lanes] + [("gloo", "tcp")] * gloo
    systems += [("nccl", "nccl")] * (device == "cuda")
    cases = [case(*each, functools.partial(run, num_workers, sizes, *each, device)) for each in systems]
    if mpi_python is not None and device == "cpu":
        for lane in MPI_OPTIONS:
            cases.append(case("openmpi", lane, functools.partial(run_mpi, num_workers, sizes, lane, mpi_python)))
    return cases


def _case(
    num_workers: int,
    sizes: Sequence[int],
    device: str,
    system: str,
    lane: str,
    run: Callable[[], tuple[Ranks, Mapping[str, str]]],
) -> Case:
    places = [(name, num_bytes) for name in COLLECTIVES for num_bytes in sizes]
    identities: list[Identity] = [
        {
            "benchmark": "collectives",
            "collective": name,
            "system": system,
            "lane": lane,
            **({"device": device} if device != "cpu" else {}),
            "n": num_workers,
            "bytes": size,
        }
        for name, size in places
    ]

    def measure() -> tuple[Sequence[Sample], Mapping[str, str]]:
        ranks, versions = run()
        return [_sample([rank[f"{name} {size}"] for rank in ranks]) for name, size in places], versions

    return Case(identities, measure)


def run(num_workers: int, sizes: Sequence[int], system: str, lane: str, device: str) -> tuple[Ranks, Mapping[str, str]]:
    """One job of a system."""
    host, port = free_addresses(1)[0].split(":")
    command = python_module("collectives.torch_job", system, sizes_argument(sizes), device)
    ways = {"STRATAGEM_TRANSPORT": lane, **gpus(device)}
    if lane == "nccl":
        ways["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    tasks = [Task(command, torch_environment(rank, num_workers, host, int(port)) | ways) for rank in range(num_workers)]
    return run_job(tasks, functools.partial(_read, num_ranks=num_workers), num_members=num_workers)


def run_mpi(num_workers: int, sizes: Sequence[int], lane: str, python: str) -> tuple[Ranks, Mapping[str, str]]:
    """The same of Open MPI, whose launcher starts the ranks and binds each to a core where there are enough."""
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(num_workers), *MPI_OPTIONS[lane]]
    task = Task([*launcher, *python_module("collectives.mpi_job", sizes_argument(sizes), python=python)])
    return run_job([task], functools.partial(_read, num_ranks=num_workers))


def _read(result: Path, num_ranks: int) -> tuple[Ranks, Mapping[str, str]]:
    found = [json.loads(rank_path(result, rank).read_text()) for rank in range(num_ranks)]
    return [each["seconds"] for each in found], found[0]["versions"]


def _sample(ranks: Sequence[Sequence[float]]) -> Sample:
    """The slowest rank's time; the CPU of all ranks together."""
    return {"median_us": max(median for median, _ in ranks) * 1e6, "cpu_us": sum(cpu for _, cpu in ranks) * 1e6}
