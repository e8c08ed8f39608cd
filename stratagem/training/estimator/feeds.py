"""Where a training's batches come from, and which step each belongs to."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from stratagem.data.options import InputContext
from stratagem.data.split_dataset import SplitDataset
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.training.estimator.inputs import Input, sample
from stratagem.training.estimator.repeated import NumberedBatch, repeated
from stratagem.training.fit.sources import Passes, for_training

logger = logging.getLogger(__name__)

ORDER_SEED = 0
"""Of shuffled examples: that of the other strategies, so that a training may go on under another one."""


@dataclasses.dataclass(eq=False, repr=False)
class InputPosition:
    """The place in the data, as a part of a checkpoint that may be restored with other data."""

    _dataset: SplitDataset | None
    """None: it has no place that a checkpoint could keep; parameter servers' chief knows it."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"dataset": None if self._dataset is None else self._dataset.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes there; where the data is not what it was, it starts at its beginning."""
        if self._dataset is None or state["dataset"] is None:
            return
        try:
            self._dataset.load_state_dict(state["dataset"])
        except ConfigurationError as error:
            logger.warning("The input starts at its beginning, because it is not what it was: %s", error)


class InStepFeed:
    """The batches of a training for workers that run in step."""

    def __init__(self, dataset: SplitDataset, is_once: bool) -> None:
        self.position = InputPosition(dataset)
        self._dataset = dataset
        self._is_once = is_once
        self._step = 0
        self._left: int | None = None

    def aim(self, step: int, target: int | None) -> int | None:
        """Says how far to go, before the batches are asked for.

        Args:
            target: updates after which to stop: the data is gone through again and again. None: one pass.

        Returns:
            updates that will have been made at the end; None: that remains to be seen.
        """
        self._step, self._left = step, None if target is None else target - step
        return None if self._is_once else target

    def batches(self) -> Iterator[tuple[int, Any]]:
        """What ``strategy.run`` is to be given, each with the number of updates before it."""
        with Passes(self._dataset, None if self._is_once else self._left) as passes:
            yield from zip(itertools.count(self._step), itertools.islice(passes.epoch(), self._left), strict=False)


class LeasedFeed:
    """The same for workers to whom the chief leases batches: exactly as many as updates are to be made."""

    def __init__(self, strategy: Strategy, source: Any) -> None:
        self.position = InputPosition(None)
        self._strategy = strategy
        self._source = source
        self._step = 0
        self._loader: DataLoader[NumberedBatch]

    def aim(self, step: int, target: int | None) -> int | None:
        self._step = step
        self._loader = repeated(self._source, None if target is None else target - step, step, ORDER_SEED)
        return step + len(self._loader)

    def batches(self) -> Iterator[tuple[int, NumberedBatch]]:
        """See :meth:`InStepFeed.batches`. It ends when all workers' updates are applied."""
        try:
            dataset = self._strategy.distribute_dataset(self._loader)
        except ConfigurationError as error:
            if "num_examples" not in str(error):
                raise
            raise ConfigurationError(
                f"{error} An Estimator's dataset is as long as its training: if max_steps is another one than before, "
                "leave out --checkpoint-dir and --state-dir or give others; it goes on from the newest checkpoint in "
                "its model_dir."
            ) from None
        for batch in dataset:
            yield self._step + batch.first // (self._loader.batch_size or 1), batch


Feed = InStepFeed | LeasedFeed


def open_feed(strategy: Strategy, given: Input, build: Callable[[Any], nn.Module]) -> Feed:
    """Opens the input; ``build`` creates the model with a small batch, and returns its modules."""
    if given.makes_replica_batches and strategy.servers is None:  # else the chief leases all batches: one pipeline
        opened: list[tuple[Any, Any]] = []

        def open_here(context: InputContext) -> Any:
            opened.append(sample(given.open(context)))
            return opened[-1][1]

        dataset = strategy.distribute_datasets_from_function(open_here)
        ((batch, source),) = opened
        build(batch)
        return InStepFeed(dataset, isinstance(source, Iterator))
    batch, source = sample(given.open())
    module = build(batch)
    if strategy.servers is not None:
        return LeasedFeed(strategy, source)
    dataset = for_training(strategy, source, module, torch.device("cpu"))
    return InStepFeed(dataset, isinstance(source, Iterator))
