"""One device: parameters, steps and input there; nothing is sent anywhere."""

from __future__ import annotations

import torch

from stratagem.arguments import checked
from stratagem.strategy.devices import parse_device
from stratagem.strategy.synchronous import SynchronousStrategy
from stratagem.worker.step_meter import StepMeter


@checked
class OneDeviceStrategy(SynchronousStrategy):
    """Trains on one device.

    Args:
        device: for example "cpu" or "cuda:0"; TensorFlow's "/gpu:0" and "/cpu:0" are understood.
        seed: seed of the order of the examples; the same seed gives the same order under every strategy.

    Raises:
        ConfigurationError: no such device.
    """

    def __init__(self, device: str | torch.device = "cpu", seed: int = 0) -> None:
        self.device = parse_device(device)
        super().__init__((self.device,), StepMeter(), seed=seed)
