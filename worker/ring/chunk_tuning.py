"""Chooses the chunk size of a ring by trying it: what is best depends on the link, the cores and the lane."""

from __future__ import annotations

import time

import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.ring_group import RingGroup

CANDIDATES = (256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
"""Bytes; 64 KiB to 8 MiB were tried on several lanes, the best one always lay in here."""
DEFAULT_BYTES = 512 << 10
TRIAL_BYTES = 8 << 20
ROUNDS = 4
CLEARLY = 0.85
"""Another size has to be faster by so much: two trials of the same size differ by a third on a busy machine."""
SLOW_S = 0.1
"""A first trial that takes longer means a slow link: there the chunk size matters little, and trying costs."""


def choose_chunk_bytes(communicator: Communicator) -> int:
    """Tries and sets the best; every rank gets the same answer."""
    tensor = torch.ones(TRIAL_BYTES // 4)
    out = torch.empty_like(tensor)
    _set(communicator, DEFAULT_BYTES)
    if _slowest(communicator, tensor[: tensor.numel() // 8], out[: tensor.numel() // 8]) > SLOW_S:
        return DEFAULT_BYTES
    taken_s = dict.fromkeys(CANDIDATES, float("inf"))
    for _ in range(ROUNDS):  # in turns: what disturbs the machine disturbs all alike
        for candidate in CANDIDATES:
            _set(communicator, candidate)
            taken_s[candidate] = min(taken_s[candidate], _slowest(communicator, tensor, out))
    fastest = min(CANDIDATES, key=taken_s.__getitem__)
    best = fastest if taken_s[fastest] < CLEARLY * taken_s[DEFAULT_BYTES] else DEFAULT_BYTES
    _set(communicator, best)
    return best


def _set(communicator: Communicator, num_bytes: int) -> None:
    if isinstance(communicator.group, RingGroup):  # a loss meanwhile may have left another group
        communicator.group.chunk_bytes = num_bytes


def _slowest(communicator: Communicator, tensor: torch.Tensor, out: torch.Tensor) -> float:
    start = time.perf_counter()
    communicator.all_reduce(tensor, out=out)
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    return float(communicator.all_reduce(taken, ReduceOp.MAX))
