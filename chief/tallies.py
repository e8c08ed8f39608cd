"""What workers have counted on units, kept once for each unit until somebody says what came of it. Pure, no I/O.

The chief cannot read what was counted: workers merge it. A tally is *settled* once a worker has said which numbers came
of it; those stand for everybody, and what was counted is forgotten.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stratagem.cluster.units import MAX_DELTA_BYTES, Unit
from stratagem.errors import LimitError

MAX_TALLY_BYTES = 256 << 20

Logs = tuple[tuple[str, float], ...]
"""Named numbers in their order."""


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class TallyName:
    """Identity of a tally."""

    group: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.group}/{self.ordinal}"


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """What was counted on one unit."""

    tally: TallyName
    unit: Unit
    """Of evaluation data: its dataset and epoch are 0."""
    data: bytes


@dataclasses.dataclass(frozen=True)
class Page:
    """Part of a tally."""

    deltas: tuple[bytes, ...] = ()
    num_left: int = 0
    logs: Logs | None = None
    """What came of it, once it is settled."""


@dataclasses.dataclass
class Tallies:
    """The tallies of a job."""

    _open: dict[TallyName, dict[Unit, bytes]] = dataclasses.field(default_factory=dict)
    _num_bytes: dict[TallyName, int] = dataclasses.field(default_factory=dict)
    _logs: dict[TallyName, Logs] = dataclasses.field(default_factory=dict)

    def check(self, delta: Delta) -> None:
        """Whether a delta can be kept.

        Raises:
            LimitError: it is too large, or all of its tally are.
        """
        if len(delta.data) > MAX_DELTA_BYTES:
            raise LimitError(f"{delta.unit}: expected at most {MAX_DELTA_BYTES} bytes counted, got {len(delta.data)}")
        if self._num_bytes.get(delta.tally, 0) + len(delta.data) > MAX_TALLY_BYTES:
            raise LimitError(
                f"what was counted in {delta.tally} is more than {MAX_TALLY_BYTES >> 20} MiB: use larger batches, or "
                "metrics that keep sums and not every output"
            )

    def place(self, name: TallyName) -> TallyName:
        """The first tally of the group from ``name`` on that is not settled."""
        while name in self._logs:
            name = TallyName(name.group, name.ordinal + 1)
        return name

    def counts(self, group: str, unit: Unit) -> bool:
        """Whether something that a group counted on a unit of training data is kept."""
        return any(unit in deltas for name, deltas in self._open.items() if name.group == group)

    def add(self, delta: Delta) -> bool:
        """Keeps a delta; False if there is one of the unit, or the tally is settled."""
        if delta.tally in self._logs or delta.unit in self._open.get(delta.tally, {}):
            return False
        self._open.setdefault(delta.tally, {})[delta.unit] = delta.data
        self._num_bytes[delta.tally] = self._num_bytes.get(delta.tally, 0) + len(delta.data)
        return True

    def units(self, name: TallyName) -> list[Unit]:
        """Units with a delta."""
        return sorted(self._open.get(name, ()))

    def page(self, name: TallyName, first: int, max_bytes: int) -> Page:
        """Deltas in the order of their units, from the ``first`` on, or what came of them.

        Args:
            name: of the tally.
            first: deltas to leave out.
            max_bytes: size of the page; one delta may be larger.
        """
        if name in self._logs:
            return Page(logs=self._logs[name])
        deltas = self._open.get(name, {})
        chosen: list[bytes] = []
        rest = sorted(deltas)[first:]
        num_bytes = 0
        for unit in rest:
            num_bytes += len(deltas[unit])
            if chosen and num_bytes > max_bytes:
                break
            chosen.append(deltas[unit])
        return Page(tuple(chosen), len(rest) - len(chosen))

    def logs(self, name: TallyName) -> Logs | None:
        """What came of a tally; None while it is open."""
        return self._logs.get(name)

    def settle(self, name: TallyName, logs: Logs) -> None:
        """Says what came of a tally, if nobody has."""
        if name not in self._logs:
            self._logs[name] = logs
            self.drop(name)

    def drop(self, name: TallyName) -> None:
        """Forgets what was counted."""
        self._open.pop(name, None)
        self._num_bytes.pop(name, None)

    def keep(self, is_accepted: Callable[[Unit], bool]) -> None:
        """Forgets what was counted on units of training data that will be computed again."""
        for name, deltas in self._open.items():
            for unit in [unit for unit in deltas if unit.dataset and not is_accepted(unit)]:
                self._num_bytes[name] -= len(deltas.pop(unit))

    def clear(self) -> None:
        """Forgets everything."""
        self._open.clear()
        self._num_bytes.clear()
        self._logs.clear()

    def to_record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "open": [
                encode_delta(Delta(name, *each)) for name, deltas in self._open.items() for each in deltas.items()
            ],
            "logs": [[name.group, name.ordinal, logs] for name, logs in self._logs.items()],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Tallies:
        """The inverse of :meth:`to_record`."""
        tallies = cls()
        for group, ordinal, logs in record["logs"]:
            tallies.settle(TallyName(group, ordinal), decode_logs(logs))
        for delta in record["open"]:
            tallies.add(decode_delta(delta))
        return tallies


def encode_delta(delta: Delta) -> dict[str, Any]:
    """As JSON."""
    unit = [delta.unit.dataset, delta.unit.epoch, delta.unit.index]
    tally = [delta.tally.group, delta.tally.ordinal]
    return {"tally": tally, "unit": unit, "data": base64.b64encode(delta.data).decode()}


def decode_delta(value: Mapping[str, Any]) -> Delta:
    """The inverse of :func:`encode_delta`."""
    return Delta(TallyName(*value["tally"]), Unit(*value["unit"]), base64.b64decode(value["data"]))


def decode_logs(value: Iterable[Iterable[Any]]) -> Logs:
    """Named numbers from JSON."""
    return tuple((str(name), float(number)) for name, number in value)
