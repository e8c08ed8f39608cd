"""docs/guides/compose.md, word for word: every command on a real engine, in a copy of the tree.

What follows each command is here, by the command: a line of the page that nobody expects fails the first test.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.containers import DEADLINE_S, ROOT, need_engine, run, wait_for

pytestmark = pytest.mark.timeout(1500)

TLS = "docker compose -f docker-compose.yml -f deploy/compose/tls.yml"
METRICS = "docker compose -f docker-compose.yml -f deploy/compose/metrics.yml"
COMMANDS = (
    "docker compose up",
    "docker compose up --scale worker=3",
    "docker compose run --rm --no-deps chief checkpoint verify /var/lib/stratagem/checkpoints",
    "docker compose --profile evaluator --profile tensorboard up",
    f"{TLS} run --rm certificates",
    f"{TLS} up",
    f"{METRICS} up",
    "docker compose -f docker-compose.yml -f deploy/compose/web.yml up",
    "docker compose up --detach --no-recreate --scale ps=3 ps",  # run by test_compose.py
    "docker compose cp chief:/var/lib/stratagem/checkpoints checkpoints",
    "docker compose --profile '*' down --volumes",
)
TRAINED = re.compile(r"held-out accuracy ([\d.]+)% on 360")


class Shell:
    """Runs commands of the page as they stand.

    Args:
        folder: a copy of the tree.
        environ: what the page says may be set: the image's name, ports.
    """

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        self.environ = {**os.environ, **environ}

    def run(self, command: str) -> str:
        """Waits for its end; what it printed."""
        return run(shlex.split(command), folder=self.folder, environ=self.environ).stdout

    @contextlib.contextmanager
    def started(self, command: str) -> Iterator[Callable[[], str]]:
        """Runs it during the block, then presses Ctrl-C; gives what it printed so far."""
        log = self.folder / "up.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                shlex.split(command), cwd=self.folder, env=self.environ, stdout=output, stderr=output, process_group=0
            )
        try:
            yield log.read_text
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DEADLINE_S)
            process.kill()
            process.wait()

    def address(self, service: str, port: int, compose: str = "docker compose") -> str:
        """Where a service's port is published; empty while it is not."""
        done = run([*compose.split(), "port", service, str(port)], folder=self.folder, environ=self.environ, code=None)
        return done.stdout.strip()

    def train(self, command: str) -> None:
        """An ``up`` that ends by itself, from a volume that is empty."""
        printed = self.run(command)
        found = TRAINED.search(printed)
        assert found is not None and float(found[1]) >= 97.0, printed


@pytest.fixture(scope="module")
def shell(clone: Path, image: str) -> Iterator[Shell]:
    environ = {"COMPOSE_PROJECT_NAME": f"stratagem-readme-{os.getpid()}", "IMAGE": image, "BUILD_NETWORK": "host"}
    ports = dict.fromkeys(("TENSORBOARD_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT", "WEB_PORT"), "0")
    # `up` says no word about a secret's folder that is not there; here it is one of this test.
    one = Shell(clone, {**environ, **ports, "SECRETS": str(clone / "secrets")})
    (clone / "secrets").mkdir()
    yield one
    one.run("docker compose --profile '*' down --volumes --remove-orphans --timeout 1")


def test_these_are_the_commands_of_the_page() -> None:
    page = (ROOT / "docs" / "guides" / "compose.md").read_text()
    block = re.search(r"```bash\n(.*?)```", page, re.DOTALL)
    assert block is not None
    assert tuple(line.split("   #")[0].strip() for line in block[1].splitlines()) == COMMANDS


def test_up_trains_and_leaves_a_checkpoint(shell: Shell) -> None:
    shell.train(COMMANDS[0])
    assert "every file is as it was written" in shell.run(COMMANDS[2])
    shell.run(COMMANDS[9])
    assert (shell.folder / "checkpoints" / "latest").read_text()
    shutil.rmtree(shell.folder / "checkpoints")


def test_a_third_worker(shell: Shell) -> None:
    shell.run(COMMANDS[-1])
    shell.train(COMMANDS[1])
    facts = json.loads(run(["docker", "inspect", f"{shell.environ['COMPOSE_PROJECT_NAME']}-worker-3"]).stdout)[0]
    assert facts["State"]["ExitCode"] == 0


def test_evaluator_and_tensorboard(shell: Shell) -> None:
    shell.run(COMMANDS[-1])
    with shell.started(COMMANDS[3]) as printed:
        wait_for(lambda: TRAINED.search(printed()), "the training", printed)
        wait_for(lambda: re.search(r"evaluator-1.*held-out accuracy", printed()), "the evaluator", printed)
        path = "/data/plugin/scalars/tags"
        wait_for(lambda: "examples_per_s" in text_at(shell.address("tensorboard", 6006) + path), "curves", printed)


def test_encrypted(shell: Shell) -> None:
    shell.run(COMMANDS[-1])
    shell.run(COMMANDS[4])
    shell.train(COMMANDS[5])


def test_the_page_is_published_on_loopback(shell: Shell) -> None:
    shell.run(COMMANDS[-1])
    with shell.started(COMMANDS[7]) as printed:
        wait_for(lambda: "sentence" in text_at(shell.address("chief", 8080) + "/api/why"), "the page", printed)
        assert shell.address("chief", 8080).startswith("127.0.0.1:")


OWN = """
import sys, torch, stratagem as sg

strategy = sg.strategy_from_environment()
with strategy.scope():
    model = torch.nn.Linear(2, 1)
model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
optimizer.zero_grad()
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("own script with", type(strategy).__name__, sys.argv[1:])
"""


def test_a_script_of_ones_own(shell: Shell, image: str, tmp_path: Path) -> None:
    shell.run(COMMANDS[-1])
    (tmp_path / "train.py").write_text(OWN)
    (tmp_path / "Dockerfile").write_text(f"FROM {image}\nCOPY train.py .\n")
    run(["docker", "build", "--quiet", "--tag", f"{image}-mine", str(tmp_path)])
    mine = Shell(shell.folder, {**shell.environ, "IMAGE": f"{image}-mine", "SCRIPT": "train.py --epochs 3"})
    try:
        printed = mine.run(f"{COMMANDS[0]} --exit-code-from chief")
        assert printed.count("own script with ParameterServerStrategy ['--epochs', '3']") == 2, printed
        mine.run(COMMANDS[-1])
    finally:
        run(["docker", "image", "rm", "--force", f"{image}-mine"])


@pytest.fixture(scope="module")
def prometheus_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Debian's Prometheus in the place of the project's own image, which lies in a registry."""
    need_engine()
    name = f"stratagem-test-prometheus:{os.getpid()}"
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "Dockerfile").write_text(
        "FROM python:3.11-slim\n"
        "RUN apt-get update && apt-get install -qq -y --no-install-recommends prometheus && mkdir /prometheus\n"
        'ENTRYPOINT ["/usr/bin/prometheus"]\n'
    )
    run(["docker", "build", "--quiet", "--network=host", "--tag", name, str(folder)])
    yield name
    run(["docker", "image", "rm", "--force", name])


def test_metrics_without_grafana(shell: Shell, prometheus_image: str) -> None:
    # Grafana is in no registry that tests may use, so the others are named: its dashboard is tried in
    # test_metrics_prometheus.py.
    shell.run(COMMANDS[-1])
    shell.environ["PROMETHEUS_IMAGE"] = prometheus_image
    with shell.started(f"{COMMANDS[6]} chief ps worker prometheus") as printed:
        query = "/api/v1/query?query=count_over_time(stratagem_ready%5B10m%5D)"
        wait_for(
            lambda: value_at(shell.address("prometheus", 9090, METRICS) + query) > 0, "the chief in Prometheus", printed
        )


def text_at(url: str) -> str:
    """What a server says; nothing while it does not answer."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{url}", timeout=5) as reply:
        return str(reply.read().decode())
    return ""


def value_at(url: str) -> float:
    """The number that a query of Prometheus gives; 0 while there is none."""
    found: Any = json.loads(text_at(url) or "{}").get("data", {}).get("result", [])
    return float(found[0]["value"][1]) if found else 0.0
