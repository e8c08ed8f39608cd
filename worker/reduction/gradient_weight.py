"""How much the gradient of one rank counts (docs/semantics.md, "Loss scaling")."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Weight:
    """The weight of one rank in one backward.

    ``"mean"``: ``Weight(share)``, this rank's examples over those of the global batch. ``"sum"``: ``Weight(1.0)``.
    ``set_weight(n)``: ``Weight(n, n)``; any common factor may be taken out of both.
    """

    scale: float
    """The rank's gradient is multiplied by it. 0: it is replaced by zeros, whatever it is (docs/protocol.md 20)."""
    numerator: float | None = None
    """When set, the sum over ranks is divided by the sum of all ranks' numerators."""
    is_share: bool = False
    """Whether the scales of all ranks make 1. If a rank is lost, those of the others do not, and what is left is
    divided by their sum."""

    @property
    def counts(self) -> bool:
        """Whether the rank had anything to say: False only for an empty share, which gives no parameter a gradient."""
        return self.scale != 0 or self.numerator is not None


@dataclasses.dataclass
class WeightSum:
    """Numerators of the backwards whose gradients are reduced together (more than one after ``no_sync``)."""

    numerator: float = 0.0
    num_with: int = 0
    """Backwards with a numerator."""
    num_without: int = 0
    """Backwards without one; empty shares belong to neither."""
    share: float = 0.0
    """Sum of the scales that are shares."""
    num_shares: int = 0
    """Backwards with a share, an empty one too."""

    def add(self, weight: Weight) -> None:
        if weight.numerator is not None:
            self.numerator += weight.numerator
            self.num_with += 1
        elif weight.counts:
            self.num_without += 1
        if weight.is_share:
            self.share += weight.scale
            self.num_shares += 1
