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


FORWARD, BACKWARD, OPTIMIZER, SCRIPT = "forward_s", "backward_s", "optimizer_s", "script_s"
DATA_WAIT, PUSH, WAIT = "data_wait_s", "push_s", "wait_s"
GATE_WAIT, MEETING, ROWS_WAIT = "gate_wait_s", "meeting_s", "rows_wait_s"
SAVE, LEASE_WAIT, OUTSIDE = "save_s", "lease_wait_s", "outside_s"
STEPS, DATA_CPU, STEP_CPU, PEER_WAIT = "steps", "data_wait_cpu_s", "step_cpu_s", "peer_wait_s"
LOADER_WORKERS, THREADS, CORES = "loader_workers", "threads", "cores"
IN_STEP, STARVED_MAIN = "in_step", "starved_main_s"
CPU, STARVED, GIL_WAIT, GIL_PROBES, THREAD_CPU = "cpu_s", "starved_s", "gil_wait_s", "gil_probes", "thread_cpu_s"
RECEIVE, QUEUE, HELD, MERGE = "receive_s", "queue_s", "held_s", "merge_s"
APPLY, REPLY, COMMITS, STALENESS = "apply_s", "reply_s", "commits", "staleness"
GROUP_APPLY, ROW_SHARE = "group_apply_s", "row_share"
SENT, RECEIVED, SENT_FRAMES, RECEIVED_FRAMES = "sent_bytes", "received_bytes", "sent_frames", "received_frames"
LINK_BUSY, ROUND_TRIP = "link_busy_s", "round_trip_s"
CHECKPOINTS, CHECKPOINT = "checkpoints", "checkpoint_s"

_WORKER, _PS, _BOTH = ("worker",), ("ps",), ("worker", "ps")

MEASURES: Mapping[str, Measure] = {
    each.name: each
    for each in (
        Measure(DATA_WAIT, "Waiting for the next batch: read, collated, copied.", Kind.PHASE, _WORKER),
        Measure(FORWARD, "The script's own before an optimizer's step, outside backward().", Kind.PHASE, _WORKER),
        Measure(BACKWARD, "backward(), from the first gradient of a prepared model on.", Kind.PHASE, _WORKER),
        Measure(OPTIMIZER, "The optimizer's own: looking at gradients, its step.", Kind.PHASE, _WORKER),
        Measure(SCRIPT, "The script's own after an optimizer's step.", Kind.PHASE, _WORKER),
        Measure(PUSH, "Encoding gradients and handing them to the lanes.", Kind.PHASE, _WORKER),
        Measure(WAIT, "Waiting for ps or other ranks.", Kind.PHASE, _WORKER),
        Measure(GATE_WAIT, "Waiting for slower workers at the staleness bound.", Kind.PHASE, _WORKER),
        Measure(MEETING, "Waiting until all workers agree: on a step, on the end of a pass.", Kind.PHASE, _WORKER),
        Measure(ROWS_WAIT, "Waiting for rows of tables.", Kind.PHASE, _WORKER),
        Measure(LEASE_WAIT, "Waiting for the chief to lease units.", Kind.PHASE, _WORKER),
        Measure(SAVE, "Writing checkpoints.", Kind.PHASE, _WORKER),
        Measure(OUTSIDE, "Outside the loops over distributed datasets.", Kind.PHASE, _WORKER),
        Measure(STEPS, "Steps completed in this process.", Kind.COUNTER, _WORKER),
        Measure(DATA_CPU, "CPU time of the training thread while it waited for data.", Kind.COUNTER, _WORKER),
        Measure(STEP_CPU, "CPU time of the training thread in the rest of its steps.", Kind.COUNTER, _WORKER),
        Measure(PEER_WAIT, "The part of wait_s that waited for this peer.", Kind.COUNTER, _WORKER, "peer"),
        Measure(LOADER_WORKERS, "Processes of the DataLoader.", Kind.GAUGE, _WORKER),
        Measure(THREADS, "Threads that torch computes with.", Kind.GAUGE, _BOTH),
        Measure(CORES, "CPU cores that the process may use.", Kind.GAUGE, _BOTH),
        Measure(CPU, "CPU time of the process.", Kind.COUNTER, _BOTH),
        Measure(STARVED, "Its threads were ready and had no core.", Kind.COUNTER, _BOTH),
        Measure(STARVED_MAIN, "The training thread was ready and had no core.", Kind.COUNTER, _WORKER),
        Measure(IN_STEP, "Whether each step waits for those of the other workers.", Kind.GAUGE, _WORKER),
        Measure(GIL_WAIT, "A thread that slept woke later than it asked to, less starved_s.", Kind.COUNTER, _BOTH),
        Measure(GIL_PROBES, "How often that was tried.", Kind.COUNTER, _BOTH),
        Measure(THREAD_CPU, "CPU time of a Python thread that the script started.", Kind.COUNTER, _WORKER, "thread"),
        Measure(RECEIVE, "Taking frames of gradients in.", Kind.COUNTER, _PS),
        Measure(QUEUE, "Commits waited for their turn: for others on the same variables.", Kind.COUNTER, _PS),
        Measure(HELD, "Commits were held, for a checkpoint or an evaluation.", Kind.COUNTER, _PS),
        Measure(MERGE, "Adding the slices of a synchronous step.", Kind.COUNTER, _PS),
        Measure(APPLY, "Applying updates.", Kind.COUNTER, _PS),
        Measure(REPLY, "Sending weights back.", Kind.COUNTER, _PS),
        Measure(COMMITS, "Updates applied.", Kind.COUNTER, _PS),
        Measure(STALENESS, "Commits by how many updates their weights lacked.", Kind.COUNTER, _PS, "at_most"),
        Measure(GROUP_APPLY, "Applying updates of this group of variables.", Kind.COUNTER, _PS, "group"),
        Measure(ROW_SHARE, "The part of a table's row updates here that this row got of late.", Kind.GAUGE, _PS, "row"),
        Measure(SENT, "Payload sent over a lane.", Kind.COUNTER, _BOTH, "lane"),
        Measure(RECEIVED, "Payload received over a lane.", Kind.COUNTER, _BOTH, "lane"),
        Measure(SENT_FRAMES, "Frames sent over a lane.", Kind.COUNTER, _BOTH, "lane"),
        Measure(RECEIVED_FRAMES, "Frames received over a lane.", Kind.COUNTER, _BOTH, "lane"),
        Measure(LINK_BUSY, "Bytes were under way over tcp, and there was room for more.", Kind.COUNTER, _BOTH, "lane"),
        Measure(ROUND_TRIP, "Round trip of a tcp lane, as the kernel measures it.", Kind.GAUGE, _BOTH, "lane"),
        Measure(CHECKPOINTS, "Checkpoints taken.", Kind.COUNTER, ("chief",)),
        Measure(CHECKPOINT, "Commits were held for checkpoints.", Kind.COUNTER, ("chief",)),
    )
}  # fmt: skip
PHASES = tuple(name for name, measure in MEASURES.items() if measure.kind is Kind.PHASE)
COMPUTING = (FORWARD, BACKWARD, OPTIMIZER, SCRIPT)
"""Phases in which the script computes."""
COMMUNICATION = (PUSH, WAIT, GATE_WAIT, MEETING, ROWS_WAIT, LEASE_WAIT)
"""Phases that are exposed communication."""
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
    return {label: value for key, value in values.items() for found, label in [split(key)] if found == name and label}


def since(values: Values, earlier: Values) -> dict[str, float]:
    """What was added to counters and phases since; gauges as they are. A value that shrank belongs to a new process."""
    return {
        key: value if _is_gauge(key) or value < earlier.get(key, 0.0) else value - earlier.get(key, 0.0)
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


def _is_gauge(key: str) -> bool:
    measure = MEASURES.get(split(key)[0])
    return measure is None or measure.kind is Kind.GAUGE


def staleness_bucket(behind: int) -> str:
    """The label of :data:`STALENESS` for a commit whose weights lacked ``behind`` updates."""
    return _STALENESS_LABELS[bisect.bisect_left(STALENESS_BOUNDS, behind)]
