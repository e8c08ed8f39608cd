"""The small collective at the end of a backward: what every rank has to know about all others before it merges."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.worker.reduction.gradient_weight import WeightSum


@dataclasses.dataclass(frozen=True)
class Tail:
    """One rank's end of a backward. Sums of these are exact, so they travel as float64 whatever the wire dtype is."""

    present: Sequence[bool]
    """By parameter: whether this rank has a gradient for it."""
    weights: WeightSum
    group: int
    """The group of parameters whose buckets left early."""
    num_groups: int
    ordinal: int
    """How many backwards were reduced before this one."""
    failed: bool = False
    """The backward of this rank raised; what its buckets hold is worth nothing."""
    wants_end: bool = False
    """This rank has been asked to end (SIGTERM): all are to stop after the same step."""

    def encode(self, rank: int, size: int) -> torch.Tensor:
        """As a float64 vector, to be summed over ranks."""
        groups, failures = [0.0] * self.num_groups, [0.0] * size
        groups[self.group] = 1.0
        failures[rank] = float(self.failed)
        weights = self.weights
        head = [weights.numerator, float(weights.num_with > 0), float(weights.num_without > 0), float(self.ordinal)]
        head.append(float(self.wants_end))
        return torch.tensor(head + groups + failures + [float(flag) for flag in self.present], dtype=torch.float64)

    def decode(self, total: torch.Tensor, size: int) -> MergedTail:
        """What the sum of all ranks' tails says.

        Raises:
            CollectiveError: the backward of some rank failed, or ranks are not in the same backward.
            ConfigurationError: some ranks called ``set_weight`` and others did not.
        """
        values = total.tolist()
        (numerator, num_with, num_without, ordinals, ends), rest = values[:5], values[5:]
        groups, failures = rest[: self.num_groups], rest[self.num_groups : self.num_groups + size]
        for rank, failure in enumerate(failures):
            if failure:
                raise CollectiveError(
                    f"backward() raised on rank {rank}: no rank has a gradient of it. The log of that rank says why.",
                    rank,
                )
        if groups[self.group] != size or ordinals != self.ordinal * size:
            raise CollectiveError(
                f"expected all {size} ranks in backward {self.ordinal + 1} of parameter group {self.group}, but only "
                f"{groups[self.group]:.0f} began with that group and the mean count is {ordinals / size + 1:g}: every "
                "rank has to make the same backward() calls, through the same models first"
            )
        if num_with and num_without:
            raise ConfigurationError(
                f"set_weight was called on {num_with:.0f} of {size} ranks for this step, and {num_without:.0f} had a "
                "backward() without it: call it on every rank before every backward(), or on none"
            )
        present = [bool(flag) for flag in rest[self.num_groups + size :]]
        return MergedTail(present, numerator if num_with else None, bool(ends))


@dataclasses.dataclass(frozen=True)
class MergedTail:
    """What is true of all ranks together."""

    present: Sequence[bool]
    """By parameter: whether any rank has a gradient for it."""
    divisor: float | None
    """Sum of the numerators; None: nothing is divided."""
    wants_end: bool = False
    """Whether any rank has been asked to end."""
