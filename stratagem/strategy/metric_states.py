"""The counts of replicas and workers, as named tensors that travel and are merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from safetensors.torch import load, save

from stratagem.cluster.units import MAX_STATE_BYTES
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.worker.ring.healing import LostMembers

States = dict[str, torch.Tensor | list[torch.Tensor]]
"""By name: a tensor, or what a metric keeps of each batch."""


def pack(states: States) -> torch.Tensor:
    """``states`` as bytes, shape [n] uint8, on the CPU."""
    return torch.frombuffer(bytearray(to_bytes(states)), dtype=torch.uint8)


def unpack(packed: torch.Tensor) -> States:
    """The reverse of :func:`pack`; tensors are on the CPU."""
    return from_bytes(packed.cpu().numpy().tobytes())


def to_bytes(states: States) -> bytes:
    """``states`` as a safetensors file, never a pickle."""
    tensors: dict[str, torch.Tensor] = {}
    lengths: dict[str, int] = {}
    for name, value in states.items():
        if isinstance(value, list):
            lengths[name] = len(value)
            tensors.update((f"{name}\n{index}", _own(part)) for index, part in enumerate(value))
        else:
            tensors[name] = _own(value)
    return save(tensors, {"lengths": json.dumps(lengths)})


def bytes_of_unit(states: States, who_keeps: str) -> bytes:
    """:func:`to_bytes` of what was counted on a unit, as "the metrics keep" it. ConfigurationError: it is too much."""
    data = to_bytes(states)
    if len(data) > MAX_STATE_BYTES:
        raise ConfigurationError(
            f"{who_keeps} {len(data)} bytes of one batch, but at most {MAX_STATE_BYTES} can be sent to the chief: use "
            "smaller batches, or metrics that keep sums instead of every output (thresholds= of torchmetrics)"
        )
    return data


def from_bytes(data: bytes) -> States:
    """The reverse of :func:`to_bytes`; tensors are on the CPU."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    lengths: dict[str, int] = json.loads(header["__metadata__"]["lengths"])
    tensors = load(data)
    states: States = {name: [tensors.pop(f"{name}\n{index}") for index in range(n)] for name, n in lengths.items()}
    return {**states, **tensors}


def states_of_all(strategy: Strategy, own: Sequence[States]) -> list[States]:
    """What all replicas of all workers have counted (or hold otherwise), in the order of the replicas, on every worker.

    Workers that run in step all have to call it. Without collectives between workers it is ``own``, of the local
    replicas.
    """
    workers = strategy.communicator
    if workers is None or workers.size == 1:
        return list(own)
    of_all = [workers.all_gather(pack(states)) for states in own]  # by local replica, then by worker
    return [unpack(part) for of_worker in zip(*of_all, strict=True) for part in of_worker]


class Lost(NamedTuple):
    """What a ring that heals has lost of a count."""

    is_any: bool = False
    """On every worker the same."""
    who: str = ""
    """Whose part, on the one worker that says so."""
    num_left: int = 0
    """Examples in what the others have counted."""


class Losses:
    """Workers that a ring lost since a count began, and with each of them what it had counted."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.reset()

    def reset(self) -> None:
        """A count begins."""
        self._num_before = len(self._found)

    def of_all(self, num_examples: int = 0) -> Lost:
        """Asked after the counts were gathered, by every worker; ``num_examples``: in this worker's own."""
        workers = self._strategy.communicator
        if workers is None or workers.healing is None:
            return Lost()
        lost = sorted({name for each in self._found[self._num_before :] for name in each.members})
        told = workers.all_gather(torch.tensor([num_examples, len(lost)]))  # a newcomer knows of no loss
        first = next((rank for rank, (_, num_lost) in enumerate(told) if num_lost), None)
        who = " and ".join(lost) if workers.rank == first else ""
        return Lost(first is not None, who, sum(int(number) for number, _ in told))

    @property
    def _found(self) -> Sequence[LostMembers]:
        workers = self._strategy.communicator
        return () if workers is None or workers.healing is None else workers.healing.losses


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, contiguous, and sharing memory with no other."""
    return tensor.detach().cpu().contiguous().clone()
