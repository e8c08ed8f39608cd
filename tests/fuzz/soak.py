"""``python -m tests.fuzz.soak --connections 200``: what a crowd of hostile connections costs a job that trains.

Takes turns, without and with the crowd, and prints for each turn the job's steps per second, its CPU-seconds a step
(what serving the crowd costs) and the crowd's own CPU-seconds; exit code 1 when the job lost more than a tenth of its
speed. Measure on a machine that does nothing else. A crowd sits on other machines: here it runs at the lowest priority,
else its own work would take the cores of the job.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from stratagem.launch.status import fetch_status
from stratagem.rpc.security import OPEN
from tests.cluster.conftest import Cluster

ROOT = Path(__file__).parents[2]
MOST_LOST = 0.1


@dataclasses.dataclass
class Turn:
    """What was seen in a turn."""

    steps_per_s: float
    cpu_s_per_step: float
    """Of all processes of the job."""
    crowd_cpu_s: float = 0.0
    """Since the crowd began."""


class Job:
    """A job of one worker and one ps that trains until it is let go.

    Args:
        folder: for its files.
    """

    def __init__(self, folder: Path) -> None:
        self._until = folder / "until"
        self.cluster = Cluster(folder / "job", 1, 1, "train_until.py", ["--until", str(self._until), "--pause-s", "0"])
        self.cluster.wait_for(lambda: "Cluster is ready: 1 workers" in self.cluster.stderr, "the cluster")
        words = self.cluster.stderr.split("chief:0 listening on ")[1]
        self.chief = words.split()[0].rstrip(",")

    def addresses(self) -> dict[str, str]:
        """Of its servers."""
        tasks = {task.task: task.address for task in fetch_status(self.chief, 60, OPEN).tasks}
        return {"chief": self.chief, "ps": tasks["ps:0"], "worker": tasks["worker:0"]}

    def step(self) -> int:
        """Steps of the worker so far."""
        return next(task.step for task in fetch_status(self.chief, 60, OPEN).tasks if task.task == "worker:0")

    def turn(self, seconds: float) -> Turn:
        """Looks on for so long."""
        first, cpu_s, began = self.step(), self._cpu_s(), time.monotonic()
        time.sleep(seconds)
        steps, took_s = self.step() - first, time.monotonic() - began
        return Turn(steps / took_s, (self._cpu_s() - cpu_s) / steps)

    def _cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.cluster.processes())

    def finish(self) -> Any:
        """Lets it go."""
        self._until.touch()
        return self.cluster.finish()


@contextlib.contextmanager
def crowd(addresses: dict[str, str], number: int) -> Iterator[tuple[psutil.Process, dict[str, int]]]:
    """A crowd in a process of its own: that, and afterwards what it did."""
    acts: dict[str, int] = {}
    told = json.dumps({"addresses": addresses, "number": number})
    process = subprocess.Popen(
        ["nice", "-n", "19", sys.executable, "-m", "tests.fuzz.crowd", told],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "all are there\n"
        yield psutil.Process(process.pid), acts
        process.stdin.close()
        acts.update(json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.soak", description=__doc__)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a turn")
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    alone: list[Turn] = []
    crowded: list[Turn] = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        try:
            addresses = job.addresses()
            for _ in range(options.turns):
                alone.append(job.turn(options.seconds))
                with crowd(addresses, options.connections) as (process, acts):
                    crowded.append(job.turn(options.seconds))
                    crowded[-1].crowd_cpu_s = sum(process.cpu_times()[:2])
            done = job.finish()
        finally:
            job.cluster.close()
    ratio = speed(crowded) / speed(alone)
    figures = {"alone": [*map(vars, alone)], "with_the_crowd": [*map(vars, crowded)], "ratio": ratio}
    print(json.dumps({**figures, "exit_code": done.code, "last_turn": acts}, indent=1))
    sys.exit(done.code or ratio < 1 - MOST_LOST)


def speed(turns: list[Turn]) -> float:
    """The median."""
    return statistics.median(turn.steps_per_s for turn in turns)


if __name__ == "__main__":
    main()
