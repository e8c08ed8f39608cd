"""The cluster that a step of Slurm describes (``srun``): node lists, tasks of each node, ports. Pure, no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from stratagem.arguments import whole_numbers
from stratagem.cluster.spec import ClusterSpec, refuse_unknown
from stratagem.cluster.task import TASK_TYPES, TaskId
from stratagem.errors import ClusterSpecError

MAX_NODES = 65536
"""Longer lists are refused: a typing error in a range must not fill the memory."""
_PORTS = range(12000, 32000)
"""Of the chief, one for each job and step: above the ports of services, below those that the kernel lends."""
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def expand_nodes(text: str) -> list[str]:
    """The names in a list of Slurm: ``"a[01-03,7],b"`` is a01, a02, a03, a7, b. ClusterSpecError: the list is
    malformed, empty, or longer than :data:`MAX_NODES`."""
    names: list[str] = []
    if "[[" in text or re.search(r"\[[^\]]*$", text):
        raise _malformed(text, "a bracket is not closed")
    for item in map(str.strip, re.split(r",(?![^\[]*\])", text)):  # at commas that stand outside brackets
        found = [""]
        for part in re.split(r"(\[[^\[\]]*\])", item):
            endings = _expand_brackets(part[1:-1], text) if part.startswith("[") else [part]
            if len(found) * len(endings) + len(names) > MAX_NODES:
                raise _malformed(text, f"more than {MAX_NODES} nodes")
            found = [name + ending for name in found for ending in endings]
        names += found
    if bad := [name for name in names if not name or re.search(r"[\[\]\s/:]", name)]:
        raise _malformed(text, f"{bad[0]!r} is not a node name")
    return names


def _expand_brackets(text: str, whole: str) -> list[str]:
    endings: list[str] = []
    for item in text.split(","):
        found = _RANGE.fullmatch(item)
        if found is None:
            raise _malformed(whole, f"{item!r} is not a range like 01-03")
        first, last = found[1], found[2] or found[1]
        if not int(first) <= int(last) < int(first) + MAX_NODES:
            raise _malformed(whole, f"{item!r} counts down, or too far")
        endings += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return endings


def _malformed(text: str, why: str) -> ClusterSpecError:
    return ClusterSpecError(f"expected a list of nodes like 'n[01-03],gpu7' from Slurm, got {text[:200]!r}: {why}")


def tasks_per_node(text: str) -> list[int]:
    """How many tasks each node has: ``"2(x3),1"`` is 2, 2, 2, 1; a ClusterSpecError for what is no such list."""
    counts: list[int] = []
    for item in text.split(","):
        found = _REPEATED.fullmatch(item.strip())
        times = int(found[2] or 1) if found else 0
        if found is None or times < 1 or len(counts) + times > MAX_NODES:
            raise ClusterSpecError(f"expected counts like '2(x3),1' in SLURM_TASKS_PER_NODE, got {text[:200]!r}")
        counts += [int(found[1])] * times
    return counts


def node_of_each_task(nodes: Sequence[str], counts: Sequence[int], distribution: str = "block") -> list[str]:
    """The node of each task, by rank. ``distribution``: what ``srun --distribution`` was given: "block" fills one node
    after the other, "cyclic" deals tasks out in turns; what follows a ":" is about sockets. ClusterSpecError: it is
    another, or there is not one count for each node."""
    if len(nodes) != len(counts):
        raise ClusterSpecError(
            f"Slurm lists {len(nodes)} nodes and the tasks of {len(counts)} nodes; run the script with srun"
        )
    kind = distribution.partition(":")[0].partition(",")[0].lower()
    if kind in ("", "*", "block"):
        return [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
    if kind != "cyclic":
        raise ClusterSpecError(f"expected SLURM_DISTRIBUTION block or cyclic, got {distribution!r}; set TF_CONFIG")
    rounds = range(max(counts, default=0))
    return [node for turn in rounds for node, count in zip(nodes, counts, strict=True) if turn < count]


def is_step(environ: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this process as one of several tasks. Only ``srun`` sets SLURM_STEP_NUM_TASKS: a script
    that runs in an allocation without it, or as its only task, trains alone."""
    return environ.get("SLURM_STEP_NUM_TASKS", "1").strip() not in ("", "0", "1")


def read_slurm(
    environ: Mapping[str, str], jobs: Mapping[str, int] | None = None, port_base: int | None = None
) -> tuple[ClusterSpec, TaskId]:
    """The cluster and the place of this process in it. The chief is at its node, at a port made from the job's id;
    everybody else takes a free port and tells it the chief.

    Args:
        environ: variables of the step (SLURM_STEP_NODELIST, …), else of the job (SLURM_JOB_NODELIST, …).
        jobs: tasks of each role, in the order of their ranks; None: workers, the last STRATAGEM_NUM_PS of them ps.
        port_base: port of the chief; None: from the ids of job and step.

    Raises:
        ClusterSpecError: a variable is missing or contradicts another one.
    """
    num_tasks, rank = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), _number(environ, "SLURM_PROCID")
    if rank >= num_tasks:
        raise ClusterSpecError(f"expected SLURM_PROCID below the {num_tasks} tasks of the step, got {rank}")
    nodes = expand_nodes(_text(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    counts = tasks_per_node(_text(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    places = node_of_each_task(nodes, counts, environ.get("SLURM_DISTRIBUTION", ""))
    if len(places) != num_tasks:
        raise ClusterSpecError(f"expected the places of {num_tasks} tasks from Slurm, got {len(places)}: {counts}")
    if port_base is None:
        numbers = _number(environ, "SLURM_JOB_ID") + _number({"SLURM_STEP_ID": "0", **environ}, "SLURM_STEP_ID")
        port_base = _PORTS[numbers % len(_PORTS)]
    roles = _roles(environ, jobs, num_tasks)
    chief = roles.index("chief") if "chief" in roles else roles.index("worker") if "worker" in roles else -1
    addresses: dict[str, list[str]] = {}
    for each, (role, node) in enumerate(zip(roles, places, strict=True)):
        addresses.setdefault(role, []).append(f"{node}:{port_base if each == chief else 0}")
    return ClusterSpec.from_mapping(addresses), TaskId(roles[rank], roles[:rank].count(roles[rank]))


def _roles(environ: Mapping[str, str], jobs: Mapping[str, int] | None, num_tasks: int) -> list[str]:
    if jobs is None:
        num_ps = _number({"STRATAGEM_NUM_PS": environ.get("STRATAGEM_NUM_PS") or "0"}, "STRATAGEM_NUM_PS")
        if num_ps >= num_tasks:
            raise ClusterSpecError(f"expected STRATAGEM_NUM_PS below the {num_tasks} tasks of the step, got {num_ps}")
        jobs = {"worker": num_tasks - num_ps, "ps": num_ps}
    refuse_unknown("role", jobs, TASK_TYPES, " in jobs", ClusterSpecError)
    whole_numbers(0, **jobs)
    roles = [role for role, count in jobs.items() for _ in range(count)]
    if len(roles) != num_tasks:
        raise ClusterSpecError(f"expected jobs for the {num_tasks} tasks of the step, got {len(roles)}: {dict(jobs)}")
    return roles


def _text(environ: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environ.get(name, "").strip():
            return environ[name].strip()
    raise ClusterSpecError(f"expected {' or '.join(names)} in the environment, got none; start the script with srun")


def _number(environ: Mapping[str, str], *names: str) -> int:
    text = _text(environ, *names)
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise ClusterSpecError(f"expected a whole number in {' or '.join(names)}, got {text[:20]!r}")
    return int(text)
