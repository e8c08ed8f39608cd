"""What each fault costs a job of real processes: ``python -m tests.cluster.fault_table`` writes ``docs/faults.md``.

Every row is a job that counts examples, on two workers and two parameter servers or in a ring of four workers, so that
it shows to the example what was lost. One that ends otherwise than its row promises ends the run, and the page stays as
it was.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch

from tests.cluster.conftest import Cluster, Finished

EPOCHS, BATCH = 3, 4
NOTHING, CHECKPOINT = "nothing is lost", "the updates since its last checkpoint are lost, and counted"
PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


@dataclasses.dataclass(frozen=True)
class Row:
    """One job."""

    chaos: str
    expected: str = NOTHING
    job: str = "s = inf"


ROWS = (
    Row("kill worker:1@step=40"),
    Row("kill worker:0@step=40"),
    Row("stop worker:1@step=40"),
    Row("kill ps:1@step=80", CHECKPOINT),
    Row("stop ps:1@step=80"),
    Row("kill chief@step=80"),
    Row("stop chief@step=80"),
    Row("pause worker:1@step=40 for=2s"),
    Row("pause worker:1@step=40 for=9s"),
    Row("pause ps:1@step=80 for=2s"),
    Row("pause chief@step=80 for=2s"),
    Row("pause chief@step=80 for=9s"),
    Row("slow worker:1@step=40 x4 for=5s"),
    Row("cut worker:0-ps:1@step=40 for=8s"),
    Row("cut ps:1-chief@step=80 for=2s"),
    Row("reset worker:0-ps:1@step=40 for=1s"),
    Row("reset worker:0-chief@step=40 for=1s"),
    Row("reset ps:1-chief@step=80 for=1s"),
    Row("kill worker:1@step=40", job="s = 0"),
    Row("kill ps:1@step=40", "all roll back to the last checkpoint and recompute", job="s = 0"),
    Row("kill chief@step=40", job="s = 0"),
    Row("cut worker:0-ps:1@step=40 for=8s", job="s = 0"),
    Row("kill ps:1@step=160", job="copies"),
    Row("cut ps:0-ps:1@step=160 for=12s", job="copies"),
    Row("kill worker:2@step=40", job="ring"),
    Row("kill worker:0@step=40", job="ring"),
    Row("reset worker:0-worker:1@step=40 for=1s", job="ring"),
    Row("cut worker:0-worker:1@step=40 for=8s", job="ring"),
)
JOBS: Mapping[str, tuple[int, int, tuple[str, ...]]] = {
    "s = inf": (2, 2, ("--staleness", "inf", "--checkpoint-every-s", "5")),
    "s = 0": (2, 2, ("--staleness", "0", "--checkpoint-every-s", "5")),
    "copies": (2, 2, ("--staleness", "inf", "--checkpoint-every-s", "5", "--ps-replicas", "2")),
    "ring": (4, 0, ("--strategy", "ring", "--min-workers", "2")),
}
"""Of each kind of job its workers, its ps and its flags."""


def run(row: Row, folder: Path) -> tuple[Finished, dict[str, Any], float]:
    """The job of a row: how it ended, what the fault cost, and how many updates' examples are missing."""
    out = folder / "out.pt"
    script = ("--examples", "800", "--epochs", str(EPOCHS), "--pause-s", "0.05", "--out", str(out))
    workers, ps, flags = JOBS[row.job]
    job = Cluster(folder, workers, ps, "count_examples.py", script, ("--chaos", row.chaos, *flags))
    try:
        done = job.finish()
    finally:
        job.close()
    if done.code or "after_s" not in done.summary["chaos"][0]:
        raise click.ClickException(f"{row.chaos}: exit code {done.code}\n{done.stderr}")
    values = torch.load(out, weights_only=True).values()
    missing = sum(float((value + EPOCHS).sum()) for value in values) / BATCH
    if missing != done.summary["updates_lost"] or (missing and row.expected == NOTHING):
        raise click.ClickException(
            f"{row.chaos}: {row.expected}, but {missing} updates are missing and "
            f"{done.summary['updates_lost']} were reported lost\n{done.stderr}"
        )
    return done, done.summary["chaos"][0], missing


@click.command()
def main() -> None:
    """Runs every row and writes the page."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=PAGE.parent)
    lines = []
    for row in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            done, fault, missing = run(row, Path(folder))
        resumed = "–" if fault["resumed_s"] is None else f"{fault['resumed_s']:.1f}"
        lines.append(
            f"| `{row.chaos}` | {row.job} | {row.expected} | {resumed} | {fault['standstill_s']:.1f} | "
            f"{done.summary['restarts']} | {missing:.0f} |"
        )
        print(lines[-1], flush=True)
    head = Path(__file__).with_name("fault_table.md").read_text()
    PAGE.write_text(head.replace("COMMIT", commit.stdout.strip()) + "\n".join(lines) + "\n")
    print(f"{len(lines)} rows, all as promised", file=sys.stderr)


if __name__ == "__main__":
    main()
