"""Rules about tasks that do nothing: silent ones, lost ones, steps that do not end."""

from __future__ import annotations

from collections.abc import Iterator

from stratagem.chief.monitoring.why.finding import Cause, Finding
from stratagem.chief.monitoring.why.reading import Reading

SILENT_S = 3.0
"""A task says something every half second."""
STUCK_S = 10.0
"""A step that takes so long, and much longer than the others did, does not end."""


def silent(reading: Reading) -> Iterator[Finding]:
    """Tasks that are stopped, on a machine that is gone, or lost."""
    if reading.is_over:
        return
    tasks = [task for task in reading.tasks if not task.task.startswith("evaluator:")]  # nobody waits for it
    for task in sorted(tasks, key=lambda one: -one.silent_s):  # what was lost first made the others go
        evidence: tuple[str, ...] = ()
        if task.state == "lost":
            if reading.is_ending:
                continue
            waits = ", and the job waits until it is restarted" if task.task.startswith("ps:") else ""
            sentence = f"{task.task} is lost{waits}"
            advice = "see its log; `stratagem run` and Kubernetes restart it by themselves"
        elif task.state == "live" and task.silent_s >= SILENT_S:
            how_long = f"{task.task} has been silent for {task.silent_s:.1f} s"
            sentence = f"{how_long}: its process is suspended, or its machine is unreachable"
            advice = "check whether its process is suspended (state T in `ps`: kill -CONT it), swaps, or has no network"
            evidence = ("a live task reports twice a second",)
        else:
            continue
        waiting = [one for one in reading.tasks if task.task in one.waiting_on]
        evidence += tuple(f"{one.task} has waited {one.waiting_s:.1f} s for {one.waiting_on}" for one in waiting)
        yield Finding(Cause.SILENT, task.task, sentence, advice, 1.0, evidence)


def stuck(reading: Reading) -> Iterator[Finding]:
    """Nobody has finished a step for long: whom do all wait for in the end? Or one has not, and the others go on."""
    workers = [worker for worker in reading.of("worker") if worker.state == "live"]
    others_go_on = any(worker.steps for worker in workers)
    if reading.is_over or not workers or (others_go_on and reading.in_step):
        return
    idle = [worker for worker in workers if not worker.steps]
    busy = [worker for worker in idle if not worker.waiting_on and worker.window_s >= STUCK_S]
    waiting = [worker for worker in workers if worker.waiting_on and worker.waiting_s >= STUCK_S]
    others = tuple(f"{one.task} has waited {one.waiting_s:.0f} s for {one.waiting_on}" for one in waiting)
    for worker in busy:
        # Between its loops, where it evaluates for example, it keeps nothing from the others.
        is_inside = worker.total_s >= STUCK_S if others_go_on else waiting or len(workers) == 1
        if worker.total_s > 0 and is_inside:
            how_long = f"{worker.task} has not finished a step for {worker.window_s:.0f} s"
            sentence = f"{how_long}, and waits for no other task: its script is stalled or computing"
            advice = "see what its threads are doing: stratagem status --stacks"
            yield Finding(Cause.STUCK, worker.task, sentence, advice, 1.0, others)
    for worker in waiting:
        if others_go_on and not worker.steps and worker.waiting_on.startswith("ps:"):  # only it lacks that ps
            sentence = (
                f"{worker.task} has not finished a step for {worker.window_s:.0f} s: it waits for {worker.waiting_on}"
            )
            advice = f"check the network between {worker.task} and what it waits for: the others are served"
            yield Finding(Cause.STUCK, worker.task, sentence, advice, 1.0, others)
    if waiting and not busy and not others_go_on:
        first = max(waiting, key=lambda one: one.waiting_s)
        sentence = f"no step has ended for {first.window_s:.0f} s: {first.task} waits for {first.waiting_on}"
        advice = "see what the threads are doing: stratagem status --stacks"
        yield Finding(Cause.STUCK, first.task, sentence, advice, 1.0, others)
