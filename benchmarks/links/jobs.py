"""The jobs of each system on hosts of their own. Ports are free there: nobody else is in these networks."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence

from benchmarks.collectives.jobs import sizes_argument, torch_environment
from benchmarks.collectives.loop import RankResult
from benchmarks.collectives.result import read_ranks
from benchmarks.hosts import INTERFACE, Host
from benchmarks.jobs import ROOT, Task, python_module, run_job

CHIEF_PORT = 4000
WORKER_PORT = 4001
GLOO_PORT = 4002
GOODPUT_PORT = 4003


def measure_goodput(hosts: Sequence[Host]) -> float:
    """Bytes per second of a plain socket from the first host to the second."""
    ends = [("receive", hosts[1]), ("send", hosts[0])]
    tasks = [
        Task(host.command(*python_module("links.goodput_job", side, hosts[1].address, str(GOODPUT_PORT))))
        for side, host in ends
    ]
    return run_job(tasks, lambda path: float(json.loads(path.read_text())), num_members=2)


def run_stratagem(hosts: Sequence[Host], sizes: Sequence[int], lane: str, wire: str) -> list[RankResult]:
    """One worker of ours on each host, and the chief beside the first, all started by hand."""
    chief = f"{hosts[0].address}:{CHIEF_PORT}"
    cluster = {"chief": [chief], "worker": [f"{host.address}:{WORKER_PORT}" for host in hosts]}
    script = [str(ROOT / "benchmarks/collectives/stratagem_job.py"), lane, wire, sizes_argument(sizes)]
    options = ["--insecure", "--strategy", "ring", "--transport", lane, "--wire-dtype", wire]
    workers = [
        Task(
            host.command(sys.executable, "-m", "stratagem.cli", "worker", *options, *script),
            {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})},
        )
        for index, host in enumerate(hosts)
    ]
    serve = ["chief", "--insecure", "--bind", chief, "--num-workers", str(len(hosts))]
    server = Task(hosts[0].command(sys.executable, "-m", "stratagem.cli", *serve))
    return run_job([*workers, server], _reader(hosts), num_members=len(hosts))


def run_gloo(hosts: Sequence[Host], sizes: Sequence[int]) -> list[RankResult]:
    """One process of torch.distributed on each host."""
    tasks = []
    for rank, host in enumerate(hosts):
        environment = torch_environment(rank, len(hosts), hosts[0].address, GLOO_PORT)
        command = host.command(*python_module("collectives.gloo_job", sizes_argument(sizes)))
        tasks.append(Task(command, {**environment, "GLOO_SOCKET_IFNAME": INTERFACE}))
    return run_job(tasks, _reader(hosts), num_members=len(hosts))


def _reader(hosts: Sequence[Host]) -> functools.partial[list[RankResult]]:
    return functools.partial(read_ranks, num_ranks=len(hosts))
