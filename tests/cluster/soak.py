"""Jobs with random faults, one after the other: ``python -m tests.cluster.soak --minutes 30 [--first SEED]``.

Each job counts examples on parameter servers while tasks are killed, stopped and slowed and connections are cut and
reset (``stratagem run --chaos "random ..."``). It has to end well; what its variables lack must be what it told to be
lost, to the example, in the last checkpoint, and no more of it in what its script saved, after which a ps may still
lose some; no process and no shared memory may be left. The first that fails ends the soak, with the seed that makes the
same faults again.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import click
import torch

import stratagem as sg
from tests.cluster.conftest import Cluster, Finished
from tests.conftest import is_of_others, shared_memory

EVERY_S, BATCH, EPOCHS, DEADLINE_S = 2.5, 4, 4, 400.0
STALENESS = ("inf", "2", "0")


@click.command()
@click.option("--minutes", default=30.0, show_default=True)
@click.option("--first", type=int, default=lambda: int(time.time()) // 86400, show_default="another one each day")
def main(minutes: float, first: int) -> None:
    """Runs jobs until the time is over; exit code 1 after one that is wrong."""
    end, num_faults, seed = time.monotonic() + 60 * minutes, 0, first
    print(f"seeds from {first} on", flush=True)
    while time.monotonic() < end:
        with tempfile.TemporaryDirectory(prefix="stratagem-soak-") as folder:
            staleness = STALENESS[seed % len(STALENESS)]
            done, wrong = run(Path(folder), seed, staleness)
        fired = [each for each in done.summary.get("chaos", []) if "after_s" in each]
        num_faults += len(fired)
        told = f"seed {seed}, staleness {staleness}: {len(fired)} faults, {done.summary.get('restarts')} restarts, "
        told += f"{done.summary.get('updates_lost')} updates lost, longest standstill "
        told += f"{max((each['standstill_s'] for each in fired), default=0.0)} s, {done.summary.get('duration_s')} s"
        print(told + (f": {wrong}" if wrong else ""), flush=True)
        if wrong:
            print(done.stderr, file=sys.stderr)
            print(f"again: python -m tests.cluster.soak --minutes 0.01 --first {seed}", file=sys.stderr)
            sys.exit(1)
        seed += 1
    print(f"{seed - first} jobs, {num_faults} faults, none wrong")


def run(folder: Path, seed: int, staleness: str) -> tuple[Finished, str]:
    """One job, and what is wrong with it."""
    out, checkpoints = folder / "out.pt", folder / "checkpoints"
    script = ("--examples", "1200", "--epochs", str(EPOCHS), "--pause-s", "0.05", "--out", str(out))
    chaos = f"random every={EVERY_S}s seed={seed}"
    saving = ("--checkpoint-every-s", "2", "--checkpoint-dir", str(checkpoints))
    flags = ("--chaos", chaos, "--max-restarts", "1000", "--staleness", staleness, *saving)
    before = shared_memory()
    job = Cluster(folder, 2, 2, "count_examples.py", script, flags)
    try:
        done = job.finish(DEADLINE_S)
    finally:
        left = [process.pid for process in job.processes() if process.pid != job.process.pid]
        job.close()
    if done.code != 0:
        return done, f"it ended with exit code {done.code}"
    told = BATCH * done.summary["updates_lost"]
    missing = _missing(sg.load_checkpoint(checkpoints))
    if missing != told:
        return done, f"{missing:.0f} examples are missing in the last checkpoint, {told} were told to be lost"
    missing = _missing(torch.load(out, weights_only=True))
    if missing > told:
        return done, f"{missing:.0f} examples are missing in {out.name}, {told} were told to be lost"
    files = {name for name in shared_memory().keys() - before.keys() if not is_of_others(name)}
    if left or files:
        return done, f"left behind: processes {left}, shared memory {files}"
    return done, ""


def _missing(values: Mapping[str, torch.Tensor]) -> float:
    """How many examples have not been counted in all of the variables together."""
    return sum(float((value + EPOCHS).sum()) for value in values.values())


if __name__ == "__main__":
    main()
