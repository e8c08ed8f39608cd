"""What a script can say about how its data reaches the replicas, by the names of ``tf.distribute``."""

from __future__ import annotations

import dataclasses
from types import NoneType
from typing import Literal

from stratagem.arguments import check_kind, known_arguments, whole_number, whole_numbers
from stratagem.cluster.named_enum import NamedEnum
from stratagem.errors import ConfigurationError


class AutoShardPolicy(NamedEnum):
    """Which part of a source each worker gets."""

    AUTO = "auto"
    """LEASE under ParameterServerStrategy; else FILE for sources made of files, DATA for all others."""
    FILE = "file"
    """Each worker reads its own files: every ``num_workers``-th of them."""
    DATA = "data"
    """Every worker knows the same global batches and takes its rows of each."""
    OFF = "off"
    """Every worker goes through all of the source, in an order of its own where it is shuffled."""
    LEASE = "lease"
    """The chief leases units; each example counts exactly once an epoch, whatever dies. ParameterServerStrategy."""


@known_arguments
@dataclasses.dataclass(frozen=True)
class DistributeOptions:
    """Options of one distributed dataset.

    Raises:
        ConfigurationError: a value is out of range.
    """

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    prefetch: int | None = None
    """Steps to read ahead and copy to the devices while the script computes. None: the number of local replicas if
    one of them is not on a CPU, else 0, because nothing has to be copied."""
    on_empty: Literal["call", "skip"] = "call"
    """What to do in a step in which a replica has no examples. call: it gets a batch of size 0. skip: every worker
    skips the step, and its examples."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "auto_shard_policy", AutoShardPolicy(self.auto_shard_policy))
        whole_numbers(0, prefetch=self.prefetch)
        if self.on_empty not in ("call", "skip"):
            raise ConfigurationError(f"expected on_empty='call' or 'skip', got {self.on_empty!r}")

    @classmethod
    def of(cls, given: DistributeOptions | None) -> DistributeOptions:
        """``given``, or the defaults for None; ConfigurationError for anything else."""
        check_kind(given, cls, NoneType)
        return cls() if given is None else given


@dataclasses.dataclass(frozen=True)
class InputContext:
    """The place in the cluster, passed to the function of ``distribute_datasets_from_function``."""

    num_input_pipelines: int = 1
    """Number of workers, each of which calls the function once."""
    input_pipeline_id: int = 0
    """Index of this worker, 0 … num_input_pipelines-1."""
    num_replicas_in_sync: int = 1
    """Replicas of all workers."""

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Examples of each replica in a global batch.

        Raises:
            ConfigurationError: the batch does not divide evenly, or is not a number.
        """
        global_batch_size = whole_number("a global batch size", global_batch_size)
        if global_batch_size % self.num_replicas_in_sync:
            raise ConfigurationError(
                f"expected a global batch size divisible by the {self.num_replicas_in_sync} replicas, "
                f"got {global_batch_size}"
            )
        return global_batch_size // self.num_replicas_in_sync
