"""Where a training's batches come from, and which step each belongs to."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from stratagem.cluster.units import Plan
from stratagem.data.distribute import leasable
from stratagem.data.index_batches import epoch_order
from stratagem.data.loaders import carried, plan_of
from stratagem.data.options import InputContext
from stratagem.data.split_dataset import SplitDataset
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.training.estimator.inputs import Input, sample
from stratagem.training.fit.sources import Passes, for_training

logger = logging.getLogger(__name__)


class InStepFeed:
    """The batches of a training for workers that run in step; to a checkpoint, which may be restored with other data,
    the place in it."""

    def __init__(self, dataset: SplitDataset, is_once: bool) -> None:
        self._dataset = dataset
        dataset.is_own_loop = False
        self._is_once = is_once
        self._step = 0
        self._left: int | None = None
        self._loaded: dict[str, Any] = {}
        """A place to begin at; of other data, perhaps, until there is something to train."""

    def state_dict(self) -> dict[str, Any]:
        return self._loaded or {"dataset": self._dataset.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = dict(state)

    def leave_out(self) -> None:
        """There is nothing to train."""

    def aim(self, step: int, target: int | None) -> int | None:
        """Says how far to go, before the batches are asked for. ``target``: updates after which to stop: the data is
        gone through again and again. None: one pass. Returns updates that will have been made at the end; None: that
        remains to be seen. Goes to the place that was loaded; where the data is not what it was, it starts at its
        beginning."""
        loaded, self._loaded = self._loaded.get("dataset"), {}
        try:
            if loaded is not None:
                self._dataset.load_state_dict(loaded)
        except ConfigurationError as error:
            logger.warning("The input starts from its beginning, because it has changed: %s", error)
        self._step, self._left = step, None if target is None else target - step
        return None if self._is_once else target

    def batches(self) -> Iterator[tuple[int, Any]]:
        """What ``strategy.run`` is to be given, each with the number of updates before it."""
        with Passes(self._dataset, None if self._is_once else self._left) as passes:
            step = self._step
            for _ in range(2):  # where the place is behind the last batch of a pass, the next one
                for batch in itertools.islice(passes.epoch(), self._left):
                    yield step, batch
                    step += 1
                if step > self._step:
                    return


class LeasedFeed:
    """The same for workers to whom the chief leases batches: exactly as many as updates are to be made."""

    def __init__(self, strategy: Strategy, source: Any, ordinal: int | None = None) -> None:
        self._strategy = strategy
        self._source = source
        self._ordinal = ordinal
        self.place = torch.zeros(4, dtype=torch.int64)
        """The examples of the stream that were before a step, and that step; seed and ordinal of the order, the ordinal
        being 0 where the stream begins with this training."""
        self._step = 0
        self._loader: DataLoader[NumberedBatch]

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": None, "place": self.place.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Older checkpoints have no place: all trainings were one stream."""
        self.place = torch.tensor(state.get("place", [0, 0, 0, 1]))

    def resume(self, state: Mapping[str, Any], step: int) -> None:
        """Goes to the place of a checkpoint with so many updates, of any strategy; where the data is not what it was,
        it starts at its beginning."""
        if (found := state["dataset"]) is None:
            self.load_state_dict(state)
            return
        plan, kept = _plan_of(leasable(self._source))
        if (found.get("num_examples"), found.get("batch_size")) == (plan.num_examples, plan.batch_size):
            before = found["epoch"] * kept + min(found["step"] * plan.batch_size, kept)
            self.place = torch.tensor([before, step, _signed(found["seed"]), found.get("ordinal", 1)])
        else:
            logger.warning("The input starts from its beginning: the place in the checkpoint is of other data")

    def leave_out(self) -> None:
        """There is nothing to train; the order of a later dataset is as if there had been."""
        assert self._strategy.servers is not None
        self._strategy.servers.num_datasets += 1

    def aim(self, step: int, target: int | None) -> int | None:
        if not self.place[3]:
            self.place[1] = step
        before, since = self.place[:2].tolist()
        self._step = step
        self._loader = repeated(self._source, None if target is None else target - step, step - since, before)
        return step + len(self._loader)

    def batches(self) -> Iterator[tuple[int, NumberedBatch]]:
        """See :meth:`InStepFeed.batches`. It ends when all workers' updates are applied."""
        try:
            dataset = self._strategy.distribute_dataset(self._loader)
        except ConfigurationError as error:
            if "num_examples" not in str(error):
                raise
            raise ConfigurationError(
                f"{error} An Estimator's dataset is as long as its training: if max_steps has changed, leave out "
                "--checkpoint-dir and --state-dir or give different ones; it resumes from the newest checkpoint in its "
                "model_dir."
            ) from None
        if not self.place[3]:  # as of the other strategies, so that a training may go on under another one
            self.place[2:] = torch.tensor([_signed(dataset.plan.seed), self._ordinal or dataset.ordinal])
        seed, ordinal = self.place[2:].tolist()
        cast(_Examples, self._loader.dataset).order_of = seed % 2**64, ordinal
        for batch in dataset:
            yield self._step + batch.first // (self._loader.batch_size or 1), batch


Feed = InStepFeed | LeasedFeed


def open_feed(strategy: Strategy, given: Input, build: Callable[[Any], nn.Module], ordinal: int | None = None) -> Feed:
    """Opens the input; ``build`` creates the model with a small batch, and returns its modules. ``ordinal``: of the
    order of shuffled examples; None: that among the datasets of the strategy."""
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
        return LeasedFeed(strategy, source, ordinal)
    dataset = for_training(strategy, source, module, torch.device("cpu"), ordinal)
    return InStepFeed(dataset, isinstance(source, Iterator))


class NumberedBatch(NamedTuple):
    """A batch, or a slice of one."""

    first: int
    """Place of its first example in the pass."""
    batch: Any


def repeated(source: Any, num_batches: int | None, start: int, before: int = 0) -> DataLoader[NumberedBatch]:
    """A loader that goes through the examples of ``source`` again and again, in another order each time if it shuffles:
    one pass that is the whole training, for parameter servers, whose chief counts the batches of a pass.

    The chief sees to it that each batch of a pass is accepted exactly once, whatever dies, and that the pass ends for
    everybody when the last one is. A pass of exactly as many batches as there are steps to make carries that over to
    ``max_steps``.

    Every batch is full: one may hold the end of an epoch and the beginning of the next. With ``drop_last`` each epoch
    leaves out what does not fill a batch, and none does. ``num_batches``: of the pass; None: the rest of an epoch,
    whose last batch may be smaller. ``start``: batches that were before it, after ``before`` examples: the order goes
    on there. ConfigurationError: the batches of ``source`` cannot be leased; says why.
    """
    loader = leasable(source)
    plan, kept = _plan_of(loader)
    before += start * plan.batch_size
    length = kept - before % kept if num_batches is None else num_batches * plan.batch_size
    examples = _Examples(loader.dataset, plan, kept, before, length)
    like = {**carried(loader, persistent=False), "collate_fn": functools.partial(_collate, loader.collate_fn)}
    return DataLoader(examples, batch_size=plan.batch_size, **like)


def _plan_of(loader: DataLoader[Any]) -> tuple[Plan, int]:
    """How the batches of a loader are cut, and the examples of an epoch that are gone through."""
    plan = plan_of(loader, num_slices=1, staleness=float("inf"))
    kept = plan.num_batches * plan.batch_size if plan.drop_last else plan.num_examples
    if not kept:
        raise ConfigurationError("the input has no batch to train on")
    return plan, kept


def _signed(seed: int) -> int:
    """As a tensor holds it."""
    return seed - (seed >> 63 << 64)


class _Examples(Dataset[Any]):
    """Examples by their place in the pass. ``kept``: examples of an epoch that are gone through; ``start``: examples
    before the pass, counted over all epochs."""

    def __init__(self, dataset: Any, plan: Plan, kept: int, start: int, length: int) -> None:
        self._dataset = dataset
        self._plan = plan
        self.order_of = 0, 1
        """Seed and ordinal of the order, if they are shuffled."""
        self._kept = kept
        self._start = start
        self._length = length
        self._orders: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, places: list[int]) -> tuple[int, Any]:
        rows = [self._row(place) for place in places]
        if hasattr(self._dataset, "__getitems__"):
            return places[0], self._dataset.__getitems__(rows)
        return places[0], [self._dataset[row] for row in rows]

    def _row(self, place: int) -> int:
        epoch, position = divmod(self._start + place, self._kept)
        if epoch not in self._orders:
            if len(self._orders) > 1:
                del self._orders[min(self._orders)]
            order = epoch_order(self._plan.num_examples, self._plan.shuffle, *self.order_of, epoch)
            self._orders[epoch] = order
        return int(self._orders[epoch][position])


def _collate(collate: Callable[[Any], Any], read: tuple[int, Any]) -> NumberedBatch:
    return NumberedBatch(read[0], collate(read[1]))
