"""Who takes part in saving and restoring: one process, or the workers of a synchronous job, of which rank 0 acts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

import safetensors.torch
import torch

from stratagem.checkpoint.tree import EncodedState, Json
from stratagem.errors import CheckpointError
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.state_broadcast import broadcast_json, broadcast_tensors

BEAT_S = 1.0
"""While rank 0 is busy it says so this often: the others wait in a collective, which has a time-out."""


@dataclasses.dataclass(eq=False, repr=False)
class CheckpointMembers:
    """The processes that save and restore together; all make the same calls in the same order."""

    _communicator: Communicator | None
    """Between them; None: this process is alone."""

    @property
    def _ring(self) -> Communicator | None:
        """None: this process is alone now; a newcomer to a ring is, until it joins."""
        return self._communicator if self._communicator is not None and self._communicator.size > 1 else None

    @property
    def rank(self) -> int:
        return 0 if self._ring is None else self._ring.rank

    @property
    def size(self) -> int:
        return 1 if self._ring is None else self._ring.size

    def from_first(self, work: Callable[[], Json]) -> Json:
        """Runs ``work`` on rank 0 alone; everybody gets what it returns.

        Raises:
            CheckpointError: it failed; on rank 0 the error itself.
        """
        if self._ring is None:
            return work()
        if self._ring.rank:
            while "busy" in (news := self._tell(self._ring, None)):
                continue
            if "error" in news:
                raise CheckpointError(news["error"])
            return news["result"]
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as executor:
            future = executor.submit(work)
            while not wait([future], BEAT_S).done:
                self._tell(self._ring, {"busy": True})
        error = future.exception()
        if error is not None:
            self._tell(self._ring, {"error": str(error)})
            raise error
        self._tell(self._ring, {"result": future.result()})
        return future.result()

    def states_from_first(self, read: Callable[[], dict[str, EncodedState]]) -> dict[str, EncodedState]:
        """As :meth:`from_first`, for encoded states; the tensors travel too, so that only rank 0 needs the files."""
        if self._ring is None:
            return read()
        states: dict[str, EncodedState] = {}

        def read_here() -> Json:
            states.update(read())
            return {name: state.tree for name, state in states.items()}

        for name, tree in self.from_first(read_here).items():
            own = states.get(name, EncodedState(tree, {}))
            states[name] = EncodedState(tree, broadcast_tensors(self._ring, own.tensors))
        return states

    def gather(self, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """What every member gave, by rank."""
        if self._ring is None:
            return [dict(tensors)]
        data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
        everybody = self._ring.all_gather(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return [safetensors.torch.load(other.numpy().tobytes()) for other in everybody]

    def _tell(self, ring: Communicator, news: dict[str, Json] | None) -> dict[str, Json]:
        """Rank 0's news, on every rank."""
        heard: dict[str, Json] = broadcast_json(ring, news)
        return heard
