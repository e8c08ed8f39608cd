"""The strategy that ``stratagem run --strategy …`` and TF_CONFIG say."""

from __future__ import annotations

import os

import torch

from stratagem.cluster.choice import choose_strategy
from stratagem.cluster.tf_config import placement_from_environment
from stratagem.strategy.base import Strategy
from stratagem.strategy.multi_worker_mirrored import MultiWorkerMirroredStrategy
from stratagem.strategy.one_device import OneDeviceStrategy
from stratagem.strategy.parameter_server import ParameterServerStrategy


def strategy_from_environment(name: str | None = None) -> Strategy:
    """Builds a strategy.

    Args:
        name: "one", "ring" or "ps"; "auto": ps when the cluster has a ps, ring when it has several workers, else one.
            None: STRATAGEM_STRATEGY, else "auto".

    Raises:
        ConfigurationError: no such strategy, or the cluster does not fit it.
    """
    placement = placement_from_environment(os.environ)
    cluster = placement.cluster if placement is not None else None
    num_workers, num_ps = (cluster.num_workers, cluster.num_ps) if cluster is not None else (1, 0)
    chosen = choose_strategy(name or os.environ.get("STRATAGEM_STRATEGY", "auto"), num_workers, num_ps)
    if chosen == "ps":
        return ParameterServerStrategy()
    if chosen == "ring":
        return MultiWorkerMirroredStrategy()
    return OneDeviceStrategy("cuda:0" if torch.cuda.is_available() else "cpu")
