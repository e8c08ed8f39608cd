"""Several lanes to one peer as one: frames take turns. Helps where one gRPC stream is limited by one thread."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from stratagem.rpc.codec import Frame
from stratagem.rpc.lane import Pieces, Place, ReceivingLane, SendingLane

L = TypeVar("L", bound=SendingLane | ReceivingLane)


class _Striped(Generic[L]):
    """Frame i goes over lane i mod n."""

    def __init__(self, lanes: Sequence[L]) -> None:
        self.name = lanes[0].name
        self._lanes = lanes
        self._turns = itertools.cycle(lanes)

    def close(self, reason: str) -> None:
        for lane in self._lanes:
            lane.close(reason)


class StripedSender(_Striped[SendingLane]):
    """Implements :class:`stratagem.rpc.lane.SendingLane`."""

    @property
    def alive(self) -> bool:
        return all(lane.alive for lane in self._lanes)

    def takes_at_once(self, num_bytes: int) -> bool:
        return all(lane.takes_at_once(num_bytes) for lane in self._lanes)

    def send(self, kind: int, transfer: int, group: int, offset: int, pieces: Pieces, num_elements: int) -> None:
        next(self._turns).send(kind, transfer, group, offset, pieces, num_elements)

    def flush(self, deadline: float) -> None:
        for lane in self._lanes:
            lane.flush(deadline)


class StripedReceiver(_Striped[ReceivingLane]):
    """Implements :class:`stratagem.rpc.lane.ReceivingLane` for the frames of a :class:`StripedSender`."""

    def receive(self, transfer: int, deadline: float, into: torch.Tensor | Place | None = None) -> Frame:
        return next(self._turns).receive(transfer, deadline, into)

    def forget(self, transfer: int) -> None:
        for lane in self._lanes:
            lane.forget(transfer)
