"""Callbacks of ``fit``, ``evaluate`` and ``predict``: ``sg.callbacks``."""

from typing import Any

from stratagem.tensorflow_names import no_attribute
from stratagem.training.callbacks.backup import BackupAndRestore
from stratagem.training.callbacks.base import Callback, LambdaCallback
from stratagem.training.callbacks.early_stopping import EarlyStopping, TerminateOnNaN
from stratagem.training.callbacks.history import CSVLogger, History
from stratagem.training.callbacks.learning_rate import LearningRateScheduler, ReduceLROnPlateau
from stratagem.training.callbacks.model_checkpoint import ModelCheckpoint
from stratagem.training.callbacks.tensorboard import TensorBoard

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "History",
    "LambdaCallback",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "ReduceLROnPlateau",
    "TensorBoard",
    "TerminateOnNaN",
]


def __getattr__(name: str) -> Any:
    raise no_attribute(f"module {__name__!r}", name, __name__)
