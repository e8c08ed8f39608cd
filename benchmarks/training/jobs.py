"""The training jobs of each system."""

from __future__ import annotations

import json
from collections.abc import Mapping

from benchmarks.collectives.jobs import tensorflow_environments, torch_environment
from benchmarks.jobs import Task, free_addresses, gpus, python_module, run_job, stratagem_run
from benchmarks.training.result import JobResult, read_result, read_results
from benchmarks.training.workloads import Workload


def run_alone(workload: Workload) -> JobResult:
    """One process, plain PyTorch, no communication: the compute floor."""
    command = python_module("training.alone_job", *_arguments(workload))
    return run_job([Task(command, gpus(workload.device))], read_result)


def run_fit(workload: Workload) -> list[JobResult]:
    """One process that trains in each of the ways of :mod:`benchmarks.training.fit_job`, in turns."""
    return run_job([Task(python_module("training.fit_job", *_arguments(workload)))], read_results)


def run_ps(workload: Workload, num_workers: int, num_ps: int, lane: str, *, tls: bool = False) -> JobResult:
    """A chief, ``num_ps`` parameter servers and ``num_workers`` workers that reach them over ``lane``."""
    options = ["--workers", str(num_workers), "--ps", str(num_ps), "--strategy", "ps", "--transport", lane]
    options += ["--tls", "auto"] if tls else []
    command = stratagem_run("training/stratagem_job.py", _arguments(workload), *options)
    return run_job([Task(command, gpus(workload.device))], read_result)


def run_bare(workload: Workload, num_workers: int, num_ps: int) -> JobResult:
    """``num_ps`` parameter servers and ``num_workers`` workers with nothing but their arithmetic and plain sockets."""
    ports = [address.split(":")[1] for address in free_addresses(num_ps)]
    workers = [
        Task(python_module("training.bare_job", "worker", *_arguments(workload), str(rank), str(num_workers), *ports))
        for rank in range(num_workers)
    ]
    servers = [Task(python_module("training.bare_job", "ps", port, str(num_ps), str(num_workers))) for port in ports]
    return run_job([*workers, *servers], read_result, num_members=num_workers)


def run_ring(workload: Workload, num_workers: int, lane: str) -> JobResult:
    """A chief and ``num_workers`` workers that all-reduce over ``lane``."""
    options = ["--workers", str(num_workers), "--strategy", "ring", "--transport", lane]
    command = stratagem_run("training/stratagem_job.py", [*_arguments(workload), lane], *options)
    return run_job([Task(command, gpus(workload.device))], read_result)


def run_ddp(
    workload: Workload, num_workers: int, environment: Mapping[str, str] | None = None, lane: str = "gloo"
) -> JobResult:
    """Processes of torch's DistributedDataParallel over gloo, or over a lane of ours; with ``environment`` beside what
    all jobs get."""
    backend, transport = ("gloo", {}) if lane == "gloo" else ("stratagem", {"STRATAGEM_TRANSPORT": lane})
    host, port = free_addresses(1)[0].split(":")
    command = python_module("training.ddp_job", *_arguments(workload), backend)
    more = {**transport, **gpus(workload.device), **(environment or {})}
    ranks = [torch_environment(rank, num_workers, host, int(port)) for rank in range(num_workers)]
    tasks = [Task(command, {**rank, **more}) for rank in ranks]
    return run_job(tasks, read_result, num_members=num_workers)


def run_tensorflow_ring(workload: Workload, num_workers: int, python: str) -> JobResult:
    """Workers of TensorFlow's MultiWorkerMirroredStrategy, RING over gRPC."""
    command = python_module("training.tensorflow_ring_job", *_arguments(workload), python=python)
    tasks = [Task(command, environment) for environment in tensorflow_environments(num_workers)]
    return run_job(tasks, read_result, num_members=num_workers)


def run_tensorflow_ps(workload: Workload, num_workers: int, num_ps: int, python: str) -> JobResult:
    """A coordinator, ``num_ps`` parameter servers and ``num_workers`` workers of TensorFlow over gRPC."""
    addresses = iter(free_addresses(num_workers + num_ps + 1))
    cluster = {
        "chief": [next(addresses)],
        "worker": [next(addresses) for _ in range(num_workers)],
        "ps": [next(addresses) for _ in range(num_ps)],
    }
    places = [(role, index) for role, members in cluster.items() for index in range(len(members))]
    configs = [{"cluster": cluster, "task": {"type": role, "index": index}} for role, index in places]
    command = python_module("training.tensorflow_ps_job", *_arguments(workload), python=python)
    return run_job([Task(command, {"TF_CONFIG": json.dumps(config)}) for config in configs], read_result)


def _arguments(workload: Workload) -> list[str]:
    return [workload.name, str(workload.warmup_steps), str(workload.timed_steps)]
