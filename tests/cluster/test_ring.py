"""MultiWorkerMirroredStrategy with real processes: equal to one process, whatever the lane; a death is named at once.

Tolerance: 2e-6 relative and absolute after 8 to 15 updates in float32; sums of slices associate differently.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forks
from tests.cluster.test_by_hand import free_addresses
from tests.cluster.test_synchronous import check_equal, one_process

Start = Callable[..., Any]
SCRIPTS = Path(__file__).parent / "scripts"
TOLERANCE = 2e-6
NUM_STEPS = 8


def lane(name: str, *more: object) -> list[str]:
    return ["--strategy", "ring", "--transport", name, *map(str, more)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("alone") / "one.pt"
    command = [sys.executable, str(SCRIPTS / "train_examples.py"), "--strategy", "one", "--out", str(out)]
    forks.run(command, check=True, timeout=240, env={**os.environ, "PYTHONPATH": str(SCRIPTS.parents[2])})
    news: dict[str, Any] = torch.load(out, weights_only=True)
    return news


@pytest.mark.parametrize(
    ("workers", "transport"),
    [
        (2, "shm"),
        pytest.param(3, "tcp", marks=pytest.mark.thorough),
        pytest.param(4, "grpc", marks=pytest.mark.thorough),
    ],
)
def test_digits_and_charlm_equal_one_process(
    cluster: Start, tmp_path: Path, alone: dict[str, Any], workers: int, transport: str
) -> None:
    out = tmp_path / "ring.pt"
    cluster(workers, 0, "train_examples.py", "--out", out, flags=lane(transport)).succeed()
    for workload, ring in torch.load(out, weights_only=True).items():
        one = alone[workload]
        assert ring["num_agreed"] == NUM_STEPS == len(one["losses"])
        torch.testing.assert_close(ring["losses"], one["losses"], rtol=TOLERANCE, atol=TOLERANCE)
        for name, value in one["state"].items():
            torch.testing.assert_close(ring["state"][name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.mark.thorough
def test_uneven_and_empty_shares_clipping_and_a_schedule(cluster: Start, tmp_path: Path) -> None:
    # 50 examples in batches of 12: slices of 4, and a last batch of 2 in which the third worker has nothing.
    out = tmp_path / "ring.pt"
    arguments = ["--optimizer", "momentum", "--clip-norm", 0.05, "--decay"]
    job = cluster(3, 0, "train_small.py", *arguments, "--out", out)
    expected = one_process(tmp_path, *arguments)
    done = job.succeed()
    check_equal(expected, out)
    assert done.summary["examples"] == 150


@pytest.mark.thorough
def test_accumulation_equals_one_process(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "ring.pt"
    arguments = ["--optimizer", "adam", "--accumulate", 5]
    job = cluster(2, 0, "train_small.py", *arguments, "--out", out, flags=lane("tcp"))
    expected = one_process(tmp_path, *arguments)
    job.succeed()
    check_equal(expected, out)


@pytest.mark.thorough
def test_two_optimizers_equal_one_process(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "ring.pt"
    job = cluster(2, 0, "train_gan.py", "--out", out)
    expected = one_process(tmp_path, script="train_gan.py")
    job.succeed()
    check_equal(expected, out)


def start_ring(
    tasks: list[subprocess.Popen[str]], num_workers: int, transport: str, *arguments: object, timeout_s: float = 300.0
) -> None:
    """`python script.py` in every task of a cluster with a chief: nobody ends the others when one dies."""
    addresses = free_addresses(num_workers + 1)
    cluster = {"chief": addresses[:1], "worker": addresses[1:]}
    for role, index in [("chief", 0), *(("worker", index) for index in range(num_workers))]:
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}}),
            "PYTHONPATH": str(SCRIPTS.parents[2]),
            "OMP_NUM_THREADS": "1",
            "STRATAGEM_TRANSPORT": transport,
            "STRATAGEM_COLLECTIVE_TIMEOUT_S": str(timeout_s),
        }
        command = [sys.executable, str(SCRIPTS / "collectives.py"), *map(str, arguments)]
        tasks.append(forks.Popen(command, env=environment, stderr=subprocess.PIPE))


@pytest.mark.parametrize(
    "transport",
    [pytest.param("shm", marks=pytest.mark.thorough), "tcp", pytest.param("grpc", marks=pytest.mark.thorough)],
)
def test_a_peer_killed_in_the_middle_of_an_all_reduce_is_named_by_all(
    tasks: list[subprocess.Popen[str]], tmp_path: Path, transport: str
) -> None:
    out = tmp_path / "news"
    start_ring(tasks, 3, transport, "break", 64 << 20, "kill", "--out", out)
    errors = [task.communicate(timeout=240)[1] for task in (tasks[1], tasks[3], tasks[2])]
    assert [task.returncode for task in tasks[1:]] == [7, -9, 7], "\n".join(errors)
    fault = json.loads(Path(f"{out}.fault").read_text())
    assert "all_reduce sum of 16,777,216 float32" in fault["position"]
    for rank in (0, 2):
        news = json.loads(Path(f"{out}.{rank}").read_text())
        assert "worker:1" in news["error"], news
        assert "step " in news["error"] and "all_reduce" in news["error"]
        assert "worker:1" in news["again"]


@pytest.mark.thorough
def test_a_peer_that_stands_still_is_named_after_the_timeout(
    tasks: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    out = tmp_path / "news"
    start_ring(tasks, 3, "tcp", "break", 64 << 20, "stop", "--out", out, timeout_s=5.0)
    for task in (tasks[1], tasks[3]):
        task.communicate(timeout=240)
        assert task.returncode == 7
    for rank in (0, 2):
        assert "worker:1" in json.loads(Path(f"{out}.{rank}").read_text())["error"]


def test_ranks_that_part_are_both_named(cluster: Start, tmp_path: Path) -> None:
    done = cluster(2, 0, "collectives.py", "leave", "--out", tmp_path / "news").finish()
    assert done.code == 1
    text = done.stderr + "".join(path.read_text() for path in (tmp_path / "job-0" / "logs").glob("*.log"))
    assert "step 4, collective" in text and "all_reduce sum of 10 float32" in text
    assert "barrier" in text and "worker:1" in text


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_many_all_reduces_leave_nothing_behind(cluster: Start, tmp_path: Path, transport: str) -> None:
    num = int(os.environ.get("TEST_SOAK", "1000"))
    out = tmp_path / "news"
    job = cluster(2, 0, "collectives.py", "soak", num, 5, "--out", out, flags=lane(transport, "--chunk-bytes", 65536))
    job.succeed(timeout_s=110 + num / 20)
    for rank in range(2):
        news = json.loads(Path(f"{out}.{rank}").read_text())
        assert news["done"] == num
        for kind in ("threads", "descriptors", "memfd_mappings"):
            assert news["after"][kind] <= news["before"][kind], (kind, news)
        assert news["after"]["resident_bytes"] < news["before"]["resident_bytes"] + (24 << 20), news
