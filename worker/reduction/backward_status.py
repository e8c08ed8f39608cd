"""The small collective at the end of a backward: what every rank must know about all others before it merges."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.worker.reduction.gradient_weight import WeightSum
from stratagem.worker.reduction.same_bits import alike

_ROUNDING = 1e-6
"""By which the shares of all ranks may differ from 1."""


@dataclasses.dataclass(frozen=True)
class BackwardStatus:
    """One rank's end of a backward. Its sums are exact, so they travel as float64 whatever the wire dtype is."""

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

    sees_newcomer: bool = False
    """This rank has heard of somebody who waits to be taken into the ring: all take it in after the same step."""
    settings: int = 0
    """Checksum of the settings of this rank's optimizers; 0: nothing is said."""
    bits: int = 0
    """Checksum of some of its weights; 0: nothing is said."""

    def encode(self, rank: int, size: int) -> torch.Tensor:
        """As a float64 vector, to be summed over ranks."""
        groups, of_rank = [0.0] * self.num_groups, [0.0] * (3 * size)
        groups[self.group] = 1.0
        of_rank[rank::size] = [float(self.failed), float(self.settings), float(self.bits)]
        weights = self.weights
        head = [weights.numerator, float(weights.num_with > 0), float(weights.num_without > 0), float(self.ordinal)]
        head += [float(self.wants_end), weights.share, float(weights.num_shares), float(self.sees_newcomer)]
        return torch.tensor(head + groups + of_rank + [float(flag) for flag in self.present], dtype=torch.float64)

    def decode(self, total: torch.Tensor, size: int) -> MergedStatus:
        """What the sum of all ranks' tails says. Raises CollectiveError: the backward of some rank failed, or ranks are
        not in the same backward; ConfigurationError: some ranks called ``set_weight`` and others did not."""
        values = total.tolist()
        (numerator, num_with, num_without, ordinals, ends, share, num_shares, sees), rest = values[:8], values[8:]
        groups, rest = rest[: self.num_groups], rest[self.num_groups :]
        of_ranks, flags = rest[: 3 * size], rest[3 * size :]
        failures, settings, bits = of_ranks[:size], of_ranks[size : 2 * size], of_ranks[2 * size :]
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
        is_alike = alike(settings) and alike(bits)
        divisor = numerator if num_with else None
        if num_shares and divisor is None:  # of all ranks together each backward has the share 1
            included = share * size / num_shares
            divisor = included if included > 0 and abs(included - 1) > _ROUNDING else None
        return MergedStatus([bool(flag) for flag in flags], divisor, bool(ends), is_alike, bool(sees))


@dataclasses.dataclass(frozen=True)
class MergedStatus:
    """What is true of all ranks together."""

    present: Sequence[bool]
    """By parameter: whether any rank has a gradient for it."""
    divisor: float | None
    """Sum of the numerators, or of the shares of those who are left after a loss; None: nothing is divided."""
    wants_end: bool = False
    """Whether any rank has been asked to end."""
    is_alike: bool = True
    """Whether the ranks have the same settings and weights, as far as they have looked."""
    sees_newcomer: bool = False
    """Whether any rank has heard of somebody who waits to be taken in."""
