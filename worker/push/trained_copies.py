"""Whether a script has changed weights that live on parameter servers, in its copies of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from stratagem.errors import ConfigurationError
from stratagem.worker.reduction.same_bits import sum_of_bits

logger = logging.getLogger(__name__)

NUM_EXACT, EXACT_EVERY = 3, 256
"""So often at first, and now and then later, all values are looked at: ``tensor.data`` hides changes from torch's
counters."""
NUM_SAMPLED_BYTES = 1024
"""The first bytes of one tensor, another one each time, are looked at in every other step: whoever loads a model
changes all of it."""
WAY_OUT = (
    "The parameter servers have the weights of the job, and the next update brings theirs. Load or change weights "
    "before strategy.prepare, or after it in strategy.load_once(lambda: model.load_state_dict(…)) on every worker; "
    "what happens in every step (clamping, normalising) belongs into forward, as torch.nn.utils.parametrize does it"
)
ALONE = (
    "No optimizer that strategy.prepare was given changes it, so every worker would train it alone: give its optimizer "
    "to strategy.prepare (an update of your own works on rings and mirrored devices, where .grad is the whole batch's)"
)


class TrainedCopies:
    """Copies of variables that an optimizer changes, or nobody. ``way_out``: what to do where they were changed, for
    the error."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], way_out: str = WAY_OUT) -> None:
        self._way_out = way_out
        self._names = [name for name, _ in named]
        self._tensors = [tensor for _, tensor in named]
        self._counters: list[tuple[int, int]] | None = None
        """Of torch, one for each tensor, which count changes in place, and where it lies, which ``tensor.data = …``
        changes; None: whatever they are is right."""
        self._sums: list[int] | None = None
        self._heads = [_head(tensor) for tensor in self._tensors]
        self._sample: tuple[int, bytes] | None = None
        self._num_checked = 0
        self._has_warned = False

    def note(self) -> None:
        """From now on they are to stay as they are."""
        self._counters = [(tensor._version, tensor.data_ptr()) for tensor in self._tensors]
        is_exact = self._num_checked < NUM_EXACT or not self._num_checked % EXACT_EVERY
        self._sums = [sum_of_bits(tensor.detach().reshape(-1)) for tensor in self._tensors] if is_exact else None
        self._sample = None
        if not is_exact and self._heads:
            index = self._num_checked % len(self._heads)
            self._sample = index, self._heads[index].tobytes()

    def forget(self) -> None:
        """They may be anything until the next :meth:`note`."""
        self._counters = self._sums = self._sample = None

    def check(self) -> None:
        """Looks whether they have stayed so. Where only the counters differ, values that were put back may be the
        same, so there is but a warning.

        Raises:
            ConfigurationError: one has other values.
        """
        if self._counters is None:
            return
        self._num_checked += 1
        if self._sums is not None:
            for name, tensor, bits in zip(self._names, self._tensors, self._sums, strict=True):
                if sum_of_bits(tensor.detach().reshape(-1)) != bits:
                    self._refuse(name)
            return
        if self._sample is not None and self._heads[self._sample[0]].tobytes() != self._sample[1]:
            self._refuse(self._names[self._sample[0]])
        if not self._has_warned:
            for name, tensor, counter in zip(self._names, self._tensors, self._counters, strict=True):
                if (tensor._version, tensor.data_ptr()) != counter:
                    self._has_warned = True
                    logger.warning("%s was written to since the last update. %s", name, self._way_out)
                    break

    def _refuse(self, name: str) -> NoReturn:
        self.forget()
        raise ConfigurationError(f"{name} was changed here since the last update. {self._way_out}")


def _head(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The first bytes of a tensor, where they lie; none where that is not so simple."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return np.empty(0, np.uint8)
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()[:NUM_SAMPLED_BYTES]
