"""Several lanes to one peer as one: frames take turns. Helps where one gRPC stream is limited by one thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stratagem.rpc.codec import Frame
from stratagem.rpc.lane import Pieces, ReceivingLane, SendingLane


class StripedSender:
    """Implements :class:`stratagem.rpc.lane.SendingLane`: frame i goes over lane i mod n."""

    def __init__(self, lanes: Sequence[SendingLane]) -> None:
        self.name = lanes[0].name
        self._lanes = lanes
        self._next = 0

    @property
    def alive(self) -> bool:
        return all(lane.alive for lane in self._lanes)

    def send(self, kind: int, transfer: int, group: int, offset: int, pieces: Pieces, num_elements: int) -> None:
        lane = self._lanes[self._next]
        self._next = (self._next + 1) % len(self._lanes)
        lane.send(kind, transfer, group, offset, pieces, num_elements)

    def flush(self, deadline: float) -> None:
        for lane in self._lanes:
            lane.flush(deadline)

    def close(self, reason: str) -> None:
        for lane in self._lanes:
            lane.close(reason)


class StripedReceiver:
    """Implements :class:`stratagem.rpc.lane.ReceivingLane` for what a :class:`StripedSender` sends."""

    def __init__(self, lanes: Sequence[ReceivingLane]) -> None:
        self.name = lanes[0].name
        self._lanes = lanes
        self._next = 0

    def receive(self, transfer: int, deadline: float, into: torch.Tensor | None = None) -> Frame:
        lane = self._lanes[self._next]
        self._next = (self._next + 1) % len(self._lanes)
        return lane.receive(transfer, deadline, into)

    def forget(self, transfer: int) -> None:
        for lane in self._lanes:
            lane.forget(transfer)

    def close(self, reason: str) -> None:
        for lane in self._lanes:
            lane.close(reason)
