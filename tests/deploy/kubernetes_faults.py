"""The example on a real one-node cluster, with a pod that is deleted or killed at a chosen moment.

``python -m tests.deploy.kubernetes_faults`` runs every row of the table and prints it. KUBECONFIG names the cluster and
DOCKER_HOST the engine of its node: a container that is killed from there has no time to say anything.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from stratagem.chief.journal.history import JobHistory
from stratagem.launch.manifests import kubernetes
from stratagem.launch.manifests.pod import JOB_FOLDER, Object
from stratagem.launch.manifests.workload import Workload
from tests.deploy.cluster import Namespace, namespace
from tests.deploy.containers import built_image, copy_tree, run
from tests.deploy.kubernetes_tools import unpacked

NAME, EPOCHS = "digits", 20
DEADLINE_S = 420.0
MOMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "training": ("worker-0", ("epoch  5 ",)),
    "last epoch done": ("worker-0", (f"epoch {EPOCHS} ",)),
    "end of the job said": ("chief-0", ("The job ends",)),
    "last checkpoint written": ("chief-0", ("The job ends", "Checkpoint of step")),
}
"""When: whose log says what."""
PODS = ("chief-0", "ps-0", "worker-0", "worker-1")
SOURCES = ("overlay one-node", "chart", "renderer")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A row: what happens to which pod; an empty pod: nothing."""

    source: str
    """Of the objects."""
    pod: str = ""
    when: str = ""
    how: str = ""
    """deleted: SIGTERM, and the Job makes another pod. killed: SIGKILL, and the kubelet starts the container again."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of it."""

    seconds: float | None
    """From the fault, or else from the start, until every Job was Complete; None: not within ``DEADLINE_S``."""
    updates_lost: int
    """Updates of parameters that a ps lost with its memory, by the chief's journal."""
    steps: int
    """Of the last checkpoint."""
    restarts: int
    """Pods and containers beyond the first of each task."""
    waiting: str = ""
    """Jobs that did not complete."""


def faults() -> list[Fault]:
    """Every row: each source alone, each role in training and at the end, and the ends of those that leave last."""
    rows = [Fault(source) for source in SOURCES]
    chosen = [(pod, when, how) for when in list(MOMENTS)[:2] for pod in PODS for how in ("deleted", "killed")]
    chosen += [(pod, when, "killed") for when in list(MOMENTS)[2:] for pod in ("chief-0", "ps-0")]
    return rows + [Fault(SOURCES[number % 3], *row) for number, row in enumerate(chosen)]


def objects_of(source: str, image: str) -> list[Object]:
    """The example as one of its three texts says it."""
    script = ("--epochs", str(EPOCHS), "--export", f"{JOB_FOLDER}/digits.pt")
    if source == "renderer":
        workload = Workload(NAME, image, "examples/digits.py", script, 2, 2, access_mode="ReadWriteOnce")
        return kubernetes.render(dataclasses.replace(workload, checkpoint_every_s=5))
    with unpacked() as tools:
        if source == "chart":
            volume = {"accessMode": "ReadWriteOnce"}
            return tools.template(NAME, image=image, volume=volume, args=list(script), checkpointEveryS=5)
        objects = tools.kustomize("overlays/one-node")
    for job in (each for each in objects if each["kind"] == "Job"):
        job["spec"]["template"]["spec"]["containers"][0]["image"] = image
    return objects


def outcome_of(fault: Fault, image: str) -> Outcome:
    """Runs a job with a fault to its end."""
    with namespace(f"faults-{os.getpid()}-{time.monotonic_ns() % 10**9}") as space:
        space.apply(objects_of(fault.source, image))
        begun = time.monotonic()
        if fault.pod:
            begun = _strike(space, fault)
        waiting = _jobs_waiting(space)
        while waiting and time.monotonic() - begun < DEADLINE_S:
            time.sleep(0.2)
            waiting = _jobs_waiting(space)
        seconds = None if waiting else round(time.monotonic() - begun, 1)
        pods = space.find("pods")
        containers = [each for pod in pods for each in pod["status"].get("containerStatuses", ())]
        restarts = len(pods) - 5 + sum(int(each["restartCount"]) for each in containers)
        restarts += fault.how == "deleted"  # that pod is gone
        if waiting:
            for name in waiting:
                print(space.kubectl("logs", f"job/{name}", code=None)[-3000:], file=sys.stderr)
        return Outcome(seconds, *_on_the_volume(space), restarts, ", ".join(waiting))


def _strike(space: Namespace, fault: Fault) -> float:
    """Waits for the moment and hits the pod; returns when that was."""
    teller, words = MOMENTS[fault.when]
    space.until(lambda: len(_containers(space)) == 5, "every container runs", DEADLINE_S)
    for _ in range(5):  # a worker that the chief took for dead starts again, in another container
        pod, container = _containers(space)[fault.pod]
        process = int(run(["docker", "inspect", "--format", "{{.State.Pid}}", container]).stdout)
        with _lines(_containers(space)[teller][1]) as lines:
            if all(any(word in line for line in lines) for word in words):
                break
        space.until(lambda: len(_containers(space)) == 5, "every container runs", DEADLINE_S)
    else:
        raise AssertionError(f"{teller} ended without {words!r}")
    begun = time.monotonic()
    if fault.how == "killed":
        with contextlib.suppress(ProcessLookupError):  # it was faster: the row shows no restart then
            os.kill(process, signal.SIGKILL)
    else:
        space.kubectl("delete", "pod", pod, "--wait=false")
    return begun


@contextlib.contextmanager
def _lines(container: str) -> Iterator[Iterator[str]]:
    """The lines of a container's log as they come, to its end."""
    command = ["docker", "logs", "--follow", container]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            yield iter(process.stdout)
        finally:
            process.kill()


def _containers(space: Namespace) -> dict[str, tuple[str, str]]:
    """Pod and container of every task that runs."""
    labels = "io.kubernetes.pod.namespace", "io.kubernetes.container.name"
    filters = [f"--filter=label={name}={value}" for name, value in zip(labels, (space.name, "task"), strict=True)]
    listed = run(["docker", "ps", '--format={{.ID}} {{.Label "io.kubernetes.pod.name"}}', *filters]).stdout
    found = {}
    for container, pod in (line.split() for line in listed.splitlines()):
        found[pod.removeprefix(f"{NAME}-").rpartition("-")[0]] = (pod, container)
    return found


def _jobs_waiting(space: Namespace) -> list[str]:
    jobs = space.find("jobs")
    assert len(jobs) == 5
    return [str(job["metadata"]["name"]) for job in jobs if not job["status"].get("succeeded")]


def _on_the_volume(space: Namespace) -> tuple[int, int]:
    """Updates lost, by the journal, and the step of the last checkpoint."""
    (claim,) = space.find("persistentvolumeclaims")
    volume = json.loads(run(["kubectl", "get", "pv", claim["spec"]["volumeName"], "--output=json"]).stdout)
    folder = Path(volume["spec"]["hostPath"]["path"])
    history = JobHistory()
    for line in (folder / "chief" / "journal.jsonl").read_text().splitlines():
        history.apply(json.loads(line))
    steps = max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))
    return history.updates_lost, steps


def table(rows: Sequence[tuple[Fault, Outcome]]) -> str:
    """The rows for people."""
    head = ("objects", "pod", "when", "how", "seconds to Complete", "restarts", "updates lost")
    lines = [f"| {' | '.join(head)} |\n", "|---" * len(head) + "|\n"]
    for fault, came in rows:
        seconds = f"not within {DEADLINE_S:.0f}: {came.waiting}" if came.seconds is None else f"{came.seconds:.0f}"
        cells = (fault.source, fault.pod, fault.when, fault.how, seconds, str(came.restarts), str(came.updates_lost))
        lines.append(f"| {' | '.join(cell or '–' for cell in cells)} |\n")
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="their numbers, with commas; default: all")
    parser.add_argument("--image", help="default: one of this tree is built")
    parser.add_argument("--json", type=Path, help="append the rows there")
    options = parser.parse_args()
    chosen = faults()
    numbers = [int(word) for word in options.rows.split(",")] if options.rows else range(len(chosen))
    rows = []
    with contextlib.ExitStack() as undo:
        image = options.image
        if image is None:
            clone = Path(undo.enter_context(tempfile.TemporaryDirectory()))
            copy_tree(clone)
            image = undo.enter_context(built_image(clone))
        for number in numbers:
            rows.append((chosen[number], outcome_of(chosen[number], image)))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            if options.json:
                at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                record = (
                    {"at": at, "load": os.getloadavg()[0]}
                    | dataclasses.asdict(rows[-1][0])
                    | dataclasses.asdict(rows[-1][1])
                )
                options.json.parent.mkdir(parents=True, exist_ok=True)
                with options.json.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    print(table(rows))
    return int(any(came.waiting for _, came in rows))


if __name__ == "__main__":
    sys.exit(main())
