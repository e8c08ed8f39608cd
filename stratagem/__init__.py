"""Stratagem: tf.distribute for PyTorch.

``import stratagem as sg`` gives what a training script needs; see the README for the map. Names are loaded when first
used, so that a chief or a command line does not load torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# gRPC's fork handlers deadlock with forked DataLoader workers; this must be set before grpc loads (PROTOCOL.md 28).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

if TYPE_CHECKING:
    from stratagem.cluster.communication import CommunicationImplementation, CommunicationOptions
    from stratagem.cluster.resolvers import SimpleClusterResolver, TFConfigClusterResolver
    from stratagem.cluster.spec import ClusterSpec
    from stratagem.errors import CollectiveError
    from stratagem.strategy.base import Strategy, get_strategy, has_strategy, is_evaluator, is_lead
    from stratagem.strategy.environment import strategy_from_environment
    from stratagem.strategy.evaluation import load_checkpoint, new_checkpoints
    from stratagem.strategy.multi_worker_mirrored import MultiWorkerMirroredStrategy
    from stratagem.strategy.one_device import OneDeviceStrategy
    from stratagem.strategy.parameter_server import ParameterServerStrategy
    from stratagem.strategy.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner
    from stratagem.strategy.values import PerReplica, ReduceOp

__version__ = "0.1.0"

_HOMES = {
    "ClusterSpec": "stratagem.cluster.spec",
    "CollectiveError": "stratagem.errors",
    "CommunicationImplementation": "stratagem.cluster.communication",
    "CommunicationOptions": "stratagem.cluster.communication",
    "FixedShardsPartitioner": "stratagem.strategy.partitioners",
    "MaxSizePartitioner": "stratagem.strategy.partitioners",
    "MinSizePartitioner": "stratagem.strategy.partitioners",
    "MultiWorkerMirroredStrategy": "stratagem.strategy.multi_worker_mirrored",
    "OneDeviceStrategy": "stratagem.strategy.one_device",
    "ParameterServerStrategy": "stratagem.strategy.parameter_server",
    "PerReplica": "stratagem.strategy.values",
    "ReduceOp": "stratagem.strategy.values",
    "SimpleClusterResolver": "stratagem.cluster.resolvers",
    "Strategy": "stratagem.strategy.base",
    "TFConfigClusterResolver": "stratagem.cluster.resolvers",
    "get_strategy": "stratagem.strategy.base",
    "has_strategy": "stratagem.strategy.base",
    "is_evaluator": "stratagem.strategy.base",
    "new_checkpoints": "stratagem.strategy.evaluation",
    "load_checkpoint": "stratagem.strategy.evaluation",
    "is_lead": "stratagem.strategy.base",
    "strategy_from_environment": "stratagem.strategy.environment",
}

__all__ = [
    "ClusterSpec",
    "CollectiveError",
    "CommunicationImplementation",
    "CommunicationOptions",
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "SimpleClusterResolver",
    "Strategy",
    "TFConfigClusterResolver",
    "get_strategy",
    "has_strategy",
    "is_evaluator",
    "is_lead",
    "load_checkpoint",
    "new_checkpoints",
    "strategy_from_environment",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'stratagem' has no attribute {name!r}")
