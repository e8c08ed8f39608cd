"""Prepared metrics under parameter servers: the counts on a unit travel with its acceptance.

The chief keeps them until a worker resets the metric; that worker then reports the result for later readers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torchmetrics

from stratagem.cluster.units import Topic
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.strategy.metric_states import bytes_of_unit, from_bytes
from stratagem.strategy.prepared_metric import PreparedMetric, check_counts_all, num_updates, states_of
from stratagem.worker.chief_client import ChiefClient

MAX_NUMBERS = 4096
"""In the value of a metric that is kept after the metric was reset."""


class CountedMetric(PreparedMetric):
    """Implements :class:`~stratagem.strategy.ps.units.UnitListener`: each unit counts once, whatever dies.

    The value is of the units that the chief has: of all, once a loop over a dataset is over. Workers that reset the
    metric begin another count; who is slower reads the value that the first of them had.
    """

    group = ""

    def __init__(self, metric: torchmetrics.Metric, strategy: Strategy, chief: ChiefClient) -> None:
        check_counts_all(metric)
        super().__init__(metric, strategy)
        self._chief = chief
        self._group = chief.new_group("metric")
        self._ordinal = 0
        self._in_unit = False
        self._newest: Any = None

    def own(self) -> torchmetrics.Metric:
        """See :class:`PreparedMetric`; a ConfigurationError where there is no batch that could count."""
        if not self._in_unit:
            raise ConfigurationError(
                f"{self.name}.update() under parameter servers counts for the batch that the script took from "
                "strategy.distribute_dataset(loader), and there is none now: call it inside a loop over that dataset. "
                "With batches of other datasets leave the metric out of prepare: each worker then counts its own"
            )
        return self._copies[0]

    def compute(self) -> Any:
        self._check_outside("compute")
        found = self._chief.states(self._group, self._ordinal)
        if isinstance(found, Mapping):
            return value_from(self.name, found) if found else self._computed([])
        self._newest = self._computed([from_bytes(data) for data in found])
        return self._newest

    def reset(self) -> None:
        self._check_outside("reset")
        if self._chief.logs(self._group, self._ordinal) is None:
            if self._newest is None and self._chief.states(self._group, self._ordinal):
                self.compute()
            value = {} if self._newest is None else numbers_of(self._newest)
            self._chief.record_logs(self._group, self._ordinal, value)
        self._ordinal += 1
        self._newest = None

    # UnitListener

    def begin_unit(self) -> None:
        self._copies[0].reset()
        self._in_unit = True

    def collect(self) -> tuple[Topic, bytes] | None:
        """See :class:`~stratagem.strategy.ps.units.UnitListener`; a ConfigurationError where it is too much."""
        self._in_unit = False
        if not num_updates(self._copies[0]):
            return None
        data = bytes_of_unit(states_of(self._copies[0]), f"{self.name} keeps")
        return Topic(self._group, self._ordinal), data

    def flush(self) -> None:
        """See :class:`~stratagem.strategy.ps.units.UnitListener`."""


def numbers_of(value: Any) -> dict[str, float]:
    """The value of a metric (tensors and numbers in dicts and sequences) as named numbers."""
    numbers: dict[str, float] = {}
    for path, leaf in _leaves(value, ()):
        tensor = torch.as_tensor(leaf)
        head = [list(path), list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
        flat = enumerate(tensor.flatten().tolist())
        numbers.update((json.dumps([*head, index]), float(number)) for index, number in flat)
        if len(numbers) > MAX_NUMBERS:
            return {json.dumps(None): float(len(numbers))}
    return numbers


def value_from(name: str, numbers: Mapping[str, float]) -> Any:
    """The reverse of :func:`numbers_of`, or a ConfigurationError, for too many; sequences come back as lists."""
    decoded = [(json.loads(key), number) for key, number in numbers.items()]
    if decoded[0][0] is None:
        raise ConfigurationError(
            f"another worker has reset {name} since, whose value has more than {MAX_NUMBERS} numbers, too many to "
            "keep: let every worker call compute() before any of them continues, or use it on the lead only"
        )
    value: Any = {}
    for head, group in itertools.groupby(decoded, lambda item: item[0][:3]):
        path, shape, dtype = head
        tensor = torch.tensor([number for _, number in group], dtype=getattr(torch, dtype)).reshape(shape)
        if not path:
            return tensor
        at = value
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = tensor
    return _with_lists(value)


def _leaves(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    return list(items.values()) if all(isinstance(key, int) for key in items) else items
