"""Stratagem: tf.distribute for PyTorch.

``import stratagem as sg`` gives what a training script needs; see the README for the map. Names are loaded when first
used, so that a chief or a command line does not load torch.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

# gRPC's fork handlers deadlock with forked DataLoader workers; this must be set before grpc loads (PROTOCOL.md 28).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

if TYPE_CHECKING:
    from stratagem import nn
    from stratagem.cluster.communication import (
        CollectiveCommunication,
        CommunicationImplementation,
        CommunicationOptions,
    )
    from stratagem.cluster.resolvers import (
        KubernetesClusterResolver,
        SimpleClusterResolver,
        SlurmClusterResolver,
        TFConfigClusterResolver,
    )
    from stratagem.cluster.spec import ClusterSpec
    from stratagem.data.files import FileDataset
    from stratagem.data.options import AutoShardPolicy, DistributeOptions, InputContext
    from stratagem.errors import (
        CheckpointError,
        CollectiveError,
        ConfigurationError,
        ExportError,
        StratagemError,
        SubmitError,
    )
    from stratagem.launch.machines import COMMON_MACHINE_CONFIGS, MachineConfig
    from stratagem.launch.submit.api import run
    from stratagem.launch.submit.environment import Job, remote
    from stratagem.strategy.base import Strategy, get_strategy, has_strategy, is_evaluator, is_lead, set_strategy
    from stratagem.strategy.central_storage import CentralStorageStrategy
    from stratagem.strategy.environment import strategy_from_environment
    from stratagem.strategy.loss_scaling import compute_average_loss, scale_regularization_loss
    from stratagem.strategy.mirrored import MirroredStrategy
    from stratagem.strategy.multi_worker_mirrored import MultiWorkerMirroredStrategy
    from stratagem.strategy.one_device import OneDeviceStrategy
    from stratagem.strategy.parameter_server import ParameterServerStrategy
    from stratagem.strategy.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner
    from stratagem.strategy.replicas.context import ReplicaContext, get_replica_context, in_cross_replica_context
    from stratagem.strategy.replicas.cross_device_ops import (
        CrossDeviceOps,
        HierarchicalCopyAllReduce,
        NcclAllReduce,
        ReductionToOneDevice,
    )
    from stratagem.strategy.replicas.variable import Variable, VariableAggregation, VariableSynchronization
    from stratagem.strategy.tpu import TPUStrategy
    from stratagem.strategy.values import PerReplica, ReduceOp, ValueContext
    from stratagem.training import callbacks
    from stratagem.training.checkpoint import Checkpoint
    from stratagem.training.checkpoint_reading import latest_checkpoint, load_checkpoint
    from stratagem.training.checkpoint_retention import CheckpointManager
    from stratagem.training.estimator.cluster_run import EvalSpec, Evaluated, TrainSpec, train_and_evaluate
    from stratagem.training.estimator.estimator import Estimator
    from stratagem.training.estimator.exporters import BestExporter, Exporter, FinalExporter, LatestExporter
    from stratagem.training.estimator.from_model import model_to_estimator
    from stratagem.training.estimator.objects import get_global_step, get_or_create
    from stratagem.training.estimator.run_config import RunConfig
    from stratagem.training.estimator.spec import EstimatorSpec, ModeKeys
    from stratagem.training.export import export_model
    from stratagem.training.export_inputs import TensorSpec
    from stratagem.training.loaded_model import LoadedModel, load_model
    from stratagem.training.model import Model
    from stratagem.training.new_checkpoints import new_checkpoints
    from stratagem.training.preemption import PreemptionCheckpointHandler

__version__ = "0.1.0"

_HOMES = {
    "AutoShardPolicy": "stratagem.data.options",
    "BestExporter": "stratagem.training.estimator.exporters",
    "COMMON_MACHINE_CONFIGS": "stratagem.launch.machines",
    "CentralStorageStrategy": "stratagem.strategy.central_storage",
    "Checkpoint": "stratagem.training.checkpoint",
    "CheckpointError": "stratagem.errors",
    "CheckpointManager": "stratagem.training.checkpoint_retention",
    "ClusterSpec": "stratagem.cluster.spec",
    "CollectiveCommunication": "stratagem.cluster.communication",
    "CollectiveError": "stratagem.errors",
    "CommunicationImplementation": "stratagem.cluster.communication",
    "CommunicationOptions": "stratagem.cluster.communication",
    "ConfigurationError": "stratagem.errors",
    "CrossDeviceOps": "stratagem.strategy.replicas.cross_device_ops",
    "DistributeOptions": "stratagem.data.options",
    "Estimator": "stratagem.training.estimator.estimator",
    "EstimatorSpec": "stratagem.training.estimator.spec",
    "EvalSpec": "stratagem.training.estimator.cluster_run",
    "Evaluated": "stratagem.training.estimator.cluster_run",
    "ExportError": "stratagem.errors",
    "Exporter": "stratagem.training.estimator.exporters",
    "FileDataset": "stratagem.data.files",
    "FinalExporter": "stratagem.training.estimator.exporters",
    "FixedShardsPartitioner": "stratagem.strategy.partitioners",
    "HierarchicalCopyAllReduce": "stratagem.strategy.replicas.cross_device_ops",
    "InputContext": "stratagem.data.options",
    "Job": "stratagem.launch.submit.environment",
    "KubernetesClusterResolver": "stratagem.cluster.resolvers",
    "LatestExporter": "stratagem.training.estimator.exporters",
    "LoadedModel": "stratagem.training.loaded_model",
    "MachineConfig": "stratagem.launch.machines",
    "MaxSizePartitioner": "stratagem.strategy.partitioners",
    "MinSizePartitioner": "stratagem.strategy.partitioners",
    "MirroredStrategy": "stratagem.strategy.mirrored",
    "ModeKeys": "stratagem.training.estimator.spec",
    "Model": "stratagem.training.model",
    "MultiWorkerMirroredStrategy": "stratagem.strategy.multi_worker_mirrored",
    "NcclAllReduce": "stratagem.strategy.replicas.cross_device_ops",
    "OneDeviceStrategy": "stratagem.strategy.one_device",
    "ParameterServerStrategy": "stratagem.strategy.parameter_server",
    "PerReplica": "stratagem.strategy.values",
    "PreemptionCheckpointHandler": "stratagem.training.preemption",
    "ReduceOp": "stratagem.strategy.values",
    "ReductionToOneDevice": "stratagem.strategy.replicas.cross_device_ops",
    "ReplicaContext": "stratagem.strategy.replicas.context",
    "RunConfig": "stratagem.training.estimator.run_config",
    "SimpleClusterResolver": "stratagem.cluster.resolvers",
    "SlurmClusterResolver": "stratagem.cluster.resolvers",
    "StratagemError": "stratagem.errors",
    "Strategy": "stratagem.strategy.base",
    "SubmitError": "stratagem.errors",
    "TFConfigClusterResolver": "stratagem.cluster.resolvers",
    "TPUStrategy": "stratagem.strategy.tpu",
    "TensorSpec": "stratagem.training.export_inputs",
    "TrainSpec": "stratagem.training.estimator.cluster_run",
    "ValueContext": "stratagem.strategy.values",
    "Variable": "stratagem.strategy.replicas.variable",
    "VariableAggregation": "stratagem.strategy.replicas.variable",
    "VariableSynchronization": "stratagem.strategy.replicas.variable",
    "compute_average_loss": "stratagem.strategy.loss_scaling",
    "export_model": "stratagem.training.export",
    "get_global_step": "stratagem.training.estimator.objects",
    "get_or_create": "stratagem.training.estimator.objects",
    "get_replica_context": "stratagem.strategy.replicas.context",
    "get_strategy": "stratagem.strategy.base",
    "has_strategy": "stratagem.strategy.base",
    "in_cross_replica_context": "stratagem.strategy.replicas.context",
    "is_evaluator": "stratagem.strategy.base",
    "is_lead": "stratagem.strategy.base",
    "latest_checkpoint": "stratagem.training.checkpoint_reading",
    "load_checkpoint": "stratagem.training.checkpoint_reading",
    "load_model": "stratagem.training.loaded_model",
    "model_to_estimator": "stratagem.training.estimator.from_model",
    "new_checkpoints": "stratagem.training.new_checkpoints",
    "remote": "stratagem.launch.submit.environment",
    "run": "stratagem.launch.submit.api",
    "scale_regularization_loss": "stratagem.strategy.loss_scaling",
    "set_strategy": "stratagem.strategy.base",
    "strategy_from_environment": "stratagem.strategy.environment",
    "train_and_evaluate": "stratagem.training.estimator.cluster_run",
}

_TENSORFLOW_ROOMS = ("distribute", "experimental", "cluster_resolver", "partitioners")
_ROOMS = {"callbacks": "stratagem.training.callbacks", "nn": "stratagem.nn"}

__all__ = [
    "COMMON_MACHINE_CONFIGS",
    "AutoShardPolicy",
    "BestExporter",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "ClusterSpec",
    "CollectiveCommunication",
    "CollectiveError",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ConfigurationError",
    "CrossDeviceOps",
    "DistributeOptions",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "Evaluated",
    "ExportError",
    "Exporter",
    "FileDataset",
    "FinalExporter",
    "FixedShardsPartitioner",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "Job",
    "KubernetesClusterResolver",
    "LatestExporter",
    "LoadedModel",
    "MachineConfig",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "MirroredStrategy",
    "ModeKeys",
    "Model",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "PreemptionCheckpointHandler",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunConfig",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "StratagemError",
    "Strategy",
    "SubmitError",
    "TFConfigClusterResolver",
    "TPUStrategy",
    "TensorSpec",
    "TrainSpec",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "callbacks",
    "compute_average_loss",
    "export_model",
    "get_global_step",
    "get_or_create",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "is_evaluator",
    "is_lead",
    "latest_checkpoint",
    "load_checkpoint",
    "load_model",
    "model_to_estimator",
    "new_checkpoints",
    "nn",
    "remote",
    "run",
    "scale_regularization_loss",
    "set_strategy",
    "strategy_from_environment",
    "train_and_evaluate",
]


def __getattr__(name: str) -> Any:
    if name.startswith("experimental_"):
        name = name.removeprefix("experimental_")
    if name in _TENSORFLOW_ROOMS:  # tf.distribute.experimental.partitioners.…: all names are here
        return sys.modules[__name__]
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(_ROOMS[name])
    raise AttributeError(f"module 'stratagem' has no attribute {name!r}")
