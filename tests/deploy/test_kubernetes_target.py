"""Jobs of `sg.run()` on a real cluster: what is created, found, read, said of a job that waits, and deleted."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from stratagem.errors import SubmitError
from stratagem.launch.machines import MachineConfig
from stratagem.launch.manifests.kubernetes import render
from stratagem.launch.manifests.pod import Object
from stratagem.launch.manifests.workload import Workload
from stratagem.launch.submit import kubernetes_target
from stratagem.launch.submit.kubernetes_client import Cluster
from stratagem.launch.submit.kubernetes_target import FILE
from stratagem.launch.submit.record import JobRecord
from tests.deploy.cluster import Namespace, namespace, need_cluster

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:Unverified HTTPS request")]

JOB = Workload(
    "job", "python:3.11-slim", "train.py", num_workers=2, num_ps=1, access_mode="ReadWriteOnce", volume_gib=1
)
TASK = (
    "import os, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
    "print('I am', os.environ['STRATAGEM_TASK'], flush=True); "
)
SLEEP = "time.sleep(600)"
NUMBERS = itertools.count()


@pytest.fixture
def space() -> Iterator[Namespace]:
    need_cluster()
    with namespace(f"target-{os.getpid()}-{next(NUMBERS)}") as made:
        yield made


def with_program(objects: list[Object], program: str) -> list[Object]:
    """The same Jobs with another program, tried once."""
    for job in (each for each in objects if each["kind"] == "Job"):
        job["spec"] |= {"backoffLimit": 0}
        pod = job["spec"]["template"]["spec"]
        pod["restartPolicy"] = "Never"
        pod["containers"][0] |= {"command": ["python3", "-c", TASK + program]}
    return objects


def submitted(space: Namespace, folder: Path, objects: list[Object]) -> JobRecord:
    """A job of these objects, as `submit` leaves it."""
    cluster = Cluster(namespace=space.name)
    try:
        cluster.create(objects)
    finally:
        cluster.close()
    (folder / FILE).write_text(yaml.safe_dump_all(objects))
    place = {"context": cluster.context, "namespace": space.name, "kubeconfig": cluster.kubeconfig}
    return JobRecord("job", "kubernetes", "train.py", "ps", 2, 1, "2026-01-01T00:00:00+00:00", place=place)


def test_a_job_runs_and_leaves_nothing_when_it_is_removed(space: Namespace, tmp_path: Path) -> None:
    record = submitted(space, tmp_path, with_program(render(JOB), ""))
    assert list(kubernetes_target.logs(record, tmp_path, follow=True)) == ["I am worker:0"]
    state = kubernetes_target.state(record, tmp_path)
    assert (state.phase, state.exit_code) == ("succeeded", 0)
    space.until(lambda: all(job["status"].get("succeeded") for job in space.find("jobs")), "all have ended")
    lines = sorted(kubernetes_target.logs(record, tmp_path, follow=False))
    assert lines == [f"{task} | I am {task.replace('-', ':')}" for task in ("chief-0", "ps-0", "worker-0", "worker-1")]
    kubernetes_target.remove(record, tmp_path)
    space.until(lambda: not space.names(), "nothing is left")
    kubernetes_target.remove(record, tmp_path)  # what is gone does not matter
    assert kubernetes_target.state(record, tmp_path).phase == "unknown"


@pytest.mark.thorough
def test_cancel_waits_for_the_pods_and_keeps_the_volume(
    space: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = submitted(space, tmp_path, with_program(render(JOB), SLEEP))
    space.until(lambda: len(list(kubernetes_target.logs(record, tmp_path, follow=False))) == 4, "all run")
    assert kubernetes_target.state(record, tmp_path).phase == "running"
    cancelled = dataclasses.replace(record, cancelled=True)
    with monkeypatch.context() as patched:
        patched.setattr(kubernetes_target, "CANCEL_S", 0.0)
        kubernetes_target.cancel(record, tmp_path)
    state = kubernetes_target.state(cancelled, tmp_path)
    assert (state.phase, "; still there to save and end: " in state.detail) == ("cancelled", True), state
    kubernetes_target.cancel(record, tmp_path)
    assert kubernetes_target.state(cancelled, tmp_path).detail == "its Jobs are gone"
    assert space.find("pods") == []
    assert {name.partition("/")[0] for name in space.names()} == {
        "service",
        "configmap",
        "persistentvolumeclaim",
        "serviceaccount",
        "networkpolicy.networking.k8s.io",
    }
    kubernetes_target.remove(record, tmp_path)
    space.until(lambda: not space.names(), "nothing is left")


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("sys.exit(42 if os.environ['STRATAGEM_TASK'] == 'worker:1' else 1)", 42, "worker-1 has failed"),
        ("b'1' * 2**31", 137, "worker-0 has failed (OOMKilled: it needs more memory)"),
    ],
)
def test_a_failed_job_says_whose_failure_it_was(
    program: str, code: int, words: str, space: Namespace, tmp_path: Path
) -> None:
    objects = with_program(render(JOB), program)
    others = [each for each in objects if each["metadata"]["name"].endswith(("-chief-0", "-ps-0"))]
    with_program([each for each in objects if each["kind"] == "Job" and code == 42 and "worker-0" in str(each)], SLEEP)
    record = submitted(space, tmp_path, [each for each in objects if each not in others or code == 42])
    space.until(lambda: kubernetes_target.state(record, tmp_path).detail == words, words)
    assert kubernetes_target.state(record, tmp_path).exit_code == code


def waits(record: JobRecord, folder: Path, space: Namespace, *words: str) -> str:
    """Waits until the state says these words; returns all that it says."""

    def said() -> str:
        return kubernetes_target.state(record, folder).detail

    space.until(lambda: all(word in said() for word in words), f"{words} in the state")
    return said()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"worker": MachineConfig(64, 1)},
            ("worker-0, worker-1: not scheduled: 0/1 nodes are available", "Insufficient cpu", "worker_config"),
        ),
        (
            {"storage_class": "nowhere"},
            (
                "the volume job (ReadWriteOnce, class nowhere) is not bound: ",
                '"nowhere" not found (kubernetes_access_mode=',
                "chief-0, ps-0, worker-0, worker-1: not scheduled: ",
            ),
        ),
        (
            {"access_mode": "ReadWriteMany"},
            ("the volume job (ReadWriteMany, class standard) is not bound: ", "'ReadWriteOnce' (--access-mode)"),
        ),
        ({"token_secret": "nothing"}, ("chief-0, ps-0, worker-0, worker-1: MountVolume.SetUp failed", '"nothing"')),
        ({"image": "127.0.0.1:1/nothing:1"}, (": ErrImagePull: ", "127.0.0.1:1")),
    ],
    ids=["cores", "class", "mode", "secret", "image"],
)
def test_a_job_that_waits_says_why(
    changes: dict[str, Any], words: tuple[str, ...], space: Namespace, tmp_path: Path
) -> None:
    record = submitted(space, tmp_path, with_program(render(dataclasses.replace(JOB, **changes)), SLEEP))
    said = waits(record, tmp_path, space, *words)
    assert said.startswith("chief-0 "), said
    assert any(line.startswith("stratagem: ") for line in kubernetes_target.logs(record, tmp_path, follow=False))


@pytest.mark.thorough
def test_the_log_that_is_followed_says_what_the_job_waits_for(space: Namespace, tmp_path: Path) -> None:
    small = dataclasses.replace(JOB, ps=MachineConfig(64, 1))
    record = submitted(space, tmp_path, with_program(render(small), SLEEP))
    with contextlib.closing(cast("Generator[str]", kubernetes_target.logs(record, tmp_path, follow=True))) as lines:
        first, second = sorted([next(lines), next(lines)])  # worker 0 writes a line, and then nothing more
    assert first == "I am worker:0"
    assert second.startswith("stratagem: ps-0: not scheduled: 0/1 nodes are available: 1 Insufficient cpu")


def test_what_a_quota_refuses_is_said_and_taken_back(space: Namespace, tmp_path: Path) -> None:
    def allow(**hard: int) -> None:
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": {"hard": hard}}
        space.apply([quota])
        space.until(
            lambda: space.find("resourcequotas")[0]["status"].get("hard") == {k: str(v) for k, v in hard.items()},
            "a quota",
        )

    allow(**{"count/jobs.batch": 1})
    with pytest.raises(SubmitError, match=r"would not create Job job-worker-0: 403 .* exceeded quota: small"):
        submitted(space, tmp_path, with_program(render(JOB), SLEEP))
    space.until(lambda: not space.names(), "what was created before is taken back")
    allow(pods=0)
    record = submitted(space, tmp_path, with_program(render(JOB), SLEEP))
    waits(record, tmp_path, space, "worker-1: no pod: ", "exceeded quota: small")
