"""The public API, told once: `__init__.py` loads each name from here when it is first used."""

from . import nn
from .checkpoint.reading import latest_checkpoint, load_checkpoint
from .cluster.communication import CollectiveCommunication, CommunicationImplementation, CommunicationOptions, ReduceOp
from .cluster.resolvers import (
    KubernetesClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
)
from .cluster.spec import ClusterSpec
from .data.files import FileDataset
from .data.options import AutoShardPolicy, DistributeOptions, InputContext
from .data.values import PerReplica, ValueContext
from .errors import (
    CheckpointError,
    ClusterSpecError,
    ClusterTimeoutError,
    CollectiveError,
    ConfigurationError,
    ExportError,
    JobStoppedError,
    NonFiniteGradientError,
    PeerUnavailableError,
    SecurityError,
    StratagemError,
    SubmitError,
    UnsupportedOptimizerError,
    VariableError,
)
from .launch.machines import COMMON_MACHINE_CONFIGS, MachineConfig
from .launch.submit.api import run
from .launch.submit.job import Job
from .launch.submit.record import remote
from .launch.widget import StatusWidget, status_widget
from .strategy.base import Strategy
from .strategy.current import set_strategy
from .strategy.default import get_strategy, has_strategy, is_lead
from .strategy.environment import strategy_from_environment
from .strategy.loss_scaling import compute_average_loss, scale_regularization_loss
from .strategy.multi_worker_mirrored import MultiWorkerMirroredStrategy
from .strategy.one_process import CentralStorageStrategy, MirroredStrategy, OneDeviceStrategy
from .strategy.parameter_server import ParameterServerStrategy
from .strategy.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner
from .strategy.replicas.context import ReplicaContext, get_replica_context, in_cross_replica_context
from .strategy.replicas.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from .strategy.replicas.variable import Variable, VariableAggregation, VariableSynchronization
from .strategy.roles import is_evaluator
from .strategy.tpu import TPUStrategy
from .training import callbacks
from .training.estimator.cluster_run import EvalSpec, Evaluated, TrainSpec, train_and_evaluate
from .training.estimator.estimator import Estimator
from .training.estimator.exporters import BestExporter, Exporter, FinalExporter, LatestExporter
from .training.estimator.from_model import model_to_estimator
from .training.estimator.model_function import EstimatorSpec, ModeKeys, get_global_step, get_or_create
from .training.estimator.run_config import RunConfig
from .training.export.export import export_model
from .training.export.inputs import TensorSpec
from .training.export.loaded_model import LoadedModel, load_model
from .training.model import Model
from .training.preemption import PreemptionCheckpointHandler
from .training.saving.checkpoint import Checkpoint
from .training.saving.manager import CheckpointManager
from .training.saving.new_checkpoints import new_checkpoints

__version__: str

__all__ = [
    "COMMON_MACHINE_CONFIGS",
    "AutoShardPolicy",
    "BestExporter",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "ClusterSpec",
    "ClusterSpecError",
    "ClusterTimeoutError",
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
    "JobStoppedError",
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
    "NonFiniteGradientError",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PeerUnavailableError",
    "PerReplica",
    "PreemptionCheckpointHandler",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunConfig",
    "SecurityError",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "StatusWidget",
    "StratagemError",
    "Strategy",
    "SubmitError",
    "TFConfigClusterResolver",
    "TPUStrategy",
    "TensorSpec",
    "TrainSpec",
    "UnsupportedOptimizerError",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableError",
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
    "status_widget",
    "strategy_from_environment",
    "train_and_evaluate",
]
