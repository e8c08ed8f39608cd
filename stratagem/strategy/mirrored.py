"""Several devices of one host, each with the whole model, in step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stratagem.arguments import checked
from stratagem.strategy.devices import parse_devices
from stratagem.strategy.replicas.cross_device_ops import CrossDeviceOps
from stratagem.strategy.synchronous import SynchronousStrategy
from stratagem.worker.step_meter import StepMeter


@checked
class MirroredStrategy(SynchronousStrategy):
    """Synchronous training on several devices of this host, one replica each, in one process.

    What ``prepare`` returns stands for each replica's own copy inside ``run``; outside of it, for replica 0's, which is
    the object that was given. A batch is a :class:`PerReplica` that ``run`` deals out.

    Args:
        devices: for example ``["cuda:0", "cuda:1"]``, TensorFlow's ``["/gpu:0", "/gpu:1"]``, or logical CPUs
            ``["cpu:0", "cpu:1"]``, which take turns. None: all GPUs that torch sees, else one CPU.
        cross_device_ops: how gradients are reduced, or the class of it; None: NCCL where each replica has a GPU of its
            own, else :class:`ReductionToOneDevice`.
        seed: seed of the order of the examples; the same seed gives the same order under every strategy.

    Raises:
        ConfigurationError: no such device, or one that comes twice.
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device] | None = None,
        cross_device_ops: CrossDeviceOps | type[CrossDeviceOps] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(parse_devices(devices), StepMeter(), ops=cross_device_ops, seed=seed)
