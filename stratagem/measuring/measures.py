"""The measures: one table of names, which worker, ps, ring, status, Prometheus, TensorBoard and ``stratagem why`` use.

A name ends with its unit: ``_s`` seconds, ``_bytes``; without one it is a number of things. What is measured for each
peer, lane or the like has a label behind a bar: ``wait_s|ps:0``. Nothing here measures or does I/O.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Mapping

Values = Mapping[str, float]
"""What a process has measured, by name and label."""


class Kind(enum.Enum):
    """What a number means."""

    PHASE = "phase"
    """Seconds of a worker's steps since the process began; a moment belongs to one phase."""
    COUNTER = "counter"
    """Adds up since the process began."""
    GAUGE = "gauge"
    """As it is now."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """One row of the table."""

    name: str
    meaning: str
    kind: Kind
    of: tuple[str, ...]
    """Types of tasks that have it."""
    label: str = ""
    """What stands behind the bar; empty: nothing does."""


MEASURES: dict[str, Measure] = {}
"""By name."""


def _row(name: str, meaning: str, kind: Kind, of: tuple[str, ...], label: str = "") -> str:
    MEASURES[name] = Measure(name, meaning, kind, of, label)
    return name


_PHASE, _COUNTER, _GAUGE = Kind
_WORKER, _PS, _BOTH = ("worker",), ("ps",), ("worker", "ps")

DATA_WAIT = _row("data_wait_s", "Waiting for the next batch: read, collated, copied.", _PHASE, _WORKER)
FORWARD = _row("forward_s", "The script's own before an optimizer's step, outside backward().", _PHASE, _WORKER)
BACKWARD = _row("backward_s", "backward(), from the first gradient of a prepared model on.", _PHASE, _WORKER)
OPTIMIZER = _row("optimizer_s", "The optimizer's own: looking at gradients, its step.", _PHASE, _WORKER)
SCRIPT = _row("script_s", "The script's own after an optimizer's step.", _PHASE, _WORKER)
PUSH = _row("push_s", "Encoding gradients and handing them to the lanes.", _PHASE, _WORKER)
WAIT = _row("wait_s", "Waiting for ps or other ranks.", _PHASE, _WORKER)
GATE_WAIT = _row("gate_wait_s", "Waiting for slower workers at the staleness bound.", _PHASE, _WORKER)
MEETING = _row("meeting_s", "Waiting until all workers agree: on a step, on the end of a pass.", _PHASE, _WORKER)
ROWS_WAIT = _row("rows_wait_s", "Waiting for rows of tables.", _PHASE, _WORKER)
LEASE_WAIT = _row("lease_wait_s", "Waiting for the chief to lease units.", _PHASE, _WORKER)
SAVE = _row("save_s", "Writing checkpoints.", _PHASE, _WORKER)
OUTSIDE = _row("outside_s", "Outside the loops over distributed datasets.", _PHASE, _WORKER)
STEPS = _row("steps", "Steps completed in this process.", _COUNTER, _WORKER)
DATA_CPU = _row("data_wait_cpu_s", "CPU time of the training thread while it waited for data.", _COUNTER, _WORKER)
STEP_CPU = _row("step_cpu_s", "CPU time of the training thread in the rest of its steps.", _COUNTER, _WORKER)
PEER_WAIT = _row("peer_wait_s", "The part of wait_s that waited for this peer.", _COUNTER, _WORKER, "peer")
LOADER_WORKERS = _row("loader_workers", "Processes of the DataLoader.", _GAUGE, _WORKER)
THREADS = _row("threads", "Threads that torch computes with.", _GAUGE, _BOTH)
CORES = _row("cores", "CPU cores that the process may use.", _GAUGE, _BOTH)
CPU = _row("cpu_s", "CPU time of the process.", _COUNTER, _BOTH)
STARVED = _row("starved_s", "Its threads were ready and had no core.", _COUNTER, _BOTH)
STARVED_MAIN = _row("starved_main_s", "In its loops, the training thread was ready and had no core.", _COUNTER, _WORKER)
IN_STEP = _row("in_step", "Whether each step waits for those of the other workers.", _GAUGE, _WORKER)
GIL_WAIT = _row("gil_wait_s", "A thread that slept woke later than it asked to, less starved_s.", _COUNTER, _BOTH)
GIL_PROBES = _row("gil_probes", "How often that was tried.", _COUNTER, _BOTH)
THREAD_CPU = _row("thread_cpu_s", "CPU time of a Python thread that the script started.", _COUNTER, _WORKER, "thread")
RECEIVE = _row("receive_s", "Taking frames of gradients in.", _COUNTER, _PS)
QUEUE = _row("queue_s", "Commits waited for their turn: for others on the same variables.", _COUNTER, _PS)
HELD = _row("held_s", "Commits were held, for a checkpoint or an evaluation.", _COUNTER, _PS)
MERGE = _row("merge_s", "Adding the slices of a synchronous step.", _COUNTER, _PS)
APPLY = _row("apply_s", "Applying updates.", _COUNTER, _PS)
REPLY = _row("reply_s", "Sending weights back.", _COUNTER, _PS)
COMMITS = _row("commits", "Updates applied.", _COUNTER, _PS)
STALENESS = _row("staleness", "Commits by how many updates their weights lacked.", _COUNTER, _PS, "at_most")
GROUP_APPLY = _row("group_apply_s", "Applying updates of this group of variables.", _COUNTER, _PS, "group")
ROW_SHARE = _row("row_share", "The part of a table's row updates here that this row got of late.", _GAUGE, _PS, "row")
SENT = _row("sent_bytes", "Payload sent over a lane.", _COUNTER, _BOTH, "lane")
RECEIVED = _row("received_bytes", "Payload received over a lane.", _COUNTER, _BOTH, "lane")
SENT_FRAMES = _row("sent_frames", "Frames sent over a lane.", _COUNTER, _BOTH, "lane")
RECEIVED_FRAMES = _row("received_frames", "Frames received over a lane.", _COUNTER, _BOTH, "lane")
LINK_BUSY = _row("link_busy_s", "Bytes were under way over tcp, and there was room for more.", _COUNTER, _BOTH, "lane")
ROUND_TRIP = _row("round_trip_s", "Round trip of a tcp lane, as the kernel measures it.", _GAUGE, _BOTH, "lane")
CHECKPOINTS = _row("checkpoints", "Checkpoints taken.", _COUNTER, ("chief",))
CHECKPOINT = _row("checkpoint_s", "Commits were held for checkpoints.", _COUNTER, ("chief",))

PHASES = tuple(name for name, measure in MEASURES.items() if measure.kind is Kind.PHASE)
COMPUTING = (FORWARD, BACKWARD, OPTIMIZER, SCRIPT)
"""Phases in which the script computes."""
COMMUNICATION = (PUSH, WAIT, GATE_WAIT, MEETING, ROWS_WAIT, LEASE_WAIT)
"""Phases that are exposed communication."""
_ADDED_UP = frozenset(name for name, measure in MEASURES.items() if measure.kind is not Kind.GAUGE)
MAX_LABELS = 64
STALENESS_BOUNDS = (0, 1, 3, 7, 15, 31)
_STALENESS_LABELS = (*map(str, STALENESS_BOUNDS), "more")


def labelled(name: str, label: str) -> str:
    """``wait_s|ps:0``."""
    return f"{name}|{label}"


def split(key: str) -> tuple[str, str]:
    """Name and label of a key; the label may be empty."""
    name, _, label = key.partition("|")
    return name, label


def labels(values: Values, name: str) -> dict[str, float]:
    """By label, what was measured under a name."""
    start = labelled(name, "")
    return {key[len(start) :]: value for key, value in values.items() if key.startswith(start) and key != start}


def since(values: Values, earlier: Values) -> dict[str, float]:
    """What was added to counters and phases since; gauges as they are. A value that shrank belongs to a new process."""
    return {
        key: value - before
        if (before := earlier.get(key, 0.0)) and not value < before and split(key)[0] in _ADDED_UP
        else value
        for key, value in values.items()
    }


def bounded(values: Values) -> dict[str, float]:
    """The same with at most :data:`MAX_LABELS` labels of each measure, those with the largest values: what a heartbeat
    carries must not grow with the cluster."""
    found = {key: value for key, value in values.items() if "|" not in key}
    for name in {split(key)[0] for key in values.keys() - found.keys()}:
        every = labels(values, name)
        for label in sorted(every, key=lambda one: every[one], reverse=True)[:MAX_LABELS]:
            found[labelled(name, label)] = every[label]
    return found


def staleness_bucket(behind: int) -> str:
    """The label of :data:`STALENESS` for a commit whose weights lacked ``behind`` updates."""
    return _STALENESS_LABELS[bisect.bisect_left(STALENESS_BOUNDS, behind)]
