"""The strategy that ``stratagem run --strategy …`` or TF_CONFIG names."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from stratagem.arguments import checked
from stratagem.cluster.choice import strategy_in
from stratagem.cluster.config import WorkerConfig
from stratagem.cluster.sources import environment_layer
from stratagem.cluster.tf_config import placement_from_environment
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.strategy.devices import default_device, named_devices, parse_devices
from stratagem.strategy.multi_worker_mirrored import MultiWorkerMirroredStrategy
from stratagem.strategy.one_process import (
    CentralStorageStrategy,
    EvaluatorStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
)
from stratagem.strategy.parameter_server import ParameterServerStrategy
from stratagem.strategy.roles import is_evaluator


@checked
def strategy_from_environment(
    name: str | None = None, devices: str | Sequence[str | torch.device] | None = None
) -> Strategy:
    """Builds a strategy.

    Args:
        name: "one", "mirrored", "central", "ring" or "ps"; "auto": ps when the cluster has a ps, ring when it has
            several workers or a chief, mirrored when this process has several devices, else one. None:
            STRATAGEM_STRATEGY, else "auto".
        devices: devices of the replicas of this process; in a string, separated by commas. None: STRATAGEM_DEVICES,
            else its GPUs, else one CPU.

    Raises:
        ConfigurationError: the strategy or device does not exist, the cluster does not fit the strategy, or an
            environment variable is unknown.
    """
    environment_layer(WorkerConfig, os.environ)  # without a cluster nobody else would read it
    placement = placement_from_environment(os.environ)
    cluster = placement.cluster if placement is not None else None
    chosen = name or os.environ.get("STRATAGEM_STRATEGY") or "auto"
    names = devices or os.environ.get("STRATAGEM_DEVICES", "")
    own = named_devices(names) if isinstance(names, str) else names
    strategy = strategy_in(cluster, chosen, len(parse_devices(own)))
    if is_evaluator():
        return EvaluatorStrategy()
    if strategy == "mirrored":
        return MirroredStrategy(own)
    if strategy == "central":
        return CentralStorageStrategy(own)
    if strategy == "ring":
        return MultiWorkerMirroredStrategy(devices=own)
    if own is not None and len(own) > 1:
        raise ConfigurationError(
            f"the strategy {strategy!r} has one replica per process, but {len(own)} devices were given: "
            f"{', '.join(map(str, own))}"
        )
    device = default_device() if own is None else own[0]
    return ParameterServerStrategy(device=device) if strategy == "ps" else OneDeviceStrategy(device)
