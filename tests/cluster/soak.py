"""Jobs with random faults, one after the other: ``python -m tests.cluster.soak --minutes 30 [--first SEED]``.

Each job counts examples on parameter servers while tasks are killed, stopped and slowed and connections are cut and
reset (``stratagem run --chaos "random ..."``). Its seed says, too, over which lane, with copies of ps, a second chief,
a table or two optimizers or without; who is told to end; and which other numbers of workers and ps are asked for. Every
fourth is a ring of three that goes on without those that die, and takes them in again: it lacks nothing. A job has to
end well; what its variables lack must be what it told to be lost, to the example, in the last checkpoint, and no
more of it in what its script saved, after which a ps may still lose some; no process and no shared memory may be left.
The first that fails ends the soak, with the seed that makes the same faults again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import click
import torch

import stratagem as sg
from stratagem.errors import StratagemError
from stratagem.launch.status import ask_to_scale
from tests.cluster.conftest import Cluster, Finished
from tests.conftest import is_of_others, shared_memory

EVERY_S, BATCH, EPOCHS, DEADLINE_S = 2.5, 4, 4, 900.0
STALENESS = ("inf", "2", "0")


@dataclasses.dataclass(frozen=True)
class Form:
    """What a job is, and what happens to it."""

    staleness: str
    """Of parameter servers; empty: a ring."""
    chaos: str
    flags: tuple[str, ...]
    arguments: tuple[str, ...]
    numbers: tuple[tuple[float, int, int], ...] = ()
    """After how many seconds which numbers of workers and ps are asked for; 0: as many as there are."""

    def __str__(self) -> str:
        words = [
            f"staleness {self.staleness}" if self.staleness else "ring",
            *self.flags,
            *self.arguments,
            f'"{self.chaos}"',
        ]
        return " ".join([*words, *(f"scale {workers}/{ps}@{at_s:.0f}s" for at_s, workers, ps in self.numbers)])


def form_of(seed: int) -> Form:
    """Of the job of a seed. Connections are cut and reset where they are gRPC's."""
    chance, staleness = random.Random(seed), STALENESS[seed % len(STALENESS)]
    transport = chance.choice(("grpc", "tcp", "shm"))
    if seed % 4 == 3:
        return _ring(chance, transport)
    copied = staleness != "0" and chance.random() < 0.3
    flags = ["--ps-replicas", "2"] * copied + ["--chiefs", "2"] * (chance.random() < 0.3)
    flags += ["--transport", transport] * (transport != "grpc")
    arguments = chance.choice(((), (), ("--table",), ("--optimizers", "2")))
    tasks = ("chief", "worker:0", "worker:1", "ps:0", "ps:1")
    faults = [f"stop {chance.choice(('chief', 'ps:0', 'ps:1'))}@{chance.uniform(2, 30):.0f}s" for _ in range(2)]
    faults = faults[: chance.choice((0, 0, 1, 2))]
    if transport == "grpc":
        faults.append(f"random every={EVERY_S}s seed={seed}")
    for _ in range(0 if transport == "grpc" else 10):
        verb, lasts = chance.choice(("kill", "kill", "pause", "slow")), f" for={chance.uniform(1, 5):.1f}s"
        how = {"kill": "", "pause": lasts, "slow": " x4" + lasts}[verb]
        faults.append(f"{verb} {chance.choice(tasks)}@{chance.uniform(1, 40):.1f}s{how}")
    numbers = [(chance.uniform(5, 40), chance.choice((0, 1, 3)), chance.choice((0, 1, 3))) for _ in range(2)]
    numbers = sorted(numbers) if staleness != "0" and chance.random() < 0.4 else []
    return Form(staleness, "; ".join(faults), tuple(flags), arguments, tuple(numbers))


def _ring(chance: random.Random, transport: str) -> Form:
    """Faults have time between them: somebody is to be left who knows the weights."""
    faults, at_s = [], 4.0
    while at_s < 60:
        verb, lasts = chance.choice(("kill", "kill", "pause", "slow")), f" for={chance.uniform(1, 5):.1f}s"
        task = chance.choice(("chief", "worker:0", "worker:1", "worker:2"))
        faults.append(f"{verb} {task}@{at_s:.1f}s" + {"kill": "", "pause": lasts, "slow": " x4" + lasts}[verb])
        at_s += chance.uniform(5, 9)
    return Form("", "; ".join(faults), ("--transport", transport), ())


@click.command()
@click.option("--minutes", default=30.0, show_default=True)
@click.option("--first", type=int, default=lambda: int(time.time()) // 86400, show_default="another one each day")
def main(minutes: float, first: int) -> None:
    """Runs jobs until the time is over, or would be over before half of the next; exit code 1 after one that is
    wrong."""
    start, num_faults, seed = time.monotonic(), 0, first
    print(f"seeds from {first} on", flush=True)
    while (elapsed := time.monotonic() - start) + 0.5 * elapsed / max(seed - first, 1) < 60 * minutes:
        form = form_of(seed)
        with tempfile.TemporaryDirectory(prefix="stratagem-soak-") as folder:
            done, wrong = run(Path(folder), seed, form)
        fired = [each for each in done.summary.get("chaos", []) if "after_s" in each]
        num_faults += len(fired)
        told = f"seed {seed}, {form}: {len(fired)} faults, {done.summary.get('restarts')} restarts, "
        told += f"{done.summary.get('updates_lost')} updates lost, longest standstill "
        told += f"{max((each['standstill_s'] for each in fired), default=0.0)} s, {done.summary.get('duration_s')} s"
        print(told + (f": {wrong}" if wrong else ""), flush=True)
        if wrong:
            print(done.stderr, file=sys.stderr)
            print(f"again: python -m tests.cluster.soak --minutes 0.01 --first {seed}", file=sys.stderr)
            sys.exit(1)
        seed += 1
    print(f"{seed - first} jobs, {num_faults} faults, none wrong")


def run(folder: Path, seed: int, form: Form) -> tuple[Finished, str]:
    """One job, and what is wrong with it."""
    out, checkpoints = folder / "out.pt", folder / "checkpoints"
    script = ("--examples", "1200", "--epochs", str(EPOCHS), "--pause-s", "0.05", "--out", str(out), *form.arguments)
    how: tuple[str, ...] = ("--strategy", "ring", "--min-workers", "1")
    if form.staleness:
        how = ("--staleness", form.staleness, "--checkpoint-every-s", "2", "--checkpoint-dir", str(checkpoints))
    flags = ("--chaos", form.chaos, "--max-restarts", "1000", *how, *form.flags)
    before = shared_memory()
    num_workers, num_ps = (2, 2) if form.staleness else (3, 0)
    job = Cluster(folder, num_workers, num_ps, "count_examples.py", script, flags)
    asked = [threading.Timer(at_s, _scale, (folder, workers, ps)) for at_s, workers, ps in form.numbers]
    for each in asked:
        each.start()
    try:
        done = job.finish(DEADLINE_S)
    finally:
        left = [process.pid for process in job.processes() if process.pid != job.process.pid]
        job.close()
        for each in asked:
            each.cancel()
            each.join()
    if done.code != 0:
        return done, f"it ended with exit code {done.code}"
    told = BATCH * done.summary.get("updates_lost", 0)
    # Of a table's batch a ps has a part; of another number of ps one may have both variables.
    least, most = min(told, 1) if "--table" in form.arguments else told, told * (2 if form.numbers else 1)
    missing = _missing(sg.load_checkpoint(checkpoints)) if form.staleness else 0
    if not least <= missing <= most:
        return done, f"{missing:.0f} examples are missing in the last checkpoint, {told} were reported lost"
    missing = _missing(torch.load(out, weights_only=True))
    if not 0 <= missing <= most:
        return done, f"{missing:.0f} examples are missing in {out.name}, {told} were reported lost"
    files = {name for name in shared_memory().keys() - before.keys() if not is_of_others(name)}
    if left or files:
        return done, f"left behind: processes {left}, shared memory {files}"
    return done, ""


def _scale(folder: Path, num_workers: int, num_ps: int) -> None:
    """As ``stratagem scale``, which may come while the chief is away or does this already."""
    for address in folder.glob("state/*/chief/chief.address"):
        with contextlib.suppress(StratagemError):
            ask_to_scale(f"file:{address}", num_workers, num_ps, 5.0)


def _missing(values: Mapping[str, torch.Tensor]) -> float:
    """How many examples have not been counted in all of the variables together."""
    return sum(float((value + EPOCHS).sum()) for value in values.values())


if __name__ == "__main__":
    main()
