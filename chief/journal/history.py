"""What the records of the journal add up to. Pure, no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from stratagem.chief.counting.metric_states import MetricStates, decode_logs, decode_state
from stratagem.chief.leasing.evaluations import Pin
from stratagem.cluster.topic import Topic
from stratagem.cluster.units import Plan, Unit, UnitBitmap


@dataclasses.dataclass
class JobHistory:
    """The job so far, as a restarted chief must know it."""

    chief_epoch: int = 0
    newest_incarnation: int = 0
    live: dict[str, int] = dataclasses.field(default_factory=dict)
    """Incarnations that are not over."""
    done: dict[str, int] = dataclasses.field(default_factory=dict)
    """Incarnations of tasks that said goodbye with 0."""
    fenced: dict[str, int] = dataclasses.field(default_factory=dict)
    """Newest incarnation to refuse, of each task."""
    ready: bool = False
    initialized: list[str] = dataclasses.field(default_factory=list)
    """The ps that have held values, once all initial values were there."""
    plans: dict[int, Plan] = dataclasses.field(default_factory=dict)
    accepted: dict[tuple[int, int], UnitBitmap] = dataclasses.field(default_factory=dict)
    steps: dict[int, tuple[Unit, ...]] = dataclasses.field(default_factory=dict)
    """Synchronous steps that may be in progress, with the units of their slices."""
    next_step: int = 1
    updates_lost: int = 0
    metric_states: MetricStates = dataclasses.field(default_factory=MetricStates)
    """What workers have counted; the chief has no other book of it."""
    evaluations: dict[Topic, Pin] = dataclasses.field(default_factory=dict)
    agreed: dict[Topic, int] = dataclasses.field(default_factory=dict)
    """What workers have decided together."""
    checkpoint: str = ""
    """Path of the newest committed checkpoint."""
    restored: str = ""
    """Path of the checkpoint that the job started from."""
    updates_undone: int = 0
    """Updates of newer checkpoints that were not whole: they are computed again."""
    ending: bool = False
    """The work is done and its last checkpoint written; tasks may not have heard of it yet."""
    stopped: str | None = None
    """Why the job is over."""

    def apply(self, record: Mapping[str, Any]) -> None:
        """Adds one record.

        Raises:
            KeyError: not a record of this journal.
        """
        _RECORDS[record["kind"]](self, record)

    def to_record(self) -> dict[str, Any]:
        """One record that says what all records so far said."""
        return {
            "kind": "summary",
            "chief_epoch": self.chief_epoch,
            "newest_incarnation": self.newest_incarnation,
            "live": self.live,
            "done": self.done,
            "fenced": self.fenced,
            "ready": self.ready,
            "initialized": self.initialized,
            "plans": [[dataset, dataclasses.asdict(plan)] for dataset, plan in self.plans.items()],
            "accepted": encode_positions(self.accepted),
            "steps": [[number, encode_units(units)] for number, units in self.steps.items()],
            "next_step": self.next_step,
            "updates_lost": self.updates_lost,
            "metric_states": self.metric_states.to_record(),
            "evaluations": [[name.group, name.ordinal, pin.to_record()] for name, pin in self.evaluations.items()],
            "agreed": [[topic.group, topic.ordinal, value] for topic, value in self.agreed.items()],
            "checkpoint": self.checkpoint,
            "restored": self.restored,
            "updates_undone": self.updates_undone,
            "ending": self.ending,
            "stopped": self.stopped,
        }

    def _summary(self, record: Mapping[str, Any]) -> None:
        self.chief_epoch = record["chief_epoch"]
        self.newest_incarnation = record["newest_incarnation"]
        self.live, self.done, self.fenced = dict(record["live"]), dict(record["done"]), dict(record["fenced"])
        self.ready, self.initialized = record["ready"], list(record["initialized"])
        self.plans = {dataset: Plan(**plan) for dataset, plan in record["plans"]}
        self.accepted = decode_positions(record["accepted"])
        self.steps = {number: tuple(Unit(*unit) for unit in units) for number, units in record["steps"]}
        self.next_step, self.updates_lost = record["next_step"], record["updates_lost"]
        self.metric_states = MetricStates.from_record(record["metric_states"])
        self.evaluations = {Topic(group, n): Pin.from_record(pin) for group, n, pin in record["evaluations"]}
        self.agreed = {Topic(group, n): value for group, n, value in record["agreed"]}
        self.checkpoint, self.stopped = record["checkpoint"], record["stopped"]
        self.ending = record["ending"]
        self.restored, self.updates_undone = record["restored"], record["updates_undone"]

    def _chief(self, record: Mapping[str, Any]) -> None:
        self.chief_epoch = record["epoch"]

    def _join(self, record: Mapping[str, Any]) -> None:
        self.newest_incarnation = max(self.newest_incarnation, record["incarnation"])
        self.live[record["task"]] = record["incarnation"]
        self.done.pop(record["task"], None)

    def _over(self, record: Mapping[str, Any]) -> None:
        task, incarnation = record["task"], record["incarnation"]
        if self.live.get(task) == incarnation:
            del self.live[task]
        if record["done"]:
            self.done[task] = incarnation
        if task.startswith("worker:"):
            self.fenced[task] = max(self.fenced.get(task, 0), incarnation)

    def _ready(self, record: Mapping[str, Any]) -> None:
        self.ready = True

    def _initialized(self, record: Mapping[str, Any]) -> None:
        self.initialized = list(record["tasks"])

    def _plan(self, record: Mapping[str, Any]) -> None:
        self.plans[record["dataset"]] = Plan(**record["plan"])

    def _accepted(self, record: Mapping[str, Any]) -> None:
        for unit in (Unit(*unit) for unit in record["units"]):
            self.accepted.setdefault((unit.dataset, unit.epoch), UnitBitmap()).add(unit.index)
        oldest = record["oldest_step"]
        self.steps = {number: units for number, units in self.steps.items() if number >= oldest}

    def _step(self, record: Mapping[str, Any]) -> None:
        self.steps[record["step"]] = tuple(Unit(*unit) for unit in record["units"])
        self.next_step = max(self.next_step, record["step"] + 1)

    def _close_step(self, record: Mapping[str, Any]) -> None:
        if record["step"] in self.steps:
            self.steps[record["step"]] = tuple(Unit(*unit) for unit in record["included"])

    def _roll_back(self, record: Mapping[str, Any]) -> None:
        self.accepted = decode_positions(record["accepted"])
        self.metric_states.keep(lambda unit: unit.index in self.accepted.get((unit.dataset, unit.epoch), UnitBitmap()))

    def _state(self, record: Mapping[str, Any]) -> None:
        self.metric_states.add(decode_state(record["state"]))

    def _logs_recorded(self, record: Mapping[str, Any]) -> None:
        self.metric_states.record(Topic(*record["topic"]), decode_logs(record["logs"]))

    def _evaluation(self, record: Mapping[str, Any]) -> None:
        name, pin = Topic(*record["name"]), Pin.from_record(record["pin"])
        known = self.evaluations.get(name)
        if known is not None and known.attempt != pin.attempt:
            self.metric_states.drop(name)
        self.evaluations[name] = pin

    def _agreed(self, record: Mapping[str, Any]) -> None:
        self.agreed[Topic(*record["topic"])] = record["value"]

    def _anew(self, record: Mapping[str, Any]) -> None:
        self.metric_states.clear()
        self.evaluations.clear()
        self.agreed.clear()

    def _lost(self, record: Mapping[str, Any]) -> None:
        self.updates_lost += record["updates"]

    def _checkpoint(self, record: Mapping[str, Any]) -> None:
        self.checkpoint = record["path"]

    def _restored(self, record: Mapping[str, Any]) -> None:
        self.restored, self.updates_undone = record["path"], self.updates_undone + record["undone"]

    def _ending(self, record: Mapping[str, Any]) -> None:
        self.ending = True

    def _stopped(self, record: Mapping[str, Any]) -> None:
        self.stopped = record["reason"]


_RECORDS = {
    "summary": JobHistory._summary,
    "chief": JobHistory._chief,
    "join": JobHistory._join,
    "over": JobHistory._over,
    "ready": JobHistory._ready,
    "initialized": JobHistory._initialized,
    "plan": JobHistory._plan,
    "accepted": JobHistory._accepted,
    "step": JobHistory._step,
    "close_step": JobHistory._close_step,
    "roll_back": JobHistory._roll_back,
    "state": JobHistory._state,
    "logs": JobHistory._logs_recorded,
    "evaluation": JobHistory._evaluation,
    "agreed": JobHistory._agreed,
    "anew": JobHistory._anew,
    "lost": JobHistory._lost,
    "checkpoint": JobHistory._checkpoint,
    "restored": JobHistory._restored,
    "ending": JobHistory._ending,
    "stopped": JobHistory._stopped,
}


def encode_units(units: Iterable[Unit]) -> list[list[int]]:
    """Units as JSON: [dataset, epoch, index]."""
    return [[unit.dataset, unit.epoch, unit.index] for unit in units]


def encode_positions(positions: Mapping[tuple[int, int], UnitBitmap]) -> list[list[Any]]:
    """Accepted units as JSON: [dataset, epoch, bitmap in hex (least significant bit of byte 0 is unit 0)]."""
    return [[*key, bitmap.to_bytes().hex()] for key, bitmap in sorted(positions.items())]


def decode_positions(value: list[list[Any]]) -> dict[tuple[int, int], UnitBitmap]:
    """The inverse of :func:`encode_positions`."""
    return {(dataset, epoch): UnitBitmap(bytes.fromhex(bitmap)) for dataset, epoch, bitmap in value}
