"""A rank that is killed or stopped inside a collective: the others raise, and name it."""

from __future__ import annotations

import json
import sys

import pytest

from tests import forks
from tests.contract.distributed.lost_ranks import CALLS, TIMEOUT_S

KNOWN_S = 30.0
"""What finding out and telling may take beyond the timeout, on a busy machine."""
EVERY = {
    transport: [(name, transport, how) for name in CALLS for how in ("SIGKILL", "SIGSTOP")]
    for transport in ("shm", "tcp", "grpc")
}
SHORT = [("all_reduce", "shm", "SIGKILL"), ("all_to_all", "tcp", "SIGKILL"), ("all_gather", "tcp", "SIGSTOP")]
SHORT += [("messages", "tcp", "SIGKILL"), ("messages", "shm", "SIGSTOP")]


@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SHORT, id="a few"),
        *(pytest.param(cases, id=f"all-{transport}", marks=pytest.mark.thorough) for transport, cases in EVERY.items()),
    ],
)
@pytest.mark.timeout(600)
def test_the_others_raise_and_name_it(cases: list[tuple[str, str, str]]) -> None:
    command = [sys.executable, "-m", "tests.contract.distributed.lost_ranks", *(",".join(case) for case in cases)]
    done = forks.run(command, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(case["name"], case["transport"], case["how"]) for case in found] == cases
    for case in found:
        assert all(text.startswith("CollectiveError") and "worker:2" in text for text in case["said"]), case
        assert case["took_s"] < TIMEOUT_S + KNOWN_S, case
