"""Several hosts, as network namespaces: shared memory inside each, a ring between them, a link that goes dark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.hosts import Host, shaped_hosts, why_unavailable
from tests import forks
from tests.cluster.test_synchronous import check_equal, one_process

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
RATE_MBIT = 1000


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with shaped_hosts(2, RATE_MBIT) as made:
        yield made


def start(
    tasks: list[subprocess.Popen[str]], hosts: Sequence[Host], per_host: int, script: str, *arguments: object
) -> None:
    """A chief on the first host, and ``per_host`` workers on each; the namespaces are new, so every port is free."""
    places = [host for host in hosts for _ in range(per_host)]
    workers = [f"{host.address}:{4001 + index}" for index, host in enumerate(places)]
    cluster = {"chief": [f"{hosts[0].address}:4000"], "worker": workers}
    roles = [("chief", 0, hosts[0]), *(("worker", index, host) for index, host in enumerate(places))]
    for role, index, host in roles:
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}}),
            "PYTHONPATH": str(SCRIPTS.parents[2]),
            "OMP_NUM_THREADS": "1",
            "STRATAGEM_INSECURE": "true",
        }
        command = host.command(sys.executable, str(SCRIPTS / script), *map(str, arguments))
        tasks.append(forks.Popen(command, env=environment, stderr=subprocess.PIPE))


@pytest.mark.thorough
def test_two_hosts_with_two_workers_each_equal_one_process(
    hosts: list[Host], tasks: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    out = tmp_path / "ring.pt"
    start(tasks, hosts, 2, "train_small.py", "--optimizer", "momentum", "--out", out)
    expected = one_process(tmp_path, "--optimizer", "momentum")
    errors = [task.communicate(timeout=240)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0] * 5, "\n".join(errors)
    check_equal(expected, out)
    assert all("shm inside hosts, ring over tcp between them" in error for error in errors[1:]), errors[1]
    assert min(host.sent_bytes() for host in hosts) > 10_000


@pytest.mark.thorough
def test_a_host_that_falls_off_the_network_is_named(
    hosts: list[Host], tasks: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    # Half-open: the far process lives, but nothing comes and no connection is closed.
    out = tmp_path / "news"
    start(tasks, hosts, 1, "collectives.py", "break", 16 << 20, "dark", "--out", out)
    errors = [task.communicate(timeout=240)[1] for task in tasks[1:]]
    news = json.loads(Path(f"{out}.0").read_text()), json.loads(Path(f"{out}.fault").read_text())
    assert tasks[1].returncode == 7, errors[0]
    assert "worker:1" in news[0]["error"]
