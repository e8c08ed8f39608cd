"""What workers agree on about each step before any of them makes it: how large it is, and whether there is one."""

from __future__ import annotations

import logging
from typing import Any

import torch

from stratagem.data.form import empty_of, form_of
from stratagem.data.nested import empty_like
from stratagem.data.readers import Parts, Totals
from stratagem.errors import ConfigurationError
from stratagem.measuring import measures
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.state_broadcast import gather_json
from stratagem.worker.step_meter import timed_phase

logger = logging.getLogger(__name__)


class StepAgreement:
    """All workers make the same steps, until none has any data; who has none left gets batches of size 0. Workers that
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

    def start(self, epoch: int, step: int, seed: int, num_examples: int) -> None:
        """All are about to start at this place of a dataset of so many examples.

        Raises:
            ConfigurationError: they are not.
        """
        self._has_met = False
        if self._communicator is None:
            return
        places = self._communicator.all_gather(torch.tensor([epoch, step, seed % 2**63, num_examples]))
        for rank, place in enumerate(places):
            if not torch.equal(place, places[0]):
                raise ConfigurationError(
                    "every worker must start at the same place of the same dataset, but (epoch, step, seed, examples) "
                    f"is {tuple(places[0].tolist())} on worker 0 and {tuple(place.tolist())} on worker {rank}: give "
                    "all the same dataset, and load_state_dict the same state on all"
                )

    def agree(self, parts: Parts | None, common: str) -> tuple[Parts, Totals] | None:
        """This worker's parts of the next step, and the whole of it; None: nobody has one.

        Args:
            common: what has to be equal on all workers that have read something; see ``IndexReader.common``.

        Raises:
            ConfigurationError: it is not, or one has a global batch to share that another has not.
        """
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
                f"the workers must read the same, but {self._communicator.size - num_with_data} of "
                f"{self._communicator.size} have no batch left where others have one, of which a part would be lost: "
                "give every worker equally many batches, or use AutoShardPolicy.OFF, which lets every worker read what "
                "it likes"
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
                    f"workers {told[0][0]} and {rank} must read the same, but the {told[0][1]['common']} of one is not "
                    f"the {one['common']} of the other: give the shuffling of the source the same seed on every "
                    "worker (and list files in one order), or use AutoShardPolicy.OFF, which lets every worker read "
                    "what it likes"
                )
        self._has_met = bool(told)  # else nobody knows what a batch looks like
        if parts is not None:
            self._empty = empty_like(parts.batches[0])
        elif told and self._empty is None:
            self._empty = empty_of(told[0][1]["form"])


def _local(parts: Parts) -> Totals:
    return Totals(sum(parts.num_examples), parts.num_examples.count(0))
