"""Batches on their way to the devices while the script computes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from stratagem.data.nested import tensors, to_device
from stratagem.data.readers import Parts

Arrivals = dict[torch.device, torch.cuda.Event]
"""The end of the copies of a step, by GPU."""


class DeviceCopies:
    """Reads steps ahead (0: each is read and copied when it is wanted) and starts their copies to the devices of the
    local replicas. GPUs copy on a stream of their own, beside what they compute; that the host goes on meanwhile needs
    ``DataLoader(pin_memory=True)``."""

    def __init__(self, devices: Sequence[torch.device], ahead: int) -> None:
        self.ahead = ahead
        self._devices = tuple(devices)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        if ahead:
            self._streams = {device: torch.cuda.Stream(device) for device in devices if device.type == "cuda"}

    def of(self, steps: Iterator[Parts]) -> Iterator[Parts]:
        """The same steps, on the devices."""
        under_way: collections.deque[tuple[Parts, Arrivals]] = collections.deque()
        for parts in steps:
            under_way.append(self._send(parts))
            if len(under_way) > self.ahead:
                yield self._receive(*under_way.popleft())
        while under_way:
            yield self._receive(*under_way.popleft())

    def _send(self, parts: Parts) -> tuple[Parts, Arrivals]:
        batches: list[Any] = []
        arrivals: Arrivals = {}
        for batch, device in zip(parts.batches, self._devices, strict=True):
            stream = self._streams.get(device)
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                batches.append(to_device(batch, device))
            if stream is not None:
                arrivals[device] = stream.record_event()
        return dataclasses.replace(parts, batches=tuple(batches)), arrivals

    def _receive(self, parts: Parts, arrivals: Arrivals) -> Parts:
        for device, arrival in arrivals.items():
            torch.cuda.current_stream(device).wait_event(arrival)
        for batch, device in zip(parts.batches, self._devices, strict=True):
            for tensor in tensors(batch) if device in self._streams else ():
                # The memory, which belongs to the copying stream, is not reused before this one is done with it.
                tensor.record_stream(torch.cuda.current_stream(device))
        return parts
