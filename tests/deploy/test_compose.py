"""docker-compose.yml and its overlays on a real engine: what the README promises of `docker compose up`."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.containers import ROOT, Project, need_engine, run, wait_for

pytestmark = pytest.mark.timeout(1500)

Make = Callable[..., Project]
OVERLAYS = [(), ("tls",), ("gpu",), ("metrics",), ("web",), ("tls", "gpu", "metrics", "web")]


@pytest.mark.parametrize("overlays", OVERLAYS, ids="+".join)
def test_every_file_is_valid(overlays: tuple[str, ...]) -> None:
    need_engine()
    files = ["docker-compose.yml", *(f"deploy/compose/{name}.yml" for name in overlays)]
    flags = [word for file in files for word in ("-f", file)]
    environ = {"WORKER_TIMEOUT_S": "600", "PEER_TIMEOUT_S": "601"}
    done = run(["docker", "compose", *flags, "--profile", "*", "config"], folder=ROOT, environ=environ)
    assert 'STRATAGEM_WORKER_TIMEOUT_S: "600"' in done.stdout
    assert done.stdout.count('STRATAGEM_PEER_TIMEOUT_S: "601"') >= 4
    assert "STRATAGEM_NUM_WORKERS" in done.stdout
    assert "STRATAGEM_ADVERTISE: chief:2222" in done.stdout
    assert done.stdout.count("timeout: 1m0s") >= 3
    assert ("driver: nvidia" in done.stdout) == ("gpu" in overlays)
    assert ("/run/secrets/worker" in done.stdout) == ("tls" in overlays)


def accuracy(output: str) -> float:
    found = re.search(r"held-out accuracy ([\d.]+)% on 360", output)
    assert found is not None, output
    return float(found[1])


def check_result(job: Project) -> None:
    """Ended with 0 and 97 %; checkpoint and export can be read."""
    assert job.finish() == 0, job.output
    assert "other machines cannot use" not in job.output
    assert accuracy(job.output) >= 97.0
    for service, count in (("chief", 1), ("ps", 2), ("worker", 2)):
        for number in range(1, count + 1):
            state = job.container(service, number)["State"]
            assert (state["ExitCode"], state["OOMKilled"]) == (0, False), job.output
    assert "every file is as it was written" in job.in_volume(
        "stratagem", "checkpoint", "verify", "/var/lib/stratagem/checkpoints"
    )
    script = "import torch; print(len(torch.load('/var/lib/stratagem/digits.pt', weights_only=True)))"
    assert job.in_volume("python", "-c", script).strip() == "8"


def show_curves(job: Project) -> None:
    """TensorBoard, after the job, has what its lead drew."""
    job.compose("--profile", "tensorboard", "up", "--detach", "--no-deps", "tensorboard")
    wait_for(lambda: health(job, "tensorboard") == "healthy", "TensorBoard", lambda: job.compose("logs", "tensorboard"))
    url = "http://127.0.0.1:6006/data/plugin/scalars/tags"
    script = f"import urllib.request; print(urllib.request.urlopen('{url}').read().decode())"
    assert "examples_per_s" in job.compose(
        "--profile", "tensorboard", "exec", "-T", "tensorboard", "python", "-c", script
    )


def health(job: Project, service: str, number: int = 1) -> str:
    return str(job.container(service, number)["State"].get("Health", {}).get("Status"))


def test_a_killed_worker_and_a_restarted_ps_change_nothing(project: Make) -> None:
    kept = "--export /var/lib/stratagem/digits.pt --logs /var/lib/stratagem/logs"
    script = f"examples/digits.py --epochs 80 {kept} --min-accuracy 0.97"
    job = project(SCRIPT=script)
    job.up("--scale", "worker=3")
    job.wait_for("  loss ")
    for service in ("chief", "ps"):
        assert health(job, service) == "healthy"  # else the workers had not been started
    for service in ("chief", "ps", "worker"):
        facts = job.container(service)
        assert facts["HostConfig"]["ReadonlyRootfs"] and facts["Config"]["User"] == "10001:10001"
        assert facts["HostConfig"]["CapDrop"] == ["ALL"] and facts["HostConfig"]["Memory"] > 0
        assert not facts["NetworkSettings"]["Ports"]
    # From outside of the container, as the kernel does when memory runs out: `docker kill` would rule out a restart.
    os.kill(job.container("worker", 2)["State"]["Pid"], signal.SIGKILL)
    job.wait_for("worker:1 (incarnation")
    wait_for(lambda: job.container("worker", 2)["RestartCount"] == 1, "a restart of the worker", lambda: job.output)
    run(["docker", "restart", f"{job.name}-ps-1"])
    job.wait_for("is lost: it was shut down, and has handed over what it held")
    job.wait_for(": 0 updates lost")
    wait_for(lambda: "healthy" in (health(job, "worker", n) for n in (1, 3)), "healthy workers", lambda: job.output)
    check_result(job)
    show_curves(job)
    assert "worker:2 (incarnation" in job.output, "the third worker did not join"
    assert job.container("worker", 3)["State"]["ExitCode"] == 0


def test_ps_come_and_go_while_the_job_runs(project: Make) -> None:
    job = project(SCRIPT="examples/digits.py --epochs 5000")
    job.up()
    job.wait_for("  loss ")
    for num_ps in (3, 1, 2):
        job.compose("up", "--detach", "--no-recreate", "--scale", f"ps={num_ps}", "ps")
        job.wait_for(f"The job has {num_ps} ps now")
    status = ["exec", "-T", "chief", "stratagem", "status", "--chief", "chief:2222", "--json"]
    assert json.loads(job.compose(*status))["updates_lost"] == 0
    assert [job.container("worker", number)["RestartCount"] for number in (1, 2)] == [0, 0]
    job.compose("stop")
    assert [job.container("ps", number)["State"]["ExitCode"] for number in (1, 2)] == [143, 143], job.output
    assert job.output.count("Shutting down once") == 4 and "may be lost" not in job.output, job.output


def test_with_certificates_and_a_token(project: Make, tmp_path: Path) -> None:
    job = project("tls", SECRETS=str(tmp_path / "secrets"), MAX_WORKERS="2", COMPOSE_PROFILES="evaluator")
    (tmp_path / "secrets").mkdir()
    job.compose("run", "--rm", "certificates")
    worker = sorted(path.name for path in (tmp_path / "secrets" / "worker").iterdir())
    assert worker == ["ca.crt", "token", "worker-0.crt", "worker-0.key", "worker-1.crt", "worker-1.key"]
    certificate = tmp_path / "secrets" / "worker" / "worker-1.crt"
    first = certificate.read_bytes()
    comment = (ROOT / "deploy" / "compose" / "tls.yml").read_text()
    (renew,) = re.findall(r'--entrypoint "(.*)" certificates worker:1', comment)
    job.compose("run", "--rm", "--entrypoint", renew, "certificates", "worker:1")
    job.compose("run", "--rm", "certificates")
    assert certificate.read_bytes() != first
    job.up()
    job.wait_for("Cluster is ready")
    assert job.output.count("with TLS and a token") >= 3
    without = ["-e", "STRATAGEM_TLS=", "-e", "STRATAGEM_TOKEN_FILE="]
    refused = job.compose("exec", "-T", *without, "chief", "stratagem", "status", "--chief", "chief:2222", code=1)
    assert "speaks TLS" in refused
    shown = ["--tls", "/operator", "--token-file", "/operator/token"]
    operator = f"{tmp_path}/secrets/operator:/operator"
    ask = ["run", "--rm", "--no-deps", "-v", operator, "chief", "status", "--chief", "chief:2222", *shown]
    assert "lead worker:0" in job.compose(*ask)
    mounted = {mount["Destination"] for mount in job.container("worker")["Mounts"]}
    assert "/run/secrets/worker" in mounted and not {"/run/secrets/chief", "/run/secrets/ps"} & mounted
    check_result(job)
    assert job.container("evaluator")["State"]["ExitCode"] == 0
    assert re.search(r"evaluator-1 +\| step \d+: held-out accuracy", job.output), job.output
