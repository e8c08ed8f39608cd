"""How a worker joins a training ring: what state it gets, and when (docs/design/healing.md)."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stratagem.checkpoint.tree import EncodedState, decode, encode
from stratagem.data.split_dataset import SplitDataset
from stratagem.errors import ConfigurationError, StratagemError
from stratagem.strategy.random_states import random_states, set_random_states
from stratagem.strategy.replicas.variable import Variable, VariableSynchronization
from stratagem.strategy.step_shares import StepShares
from stratagem.worker.ring.agreement import broadcast_json, broadcast_tensors
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.healing import Healing
from stratagem.worker.step_meter import StepMeter

logger = logging.getLogger(__name__)

STREAMS = ("torch", "numpy", "python", "cuda")
"""Generators of a process, by the beginning of the names of their states."""


@dataclasses.dataclass(eq=False, repr=False)
class Newcomers:
    """One rank's part in taking newcomers in, or a newcomer's in being taken in."""

    _communicator: Communicator
    """Of a ring that heals."""
    _healing: Healing
    _objects: Callable[[], Sequence[Any]]
    """What was prepared, and variables: the same on every worker, in the same order."""
    _shares: StepShares
    _meter: StepMeter
    _has_pending: Callable[[], bool]
    """Whether there are gradients that only this rank knows of."""

    def __post_init__(self) -> None:
        self.datasets: dict[int, SplitDataset] = {}
        """By ordinal."""
        self.has_stepped = False
        """Whether an optimizer has made its step with the gradients of the newest backward."""

    @property
    def is_new(self) -> bool:
        return self._healing.is_new

    def arrive(self, ordinal: int) -> None:
        """The script comes to a dataset: a newcomer joins the others, in the middle of their pass over it; a
        ConfigurationError where they go through another one, or have prepared something else."""
        if self._healing.is_new:
            self._join(ordinal)

    def between_steps(self, ordinal: int, is_last: bool) -> None:
        """The others take in those who wait, all between the same two steps; not after the last one of several in a
        pass, of which the newcomer's loop would have none."""
        healing = self._healing
        is_in_order = self.has_stepped and self._shares.is_newest and not self._has_pending()
        if healing.newcomers or (healing.is_due and is_in_order and not is_last):
            self._join(ordinal)

    def _join(self, ordinal: int) -> None:
        began = time.monotonic()
        self._healing.take_in(self._communicator, functools.partial(self._give, ordinal))
        logger.info("the ring has %d ranks after %.2f s", self._communicator.size, time.monotonic() - began)

    def _give(self, ordinal: int) -> None:
        """Brings the state of the first rank that has it to those who do not. Collective."""
        healing, ring = self._healing, self._communicator
        donor, is_new = healing.donor, healing.is_new
        shared = self._shared_streams()
        state = EncodedState(None, {})
        error = ""
        if ring.rank == donor:
            try:
                state = encode(self._state(ordinal, shared), "the training", copy=False)
            except StratagemError as cannot:
                error = f"its state cannot be sent to a newcomer: {cannot}"
        error, tree = broadcast_json(ring, [error, state.tree], donor)
        if error:
            logger.error("no worker can join this training: %s", error)
            if is_new:
                raise ConfigurationError(f"this worker cannot join the training: {error}")
            return
        tensors = broadcast_tensors(ring, state.tensors, donor, wants=is_new)
        if is_new:
            self._take(ordinal, decode(tree, tensors))

    def _state(self, ordinal: int, streams: Sequence[str]) -> dict[str, Any]:
        states, loop = random_states(), self._healing.loop
        return {
            "ordinal": ordinal,
            "kinds": [type(item).__name__ for item in self._objects()],
            "objects": [_state_of(item) for item in self._objects()],
            "datasets": {str(number): each.hand_over(number == ordinal) for number, each in self.datasets.items()},
            "loop": None if loop is None else loop.hand_over(),
            "counts": (self._shares.num_told, self._meter.steps),
            "streams": {name: state for name, state in states.items() if _stream(name) in streams},
        }

    def _take(self, ordinal: int, given: Mapping[str, Any]) -> None:
        objects, kinds = self._objects(), [type(item).__name__ for item in self._objects()]
        if given["ordinal"] != ordinal:
            raise ConfigurationError(
                f"the others iterate over dataset {given['ordinal']} of the script, but this worker reached dataset "
                f"{ordinal} first: a script that newcomers can join must not read another dataset before the one that "
                "it trains on"
            )
        if kinds != given["kinds"]:
            raise ConfigurationError(
                f"expected this worker to prepare what the others have: {', '.join(given['kinds'])}; got "
                f"{', '.join(kinds)}"
            )
        loop = self._healing.loop
        if (loop is None) != (given["loop"] is None):
            ours, theirs = ("is", "are not") if loop is not None else ("is not", "are")
            raise ConfigurationError(f"this worker {ours} inside of fit, and the others {theirs}: run the same script")
        for number, (item, state) in enumerate(zip(objects, given["objects"], strict=True)):
            try:
                _put(item, state)
            except (RuntimeError, ValueError, KeyError) as error:  # as torch says that a state does not fit
                raise ConfigurationError(
                    f"the {kinds[number]} that this worker prepared differs from the others': {error}"
                ) from error
        for name, place in given["datasets"].items():
            if (dataset := self.datasets.get(int(name))) is not None:
                dataset.take_over(place)
        if loop is not None:
            loop.take_over(given["loop"])
        set_random_states(random_states() | given["streams"])
        self._shares.num_told, steps = given["counts"]
        self._meter.take_over(steps)

    def _shared_streams(self) -> list[str]:
        """Streams of random numbers that are the same on all ranks that train: a newcomer takes them over."""
        states = random_states()
        sums = [
            sum(zlib.crc32(state.numpy().tobytes()) for name, state in states.items() if _stream(name) == stream)
            for stream in STREAMS
        ]
        told = self._communicator.all_gather(torch.tensor([sums]))
        old = [
            each for each, name in zip(told, self._healing.members, strict=True) if name not in self._healing.newcomers
        ]
        return [stream for place, stream in enumerate(STREAMS) if len({int(each[0, place]) for each in old}) == 1]


def _stream(name: str) -> str:
    return name.partition(".")[0].partition(":")[0]


def _state_of(item: Any) -> dict[str, Any]:
    if isinstance(item, Variable):  # ON_READ: each replica counts for itself
        return {} if item.synchronization is VariableSynchronization.ON_READ else {"value": item.tensors[0].detach()}
    if isinstance(item, nn.Module):
        trains = {name: parameter.requires_grad for name, parameter in item.named_parameters()}
        return {"state": item.state_dict(), "buffers": dict(item.named_buffers()), "trains": trains}
    return {"state": item.state_dict()}


@torch.no_grad()
def _put(item: Any, state: Mapping[str, Any]) -> None:
    if isinstance(item, Variable):
        for tensor in item.tensors if state else ():
            tensor.copy_(state["value"])
        return
    item.load_state_dict(state["state"])
    if isinstance(item, nn.Module):
        for name, buffer in item.named_buffers():
            buffer.copy_(state["buffers"][name])
        for name, parameter in item.named_parameters():
            parameter.requires_grad_(state["trains"][name])
