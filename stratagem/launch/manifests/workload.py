"""A job in containers: which tasks, of which image, on which machines. Pure, no I/O."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from stratagem.cluster.choice import StrategyName, choose_strategy
from stratagem.launch.machines import MachineConfig

_ANY_MACHINE = MachineConfig()


@dataclasses.dataclass(frozen=True)
class Workload:
    """What every renderer takes: docker-compose, Kubernetes, JobSet and TrainJob show the same job.

    Raises:
        ClusterSpecError: the strategy cannot run on these tasks.
    """

    name: str
    """Of the job: lower-case letters, digits and "-"; at most 40 characters, because pods add theirs."""
    image: str
    """Has stratagem installed and the script in its working directory."""
    script: str
    """Path of the training script inside the image."""
    args: tuple[str, ...] = ()
    num_workers: int = 1
    num_ps: int = 0
    evaluator: bool = False
    strategy: str = "auto"
    staleness: float = math.inf
    """Staleness bound, for parameter servers."""
    chief: MachineConfig = _ANY_MACHINE
    worker: MachineConfig = _ANY_MACHINE
    ps: MachineConfig = _ANY_MACHINE
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """For every task."""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The user's own, beside those of the job."""
    checkpoint_every_s: float = 0.0
    port: int = 2222
    """Of every task; each has an address of its own."""

    def __post_init__(self) -> None:
        choose_strategy(self.strategy, self.num_workers, self.num_ps)

    @property
    def chosen_strategy(self) -> StrategyName:
        """The strategy, with "auto" resolved."""
        return choose_strategy(self.strategy, self.num_workers, self.num_ps, self.worker.accelerator_count)
