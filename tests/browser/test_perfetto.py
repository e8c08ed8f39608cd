"""A timeline of ``stratagem trace`` in Perfetto's own trace processor: what it shows adds up to the counters."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

if importlib.util.find_spec("playwright") is None:
    pytest.skip("no playwright in this environment: make test-browser", allow_module_level=True)

from stratagem.launch.status import fetch_status
from stratagem.measuring.measures import BACKWARD, FORWARD, PHASES
from tests import forks
from tests.browser.desk import chromium
from tests.browser.trace_processor import trace_processor, why_unavailable
from tests.cluster.conftest import Cluster, cluster
from tests.cluster.slowdowns import address_of

__all__ = ["cluster"]  # the fixture
pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="no chromium on this machine: apt-get install chromium"),
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
    pytest.mark.thorough,
    pytest.mark.timeout(240),
]
STEPS = 20
SUMS = """
select process.name as task, slice.name as name, sum(dur) / 1e9 as spent_s, count(*) as num
from slice join thread_track on track_id = thread_track.id join thread using (utid) join process using (upid)
group by task, slice.name
"""


def test_twenty_steps_add_up_to_the_counters(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    timeline = tmp_path / "trace.json"
    job = cluster(2, 1, "slowed.py", "--work", 40, "--bulk", 0.5)
    job.wait_for(lambda: bool(address_of(job.stderr)), "the chief")
    address = address_of(job.stderr)
    job.wait_for(lambda: sum(task.step for task in fetch_status(address, 10.0).tasks) >= 4, "steps")
    command = [sys.executable, "-m", "stratagem.cli", "trace", "--chief", address, f"--steps={STEPS}"]
    done = forks.run([*command, "-o", str(timeline), "--timeout-s=60"], timeout=100)
    assert done.returncode == 0, done.stderr
    told = json.loads(timeline.read_text())
    about = told["metadata"]["stratagem"]

    async def look() -> None:
        async with trace_processor(timeline) as processor:
            found = {(task, name): (spent_s, num) for task, name, spent_s, num in await processor.query(SUMS)}
            compared = 0
            for task, of_task in about.items():
                for name, spent_s in of_task["spent_s"].items():
                    if (name in PHASES or name == "apply_s") and spent_s > 0.005:
                        assert found[task, name][0] == pytest.approx(spent_s, rel=0.02), (task, name)
                        compared += 1
            assert (
                compared >= 7
                and {(f"worker:{i}", name) for i in (0, 1) for name in (FORWARD, BACKWARD)} <= found.keys()
            )
            assert all(found[f"worker:{index}", FORWARD][1] >= STEPS for index in (0, 1))
            ((arrows,),) = await processor.query("select count(*) as num from flow")
            assert arrows == sum(event["ph"] == "f" for event in told["traceEvents"]) > 0
            wrong = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
            assert await processor.query(wrong) == []

    asyncio.run(asyncio.wait_for(look(), 120))
