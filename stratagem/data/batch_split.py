"""Which examples of a global batch go to which replica, in which step. Pure."""

from __future__ import annotations

import dataclasses


def cut(num_examples: int, num_replicas: int) -> list[range]:
    """The rule of ``tf.distribute``: ceil(examples / replicas) each until they are used up, nothing for the rest."""
    each = -(-num_examples // num_replicas)
    starts = [min(replica * each, num_examples) for replica in range(num_replicas)]
    return [range(start, min(start + each, num_examples)) for start in starts]


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """How a worker turns a global batch that it knows into steps."""

    num_workers: int
    worker: int
    num_local_replicas: int
    alone: bool
    """The batch is this worker's alone (FILE, OFF): all its slices, one after the other; else its own slices."""

    @property
    def num_replicas(self) -> int:
        """Slices of a global batch."""
        return self.num_workers * self.num_local_replicas

    @property
    def steps_per_batch(self) -> int:
        """Steps that come of one global batch."""
        return self.num_workers if self.alone else 1

    def steps(self, num_examples: int) -> list[list[range]]:
        """For each step and local replica: its examples within a global batch of ``num_examples``."""
        slices, size = cut(num_examples, self.num_replicas), self.num_local_replicas
        if self.alone:
            return [slices[first : first + size] for first in range(0, len(slices), size)]
        return [slices[self.worker * size : (self.worker + 1) * size]]
