"""This worker's part of a source of global batches, as an iterable for the script."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Generator, Mapping
from typing import Any

import torch

from stratagem.arguments import warn_once
from stratagem.cluster.units import Plan
from stratagem.data.distributed import DistributedIterator
from stratagem.data.healing_reader import HealingReader
from stratagem.data.index_batches import IndexBatches
from stratagem.data.nested import empty_like, empty_of, form_of, warn_of_left_examples
from stratagem.data.options import AutoShardPolicy, DistributeOptions
from stratagem.data.placement import InputPlacement, Listener, StepShare
from stratagem.data.readers import DeviceCopies, Parts, Reader, Totals
from stratagem.data.values import PerReplica
from stratagem.errors import ConfigurationError
from stratagem.measuring import measures
from stratagem.tensorflow_names import WithWaysOut
from stratagem.worker.ring.agreement import gather_json
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.step_meter import timed_phase

logger = logging.getLogger(__name__)


class SplitDataset(WithWaysOut):
    """Batches of the local replicas, step by step. Each ``iter()`` is the next epoch.

    With one local replica an item is its batch, else :class:`PerReplica` of all their batches, on their devices.
    Replicas without examples get batches of size 0.

    Args:
        policy: how the source is shared out; None: it gives batches of single replicas.
        plan: how epochs are cut, if they follow from a plan on all workers.
        batches: what ``reader`` reads, where that is by indices.
        healing_reader: reads in the place of ``reader`` where workers may be lost.
        contents: as ``contents_of`` has it, where all workers must hold the same.
    """

    is_own_loop = True
    """Whether the script goes through it itself, and may count on a batch in each pass."""

    def __init__(
        self,
        reader: Reader,
        placement: InputPlacement,
        options: DistributeOptions,
        *,
        seed: int,
        listener: Listener,
        policy: AutoShardPolicy | None,
        plan: Plan | None = None,
        batches: IndexBatches | None = None,
        healing_reader: HealingReader | None = None,
        contents: int = 0,
    ) -> None:
        self._batches = batches
        self._contents = contents
        self._healing_reader = healing_reader
        self._reader = reader
        self._placement = placement
        self._skips_empty = options.on_empty == "skip"
        self._listener = listener
        self._policy = policy
        self._plan = plan
        self._seed = seed
        asks, is_shared = not reader.knows_totals, policy is AutoShardPolicy.DATA
        self._agreement = StepAgreement(placement.communicator, placement.num_local_replicas, asks, is_shared)
        copying = any(device.type != "cpu" for device in placement.devices)
        ahead = placement.num_local_replicas if copying else 0
        self._copies = DeviceCopies(placement.devices, ahead if options.prefetch is None else options.prefetch)
        self._epoch = 0
        self._step = 0
        self._pass: object | None = None
        """Whoever goes through the current epoch, or did and left."""
        self._is_left = False
        self._saved_left: tuple[int, int] | None = None
        """Of a pass that the script had left: epoch and step of a position that it saved."""
        self._joins_pass = False
        """Whether the next pass is one in which the other workers are already."""

    @property
    def plan(self) -> Plan | None:
        """How every epoch is cut into units; None: by no plan."""
        return None if self._plan is None else dataclasses.replace(self._plan, seed=self._seed)

    @property
    def epoch(self) -> int:
        """The epoch of the position: passes completed, or left. A newcomer to a ring joins the others here."""
        self.arrive()
        return self._epoch

    @property
    def next_epoch(self) -> int:
        """Number of the next pass; while one is gone through, its own."""
        return self._epoch + (self._pass is not None and self._is_left)

    def reorder(self, ordinal: int) -> None:
        """Takes the order of examples of the dataset with this ordinal."""
        if self._batches is not None:
            self._batches.ordinal = ordinal

    def arrive(self) -> None:
        """A newcomer to a ring joins the others, in the middle of their pass if they are in one."""
        self._listener.arrive()

    def __len__(self) -> int:
        """Steps in an epoch. Raises TypeError: the source does not say, or the workers read different things."""
        steps, plan = self._reader.num_steps, self._plan
        is_open = self._policy is None and self._placement.num_workers > 1
        if steps is None or is_open or (self._skips_empty and plan is None):
            raise TypeError("this distributed dataset does not know how many steps an epoch has")
        if self._skips_empty and plan is not None:
            shared = dataclasses.replace(plan, num_slices=self._placement.num_replicas)
            return sum(len(shared.units_of(step)) == shared.num_slices for step in range(steps))
        return steps

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._pass_over())

    def _pass_over(self) -> Generator[Any]:
        self.arrive()
        this_pass = object()
        if self._pass is not None:  # the script left the pass before this one
            if self._saved_left == (self._epoch, self._step):
                warn_once(
                    logger,
                    "A position was saved after the script had left a pass of a distributed dataset, and now it begins "
                    "the next one: a job that resumes there trains the rest of the pass first. If it should begin with "
                    "the next one too, call dataset.begin_at(dataset.epoch + 1) before you save",
                )
            self._epoch, self._step = self._epoch + 1, 0
        self._pass, self._is_left = this_pass, False
        epoch, number = self._epoch, (first := self._step)
        if not self._joins_pass:
            num_examples = self._plan.num_examples if self._plan else 0
            self._agreement.start(epoch, number, self._seed, num_examples, self._contents)
            self._contents = 0  # compared once; a dataset may change what it keeps
        self._joins_pass = False
        self._listener.start_epoch(epoch)
        complete = False
        try:
            if self._healing_reader is None:
                steps = self._copies.of(self._reader.read(epoch, number, self._seed))
            else:
                steps = self._healing_reader.read(epoch, number, self._seed, self._copies)
            while (agreed := self._agreement.agree(next(steps, None), self._reader.common)) is not None:
                parts, totals = agreed
                if self._pass is not this_pass:
                    raise ConfigurationError("a newer iter() of this distributed dataset continues with the next epoch")
                self._step = number + 1
                if totals.num_examples and not (self._skips_empty and totals.num_empty):
                    share = StepShare(epoch, number, parts.num_examples, totals.num_examples)
                    if 0 in parts.num_examples:
                        warn_of_left_examples(parts.batches[parts.num_examples.index(0)])
                    batch = parts.batches[0]
                    if len(parts.batches) > 1:
                        batch = PerReplica(parts.batches, tuple(map(float, parts.num_examples)))
                    self._listener.begin(share, batch)
                    yield batch
                    self._listener.done(share)
                number += 1
                is_last = number > 1 and self._healing_reader is not None and self._healing_reader.is_over(number)
                self._listener.between_steps(is_last)
            if self.is_own_loop and 0 < first == number:  # else nobody knows why the script fails at each of its starts
                logger.warning(
                    "The position that was loaded is behind the last batch of its epoch, as where a job was told to "
                    "end there, so this pass has no batch. In a loop of your own, give what its body sets (a loss that "
                    "is printed after it) a value before the loop"
                )
            complete = True
            if self._pass is this_pass:
                self._pass, self._epoch, self._step = None, epoch + 1, 0
        finally:
            self._is_left = not complete
            if not sys.is_finalizing():  # as in DistributedDataset
                self._listener.end_epoch(complete)

    def state_dict(self) -> dict[str, Any]:
        """The position: the batches that the script has got so far count as seen. Plain values, fit for JSON.

        A script that saves inside its loop does so after the step; of a pass that it left, the rest is still to come,
        unless :meth:`begin_at` says otherwise. Under DATA the position does not depend on the number of workers and
        replicas.
        """
        if self._pass is not None and self._is_left:
            self._saved_left = self._epoch, self._step
        return self._position()

    def _position(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self._epoch, "step": self._step, "seed": self._seed}
        state["policy"] = "function" if self._policy is None else self._policy.value
        if self._policy is not AutoShardPolicy.DATA:
            placement = self._placement
            state |= {"num_workers": placement.num_workers, "num_local_replicas": placement.num_local_replicas}
        if self._plan is not None:
            state |= {"num_examples": self._plan.num_examples, "batch_size": self._plan.batch_size}
        if self._batches is not None:
            state["ordinal"] = self._batches.ordinal
        if self._healing_reader is not None and (left := self._healing_reader.note_losses()):
            state["left"] = left
        return state

    def begin_at(self, epoch: int) -> None:
        """The next ``iter()`` is this epoch: of a position that only says which one it is."""
        self._epoch, self._step, self._pass = epoch, 0, None

    def hand_over(self, is_open: bool) -> dict[str, Any]:
        """What a newcomer's dataset needs to go on with the others, between two steps, of this dataset if it
        ``is_open``."""
        state = self._position()
        is_left = self._pass is not None and not is_open  # by the script: the next pass is another one
        return state | ({"epoch": self._epoch + 1, "step": 0} if is_left else {}) | {"is_open": is_open}

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Stands where those of the others stand, whose ``hand_over`` it is; in the middle of a pass, if they are."""
        self.load_state_dict(state)
        self._joins_pass = bool(state["is_open"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next ``iter()`` goes on where ``state`` was saved; every worker has to load the same.

        A DataLoader over a map-style dataset goes there at once; of an iterable, what lies before is read and dropped.
        Raises ConfigurationError: the state belongs to data that is shared out in another way.
        """
        for name, here in self._position().items():
            if name in ("left", "ordinal"):
                continue
            if name not in state:
                raise ConfigurationError(f"expected the state of a distributed dataset, got one without {name!r}")
            if name not in ("epoch", "step", "seed") and state[name] != here:
                raise ConfigurationError(
                    f"the state was saved with {name}={state[name]!r}, but here it is {here!r}: a position counts "
                    "steps, and these steps differ"
                )
        self._epoch, self._step, self._seed = int(state["epoch"]), int(state["step"]), int(state["seed"])
        self._pass = None
        if "ordinal" in state:  # the order is that of the dataset that was saved
            self.reorder(int(state["ordinal"]))
        if self._healing_reader is not None:
            self._healing_reader.left = list(state.get("left", ()))
        elif state.get("left"):
            raise ConfigurationError(
                f"the state was saved by a ring that had lost a worker, and {len(state['left'])} examples of the epoch "
                "were still to be repeated: load it in a job with --min-workers too"
            )


class StepAgreement:
    """What workers agree on about each step before any of them makes it: how large it is, and whether there is one.

    All workers make the same steps, until none has any data; who has none left gets batches of size 0. Workers that
    do not ask (``asks``) know it alike: :class:`Parts` say all there is to know. Those that share each global batch
    (``is_shared``) all have it, or none does."""

    def __init__(
        self, communicator: Communicator | None, num_local_replicas: int, asks: bool, is_shared: bool = False
    ) -> None:
        self._communicator = communicator
        self._asks = asks
        self._is_shared = is_shared
        self._num_local_replicas = num_local_replicas
        self._empty: Any = None
        self._has_met = False
        self._has_warned = False

    def start(self, epoch: int, step: int, seed: int, num_examples: int, contents: int) -> None:
        """All are about to start at this place of a dataset of so many examples; a ConfigurationError if not. A warning
        where ``contents`` differ; 0 is unlike nothing."""
        self._has_met = False
        if self._communicator is None:
            return
        gathered = self._communicator.all_gather(torch.tensor([epoch, step, seed % 2**63, num_examples, contents]))
        places = [place[:-1] for place in gathered]
        for rank, place in enumerate(places):
            if not torch.equal(place, places[0]):
                raise ConfigurationError(
                    "every worker must start at the same position in the same dataset, but (epoch, step, seed, "
                    f"examples) is {tuple(places[0].tolist())} on worker 0 and {tuple(place.tolist())} on worker "
                    f"{rank}: give all the same dataset, and load_state_dict the same state on all"
                )
        held = {number for place in gathered if (number := int(place[-1]))}
        if len(held) > 1 and self._communicator.rank == 0:
            warn_once(
                logger,
                "The workers hold different examples, and each gets only its share of every batch: the rest of what it "
                "holds is not used. Give every worker the whole dataset (no x[rank::size], no dataset.shard), or give "
                "distribute_dataset options=sg.DistributeOptions(auto_shard_policy=sg.AutoShardPolicy.OFF), with which "
                "every worker reads all of its own",
            )

    def agree(self, parts: Parts | None, common: str) -> tuple[Parts, Totals] | None:
        """This worker's parts of the next step, and the whole of it; None: nobody has one. ``common``: what has to be
        equal on all workers that have read something; see ``IndexReader.common``. Raises ConfigurationError: it is not,
        or one has a global batch to share that another has not."""
        if self._communicator is None or not self._asks:
            return None if parts is None else (parts, parts.totals or _local(parts))
        if not self._has_met:
            self._meet(self._communicator, parts, common)
        elif parts is not None and self._empty is None:
            self._empty = empty_like(parts.batches[0])
        own = _local(parts) if parts is not None else Totals(0, self._num_local_replicas)
        counts = torch.tensor([own.num_examples, own.num_empty, parts is not None])
        with timed_phase(measures.MEETING):
            num_examples, num_empty, num_with_data = self._communicator.all_reduce(counts).tolist()
        if not num_with_data:
            return None
        if self._is_shared and num_with_data < self._communicator.size:
            raise ConfigurationError(
                f"the workers must read the same data, but {self._communicator.size - num_with_data} of "
                f"{self._communicator.size} have no batch left where others have one, of which a part would be lost: "
                "give every worker the same number of batches, or use AutoShardPolicy.OFF, which lets every worker "
                "read its own data"
            )
        if parts is None:
            if not self._has_warned:
                self._has_warned = True
                logger.info("this worker has no data left in this epoch; it takes part with batches of size 0")
            parts = Parts((self._empty,) * self._num_local_replicas, (0,) * self._num_local_replicas)
        return parts, Totals(num_examples, num_empty)

    def _meet(self, communicator: Communicator, parts: Parts | None, common: str) -> None:
        """Before the first step of a pass: what a batch looks like, and whether all read the same."""
        mine = None if parts is None else {"form": form_of(parts.batches[0]), "common": common}
        everybody = gather_json(communicator, mine)
        told = [(rank, one) for rank, one in enumerate(everybody) if one is not None]
        for rank, one in told:
            if one["common"] != told[0][1]["common"]:
                raise ConfigurationError(
                    f"workers {told[0][0]} and {rank} must read the same data, but the {told[0][1]['common']} of one "
                    f"is not the {one['common']} of the other: shuffle the source with the same seed on every worker "
                    "(and list files in the same order), or use AutoShardPolicy.OFF, which lets every worker read its "
                    "own data"
                )
        self._has_met = bool(told)  # else nobody knows what a batch looks like
        if parts is not None:
            self._empty = empty_like(parts.batches[0])
        elif told and self._empty is None:
            self._empty = empty_of(told[0][1]["form"])


def _local(parts: Parts) -> Totals:
    return Totals(sum(parts.num_examples), parts.num_examples.count(0))
