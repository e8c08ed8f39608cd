"""What ``stratagem why`` says of jobs that are slow for a known reason, of healthy ones, and after the end."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import why_unavailable
from stratagem.chief.monitoring.why.reading import reading_of
from stratagem.launch.status import fetch_status
from stratagem.measuring import measures
from tests import forks
from tests.cluster.conftest import Cluster
from tests.cluster.slowdowns import CASES, HEALTHY, LOOK_S, address_of, run_case

pytestmark = pytest.mark.timeout(600)  # a job may take START_S alone to begin, and some have tasks on four hosts

COMPUTING = measures.COMPUTING


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES | HEALTHY)
def test_the_cause_is_named_of_every_kind(name: str, tmp_path: Path) -> None:
    case = (CASES | HEALTHY)[name]
    if case.links and why_unavailable() is not None:
        pytest.skip(str(why_unavailable()))
    said = run_case(case, tmp_path / "job", LOOK_S)
    assert said.is_right(case), json.dumps(said.verdict, indent=2)


@pytest.mark.thorough
def test_a_run_is_traced_and_judged_by_its_summary_after_its_end(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    until = tmp_path / "until"
    script = ("slowed.py", "--until", until, "--work", 100)
    job = cluster(2, 1, *script, flags=["--staleness", "0", "--web=127.0.0.1:0"])
    job.wait_for(lambda: bool(address_of(job.stderr)), "the chief")
    address = address_of(job.stderr)
    job.wait_for(lambda: sum(task.steps for task in reading_of(fetch_status(address, 60.0)).tasks) >= 2, "steps")
    check_log(re.search(r"The page of the job is at (\S+)", job.stderr))
    timeline = job.folder / "trace.json"
    told = stratagem(
        "trace", "--chief", address, "--steps=2", "-o", str(timeline), "--timeout-s=90", "--json", "--torch"
    )
    assert {"worker:0", "worker:1", "ps:0"} == told["tasks"].keys()
    check_timeline(json.loads(timeline.read_text()))
    check_operators(json.loads(timeline.read_text())["traceEvents"])
    until.touch()
    done = job.succeed()
    assert {"worker:0", "worker:1", "ps:0"} <= done.summary["measures"].keys()
    values = done.summary["measures"]["worker:1"]["values"]
    assert values["forward_s"] > 0 and values["wait_s"] > 0 and values["steps"] > 0
    verdict = stratagem("why", "--summary", str(job.summary), "--json")
    # Where other tests have the cores, one worker waits for the other.
    assert verdict["cause"] in ("nothing", "no core", "slow worker"), verdict


def check_log(page: re.Match[str] | None) -> None:
    """The page's stream tells lines of the log of chief and workers."""
    assert page is not None
    told: set[str] = set()
    with urllib.request.urlopen(f"{page[1]}/api/live", timeout=20) as stream:
        while not told >= {"chief:0", "worker:0", "worker:1"}:
            line = stream.readline()
            assert line, told
            if line.startswith(b'data: {"happenings"'):
                told |= {one["task"] for one in json.loads(line[6:])["lines"]}


def stratagem(*arguments: str) -> Any:
    """What a command prints as JSON."""
    command = [sys.executable, "-m", "stratagem.cli", *arguments]
    asked = forks.run(command, timeout=240)
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout)


def check_operators(events: Any) -> None:
    """torch's operators are on the clock of the rest: products of matrices lie within what their worker computes."""
    spans = [event for event in events if event["ph"] == "X"]
    workers = {event["pid"] for event in spans if event["cat"] == "torch"}
    assert len(workers) == 2
    for worker in workers:
        computing = [(e["ts"], e["ts"] + e["dur"]) for e in spans if e["pid"] == worker and e["name"] in COMPUTING]
        until = max(end for _, end in computing)  # the last step ends after the trace of phases
        found = [e["ts"] for e in spans if e["pid"] == worker and e["name"] == "aten::mm" and e["ts"] < until]
        inside = [at for at in found if any(start - 500 <= at <= end + 500 for start, end in computing)]
        assert len(found) > 100 and len(inside) > 0.95 * len(found), (len(found), len(inside))


def check_timeline(timeline: Any) -> None:
    """Spans add up to what the counters of the same time say, and arrows lead from pushes to commits."""
    events, about = timeline["traceEvents"], timeline["metadata"]["stratagem"]
    tasks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    sums: dict[tuple[str, str], float] = {}
    for event in events:
        if event["ph"] == "X":
            key = tasks[event["pid"]], event["name"]
            sums[key] = sums.get(key, 0.0) + event["dur"] / 1e6
    for task, names in (("worker:0", (*COMPUTING, "wait_s")), ("worker:1", COMPUTING), ("ps:0", ("apply_s",))):
        assert about[task]["clock_error_us"] < 1e5 and about[task]["num_dropped"] == 0
        for name in names:
            assert sums[task, name] == pytest.approx(about[task]["spent_s"][name], rel=0.02, abs=1e-4), (task, name)
    sent = {event["id"]: event for event in events if event["ph"] == "s"}
    assert all(isinstance(number, int) for number in sent)  # Perfetto refuses other ids
    came = {event["id"]: event for event in events if event["ph"] == "f"}
    assert sent.keys() == came.keys() and sent
    assert {tasks[event["pid"]] for event in came.values()} == {"ps:0"}
