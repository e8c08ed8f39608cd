"""What the records of the journal add up to. Pure, no I/O."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from stratagem.chief.counting.metric_states import MetricStates, decode_numbers, decode_state
from stratagem.chief.leasing.evaluations import Pin
from stratagem.chief.leasing.positions import common, has, plus
from stratagem.cluster.config import MAX_TASKS
from stratagem.cluster.task import TaskId
from stratagem.cluster.units import MAX_UNITS, Plan, Topic, Unit, UnitBitmap

_ENCODED = {"plans", "accepted", "ended", "left", "left_groups", "steps", "lost", "metric_states", "evaluations"}
_ENCODED |= {"agreed", "wanted_workers", "wanted_ps", "num_ps", "told_ps"}
"""Fields of the history that are not in its record as they are."""


@dataclasses.dataclass
class JobHistory:
    """The job so far, as a restarted chief must know it."""

    chief_epoch: int = 0
    newest_incarnation: int = 0
    earlier_incarnations: int = 0
    """The newest one of jobs that are over, whose journal lay here before: a process of theirs that lives on is none of
    this job's."""
    live: dict[str, int] = dataclasses.field(default_factory=dict)
    """Incarnations that are not over."""
    prepared: dict[str, int] = dataclasses.field(default_factory=dict)
    """Of each ps the newest incarnation that had been brought up to date."""
    put_back: dict[str, int] = dataclasses.field(default_factory=dict)
    """Of each ps the newest process that went back to a checkpoint alone: it may lack units that are reported yet."""
    pids: dict[str, int] = dataclasses.field(default_factory=dict)
    """The process of the newest incarnation of each task, on its host."""
    done: dict[str, int] = dataclasses.field(default_factory=dict)
    """Incarnations of tasks that said goodbye with 0."""
    fenced: dict[str, int] = dataclasses.field(default_factory=dict)
    """Newest incarnation to refuse, of each task."""
    ready: bool = False
    joining: dict[str, int] = dataclasses.field(default_factory=dict)
    """Incarnations that came to a ring that trained, and are none of its ranks."""
    taken_in: dict[str, int] = dataclasses.field(default_factory=dict)
    """Incarnations that became ranks of one."""
    wanted_workers: int = 0
    wanted_ps: int = 0
    """How many there are to be, once somebody has said so."""
    num_ps: int = 0
    told_ps: int = 0
    """The number that the last chief was started with."""
    has_begun: bool = False
    """A ps had values, though it may be gone with them."""
    initialized: list[str] = dataclasses.field(default_factory=list)
    """The ps that have held values, once all initial values were there."""
    is_rerouted: bool = False
    """There is another number of ps, or one of them has come back, and workers have not said yet which hold rows."""
    steps_per_unit: int = 0
    """Updates of a unit, as far as workers have said."""
    num_routings: int = 0
    """How often their number has changed."""
    plans: dict[int, Plan] = dataclasses.field(default_factory=dict)
    accepted: dict[tuple[int, int], UnitBitmap] = dataclasses.field(default_factory=dict)
    ended: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    """Of an epoch at staleness 0 the unit before which it is over for some worker, which was about a part of it."""
    left: dict[tuple[str, int], int] = dataclasses.field(default_factory=dict)
    """Of workers that live, and datasets at staleness 0, the last epoch that they left early."""
    left_groups: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    """Workers that live, each with a group of agreements that it has left."""
    steps: dict[int, tuple[Unit, ...]] = dataclasses.field(default_factory=dict)
    """Synchronous steps that may be in progress, with the units of their slices."""
    next_step: int = 1
    lost: dict[str, dict[tuple[int, int], UnitBitmap]] = dataclasses.field(default_factory=dict)
    """Accepted units without an update on a ps, by its name, or on any (""): each once, however often it goes back."""
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
    updates_in_part: int = 0
    """At staleness 0: steps of a part of a batch, as fewer workers took part than there were."""
    ending: str = ""
    """Why the job ends, once its work is done and its last checkpoint written; tasks may not have heard of it yet."""
    undone: str = ""
    """At staleness 0: what took back work that was done, so that it is in no checkpoint."""
    unsaved: str = ""
    """Why that one could not be written."""
    stopped: str | None = None
    """Why the job is over."""
    exit_code: int = 0
    """Of a job that is over."""

    @property
    def is_new(self) -> bool:
        """Whether no task has ever joined the job."""
        return self.newest_incarnation == self.earlier_incarnations

    @property
    def examples(self) -> int:
        """In accepted units."""
        plans = self.plans
        return sum(plans[key[0]].examples_in(units) for key, units in self.accepted.items() if key[0] in plans)

    @property
    def num_units(self) -> int:
        """Accepted."""
        return sum(map(len, self.accepted.values()))

    @property
    def updates_lost(self) -> int:
        """How many updates went with the memory of a ps."""
        return sum(len(bitmap) for units in self.lost.values() for bitmap in units.values())

    def apply(self, record: Mapping[str, Any]) -> None:
        """Adds one record. KeyError: not a record of this journal."""
        match record["kind"]:
            case "summary":
                self._replace_by(record)
            case "chief":
                self.chief_epoch = record["epoch"]
                told = record.get("num_ps", 0)
                if self.told_ps and told not in (0, self.told_ps):
                    self.wanted_ps = told  # whoever has started it anew wants another number
                self.num_ps, self.told_ps = self.num_ps or told, told
            case "join":
                self.newest_incarnation = max(self.newest_incarnation, record["incarnation"])
                self.live[record["task"]] = record["incarnation"]
                self.pids[record["task"]] = record.get("pid", 0)
                self.done.pop(record["task"], None)
                self._forget_left(record["task"])
                if record.get("joining"):
                    self.joining[record["task"]] = record["incarnation"]
            case "taken_in":
                self.joining.pop(record["task"], None)
                self.taken_in[record["task"]] = record["incarnation"]
            case "prepared" | "put_back" as kind:
                getattr(self, kind)[record["task"]] = record["incarnation"]
            case "over":
                task, incarnation = record["task"], record["incarnation"]
                if self.live.get(task) == incarnation:
                    del self.live[task]
                    self._forget_left(task)
                if record["done"]:
                    self.done[task] = incarnation
                if task.startswith("worker:"):
                    self.fenced[task] = max(self.fenced.get(task, 0), incarnation)
            case "ready":
                self.ready = True
            case "wanted":
                self.wanted_workers, self.wanted_ps = record["workers"], record["ps"]
            case "routed":
                self.num_ps, self.num_routings = _checked("num_ps", record["num_ps"], MAX_TASKS), self.num_routings + 1
                self.initialized, self.is_rerouted = [f"ps:{index}" for index in range(self.num_ps)], True
                self.prepared.clear()  # whatever they hold, it is for another number of them
            case "steps_per_unit":
                self.steps_per_unit = record["number"]
            case "untold":
                self.is_rerouted = True
            case "begun":
                self.has_begun = True
            case "initialized":
                self.initialized, self.is_rerouted = list(record["tasks"]), False
            case "plan":
                self.plans[record["dataset"]] = Plan(**record["plan"])
            case "accepted":
                for unit in (Unit(*unit) for unit in record["units"]):
                    index = _checked("a unit", unit.index, MAX_UNITS - 1)
                    self.accepted.setdefault((unit.dataset, unit.epoch), UnitBitmap()).add(index)
                oldest = record["oldest_step"]
                self.steps = {number: units for number, units in self.steps.items() if number >= oldest}
            case "ended":
                self.ended[record["dataset"], record["epoch"]] = record["stop"]
            case "left":
                self.left.pop((record["task"], record["dataset"]), None)  # the last one is the newest
                self.left[record["task"], record["dataset"]] = record["epoch"]
            case "left_group":
                self.left_groups.add((record["task"], record["group"]))
            case "in_group":
                self.left_groups.discard((record["task"], record["group"]))
            case "step":
                units = self.steps[record["step"]] = tuple(Unit(*unit) for unit in record["units"])
                if (plan := self.plans.get(units[0].dataset)) is not None:
                    self.updates_in_part += len(units) < len(plan.units_of(plan.batch_of(units[0].index)))
                self.next_step = max(self.next_step, record["step"] + 1)
            case "close_step":
                if record["step"] in self.steps:
                    self.steps[record["step"]] = tuple(Unit(*unit) for unit in record["included"])
            case "roll_back":
                self.accepted = decode_positions(record["accepted"])
                self.steps.clear()  # their units are leased again, in other steps
                self.put_back = dict(record.get("put_back", {}))  # all ps have gone back together, but for these
                self.undone = record.get("undone") or self.undone
                if record.get("reopen"):  # what was lost after that checkpoint comes again
                    self.undone = ""
                    self.ended.clear()
                    self.lost = {task: common([units, self.accepted]) for task, units in self.lost.items()}
                self.metric_states.keep(functools.partial(has, self.accepted))
            case "state":
                self.metric_states.add(decode_state(record["state"]))
            case "logs":
                self.metric_states.record(Topic(*record["topic"]), decode_numbers(record["logs"]))
            case "evaluation":
                name, pin = Topic(*record["name"]), Pin.from_record(record["pin"])
                known = self.evaluations.get(name)
                if known is not None and known.attempt != pin.attempt:
                    self.metric_states.drop(name)
                self.evaluations[name] = pin
            case "agreed":
                self.agreed[Topic(*record["topic"])] = record["value"]
            case "anew":
                self.has_begun = False
                self.metric_states = MetricStates()
                self.evaluations.clear()
                self.agreed.clear()
                self.left_groups.clear()
            case "lost":
                task = record["task"]
                self.lost[task] = plus(self.lost.get(task, {}), decode_positions(record["units"]))
            case "checkpoint":
                self.checkpoint = record["path"]
            case "restored":
                self.restored, self.updates_undone = record["path"], self.updates_undone + record["undone"]
            case "ending":
                self.ending, self.unsaved = record["reason"], record.get("unsaved", "")
            case "stopped":
                self.stopped, self.exit_code = record["reason"], record.get("exit_code", int(not self.ending))
            case kind:
                raise KeyError(kind)

    def check(self) -> None:
        """Whether everything is of its kind. TypeError, ClusterSpecError: it is not; says what."""
        for name, usual in vars(JobHistory()).items():
            value = getattr(self, name)
            if not isinstance(value, (str, type(None)) if name == "stopped" else type(usual)):
                raise TypeError(f"{name} is {value!r}")
        for name in ("live", "prepared", "put_back", "done", "fenced", "joining", "taken_in", "pids"):
            for task, number in getattr(self, name).items():
                TaskId.parse(str(task))
                _checked(name, number, 1 << (32 if name == "pids" else 64))
        for task in self.initialized:
            TaskId.parse(str(task))
        for name in ("num_ps", "told_ps", "wanted_ps", "wanted_workers"):
            _checked(name, getattr(self, name), MAX_TASKS)
        left = (number for (_, dataset), epoch in self.left.items() for number in (dataset, epoch))
        for number in (*self.plans, *self.steps, *left, *(part for key in self.accepted for part in key)):
            _checked("a dataset, epoch or step", number)

    def to_record(self) -> dict[str, Any]:
        """One record that says what all records so far said."""
        return {
            "kind": "summary",
            **{name: value for name, value in vars(self).items() if name not in _ENCODED},
            "wanted": [self.wanted_workers, self.wanted_ps],
            "num_ps": [self.num_ps, self.told_ps],
            "plans": [[dataset, dataclasses.asdict(plan)] for dataset, plan in self.plans.items()],
            "accepted": encode_positions(self.accepted),
            "ended": [[*key, stop] for key, stop in self.ended.items()],
            "left": [[*key, epoch] for key, epoch in self.left.items()],
            "left_groups": sorted(self.left_groups),
            "steps": [*self.steps.items()],
            "lost": [[task, encode_positions(units)] for task, units in self.lost.items()],
            "metric_states": self.metric_states.to_record(),
            "evaluations": [[name.group, name.ordinal, pin.to_record()] for name, pin in self.evaluations.items()],
            "agreed": [[topic.group, topic.ordinal, value] for topic, value in self.agreed.items()],
        }

    def _forget_left(self, task: str) -> None:
        self.left = {key: epoch for key, epoch in self.left.items() if key[0] != task}
        self.left_groups -= {key for key in self.left_groups if key[0] == task}

    def _replace_by(self, record: Mapping[str, Any]) -> None:
        for name in vars(self).keys() - _ENCODED:
            setattr(self, name, copy.copy(record[name]))
        self.wanted_workers, self.wanted_ps = record["wanted"]
        self.num_ps, self.told_ps = record["num_ps"]
        self.plans = {dataset: Plan(**plan) for dataset, plan in record["plans"]}
        self.accepted = decode_positions(record["accepted"])
        self.ended = {(dataset, epoch): stop for dataset, epoch, stop in record["ended"]}
        self.left = {(task, dataset): epoch for task, dataset, epoch in record["left"]}
        self.left_groups = {(task, group) for task, group in record["left_groups"]}
        self.steps = {number: tuple(Unit(*unit) for unit in units) for number, units in record["steps"]}
        self.lost = {task: decode_positions(units) for task, units in record["lost"]}
        self.metric_states = MetricStates.from_record(record["metric_states"])
        self.evaluations = {Topic(group, n): Pin.from_record(pin) for group, n, pin in record["evaluations"]}
        self.agreed = {Topic(group, n): value for group, n, value in record["agreed"]}


def _checked(name: str, number: Any, most: int = 1 << 64) -> int:
    if not isinstance(number, int) or not 0 <= number <= most:
        raise TypeError(f"{name} is {number!r}")
    return number


def encode_positions(positions: Mapping[tuple[int, int], UnitBitmap]) -> list[list[Any]]:
    """Accepted units as JSON: [dataset, epoch, bitmap in hex (least significant bit of byte 0 is unit 0)]."""
    return [[*key, bitmap.to_bytes().hex()] for key, bitmap in sorted(positions.items())]


def decode_positions(value: list[list[Any]]) -> dict[tuple[int, int], UnitBitmap]:
    return {(dataset, epoch): UnitBitmap(bytes.fromhex(bitmap)) for dataset, epoch, bitmap in value}
