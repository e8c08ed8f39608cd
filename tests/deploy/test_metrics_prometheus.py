"""The rules and the dashboard against Debian's Prometheus, which scrapes a live chief."""

from __future__ import annotations

import http
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratagem.rpc.session import SessionClient

METRICS = Path(__file__).parents[2] / "deploy" / "compose" / "metrics"
DEADLINE_S = 60.0
DASHBOARD = json.loads((METRICS / "stratagem.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def _tools() -> None:
    for tool in ("promtool", "prometheus"):
        if shutil.which(tool) is None and not os.environ.get("TEST_DOCKER"):
            pytest.skip(f"no {tool} on this machine: apt-get install prometheus; TEST_DOCKER=1 makes this a failure")


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_and_configuration_are_valid() -> None:
    assert "9 rules found" in promtool("check", "rules", METRICS / "rules.yml")
    assert "is valid prometheus config file" in promtool("check", "config", METRICS / "prometheus.yml")


def test_alerts_fire_when_they_must_and_else_not() -> None:
    promtool("test", "rules", Path(__file__).parent / "alerts.yml")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def worker_progress() -> dict[str, Any]:
    seconds = time.monotonic()
    return dict(
        step=int(seconds * 10),
        examples=int(seconds * 320),
        loss=0.5,
        has_loss=True,
        step_s=0.1,
        exposed_s=0.04,
        metrics={"accuracy": 0.9},
    )


@pytest.fixture
def chief() -> Iterator[str]:
    """The address of the metrics of a chief with a worker that trains and a ps that holds something."""
    config = {"num_workers": 1, "num_ps": 0, "heartbeat_interval_s": 0.1, "metrics_bind": "127.0.0.1:0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "stratagem.chief", "--print-address", "--config-json", json.dumps(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    worker = None
    try:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().strip()
        worker = SessionClient(address, "worker:0", "", progress=worker_progress)
        worker.start(DEADLINE_S)
        line = next(line for line in process.stderr if "Metrics at" in line)
        yield urllib.parse.urlsplit(line.split()[-1]).netloc
    finally:
        if worker is not None:
            worker.goodbye(0)
            worker.close()
        process.kill()
        process.communicate()


@pytest.fixture
def prometheus(chief: str, tmp_path: Path) -> Iterator[str]:
    """The URL of a Prometheus that runs the committed configuration, with this chief for its target."""
    text = (METRICS / "prometheus.yml").read_text()
    assert text.count('"chief:9464"') == 1 and text.count(": 5s") == 2
    (tmp_path / "prometheus.yml").write_text(text.replace("chief:9464", chief).replace(": 5s", ": 1s"))
    shutil.copy(METRICS / "rules.yml", tmp_path)
    port = free_port()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def ask(url: str, path: str, **parameters: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
        return json.load(answer)["data"]


def results(url: str, query: str) -> list[Any]:
    try:
        found: list[Any] = ask(url, "query", query=query)["result"]
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.SERVICE_UNAVAILABLE:
            return []  # it listens, and is still starting
        pytest.fail(f"{query}: {error.read().decode()}")
    except OSError:
        return []  # it does not listen yet
    return found


def test_prometheus_scrapes_a_chief_and_the_dashboard_has_something_to_show(prometheus: str) -> None:
    of_ps = ("updates_lost_total", "bytes_held", "updates_applied", "checkpoint_step", "units_", 'state="lost"')
    absent = (*of_ps, "steps_ahead")  # which a staleness bound counts
    shown = [query for query in QUERIES if not any(word in query for word in absent)]
    assert len(shown) >= 10
    missing = ["up"]
    deadline = time.monotonic() + DEADLINE_S
    while missing and time.monotonic() < deadline:
        missing = [query for query in [*shown, "stratagem:examples_per_second"] if not results(prometheus, query)]
        time.sleep(0.2)
    assert missing == []
    for query in QUERIES:
        results(prometheus, query)  # fails where it cannot be read
    assert float(results(prometheus, "stratagem:exposed_communication")[0]["value"][1]) == pytest.approx(0.4)
    (target,) = ask(prometheus, "targets")["activeTargets"]
    assert target["health"] == "up", target["lastError"]
    rules = [rule for group in ask(prometheus, "rules")["groups"] for rule in group["rules"]]
    assert len(rules) == 9 and {rule["health"] for rule in rules} == {"ok"}
    assert not [rule["name"] for rule in rules if rule.get("state") == "firing"]
