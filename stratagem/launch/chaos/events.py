"""What ``--chaos`` asks for, read from its text. Pure.

``EVENT; EVENT; ...``, each ``VERB TARGET[@WHEN] [for=SECONDS] [xFACTOR]``::

    kill ps:1@step=200              SIGKILL, when ps:1 has applied 200 updates
    stop chief@40s                  SIGTERM, 40 s after the first step; the one that stands by is called standby
    pause worker:0@step=50 for=5s   SIGSTOP, and SIGCONT 5 s later
    slow worker:1 x4                stopped three quarters of the time, to the end
    cut worker:1-ps:0@20s for=10s   nothing passes between the two; what is sent meanwhile comes later
    reset worker:1-chief for=1s     every connection between the two is reset, and each new one
    random every=8s seed=3          one of these, at a random task, about every 8 s
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator, Sequence

from stratagem.cluster.task import TaskId
from stratagem.errors import ConfigurationError

STANDBY = TaskId("chief", 1)
"""The chief that stands by. Nobody connects to it; the one that serves is chief:0, whichever process it is."""
VERBS = {"kill": "", "stop": "", "pause": "for", "slow": "factor", "cut": "for", "reset": "for"}
"""And what each cannot do without."""
ON_CONNECTIONS = ("cut", "reset")
MAX_PAUSE_S = 3.0
"""Of random events: shorter than the silence after which a task is given up."""
_NUMBER = r"(\d+(?:\.\d+)?)"
_EXAMPLE = 'expected for example --chaos "kill ps:1@step=200; pause worker:0@20s for=5s; slow worker:1 x4"'


@dataclasses.dataclass(frozen=True)
class ChaosEvent:
    text: str
    verb: str
    targets: tuple[TaskId, ...]
    """One task, or the two between which connections suffer."""
    step: int | None = None
    """Of the first target: completed steps of a worker, applied updates of a ps; of the job for a chief."""
    at_s: float = 0.0
    """Seconds after the job's first step."""
    for_s: float | None = None
    """None: to the end of the job."""
    factor: float = 1.0


def parse(
    text: str, tasks: Sequence[TaskId], has_copies: bool = False
) -> tuple[list[ChaosEvent], list[Iterator[ChaosEvent]]]:
    """The events of ``text`` and those to be drawn. ``has_copies``: whether a ps follows another. ConfigurationError: a
    word that is none of the language, a task that the job does not have, or two that have no connection; says which."""
    events, drawn = [], []
    for each in filter(None, map(str.strip, text.split(";"))):
        if each.split()[0] == "random":
            drawn.append(_random(each, [task for task in tasks if task != STANDBY]))
        else:
            events.append(_event(each, tasks, has_copies))
    return events, drawn


def _event(text: str, tasks: Sequence[TaskId], has_copies: bool) -> ChaosEvent:
    verb, *rest = text.split()
    if verb not in VERBS:
        raise ConfigurationError(f"--chaos: {text!r} begins with none of {', '.join([*VERBS, 'random'])}; {_EXAMPLE}")
    if not rest:
        raise ConfigurationError(f"--chaos: {text!r} does not say whom; {_EXAMPLE}")
    names, _, when = rest[0].partition("@")
    targets = tuple(_task(name, text, tasks) for name in names.split("-"))
    if len(targets) != (2 if verb in ON_CONNECTIONS else 1):
        wanted = "two tasks, such as worker:1-ps:0" if verb in ON_CONNECTIONS else "one task, such as worker:1"
        raise ConfigurationError(f"--chaos: {verb} takes {wanted}, got {text!r}")
    if len(targets) == 2 and not {targets, targets[::-1]}.intersection(connections(tasks, has_copies)):
        raise ConfigurationError(f"--chaos: {targets[0]} and {targets[1]} have no connection ({text!r})")
    found: dict[str, float] = {}
    for word in rest[1:]:
        if (match := re.fullmatch(rf"for={_NUMBER}s?", word)) and verb not in ("kill", "stop"):
            found["for"] = float(match[1])
        elif (match := re.fullmatch(rf"x{_NUMBER}", word)) and verb == "slow" and float(match[1]) > 1:
            found["factor"] = float(match[1])
        else:
            raise ConfigurationError(f"--chaos: {word!r} means nothing in {text!r}; {_EXAMPLE}")
    if (needed := VERBS[verb]) and needed not in found:
        way = "for how long: for=5s" if needed == "for" else "how much: x4 makes it four times as slow"
        raise ConfigurationError(f"--chaos: {text!r} does not say {way}")
    step, at_s = _when(when, text)
    return ChaosEvent(text, verb, targets, step, at_s, found.get("for"), found.get("factor", 1.0))


def _when(when: str, text: str) -> tuple[int | None, float]:
    if match := re.fullmatch(r"step=(\d+)", when):
        return int(match[1]), 0.0
    if match := re.fullmatch(rf"{_NUMBER}s", when):
        return None, float(match[1])
    if when or "@" in text:
        raise ConfigurationError(f"--chaos: @{when} in {text!r} is neither @step=200 nor @20s")
    return None, 0.0


def _task(name: str, text: str, tasks: Sequence[TaskId]) -> TaskId:
    for task in tasks:
        if name == word_of(task) or (name == str(task) and task != STANDBY):
            return task
    raise ConfigurationError(
        f"--chaos: this job has no task {name!r} ({text!r}); it has {', '.join(map(word_of, tasks))}"
    )


def word_of(task: TaskId) -> str:
    """What a task is called in ``--chaos``."""
    return {TaskId("chief", 0): "chief", STANDBY: "standby"}.get(task, str(task))


def connections(tasks: Sequence[TaskId], has_copies: bool = False) -> list[tuple[TaskId, TaskId]]:
    """Who connects to whom: (client, server)."""
    of_ps = ("chief", "ps") if has_copies else ("chief",)
    servers = {"worker": ("chief", "ps"), "evaluator": ("chief", "ps"), "ps": of_ps, "chief": ("ps",)}
    if all(task.type != "ps" for task in tasks):
        servers["worker"] = ("chief", "worker")  # a ring
    reached = [task for task in tasks if task != STANDBY]
    return [(one, other) for one in reached for other in reached if one != other and other.type in servers[one.type]]


def _random(text: str, tasks: Sequence[TaskId]) -> Iterator[ChaosEvent]:
    found = {"every": 10.0, "seed": 0.0}
    for word in text.split()[1:]:
        match = re.fullmatch(rf"(every|seed)={_NUMBER}s?", word)
        if match is None or (match[1] == "every" and not float(match[2])):
            raise ConfigurationError(f"--chaos: {word!r} means nothing in {text!r}; expected random every=8s seed=3")
        found[match[1]] = float(match[2])
    return _draw(tasks, found["every"], int(found["seed"]))


def _draw(tasks: Sequence[TaskId], every_s: float, seed: int) -> Iterator[ChaosEvent]:
    """Events without end, equal for an equal seed: ``every_s`` seconds apart in the mean."""
    chance, at_s = random.Random(seed), 0.0
    pairs = connections(tasks)
    while True:
        at_s += chance.uniform(0.5, 1.5) * every_s
        verb = chance.choice(["kill", "pause", "slow", *ON_CONNECTIONS])
        targets = chance.choice(pairs) if verb in ON_CONNECTIONS else (chance.choice(tasks),)
        for_s = None if verb == "kill" else round(chance.uniform(0.2, MAX_PAUSE_S), 1)
        text = f"{verb} {'-'.join(map(str, targets))}@{at_s:.0f}s" + (f" for={for_s}s" if for_s else "")
        yield ChaosEvent(text, verb, targets, None, at_s, for_s, 4.0)
