"""Whether a script has changed weights that live on parameter servers, in its copies of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from stratagem.errors import ConfigurationError
from stratagem.worker.reduction.same_bits import sum_of_bits

logger = logging.getLogger(__name__)

NUM_EXACT, EXACT_EVERY = 3, 256
"""So often at first, and now and then later, all values are looked at: ``tensor.data`` hides changes from torch's
counters."""
NUM_SAMPLED = 4096
"""Of one tensor, another one each time, so many elements are looked at in every other step: whoever loads a model
changes all."""
_WAY_OUT = (
    "The parameter servers have the weights of the job, and the next update brings theirs. Load or change weights "
    "before strategy.prepare, or after it in strategy.load_once(lambda: model.load_state_dict(…)) on every worker; "
    "what happens in every step (clamping, normalising) belongs into forward, as torch.nn.utils.parametrize does it"
)


class TrainedCopies:
    """Copies of variables that an optimizer changes.

    Args:
        named: names and tensors.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._names = [name for name, _ in named]
        self._tensors = [tensor for _, tensor in named]
        self._counters: list[int] | None = None
        """Of torch, one for each tensor, which count changes in place; None: whatever they are is right."""
        self._sums: dict[int, int] = {}
        """Of the bits of those that are looked at."""
        self._num_checked = 0
        self._has_warned = False

    def note(self) -> None:
        """From now on they are to stay as they are."""
        self._counters = [tensor._version for tensor in self._tensors]
        is_exact = self._num_checked < NUM_EXACT or not self._num_checked % EXACT_EVERY
        num = len(self._tensors)
        looked_at = range(num) if is_exact or not num else [self._num_checked % num]
        self._sums = {index: self._sum(index, is_exact) for index in looked_at}

    def forget(self) -> None:
        """They may be anything until the next :meth:`note`."""
        self._counters = None

    def _sum(self, index: int, is_exact: bool) -> int:
        flat = self._tensors[index].detach().reshape(-1)
        return sum_of_bits(flat if is_exact else flat[:NUM_SAMPLED])

    def check(self) -> None:
        """Looks whether they have stayed so. Where only the counters differ, values that were put back may be the
        same, so there is but a warning.

        Raises:
            ConfigurationError: one has other values.
        """
        if self._counters is None:
            return
        self._num_checked += 1
        is_exact = len(self._sums) == len(self._tensors)
        for index, bits in self._sums.items():
            if self._sum(index, is_exact) != bits:
                self.forget()
                raise ConfigurationError(f"{self._names[index]} was changed here since the last update. {_WAY_OUT}")
        if not is_exact and not self._has_warned:
            for name, tensor, counter in zip(self._names, self._tensors, self._counters, strict=True):
                if tensor._version != counter:
                    self._has_warned = True
                    logger.warning("%s was written to since the last update. %s", name, _WAY_OUT)
                    break
