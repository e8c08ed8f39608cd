"""The training jobs of each system."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping

from benchmarks.collectives.jobs import tensorflow_environments, torch_environment
from benchmarks.hosts import Host, distant_hosts
from benchmarks.jobs import ROOT, Task, free_addresses, gpus, python_module, run_job, stratagem_run
from benchmarks.training.result import JobResult, read_result, read_results
from benchmarks.training.workloads import Workload

FIRST_PORT = 4000
"""On hosts of their own, where nobody else has ports."""


def run_alone(workload: Workload) -> JobResult:
    """One process, plain PyTorch, no communication: the compute floor."""
    command = python_module("training.alone_job", *_arguments(workload))
    return run_job([Task(command, gpus(workload.device))], read_result)


def run_fit(workload: Workload) -> list[JobResult]:
    """One process that trains in each of the ways of :mod:`benchmarks.training.fit_job`, in turns."""
    return run_job([Task(python_module("training.fit_job", *_arguments(workload)))], read_results)


def run_ps(
    workload: Workload, num_workers: int, num_ps: int, lane: str, *, tls: bool = False, in_step: bool = False
) -> JobResult:
    """A chief, ``num_ps`` parameter servers and ``num_workers`` workers that reach them over ``lane``; ``in_step``: at
    staleness 0."""
    options = ["--workers", str(num_workers), "--ps", str(num_ps), "--strategy", "ps", "--transport", lane]
    options += ["--tls", "auto"] if tls else []
    options += ["--staleness", "0"] if in_step else []
    command = stratagem_run("training/stratagem_job.py", _arguments(workload), *options)
    return run_job([Task(command, gpus(workload.device))], read_result)


def run_ps_apart(workload: Workload, num_workers: int, num_ps: int, lane: str, rtt_s: float) -> JobResult:
    """As :func:`run_ps`, all tasks started by hand: the workers on another host than chief and ps."""
    with distant_hosts(rtt_s) as (servers, workers):
        chief = f"{servers.address}:{FIRST_PORT}"

        def task(host: Host, role: str, *options: str) -> Task:
            return Task(host.command(sys.executable, "-m", "stratagem.cli", role, "--insecure", *options))

        joins = "--chief", chief, "--bind"
        script = [str(ROOT / "benchmarks/training/stratagem_job.py"), *_arguments(workload)]
        options = ["--strategy", "ps", "--transport", lane, *script]
        tasks = [
            *(
                task(workers, "worker", *joins, f"{workers.address}:0", "--task", f"worker:{index}", *options)
                for index in range(num_workers)
            ),
            task(servers, "chief", "--bind", chief, "--num-workers", str(num_workers), "--num-ps", str(num_ps)),
            *(task(servers, "ps", *joins, f"{servers.address}:0", "--task", f"ps:{index}") for index in range(num_ps)),
        ]
        return run_job(tasks, read_result, num_members=num_workers)


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


def run_tensorflow_ps(workload: Workload, num_workers: int, num_ps: int, python: str, rtt_s: float = 0.0) -> JobResult:
    """A coordinator, ``num_ps`` parameter servers and ``num_workers`` workers of TensorFlow over gRPC; the workers on
    another host than the others if ``rtt_s`` is not 0."""
    roles = ["chief"] + ["worker"] * num_workers + ["ps"] * num_ps
    command = python_module("training.tensorflow_ps_job", *_arguments(workload), python=python)
    with distant_hosts(rtt_s) if rtt_s else contextlib.nullcontext() as hosts:
        if hosts is None:
            addresses, commands = free_addresses(len(roles)), [command] * len(roles)
        else:
            places = [hosts[role == "worker"] for role in roles]
            addresses = [f"{host.address}:{FIRST_PORT + index}" for index, host in enumerate(places)]
            commands = [host.command(*command) for host in places]
        cluster: dict[str, list[str]] = {}
        tasks = []
        for role, address, own in zip(roles, addresses, commands, strict=True):
            cluster.setdefault(role, []).append(address)
            tasks.append((own, {"type": role, "index": len(cluster[role]) - 1}))
        return run_job(
            [Task(own, {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}) for own, task in tasks],
            read_result,
        )


def _arguments(workload: Workload) -> list[str]:
    return [workload.name, str(workload.warmup_steps), str(workload.timed_steps)]
