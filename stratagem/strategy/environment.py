"""The strategy that ``stratagem run --strategy …`` and TF_CONFIG say."""

from __future__ import annotations

import os

import torch

from stratagem.cluster.tf_config import placement_from_environment
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.strategy.one_device import OneDeviceStrategy
from stratagem.strategy.parameter_server import ParameterServerStrategy

NAMES = ("auto", "one", "ps")


def strategy_from_environment(name: str | None = None) -> Strategy:
    """Builds a strategy.

    Args:
        name: "one" or "ps"; "auto": ps when the cluster has a ps, else one. None: STRATAGEM_STRATEGY, else "auto".

    Raises:
        ConfigurationError: no such strategy, or the cluster does not fit it.
    """
    name = name or os.environ.get("STRATAGEM_STRATEGY", "auto")
    if name not in NAMES:
        raise ConfigurationError(f"expected one of the strategies {', '.join(NAMES)}, got {name!r}")
    placement = placement_from_environment(os.environ)
    if name == "auto":
        name = "ps" if placement is not None and placement.cluster.num_ps else "one"
    if name == "ps":
        return ParameterServerStrategy()
    if placement is not None and placement.cluster.num_ps:
        raise ConfigurationError(
            "the cluster has parameter servers, but the strategy is 'one', which uses none; "
            "choose --strategy ps, or take 'ps' out of the cluster"
        )
    return OneDeviceStrategy("cuda:0" if torch.cuda.is_available() else "cpu")
