"""Jobs that are slow for a known reason, and healthy ones: what ``stratagem why`` says of each.

``python -m tests.cluster.slowdowns [NAME…] [--results FILE] [--write FILE]`` runs them and writes a table.
Slowdowns are relative to the job's own steps, so that the load of the machine changes little.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.hosts import INTERFACE, shaped_hosts
from tests.cluster.conftest import SCRIPTS, Cluster
from tests.cluster.scripts.slowed import BATCH

SCRIPT = SCRIPTS / "slowed.py"
START_S, LOOK_S = 100.0, 16.0
"""Seconds for the first steps to come, and that they are watched then: `why` has to know within 30 s."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One job."""

    cause: str
    """What makes it slow, as the verdict calls it."""
    about: str = ""
    """What the sentence has to say."""
    workers: int = 2
    ps: int = 1
    flags: tuple[str, ...] = ()
    script: tuple[str, ...] = ()
    slowed: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stopped: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Tasks that are stopped (SIGSTOP) this part of the time; 1: from the first look on."""
    starved: tuple[str, ...] = ()
    """Tasks that get a tenth of the core that others get, where they want one too."""
    killed: str = ""
    """A task that is killed, and its launcher stopped, so that nobody starts it again."""
    links: tuple[int, ...] = ()
    """Mbit/s of the link of each host, the first of which has chief and ps: the job runs in network namespaces."""


RING: dict[str, Any] = {"ps": 0}
HEAVY = "--bulk 4 --work 4"
WIDE, TINY = "--size 512 --work 8", "--size 32 --work 200"


def _case(cause: str, about: str = "", *, script: str = "", flags: str = "", **options: Any) -> Case:
    return Case(cause, about, script=tuple(script.split()), flags=tuple(flags.split()), **options)


CASES: dict[str, Case] = {
    "slow worker, ring": _case("slow worker", "worker:1", **RING, slowed={"worker:1": {"factor": 4}}),
    "slow worker, ps": _case("slow worker", "worker:2", workers=3, slowed={"worker:2": {"sleep_s": 0.5}}),
    "slow data, all": _case("slow data", "every worker", slowed={"worker": {"data_sleep_s": 0.25}}),
    "slow data, one of a ring": _case("slow data", "worker:1", **RING, slowed={"worker:1": {"data_work": 160}}),
    "slow ps, one stopped now and then": _case(
        "slow ps", "ps:1", ps=2, script="--work 10 --bulk 1 --sharded", stopped={"ps:1": 0.8}
    ),
    "slow ps, Adam on one": _case("slow ps", "ps:0", script="--bulk 8 --work 1 --optimizer Adam"),
    "hot shard, Adam": _case("hot shard", "ps:", ps=2, script=HEAVY + " --optimizer Adam"),
    "hot shard, SGD": _case("hot shard", "ps:", workers=1, ps=3, script="--bulk 8 --work 1"),
    "hot shard, rows of a table": _case("hot shard", "8 rows of table.weight", ps=2, script="--rows 64 --work 4"),
    "slow link, ring": _case("slow link", "worker:", links=(1000, 1000, 40), ps=0, script=HEAVY),
    "slow link, ps": _case("slow link", "worker:1", links=(1000, 1000, 40), script=HEAVY),
    "too many threads, ps": _case("too many threads", flags="--threads 24", script=WIDE),
    "too many threads, ring": _case("too many threads", **RING, flags="--threads 12", script=WIDE),
    "no core, ps": _case("no core", "ps:0", workers=4, script="--work 10 --bulk 1", starved=("ps:0",)),
    "no core, worker": _case("no core", "worker:2", workers=3, starved=("worker:2",)),
    "staleness 1": _case("staleness bound", "worker:1", flags="--staleness 1", slowed={"worker:1": {"factor": 4}}),
    "staleness 3": _case(
        "staleness bound", "worker:0", workers=3, flags="--staleness 3", slowed={"worker:0": {"sleep_s": 0.5}}
    ),
    "checkpoints, by the chief": _case("checkpoints", flags="--checkpoint-every-s 0.2", script="--bulk 16 --work 10"),
    "checkpoints, by the script": _case("checkpoints", **RING, script="--bulk 4 --work 10 --save-every 1"),
    "Python threads, one worker": _case(
        "interpreter lock", "worker:0", slowed={"worker:0": {"burning": 2}}, script=TINY
    ),
    "Python threads, ring": _case(
        "interpreter lock", "worker:", **RING, slowed={"worker": {"burning": 1}}, script=TINY
    ),
    # It is asked about before the ring ends for want of it, however long `why` takes to start.
    "a stopped worker": _case(
        "silent task",
        "worker:1",
        **RING,
        stopped={"worker:1": 1.0},
        environment={"STRATAGEM_SESSION_TIMEOUT_S": "30"},
    ),
    "a stopped ps": _case("silent task", "ps:0", stopped={"ps:0": 1.0}),
    "a stopped chief": _case("chief away", "chief", stopped={"chief:0": 1.0}),
    "a dead chief": _case("chief away", "chief", killed="chief:0"),
    "small frames, ps": _case("small frames", script=HEAVY, environment={"STRATAGEM_FRAME_BYTES": "2048"}),
    "small frames, ring": _case("small frames", **RING, script=HEAVY, flags="--transport tcp --chunk-bytes 2048"),
    "tcp on one host": _case("slower lane", "tcp", **RING, script=HEAVY, flags="--transport tcp"),
    "grpc on one host": _case("slower lane", "grpc", script=HEAVY, flags="--transport grpc"),
}
HEALTHY: dict[str, Case] = {
    "healthy, one worker": _case("nothing", workers=1),
    "healthy, two workers": _case("nothing"),
    "healthy, three workers and two ps": _case("nothing", workers=3, ps=2),
    "healthy, synchronous": _case("nothing", flags="--staleness 0"),
    "healthy, staleness 4": _case("nothing", flags="--staleness 4"),
    "healthy, ring": _case("nothing", **RING),
    "healthy, ring of three": _case("nothing", workers=3, **RING),
    "healthy, processes for data": _case("nothing", script="--loaders 1 --work 60"),
    "healthy, more parameters": _case("nothing", script="--bulk 1 --work 120"),
    "healthy, long steps": _case("nothing", **RING, script="--work 400"),
}


@dataclasses.dataclass(frozen=True)
class Said:
    """What came of a case."""

    verdict: Mapping[str, Any]
    after_s: float
    """From the first steps, or the fault, to the answer."""

    def is_right(self, case: Case) -> bool:
        """Whether it names the cause."""
        return self.verdict.get("cause") == case.cause and case.about in self.verdict.get("sentence", "")


def run_case(case: Case, folder: Path, look_s: float = LOOK_S) -> Said:
    """Runs a job until its steps have been watched for ``look_s`` seconds, asks why, and ends it."""
    with contextlib.ExitStack() as cleanup:
        if case.links:
            prefix, address = cleanup.enter_context(_on_hosts(case, folder))
        else:
            job = _start(case, folder)
            cleanup.callback(job.close)
            job.wait_for(lambda: bool(address_of(job.stderr)), "the chief")
            prefix, address = [], address_of(job.stderr)
        environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parents[2])}

        def ask(what: str) -> Any:
            command = [*prefix, sys.executable, "-m", "stratagem.cli", what, "--chief", address, "--json"]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
            return json.loads(done.stdout) if done.returncode == 0 else {}

        deadline = time.monotonic() + START_S
        while sum(task["examples"] for task in ask("status").get("tasks", ())) < 4 * BATCH * case.workers:
            if time.monotonic() > deadline:
                return Said({"sentence": "no step was made"}, START_S)
        begun = time.monotonic()
        for task in case.starved:
            _starve(_pid(job, task))
        for task, part in case.stopped.items():
            if part < 1:
                cleanup.enter_context(_stopping(_pid(job, task), part))
        time.sleep(look_s / 2)
        wait_s = look_s / 2
        for task in [name for name, part in case.stopped.items() if part == 1]:
            pid = _pid(job, task)
            os.kill(pid, signal.SIGSTOP)
            cleanup.callback(_continue, pid)
            begun, wait_s = time.monotonic(), 4.0
        if case.killed:
            os.kill(job.process.pid, signal.SIGSTOP)
            cleanup.callback(_continue, job.process.pid)
            os.kill(_pid(job, case.killed), signal.SIGKILL)
            begun, wait_s = time.monotonic(), 2.0
        time.sleep(wait_s)
        return Said(ask("why"), time.monotonic() - begun)


def _start(case: Case, folder: Path) -> Cluster:
    environment = {"TEST_SLOWED": json.dumps(case.slowed), **case.environment}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        return Cluster(folder, case.workers, case.ps, SCRIPT, case.script, case.flags)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _pid(job: Cluster, task: str) -> int:
    pid = job.pid_of(task)
    assert pid is not None, f"{task} does not run"
    return pid


def address_of(stderr: str) -> str:
    """Where the chief of a job listens, from its log; empty: not yet."""
    found = re.search(r"chief:0 listening on (\S+)", stderr)
    return found[1] if found else ""


@contextlib.contextmanager
def _stopping(pid: int, part: float, period_s: float = 0.1) -> Iterator[None]:
    """Stops a process for a part of every tenth of a second."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(part * period_s)
            os.kill(pid, signal.SIGCONT)
            over.wait((1 - part) * period_s)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _starve(pid: int) -> None:
    """A tenth of what others get of a core is left to it: to its group, if a session has one of its own, and alone."""
    with contextlib.suppress(FileNotFoundError):
        Path(f"/proc/{pid}/autogroup").write_text("10")
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), 10)


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _on_hosts(case: Case, folder: Path) -> Iterator[tuple[list[str], str]]:
    """Chief and ps on the first host, a worker on each other one; or a worker on each, for a ring."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as cleanup:
        hosts = cleanup.enter_context(shaped_hosts(len(case.links), max(case.links)))
        for host, mbit in zip(hosts, case.links, strict=True):
            if mbit != max(case.links):
                rate = ("rate", f"{mbit}mbit", "burst", "32kb", "latency", "50ms")
                command = ["tc", "-netns", host.namespace, "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *rate]
                subprocess.run(command, check=True)
        places = hosts if case.ps == 0 else hosts[1:]
        cluster: dict[str, list[str]] = {
            "chief": [f"{hosts[0].address}:4000"],
            "worker": [f"{host.address}:{4001 + index}" for index, host in enumerate(places)],
        }
        tasks = [("chief", 0, hosts[0]), *(("worker", index, host) for index, host in enumerate(places))]
        if case.ps:
            cluster["ps"] = [f"{hosts[0].address}:{4100 + index}" for index in range(case.ps)]
            tasks += [("ps", index, hosts[0]) for index in range(case.ps)]
        for role, index, host in tasks:
            environment = {
                **os.environ,
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}}),
                "PYTHONPATH": str(SCRIPTS.parents[2]),
                "OMP_NUM_THREADS": "1",
                "STRATAGEM_INSECURE": "true",
                "TEST_SLOWED": json.dumps(case.slowed),
            }
            log = cleanup.enter_context((folder / f"{role}-{index}.log").open("w"))
            command = host.command(sys.executable, str(SCRIPT), *case.script)
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            cleanup.callback(process.wait)
            cleanup.callback(process.kill)
        yield hosts[0].command(), f"{hosts[0].address}:4000"


def table(results: Sequence[tuple[str, Case, Said]]) -> str:
    """Rows of Markdown."""
    lines = ["| job | what is wrong | right | after | what `why` said |", "|---|---|---|---|---|"]
    for name, case, said in results:
        right = "yes" if said.is_right(case) else "**no**"
        lines.append(f"| {name} | {case.cause} | {right} | {said.after_s:.0f} s | {said.verdict.get('sentence', '')} |")
    return "\n".join(lines)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--results", type=click.Path(path_type=Path), help="Lines of JSON to go on from: what is there is done.")
@click.option("--write", type=click.Path(path_type=Path), help="File for the table.")
def main(names: Sequence[str], results: Path | None, write: Path | None) -> None:
    """Runs the jobs whose names contain one of NAMES; all without any."""
    every = CASES | HEALTHY
    lines = results.read_text().splitlines() if results is not None and results.exists() else []
    found = {name: Said(verdict, after_s) for name, verdict, after_s in map(json.loads, lines)}
    for name in [name for name in every if not names or any(each in name for each in names)]:
        if name in found:
            continue
        folder = Path(tempfile.mkdtemp(prefix="slowdown-"))
        said = found[name] = run_case(every[name], folder)
        if results is not None:
            with results.open("a") as file:
                print(json.dumps([name, said.verdict, said.after_s]), file=file)
        if said.is_right(every[name]):
            print(f"ok     {name} ({said.after_s:.0f} s)", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"WRONG  {name} ({said.after_s:.0f} s, {folder})\n{json.dumps(said.verdict, indent=2)}", flush=True)
    told = [(name, case, found[name]) for name, case in every.items() if name in found]
    print(f"{sum(said.is_right(case) for _, case, said in told)} of {len(told)}")
    if write is not None:
        write.write_text(table(told) + "\n")


if __name__ == "__main__":
    main()
