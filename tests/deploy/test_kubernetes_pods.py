"""The environments of the rendered pods form a cluster: they find each other by name, train, survive, and end."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import why_unavailable
from stratagem.launch.certificates import make_throw_away
from stratagem.launch.manifests import kubernetes
from stratagem.launch.manifests.pod import JOB_FOLDER
from stratagem.launch.manifests.workload import Workload
from tests.deploy.pods import Pods, pods_of

pytestmark = [
    pytest.mark.usefixtures("preloaded"),
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
    pytest.mark.timeout(300),
]
SCRIPTS = "tests/cluster/scripts"
JOB = Workload(
    "job",
    "stratagem",
    f"{SCRIPTS}/train_until.py",
    ("--until", f"{JOB_FOLDER}/until", "--limit-s", "250"),
    num_workers=2,
    num_ps=2,
    checkpoint_every_s=2,
    tls_secret="job-tls",
)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    one_more = dataclasses.replace(JOB, num_workers=JOB.num_workers + 1)
    make_throw_away(tmp_path / JOB.tls_secret, ["chief:0", "ps:0", "ps:1", "worker:0", "worker:1", "worker:2"])
    with pods_of(kubernetes.render(JOB), tmp_path, later=kubernetes.render(one_more)) as running:
        yield running


def steps_of(pods: Pods, task: str, certificates: Path) -> int:
    """Steps that the chief knows of; 0 while it does not know the task."""
    ask = ("stratagem", "status", "--chief", "127.0.0.1:2222", "--json", "--tls", str(certificates))
    said = pods["chief-0"].execute(*ask)
    tasks = json.loads(said.stdout)["tasks"] if said.returncode == 0 else []
    return next((each["step"] for each in tasks if each["task"] == task), 0)


@pytest.mark.thorough
def test_a_job_lives_through_a_drain_one_more_worker_and_the_death_of_its_chief(pods: Pods, tmp_path: Path) -> None:
    def until_said(pod: str, words: str, times: int = 1) -> None:
        pods.until(lambda: pods[pod].text().count(words) >= times, f"{pod} says {words!r} {times} times")

    pods.start("ps-0", "ps-1", "worker-1")
    until_said("ps-0", "Listening on 0.0.0.0:2222, with TLS")
    assert pods["ps-0"].probe("livenessProbe")
    assert not pods["ps-0"].probe("readinessProbe")  # it has not registered: there is no chief yet
    pods.start("worker-0", "chief-0")
    until_said("worker-0", "Cluster is ready")
    assert all(pods[name].probe("readinessProbe") for name in ("chief-0", "ps-0", "worker-0"))

    pods["worker-1"].signal(signal.SIGTERM)
    until_said("worker-1", "Cluster is ready", times=2)
    pods.start("worker-2")
    pods.until(lambda: steps_of(pods, "worker:2", tmp_path / JOB.tls_secret) > 0, "worker-2 trains")
    pods["chief-0"].signal(signal.SIGKILL)
    for name in ("ps-0", "ps-1", "worker-0", "worker-1", "worker-2"):
        until_said("chief-0", f"resumed at {name}.job:2222")

    (tmp_path / "until").touch()
    pods.until_done()
    codes = {name: pods[name].exit_codes for name in ("worker-1", "chief-0")}
    assert codes == {"worker-1": [143, 0], "chief-0": [-signal.SIGKILL, 0]}, pods.logs()
    assert all(pods[name].exit_codes == [0] for name in ("ps-0", "ps-1", "worker-0", "worker-2")), pods.logs()
    assert "joined at worker-2.job:2222" in pods["chief-0"].text()
    assert not (tmp_path / "worker-0" / "tls" / "ps-0.key").exists()


@pytest.mark.thorough
def test_a_drained_worker_of_a_ring_takes_the_job_to_a_checkpoint_and_on(tmp_path: Path) -> None:
    ring = Workload(
        "ring",
        "stratagem",
        f"{SCRIPTS}/train_preempted.py",
        ("--by", "fit", "--folder", f"{JOB_FOLDER}/backup", "--out", f"{JOB_FOLDER}/out.pt"),
        num_workers=2,
        environment={
            "TEST_FAULTS": json.dumps([{"task": "worker:1", "step": 7, "action": "terminate"}]),
            "TEST_FAULTS_DIR": JOB_FOLDER,
        },
    )
    with pods_of(kubernetes.render(ring), tmp_path) as pods:
        pods.start()
        pods.until_done()
        assert pods["worker-0"].exit_codes == pods["worker-1"].exit_codes == [143, 0], pods.logs()
        assert pods["chief-0"].exit_codes == [0]
        assert "Resuming at epoch 2" in pods["worker-1"].text()
        assert (tmp_path / "out.pt").exists()
