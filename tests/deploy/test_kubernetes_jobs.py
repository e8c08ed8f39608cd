"""Whole jobs on a real cluster: the example's manifests with a pod that goes, and a script that was submitted.

The short ones; `python -m tests.deploy.kubernetes_faults` has the others, and the table.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.cluster import namespace, need_cluster
from tests.deploy.containers import run
from tests.deploy.desk import Desk
from tests.deploy.kubernetes_faults import Fault, outcome_of
from tests.deploy.kubernetes_tools import CHART, KUSTOMIZE, unpacked

pytestmark = pytest.mark.timeout(1200)

TRAIN = """
import torch
import stratagem as sg

strategy = sg.strategy_from_environment()
with strategy.scope():
    model = torch.nn.Linear(2, 1)
model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))


def step(batch):
    optimizer.zero_grad()
    loss = model(batch[0]).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(16, 2) / 32)
for batch in strategy.distribute_dataset(torch.utils.data.DataLoader(data, batch_size=2)):
    strategy.run(step, args=(batch,))
print("trained with", type(strategy).__name__, "in", sg.run().id)
"""


@pytest.mark.parametrize(
    "fault",
    [
        Fault("renderer", "ps-0", "last checkpoint written", "killed"),
        pytest.param(Fault("overlay one-node", "worker-1", "training", "deleted"), marks=pytest.mark.thorough),
    ],
    ids=["ps-at-the-end", "worker"],
)
def test_a_job_completes_without_a_pod_that_goes(fault: Fault, image: str) -> None:
    need_cluster()
    came = outcome_of(fault, image)
    assert came.waiting == ""
    assert came.updates_lost == 0 and came.steps == 900


@pytest.mark.thorough
def test_helm_upgrade_gives_a_running_job_another_number_of_ps(image: str) -> None:
    need_cluster()
    values = {"image": image, "volume": {"accessMode": "ReadWriteOnce"}, "args": ["--epochs", "5000"]}
    with namespace(f"scale-{os.getpid()}") as space, unpacked() as tools:

        def release(verb: str, num_ps: int) -> None:
            given = {**values, "ps": {"count": num_ps}}
            options = ("--namespace", space.name, "--server-side=false")  # Kubernetes 1.20 knows no defaults there
            tools.helm(verb, "digits", str(CHART), *options, values=given)

        def status() -> Any:
            ask = ["stratagem", "status", "--chief", "127.0.0.1:2222", "--json"]
            return json.loads(space.kubectl("exec", "job/digits-chief-0", "--", *ask, code=None) or "{}")

        def trains(num_ps: int) -> bool:
            told = status()
            return bool(told and told["num_ps"] == num_ps and told["examples"] > trained)

        trained = 0
        release("install", 2)
        for num_ps in (2, 3, 1, 2):
            release("upgrade", num_ps)
            space.until(functools.partial(trains, num_ps), f"training with {num_ps} ps", 400.0)
            trained = status()["examples"]
        assert status()["updates_lost"] == 0
        pods = space.find("pods", "app.kubernetes.io/component=worker")
        assert [pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods] == [0, 0]


def test_helm_upgrade_with_another_image_changes_nothing_and_says_what_to_do() -> None:
    need_cluster()
    with namespace(f"image-{os.getpid()}") as space, unpacked() as tools:

        def release(verb: str, image: str, num_ps: int) -> None:
            options = ("--namespace", space.name, "--server-side=false")
            tools.helm(verb, "digits", str(CHART), *options, values={"image": image, "ps": {"count": num_ps}})

        release("install", "nowhere:1", 1)
        before = space.names()
        with pytest.raises(subprocess.CalledProcessError) as refused:
            release("upgrade", "nowhere:2", 2)
        advice = f"kubectl --namespace {space.name} delete job -l app.kubernetes.io/instance=digits"
        assert advice in refused.value.stderr
        assert {name for name in space.names() if not name.startswith("pod/")} <= before
        space.kubectl(*advice.split()[3:])
        release("upgrade", "nowhere:2", 2)
        release("upgrade", "nowhere:2", 3)
        assert "job.batch/digits-ps-2" in space.names()


def test_helm_install_waits_for_no_volume_that_is_being_deleted() -> None:
    """The new job took the old one's volume, lost it with the last of the old pods, and its own waited for ever."""
    need_cluster()
    with namespace(f"again-{os.getpid()}") as space, unpacked() as tools:

        def release(verb: str, *options: str) -> None:
            tools.helm(verb, "digits", *options, "--namespace", space.name)

        def hold(*finalizers: str) -> None:
            patch = json.dumps({"metadata": {"finalizers": finalizers}})
            space.kubectl("patch", "pvc", "digits", "--type=merge", "--patch", patch)

        install = ("install", str(CHART), "--server-side=false", "--set=image=nowhere:1")
        release(*install)
        hold("stratagem.test/held")
        release("uninstall")
        with pytest.raises(subprocess.CalledProcessError) as refused:
            release(*install)
        advice = f"kubectl --namespace {space.name} wait --for=delete --timeout=-1s pvc/digits"
        assert advice in refused.value.stderr
        assert not space.find("jobs")
        hold()
        space.kubectl(*advice.replace("-1s", "60s").split()[3:], code=None)  # an error: it may be gone by now
        release(*install)
        assert {"persistentvolumeclaim/digits", "job.batch/digits-ps-0"} <= space.names()


KEPT: list[tuple[dict[str, Any], dict[str, Any], str, bool]] = [
    ({"staleness": 2}, {"staleness": 0}, "keeps its staleness 2, and would end with 2 at staleness 0", False),
    ({"staleness": 0}, {"staleness": 0, "worker": {"count": 3}}, "keeps its staleness 0 and worker.count 2", False),
    ({"staleness": 0}, {"staleness": 0, "ps": {"count": 3}}, "another number of tasks", True),
    ({"ps": {"count": 0}}, {"ps": {"count": 0}, "worker": {"count": 3}}, "another number of tasks", True),
    ({}, {"volume": {"accessMode": "ReadWriteOnce"}}, "accessMode ReadWriteMany and storageClassName", False),
    ({}, {"volume": {"storageClassName": "another"}}, "which Kubernetes never changes", False),
    ({}, {"labels": {"team": "x"}}, "strategy, label, port or Secret", True),
    ({}, {"volume": {"sizeGib": 9}}, "has 10 GiB, and Kubernetes never makes one smaller", False),
    ({"volume": {"sizeGib": 2048}}, {"volume": {"sizeGib": 2047}}, "take volume.sizeGib=2048 again", False),
    ({}, {"ps": {"count": 0}}, "another image, script, argument, machine, strategy, label, port or Secret", True),
]


def test_helm_upgrade_refuses_what_a_job_keeps() -> None:
    need_cluster()
    with namespace(f"kept-{os.getpid()}") as space, unpacked() as tools:

        def release(verb: str, name: str, values: dict[str, Any]) -> None:
            options = ("--namespace", space.name, "--server-side=false")
            tools.helm(verb, name, str(CHART), *options, values={"image": "nowhere:1", **values})

        for number, (before, after, words, ends_with_the_jobs) in enumerate(KEPT):
            name = f"job-{number}"
            release("install", name, before)
            release("upgrade", name, before)
            with pytest.raises(subprocess.CalledProcessError) as refused:
                release("upgrade", name, after)
            assert words in refused.value.stderr
            space.kubectl("delete", "job", "-l", f"app.kubernetes.io/instance={name}", "--wait=false")
            space.until(lambda: not space.find("jobs"), "the Jobs are gone")
            with contextlib.nullcontext() if ends_with_the_jobs else pytest.raises(subprocess.CalledProcessError):
                release("upgrade", name, after)
            space.kubectl("delete", "job", "--all", "--wait=false")
            space.until(lambda: not space.find("jobs"), "the Jobs are gone")


def test_helm_upgrade_adds_no_task_to_a_job_that_is_over() -> None:
    """It waited for the chief, for 900 s and again."""
    need_cluster()
    with namespace(f"over-{os.getpid()}") as space, unpacked() as tools:

        def release(verb: str, num_ps: int) -> None:
            values = {"image": "nowhere:1", "ps": {"count": num_ps}}
            tools.helm(verb, "digits", str(CHART), "--namespace", space.name, "--server-side=false", values=values)

        release("install", 2)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        ended = {"status": "True", "lastTransitionTime": now}
        status = {
            "succeeded": 1,
            "startTime": now,
            "completionTime": now,
            "conditions": [{"type": kind, **ended} for kind in ("SuccessCriteriaMet", "Complete")],
        }
        patch = json.dumps({"status": {**status, "active": 0}})
        space.kubectl("patch", "job", "digits-chief-0", "--subresource=status", "--type=merge", f"--patch={patch}")
        release("upgrade", 2)
        with pytest.raises(subprocess.CalledProcessError) as refused:
            release("upgrade", 3)
        assert "the job digits is over: digits-ps-2 would find no chief" in refused.value.stderr


def test_files_of_a_job_that_is_over(image: str, tmp_path: Path) -> None:
    need_cluster()
    readme = (KUSTOMIZE / "README.md").read_text()
    block, commands = re.findall(r"(kind: Pod\n.*?)```\n\n```bash\n(.*?)```", readme, re.DOTALL)[0]
    pod = yaml.safe_load(f"apiVersion: v1\n{block}")
    (container,) = pod["spec"]["containers"]
    container["image"] = image
    with namespace(f"files-{os.getpid()}") as space, unpacked() as tools:
        values = {"image": "nowhere:1", "volume": {"accessMode": "ReadWriteOnce"}}
        tools.helm("install", "digits", str(CHART), "-n", space.name, "--server-side=false", values=values)
        space.kubectl("delete", "job", "--all")
        (mount,) = container["volumeMounts"]
        write = ["sh", "-c", "mkdir /job/checkpoints && echo whole > /job/checkpoints/latest"]
        writer = {**container, "name": "writer", "command": write, "volumeMounts": [{**mount, "readOnly": False}]}
        pod["spec"]["initContainers"] = [writer]
        (tmp_path / "files.yaml").write_text(yaml.safe_dump(pod))
        for command in commands.splitlines():
            run(["kubectl", "--namespace", space.name, *shlex.split(command)[1:]], folder=tmp_path)
        assert (tmp_path / "checkpoints" / "latest").read_text() == "whole\n"


@pytest.mark.thorough
def test_a_submitted_script_trains_and_is_removed(desk: Desk, image: str, registry: str) -> None:
    need_cluster()
    (desk.folder / "train.py").write_text(TRAIN)
    where = ["--target=kubernetes", f"--registry={registry}/team", f"--base-image={image}", "--build-network=host"]
    what = ["--workers=1", "--ps=1", "--worker-config=0.4:1", "--ps-config=0.2:1", "--access-mode=ReadWriteOnce"]
    with namespace(f"submit-{os.getpid()}") as space:
        done = desk.stratagem("submit", *where, *what, f"--namespace={space.name}", "--stream-logs", "train.py")
        (job,) = desk.jobs()
        assert f"trained with ParameterServerStrategy in {job['id']}" in done.stdout
        assert (job["state"]["phase"], job["state"]["exit_code"]) == ("succeeded", 0)
        desk.stratagem("jobs", "remove", job["id"])
        space.until(lambda: not space.names(), "nothing is left")
        assert desk.jobs() == []
