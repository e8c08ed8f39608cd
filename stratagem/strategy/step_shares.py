"""How much each local replica counts in a step (docs/semantics.md, "Loss scaling")."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from stratagem.data.placement import StepShare
from stratagem.errors import ConfigurationError
from stratagem.worker.reduction.gradient_weight import Weight


class StepShares:
    """The share of the batch that a step is run on, and what the step itself says with ``set_weight``. Without a batch
    of a distributed dataset each replica of all workers counts as much as the others."""

    def __init__(self, num_local: int, num_replicas: Callable[[], int]) -> None:
        self._num_local = num_local
        self._num_replicas = num_replicas
        self.num_told = num_replicas()
        """How many the script was told of, when it asked first or was called because of a change."""
        self._shares: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """By tensor of a batch that the script still has."""
        self._newest: StepShare | None = None
        self._now: StepShare | None = None
        self._are_unlike = False
        """Whether the step has batches of several datasets, and its replicas other shares of one than of another."""
        self._set: list[float | None] = [None] * num_local
        self.is_adding = False
        """Whether a replica that nothing reduces has begun to add gradients in ``no_sync``, since the last step."""
        self.is_over = False
        """Whether the script has taken its batches from a distributed dataset, and is not in a pass over one."""
        self.num_seen = [0] * num_local
        """Examples in the batches that each replica was given so far."""

    def begin(self, share: StepShare, batch: Any) -> None:
        self._newest, self.is_over = share, False
        for tensor in _tensors(batch):
            self._shares[tensor] = share
        self._choose(share)
        self.num_seen = [seen + count for seen, count in zip(self.num_seen, share.num_examples, strict=True)]

    def end(self) -> None:
        """The dataset has been gone through: what comes now is no batch of it, unless it is given one."""
        self._newest, self.is_over = None, True
        self._choose(None)

    def start_run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A step begins, with these arguments. One that has a batch in it is run on its share, else on the newest."""
        shares = [self._shares.get(tensor) for tensor in _tensors([*args, *kwargs.values()])]
        told = [share for share in shares if share is not None]
        self._choose(told[0] if told else self._newest)
        self._are_unlike = len({share.weights for share in told}) > 1

    def set_weight(self, replica: int, weight: float) -> None:
        """What the loss of a local replica was divided by."""
        self._set[replica] = weight

    def check_sum(self) -> None:
        """A ConfigurationError where weights are said of gradients that a replica alone adds: several make a mean."""
        if self.is_adding and self._set != [None] * self._num_local:
            raise ConfigurationError(
                "set_weight and no_sync() together form one mean over all their backward passes, but a single replica "
                'only adds. Prepare with gradients="sum" and divide each loss by the total weight of all those '
                "backward passes and replicas, under every strategy, or use set_weight and a larger batch"
            )

    def is_empty(self, replica: int) -> bool:
        """Whether a local replica has none of the examples of the step."""
        return self._now is not None and not self._now.num_examples[replica]

    @property
    def is_newest(self) -> bool:
        """Whether the newest step was run on the newest batch: the script takes none ahead."""
        return self._now is self._newest

    @property
    def are_told(self) -> bool:
        """Whether the step is run on a batch of a distributed dataset."""
        return self._now is not None

    def weight(self, replica: int, gradients: Literal["mean", "sum"]) -> Weight:
        """Of the gradient of a local replica."""
        if (told := self._set[replica]) is not None:
            return Weight(told, told)
        if gradients == "sum":
            return Weight(1.0)
        if self._are_unlike:
            raise ConfigurationError(
                "the step was given batches of several datasets, and a replica's share differs between them (a last "
                "batch is smaller, say), but a gradient has one weight: give the DataLoaders drop_last=True and batch "
                "sizes divisible by the number of replicas, make one dataset of them (torch.utils.data.StackDataset), "
                "or set the weight of each backward with strategy.set_weight(n)"
            )
        scale = 1 / self._num_replicas() if self._now is None else self._now.weights[replica]
        return Weight(scale, is_share=True)

    @property
    def of_result(self) -> tuple[float, ...]:
        """How much each local replica's result counts in a mean; empty: all the same; NaN: its batches disagree."""
        if self._now is None and not any(weight is not None for weight in self._set):
            return ()
        counts: Sequence[float] = (1.0,) * self._num_local if self._now is None else self._now.num_examples
        if self._are_unlike:
            counts = (math.nan,) * self._num_local
        pairs = zip(self._set, counts, strict=True)
        return tuple(float(count if told is None else told) for told, count in pairs)

    def _choose(self, share: StepShare | None) -> None:
        self._now = share
        self._are_unlike = False
        self._set = [None] * self._num_local


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):  # PerReplica is one too; one with slots has no vars()
            yield from _tensors(getattr(value, field.name, None))
