"""`sg.run()` into containers: a real engine, a real registry; Kubernetes is kmock behind the real client."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stratagem as sg
from stratagem.launch.manifests.kubernetes import render
from stratagem.launch.manifests.workload import Workload
from stratagem.launch.submit import compose_target
from stratagem.launch.submit.build_context import IgnoreRules, read_context
from stratagem.launch.submit.compose_target import FILE
from stratagem.launch.submit.record import JobRecord
from stratagem.launch.submit.request import machine_of
from tests.deploy.containers import need_engine, run, wait_for
from tests.deploy.desk import Desk, answers
from tests.unit.launch.submit.api_server import api_server

pytestmark = pytest.mark.timeout(600)

TRAIN = """
import os, pathlib, sys
import stratagem as sg

job = sg.run(
    requirements_txt="requirements.txt", docker_base_image={image!r}, worker_count=2, entry_point_args=["--lr", "$x"],
    target="compose", docker_build_network="host", job_labels={{"team": "vision"}},
    worker_config=sg.MachineConfig(cpu_cores=64, memory_gib=2),
)
import iniconfig  # of requirements.txt
import torch

strategy = sg.strategy_from_environment()
with strategy.scope():
    model = torch.nn.Linear(2, 1)
model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
optimizer.zero_grad()
loss = model(torch.ones(1, 2)).sum()
loss.backward()
optimizer.step()
print("trained with", type(strategy).__name__, sys.argv[1:], "in", job.id, "as", os.getuid())
pathlib.Path(job.folder, f"done-{{os.environ['RANK']}}").touch()
sys.exit(7 if os.environ["RANK"] == "1" else 0)
"""
WAIT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("waiting", flush=True)
while True:
    time.sleep(0.1)
"""


def of_job(kind: str, job_id: str) -> list[str]:
    """What the engine has of a job: "container", "volume" or "network"."""
    everything = ["--all"] if kind == "container" else []
    label = f"label=com.docker.compose.project={job_id}"
    return run(["docker", kind, "ls", *everything, "--quiet", "--filter", label]).stdout.split()


def test_a_script_runs_as_a_compose_project(desk: Desk, image: str) -> None:
    (desk.folder / "train.py").write_text(TRAIN.format(image=image))
    (desk.folder / "requirements.txt").write_text("iniconfig==2.3.0\n")
    run([sys.executable, "train.py"], folder=desk.folder, environ=desk.environ)
    (job,) = desk.jobs()
    followed = desk.stratagem("jobs", "logs", "--follow", job["id"], code=7)
    words = f"trained with MultiWorkerMirroredStrategy ['--lr', '$x'] in {job['id']} as 10001"
    assert followed.stdout.count(words) == 2, followed.stdout
    (after,) = desk.jobs()
    assert (after["state"]["phase"], after["state"]["exit_code"]) == ("failed", 7)
    assert after["state"]["detail"] == "worker-1 ended with exit code 7"
    containers = of_job("container", job["id"])
    assert len(containers) == 3
    for container in json.loads(run(["docker", "inspect", *containers]).stdout):
        assert container["Config"]["Labels"]["team"] == "vision"
        assert container["HostConfig"]["ReadonlyRootfs"] and container["HostConfig"]["CapDrop"] == ["ALL"]
    (volume,) = of_job("volume", job["id"])
    listed = run(
        ["docker", "run", "--rm", "--network=none", "-v", f"{volume}:/v", "--entrypoint=ls", image, "/v"]
    ).stdout
    assert {"done-0", "done-1"} <= set(listed.split())
    desk.stratagem("jobs", "remove", job["id"])
    assert [of_job(kind, job["id"]) for kind in ("container", "volume", "network")] == [[], [], []]
    assert run(["docker", "image", "ls", "--quiet", job["image"]]).stdout == ""


CELLS = (
    "!echo a command of a cell",
    "import stratagem as sg",
    "if sg.remote(): print('cells in', sg.run().id, 'with', sg.strategy_from_environment().task)",
)


def test_cells_of_a_kernel_run_as_a_compose_project(desk: Desk, image: str) -> None:
    options = f"worker_count=2, ps_count=1, docker_base_image={image!r}, docker_build_network='host'"
    printed = desk.execute(*CELLS, f"job = sg.run(target='compose', {options})", "print('submitted', job.id)")
    (job,) = desk.jobs()
    assert f"submitted {job['id']}" in printed and "cells in" not in printed
    followed = desk.stratagem("jobs", "logs", "--follow", job["id"])
    assert followed.stdout.count("a command of a cell") == followed.stdout.count(f"cells in {job['id']}") == 2
    assert (desk.jobs()[0]["state"]["phase"], len(of_job("container", job["id"]))) == ("succeeded", 4)


def test_cancel_stops_the_containers_and_keeps_the_logs(desk: Desk, image: str) -> None:
    (desk.folder / "wait.py").write_text(WAIT)
    options = ["--target", "compose", "--base-image", image, "--build-network", "host"]
    job_id = desk.stratagem("submit", *options, "wait.py").stdout.strip()
    wait_for(lambda: "waiting" in desk.stratagem("jobs", "logs", job_id).stdout, "the script to run")
    assert desk.jobs()[0]["state"]["phase"] == "running"
    assert desk.stratagem("jobs", "remove", job_id, code=2).stderr
    cancelled = desk.stratagem("jobs", "cancel", job_id).stderr
    assert "cancelled, exit code 143" in cancelled
    assert "waiting" in desk.stratagem("jobs", "logs", job_id).stdout


def test_a_build_that_fails_says_why_and_leaves_no_job(desk: Desk) -> None:
    need_engine()
    (desk.folder / "wait.py").write_text(WAIT)
    options = ["--target", "compose", "--base-image", "python:3.11-slim", "--build-network", "host"]
    failed = desk.stratagem("submit", *options, "wait.py", code=1)
    assert f"the base image python:3.11-slim has no stratagem {sg.__version__}" in failed.stderr
    assert desk.jobs() == []


@pytest.fixture
def light_image(clone: Path, tmp_path: Path) -> Iterator[str]:
    """The sources without torch: a gigabyte less to push."""
    need_engine()
    name = f"stratagem-test-light:{os.getpid()}"
    lines = ("FROM python:3.11-slim", "RUN pip install --quiet lazy_loader", "COPY . /src", "ENV PYTHONPATH=/src")
    (tmp_path / "Dockerfile").write_text("\n".join(lines))
    command = ["docker", "build", "--quiet", "--network=host", "--file", str(tmp_path / "Dockerfile")]
    run([*command, "--tag", name, str(clone)])
    yield name
    run(["docker", "image", "rm", "--force", name])


@pytest.mark.parametrize("target", ["compose", "kubernetes"])
def test_a_push_that_fails_leaves_neither_job_nor_image(
    desk: Desk, light_image: str, tmp_path: Path, target: str
) -> None:
    (desk.folder / "wait.py").write_text(WAIT)
    options = [f"--target={target}", "--registry=127.0.0.1:9/team", "--workers=1", f"--base-image={light_image}"]
    with api_server(tmp_path) as server:
        server.add_namespace()
        desk.environ["KUBECONFIG"] = str(server.kubeconfig)
        failed = desk.stratagem("submit", *options, "--build-network=host", "wait.py", code=1)
    assert "docker could not push the image 127.0.0.1:9/team/wait-" in failed.stderr
    assert desk.jobs() == []
    assert run(["docker", "image", "ls", "--quiet", "--filter", "reference=127.0.0.1:9/team/*"]).stdout == ""


def test_what_kubernetes_gets_is_what_render_shows_of_the_pushed_image(
    desk: Desk, light_image: str, registry: str, tmp_path: Path
) -> None:
    (desk.folder / "wait.py").write_text(WAIT)
    options = ["--target=kubernetes", f"--registry={registry}/team", "--label=team=vision", "--workers=2", "--ps=1"]
    image_options = [f"--base-image={light_image}", "--build-network=host"]
    with api_server(tmp_path) as server:
        server.add_namespace()
        desk.environ["KUBECONFIG"] = str(server.kubeconfig)
        job_id = desk.stratagem("submit", *options, *image_options, "wait.py", "--lr", "1").stdout.strip()
        (job,) = desk.jobs()
        assert (job["id"], job["state"]["phase"], job["place"]["namespace"]) == (job_id, "pending", "team")
        digest = job["image"].removeprefix(f"{registry}/team/{job_id}@")
        assert digest.startswith("sha256:")
        assert answers(f"http://{registry}/v2/team/{job_id}/manifests/{digest}")
        workload = Workload(
            name=job_id,
            image=job["image"],
            script="wait.py",
            args=("--lr", "1"),
            num_workers=2,
            num_ps=1,
            strategy="ps",
            worker=machine_of("auto", ""),
            ps=machine_of("auto", ""),
            environment={
                "STRATAGEM_DEVICES": "cpu",
                "STRATAGEM_JOB_ID": job_id,
                "STRATAGEM_JOB_TARGET": "kubernetes",
                "STRATAGEM_JOB_IMAGE": job["image"],
                "STRATAGEM_JOB_DIR": "/var/lib/stratagem",
            },
            labels={"team": "vision"},
        )
        assert server.posted == render(workload)
        desk.stratagem("jobs", "cancel", job_id)
        assert desk.jobs()[0]["state"]["phase"] == "cancelled"
        desk.stratagem("jobs", "remove", job_id)
        assert server.names == set() and desk.jobs() == []
    assert run(["docker", "image", "ls", "--quiet", f"{registry}/team/{job_id}"]).stdout == ""


def test_cells_of_a_kernel_reach_kubernetes_in_an_image(
    desk: Desk, light_image: str, registry: str, tmp_path: Path
) -> None:
    with api_server(tmp_path) as server:
        server.add_namespace()
        desk.environ["KUBECONFIG"] = str(server.kubeconfig)
        options = f"docker_base_image={light_image!r}, docker_build_network='host', worker_count=2"
        run_cell = f"job = sg.run(target='kubernetes', docker_image_bucket_name='{registry}/team', {options})"
        printed = desk.execute(*CELLS, run_cell, "print('submitted', job.id)")
        (job,) = desk.jobs()
        assert f"submitted {job['id']}" in printed
        workers = [one for one in server.posted if one["metadata"]["name"].startswith(f"{job['id']}-worker")]
        (container,) = workers[1]["spec"]["template"]["spec"]["containers"]
        assert (len(workers), container["image"]) == (2, job["image"])
        assert container["command"][-1] == "notebook_cells.py", container
        script = run(["docker", "run", "--rm", "--network=none", job["image"], "cat", "notebook_cells.py"]).stdout
        assert "_subprocess.run(['echo'" in script and "cells in" in script and "submitted" not in script
        desk.stratagem("jobs", "cancel", job["id"])
        desk.stratagem("jobs", "remove", job["id"])


TREE = (
    "a.py",
    "b.md",
    "README.md",
    "data/x.bin",
    "data/deep/y.txt",
    "src/c.py",
    "src/d.log",
    "src/sub/e.log",
    ".h/f",
)


@pytest.mark.parametrize(
    "lines",
    [
        "*.md\n!README.md\ndata\n",
        "*\n!src\nsrc/**/*.log\n",
        "**/*.log\n!src/d.log\n/data/deep\n.h",
        "*/*\n!data/deep/y.txt\n[ab].*",
        "# comment\n\n./src/\n**/y.*\n!src/sub",
    ],
)
def test_dockerignore_means_here_what_it_means_to_docker(lines: str, tmp_path: Path) -> None:
    need_engine()
    tree = tmp_path / "tree"
    for name in TREE:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    (tree / ".dockerignore").write_text(lines)
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    command = ["docker", "build", "--quiet", "--file", str(tmp_path / "Dockerfile")]
    run([*command, "--output", f"type=local,dest={tmp_path / 'out'}", str(tree)])
    docker = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert set(read_context(tree).files) == docker
    assert {name for name in TREE if not IgnoreRules(lines).ignores(name)} == docker & set(TREE)


def test_a_job_whose_task_had_too_little_memory_says_so(tmp_path: Path) -> None:
    need_engine()
    name = f"memory-{os.getpid()}"
    service = {"image": "python:3.11-slim", "deploy": {"resources": {"limits": {"memory": "64m"}}}}
    service |= {"command": ["python3", "-c", "b'1' * 2**31"]}
    (tmp_path / FILE).write_text(json.dumps({"name": name, "services": {"worker-0": service}}))
    compose = ["docker", "compose", "--file", str(tmp_path / FILE)]
    run([*compose, "up", "--detach"])
    try:
        record = JobRecord(name, "compose", "train.py", "one", 1, 0, "2026-01-01")
        wait_for(lambda: compose_target.state(record, tmp_path).is_over, "its end")
        state = compose_target.state(record, tmp_path)
        assert state.detail == "worker-0 ended with exit code 137 (OOMKilled: it needs more memory)"
    finally:
        run([*compose, "down", "--timeout", "1"])
