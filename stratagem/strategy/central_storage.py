"""One copy of the variables, several devices that compute with it, in step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stratagem.arguments import checked
from stratagem.errors import ConfigurationError
from stratagem.strategy.devices import parse_device, parse_devices
from stratagem.strategy.replicas.central_replicas import CentralReplicas
from stratagem.strategy.replicas.local_replicas import LocalReplicas, OneReplica
from stratagem.strategy.synchronous import SynchronousStrategy
from stratagem.worker.step_meter import StepMeter


@checked
class CentralStorageStrategy(SynchronousStrategy):
    """Synchronous training on several devices of this host with ONE copy of parameters and of optimizer state.

    Gradients of all replicas are added up, and the only optimizer makes one step with them. What ``prepare`` returns
    stands for the objects that were given, outside of ``run``; inside, a model stands for the replica's copy, which on
    the device of the parameters is the same memory.

    Args:
        compute_devices: as for :class:`MirroredStrategy`: one replica each.
        parameter_device: where the only copy is; None: on the only device if there is one, else on the CPU.
        seed: seed of the order of the examples; the same seed gives the same order under every strategy.

    Raises:
        ConfigurationError: no such device, or one that comes twice.
    """

    def __init__(
        self,
        compute_devices: Sequence[str | torch.device] | None = None,
        parameter_device: str | torch.device | None = None,
        *,
        seed: int = 0,
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
            return OneReplica(self, devices[0], self._meter)
        return CentralReplicas(
            self, devices, self._parameter_device, self._ops, self._meter, lambda: self._shares.num_seen
        )

    def check_variable(self, name: str, trainable: bool) -> None:
        if trainable and len(self.local_devices) > 1:
            raise ConfigurationError(
                f"variable {name!r}: replicas that share one copy cannot each have a gradient of it; make it an "
                "nn.Parameter of a model, of which they have copies"
            )
