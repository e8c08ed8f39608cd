"""The short variant of ``python -m tests.fuzz``: live servers do not notice."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
import pytest

from tests.fuzz.__main__ import fuzz

# The poller thread of grpc.aio lives as long as the process; started here, before the first test looks for leaks.
grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # the stubs lack it

NUM_FRAMES = 1000


@pytest.mark.parametrize("seed", [7])
def test_mutated_messages_change_nothing_for_others(tmp_path: Path, seed: int) -> None:
    log = tmp_path / "target.log"
    figures = fuzz(NUM_FRAMES, seed, log)
    assert figures["frames"] == NUM_FRAMES
    rounds = figures["honest_rounds"]
    assert isinstance(rounds, int) and rounds > 0
    outcomes = figures["outcomes"]
    assert isinstance(outcomes, dict)
    # The attacks got somewhere: some were understood and refused by the logic, some even served.
    for code in ("OK", "INVALID_ARGUMENT", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"):
        assert outcomes["requests"].get(code), (code, outcomes["requests"])
    lines = log.read_text(errors="replace").splitlines()
    assert not [line for line in lines if " failed" in line and " refused: " not in line]  # a refusal may say why
