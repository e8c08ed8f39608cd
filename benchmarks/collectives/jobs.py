"""The all-reduce jobs of each system on this machine."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

from benchmarks.collectives.loop import RankResult
from benchmarks.collectives.result import read_ranks
from benchmarks.jobs import Task, free_addresses, python_module, run_job, stratagem_run


def run_stratagem(
    num_workers: int, sizes: Sequence[int], lane: str, wire: str, *, tls: bool = False
) -> list[RankResult]:
    """Our workers, started by ``stratagem run``."""
    options = ["--workers", str(num_workers), "--strategy", "ring", "--transport", lane, "--wire-dtype", wire]
    options += ["--tls", "auto"] if tls else []
    command = stratagem_run("collectives/stratagem_job.py", [lane, wire, sizes_argument(sizes)], *options)
    return run_job([Task(command)], functools.partial(read_ranks, num_ranks=num_workers))


def run_gloo(num_workers: int, sizes: Sequence[int]) -> list[RankResult]:
    """Processes of torch.distributed."""
    host, port = free_addresses(1)[0].split(":")
    command = python_module("collectives.gloo_job", sizes_argument(sizes))
    tasks = [Task(command, torch_environment(rank, num_workers, host, int(port))) for rank in range(num_workers)]
    return run_job(tasks, functools.partial(read_ranks, num_ranks=num_workers), num_members=num_workers)


def run_tensorflow(num_workers: int, sizes: Sequence[int], python: str) -> list[RankResult]:
    """Workers of TensorFlow's MultiWorkerMirroredStrategy."""
    command = python_module("collectives.tensorflow_job", sizes_argument(sizes), python=python)
    tasks = [Task(command, environment) for environment in tensorflow_environments(num_workers)]
    return run_job(tasks, functools.partial(read_ranks, num_ranks=num_workers), num_members=num_workers)


def torch_environment(rank: int, num_workers: int, host: str, port: int) -> dict[str, str]:
    """What ``init_process_group`` reads."""
    return {"RANK": str(rank), "WORLD_SIZE": str(num_workers), "MASTER_ADDR": host, "MASTER_PORT": str(port)}


def tensorflow_environments(num_workers: int) -> list[dict[str, str]]:
    """TF_CONFIG of each worker of a cluster of workers alone, on loopback."""
    cluster = {"worker": free_addresses(num_workers)}
    configs = [{"cluster": cluster, "task": {"type": "worker", "index": index}} for index in range(num_workers)]
    return [{"TF_CONFIG": json.dumps(config)} for config in configs]


def sizes_argument(sizes: Sequence[int]) -> str:
    """Sizes as the jobs read them."""
    return ",".join(f"{size}B" for size in sizes)
