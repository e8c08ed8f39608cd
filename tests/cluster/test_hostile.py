"""A job trains on while a crowd of hostile connections is at its servers. ``python -m tests.fuzz.soak`` measures it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tests.fuzz.soak import Job, crowd

NUM_CONNECTIONS = int(os.environ.get("TEST_SOAK_CONNECTIONS", "12"))
MAX_MORE_THREADS = 4 * NUM_CONNECTIONS
KINDS = {"silent", "noise", "idle_stream", "unread", "mutated", "visitor"}


# tests/fuzz has such a crowd at servers of their own in every run.
@pytest.mark.thorough
def test_a_job_goes_on_amid_a_hostile_crowd(tmp_path: Path) -> None:
    job = Job(tmp_path)
    try:
        ps = psutil.Process(job.cluster.pid_of("ps:0"))
        num_alone = ps.num_threads()
        with crowd(job.addresses(), NUM_CONNECTIONS) as (_, acts):
            before = job.step()
            job.cluster.wait_for(lambda: job.step() > before + 30, "thirty steps amid the crowd")
            num_threads = ps.num_threads()
        assert set(acts) == KINDS and sum(acts.values()) >= NUM_CONNECTIONS
        assert num_threads - num_alone < MAX_MORE_THREADS
        job.cluster.wait_for(lambda: ps.num_threads() < num_threads, "the threads of the crowd to end")
        done = job.finish()
    finally:
        job.cluster.close()
    assert done.code == 0, done.stderr
    assert done.summary["restarts"] == 0
    assert " failed\n" not in done.stderr and "Traceback" not in done.stderr
