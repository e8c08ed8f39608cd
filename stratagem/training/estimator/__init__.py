"""Estimators: a training described by functions, run in every task of a cluster by one call."""

from stratagem.training.estimator.cluster_run import EvalSpec, Evaluated, TrainSpec, train_and_evaluate
from stratagem.training.estimator.estimator import Estimator
from stratagem.training.estimator.exporters import BestExporter, Exporter, FinalExporter, LatestExporter
from stratagem.training.estimator.from_model import model_to_estimator
from stratagem.training.estimator.objects import get_global_step, get_or_create
from stratagem.training.estimator.run_config import RunConfig
from stratagem.training.estimator.spec import EstimatorSpec, ModeKeys

__all__ = [
    "BestExporter",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "Evaluated",
    "Exporter",
    "FinalExporter",
    "LatestExporter",
    "ModeKeys",
    "RunConfig",
    "TrainSpec",
    "get_global_step",
    "get_or_create",
    "model_to_estimator",
    "train_and_evaluate",
]
