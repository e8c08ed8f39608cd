"""The strategies of one process: one device, several in step, and the one in a cluster's evaluator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stratagem.arguments import checked
from stratagem.errors import ConfigurationError
from stratagem.strategy.devices import default_device, parse_device, parse_devices
from stratagem.strategy.prepared import Preparation
from stratagem.strategy.replicas.central_replicas import CentralReplicas
from stratagem.strategy.replicas.cross_device_ops import CrossDeviceOps
from stratagem.strategy.replicas.local_replicas import LocalReplicas
from stratagem.strategy.synchronous import SynchronousStrategy
from stratagem.worker.step_meter import StepMeter


@checked
class OneDeviceStrategy(SynchronousStrategy):
    """Trains on one device.

    Args:
        device: for example "cpu" or "cuda:0"; TensorFlow's "/gpu:0" and "/cpu:0" are accepted.
        seed: seed of the order of the examples; the same seed gives the same order under every strategy. None:
            STRATAGEM_SEED, else 0.

    Raises:
        ConfigurationError: the device does not exist.
    """

    def __init__(self, device: str | torch.device = "cpu", seed: int | None = None) -> None:
        self.device = parse_device(device)
        super().__init__((self.device,), StepMeter(), seed=seed)


@checked
class MirroredStrategy(SynchronousStrategy):
    """Synchronous training on several devices of this host, one replica each, in one process.

    Inside ``run``, an object that ``prepare`` returns stands for each replica's own copy; outside, for replica 0's,
    which is the original object. A batch is a :class:`PerReplica` that ``run`` distributes.

    Args:
        devices: for example ``["cuda:0", "cuda:1"]``, TensorFlow's ``["/gpu:0", "/gpu:1"]``, or logical CPUs
            ``["cpu:0", "cpu:1"]``, which take turns. None: all GPUs that torch sees, else one CPU.
        cross_device_ops: how gradients are reduced: an object or its class; None: NCCL if each replica has a GPU of its
            own, else :class:`ReductionToOneDevice`.
        seed: seed of the order of the examples; the same seed gives the same order under every strategy. None:
            STRATAGEM_SEED, else 0.

    Raises:
        ConfigurationError: a device does not exist, or is listed twice.
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device] | None = None,
        cross_device_ops: CrossDeviceOps | type[CrossDeviceOps] | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(parse_devices(devices), StepMeter(), ops=cross_device_ops, seed=seed)


@checked
class CentralStorageStrategy(SynchronousStrategy):
    """Synchronous training on several devices of this host with ONE copy of parameters and of optimizer state.

    Gradients of all replicas are added, and the only optimizer makes one step with them. Outside ``run``, an object
    that ``prepare`` returns stands for the original object; inside, a model stands for the replica's copy, which on
    the device of the parameters is the same memory.

    Args:
        compute_devices: as for :class:`MirroredStrategy`: one replica each.
        parameter_device: device of the only copy; None: the only device if there is one, else the CPU.
        seed: seed of the order of the examples; the same seed gives the same order under every strategy. None:
            STRATAGEM_SEED, else 0.

    Raises:
        ConfigurationError: a device does not exist, or is listed twice.
    """

    def __init__(
        self,
        compute_devices: Sequence[str | torch.device] | None = None,
        parameter_device: str | torch.device | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        devices = parse_devices(compute_devices)
        if parameter_device is not None:
            self._parameter_device = parse_device(parameter_device)
        else:
            self._parameter_device = devices[0] if len(devices) == 1 else torch.device("cpu")
        super().__init__(devices, StepMeter(), seed=seed)

    @property
    def parameter_device(self) -> torch.device:
        return self._parameter_device

    def _make_replicas(self, devices: tuple[torch.device, ...]) -> LocalReplicas:
        if devices == (self._parameter_device,):
            return LocalReplicas(self, devices, self._meter)
        return CentralReplicas(
            self,
            devices,
            self._parameter_device,
            self._ops,
            self._meter,
            self._is_pending,
            lambda: self._shares.num_seen,
        )

    def check_variable(self, name: str, trainable: bool) -> None:
        if trainable and len(self.local_devices) > 1:
            raise ConfigurationError(
                f"variable {name!r}: replicas that share one copy cannot each have a gradient of it; make it an "
                "nn.Parameter of a model, of which they have copies"
            )


class EvaluatorStrategy(SynchronousStrategy):
    """One replica, in this process alone, that evaluates and refuses to train.

    A script that builds its strategy first, and leaves it to the Estimator who trains, has one in the evaluator too.
    """

    def __init__(self) -> None:
        super().__init__((default_device(),), StepMeter())

    def _prepare(self, objects: Sequence[Any], preparation: Preparation) -> Sequence[Any]:
        if any(isinstance(item, torch.optim.Optimizer) for item in objects):
            raise ConfigurationError(
                "an evaluator does not train: in the script, ask sg.is_evaluator() before preparing an optimizer, and "
                "loop over sg.new_checkpoints()"
            )
        return super()._prepare(objects, preparation)
