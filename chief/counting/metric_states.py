"""What workers have counted on units, kept once for each unit until a worker reports the result. Pure, no I/O.

The chief cannot read the counts: workers merge them. A topic is *closed* once a worker has reported its result, which
then stands for all; the counts are dropped.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stratagem.cluster.units import EARLIER_LOGS, EPOCH_LOGS, IN_CHECKPOINTS, MAX_STATE_BYTES, Topic, Unit, UnitBitmap
from stratagem.errors import LimitError

MAX_TOPIC_BYTES = 256 << 20
MAX_OPEN_BYTES = 1 << 30
"""Of all topics that are open."""
_STATE_BYTES = 256
"""What a state takes beyond what was counted."""
MAX_LOGS_BYTES = 256 << 20
"""Of what came of all topics."""

Logs = tuple[tuple[str, float], ...]
"""Named numbers in their order."""


@dataclasses.dataclass(frozen=True, slots=True)
class MetricState:
    """What was counted on one unit."""

    topic: Topic
    unit: Unit
    """Of evaluation data: its dataset and epoch are 0."""
    data: bytes


@dataclasses.dataclass(frozen=True)
class Page:
    """Part of a topic."""

    states: tuple[bytes, ...] = ()
    num_left: int = 0
    logs: Logs | None = None
    """What came of it, once it is closed."""


@dataclasses.dataclass
class MetricStates:
    _open: dict[Topic, dict[Unit, bytes]] = dataclasses.field(default_factory=dict)
    _num_bytes: dict[Topic, int] = dataclasses.field(default_factory=dict)
    _open_bytes: int = 0
    _counted: collections.Counter[tuple[str, Unit]] = dataclasses.field(default_factory=collections.Counter)
    """By group and unit: open topics with a state of it."""
    _logs: dict[Topic, Logs] = dataclasses.field(default_factory=dict)
    _in_logs: dict[tuple[str, int, int], UnitBitmap] = dataclasses.field(default_factory=dict)
    """By group, dataset and epoch: units of training data that are counted in what came of a topic."""
    _logs_bytes: int = 0

    def check(self, state: MetricState) -> None:
        """Whether a state can be kept. LimitError: it is too large, or all of its topic, or of all topics, are."""
        if len(state.data) > MAX_STATE_BYTES:
            raise LimitError(f"{state.unit}: expected at most {MAX_STATE_BYTES} bytes counted, got {len(state.data)}")
        if self._num_bytes.get(state.topic, 0) + len(state.data) > MAX_TOPIC_BYTES:
            raise LimitError(
                f"what was counted in {state.topic} is more than {MAX_TOPIC_BYTES >> 20} MiB: use larger batches, or "
                "metrics that keep sums and not every output"
            )

        if self._open_bytes + _STATE_BYTES + len(state.data) > MAX_OPEN_BYTES:
            raise LimitError(
                f"what was counted and nobody has asked for takes more than {MAX_OPEN_BYTES >> 20} MiB: use larger "
                "batches, and let each fit and evaluation come to its end"
            )

    def check_logs(self, name: Topic, logs: Logs) -> None:
        """Whether what came of a topic can be kept. LimitError: it is too much, with that of all others."""
        if self._logs_bytes + _size_of(name, logs) > MAX_LOGS_BYTES:
            raise LimitError(
                f"what came of {name} and of all before is more than {MAX_LOGS_BYTES >> 20} MiB: report fewer metrics, "
                "or call fit and evaluate less often"
            )

    def place(self, name: Topic) -> Topic:
        """The first topic of the group from ``name`` on that is open."""
        while name in self._logs:
            name = Topic(name.group, name.ordinal + 1)
        return name

    def counts(self, group: str, unit: Unit) -> bool:
        """Whether what a group counted on a unit of training data is kept, or in what came of a topic of it."""
        is_in_logs = unit.index in self._in_logs.get((group, unit.dataset, unit.epoch), ())
        return is_in_logs or (group, unit) in self._counted

    def add(self, state: MetricState) -> bool:
        """Keeps a state; False if there is one of the unit, or the topic is closed."""
        if state.topic in self._logs or state.unit in self._open.get(state.topic, {}):
            return False
        self._open.setdefault(state.topic, {})[state.unit] = state.data
        self._num_bytes[state.topic] = self._num_bytes.get(state.topic, 0) + len(state.data)
        self._open_bytes += _STATE_BYTES + len(state.data)
        self._counted[state.topic.group, state.unit] += 1
        return True

    def units(self, name: Topic) -> list[Unit]:
        return sorted(self._open.get(name, ()))

    def page(self, name: Topic, first: int, max_bytes: int) -> Page:
        """States in the order of their units, without the ``first``, in a page of ``max_bytes`` (one state may be
        larger), or what came of them."""
        if name in self._logs:
            return Page(logs=self._logs[name])
        states = self._open.get(name, {})
        chosen: list[bytes] = []
        rest = sorted(states)[first:]
        num_bytes = 0
        for unit in rest:
            num_bytes += len(states[unit])
            if chosen and num_bytes > max_bytes:
                break
            chosen.append(states[unit])
        return Page(tuple(chosen), len(rest) - len(chosen))

    def logs(self, name: Topic) -> Logs | None:
        """What came of a topic; None while it is open."""
        return self._logs.get(name)

    def lasting_logs(self) -> dict[Topic, Logs]:
        """What came of all epochs that are over, and where schedulers are, as a job that resumes has it."""
        return {lasting: logs for name, logs in self._logs.items() if (lasting := _lasting(name)) is not None}

    def record(self, name: Topic, logs: Logs) -> None:
        """Says what came of a topic, if nobody has."""
        if name not in self._logs:
            self._logs[name] = logs
            self._logs_bytes += _size_of(name, logs)
            for unit in self._open.get(name, ()):
                if unit.dataset:
                    self._in_logs.setdefault((name.group, unit.dataset, unit.epoch), UnitBitmap()).add(unit.index)
            self.drop(name)

    def drop(self, name: Topic) -> None:
        self._take_out(name, [*self._open.get(name, ())])
        self._open.pop(name, None)
        self._num_bytes.pop(name, None)

    def keep(self, is_accepted: Callable[[Unit], bool]) -> None:
        """Forgets what was counted on units of training data that will be computed again."""
        for name, states in self._open.items():
            self._take_out(name, [unit for unit in states if unit.dataset and not is_accepted(unit)])

    def _take_out(self, name: Topic, units: Iterable[Unit]) -> None:
        """Forgets states of an open topic."""
        for unit in units:
            num_bytes = len(self._open[name].pop(unit))
            self._num_bytes[name] -= num_bytes
            self._open_bytes -= _STATE_BYTES + num_bytes
            self._counted[name.group, unit] -= 1
            if not self._counted[name.group, unit]:
                del self._counted[name.group, unit]

    def to_record(self) -> dict[str, Any]:
        return {
            "open": [
                encode_state(MetricState(name, *each)) for name, states in self._open.items() for each in states.items()
            ],
            "logs": encode_logs(self._logs),
            "in_logs": [[*key, base64.b64encode(units.to_bytes()).decode()] for key, units in self._in_logs.items()],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> MetricStates:
        metric_states = cls()
        for name, logs in decode_logs(record["logs"]).items():
            metric_states.record(name, logs)
        for state in record["open"]:
            metric_states.add(decode_state(state))
        for group, dataset, epoch, units in record["in_logs"]:
            metric_states._in_logs[group, dataset, epoch] = UnitBitmap(base64.b64decode(units))
        return metric_states


def _size_of(name: Topic, logs: Logs) -> int:
    """Bytes that the chief keeps, about: a number, its name and what holds them."""
    return 256 + len(name.group) + sum(128 + len(each) for each, _ in logs)


def encode_state(state: MetricState) -> dict[str, Any]:
    topic = [state.topic.group, state.topic.ordinal]
    return {"topic": topic, "unit": state.unit, "data": base64.b64encode(state.data).decode()}


def decode_state(value: Mapping[str, Any]) -> MetricState:
    return MetricState(Topic(*value["topic"]), Unit(*value["unit"]), base64.b64decode(value["data"]))


def encode_logs(logs: Mapping[Topic, Logs]) -> list[list[Any]]:
    return [[name.group, name.ordinal, numbers] for name, numbers in logs.items()]


def decode_logs(value: Iterable[Iterable[Any]]) -> dict[Topic, Logs]:
    return {Topic(str(group), int(ordinal)): decode_numbers(numbers) for group, ordinal, numbers in value}


def decode_numbers(value: Iterable[Iterable[Any]]) -> Logs:
    return tuple((str(name), float(number)) for name, number in value)


def _lasting(name: Topic) -> Topic | None:
    """The topic of a resumed job that has what came of this one; None: none has."""
    for end in (EPOCH_LOGS, EARLIER_LOGS):
        if name.group.endswith(end):
            return Topic(name.group.removesuffix(end) + EARLIER_LOGS, name.ordinal)
    return name if name.group.startswith(IN_CHECKPOINTS) else None
