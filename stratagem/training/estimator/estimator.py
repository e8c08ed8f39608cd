"""``sg.Estimator``: a model described by a function, trained from and into one folder."""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from stratagem.arguments import check_kind, checked, known_arguments, whole_numbers
from stratagem.checkpoint.catalog import newest
from stratagem.checkpoint.durable import patiently
from stratagem.checkpoint.reading import find
from stratagem.cluster.tf_config import placement_from_environment
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.strategy.current import current_strategy, set_strategy
from stratagem.strategy.default import DefaultStrategy
from stratagem.strategy.devices import default_device
from stratagem.strategy.environment import strategy_from_environment
from stratagem.tensorflow_names import WithWaysOut
from stratagem.training.callbacks.tensorboard import Summaries
from stratagem.training.estimator import evaluation
from stratagem.training.estimator.evaluation import Predictor, RestoredObjects
from stratagem.training.estimator.inputs import Input, InputFunction
from stratagem.training.estimator.model_function import EstimatorSpec, ModeKeys, ModelFunction
from stratagem.training.estimator.run_config import CHECKPOINT_NAME, RunConfig, StrategyOrFactory
from stratagem.training.estimator.training import EstimatorTraining, SavingListener, listening
from stratagem.training.export.export import export_model
from stratagem.training.export.inputs import as_arguments, batch_of
from stratagem.worker.runtime import active_runtime

logger = logging.getLogger(__name__)

_unnamed: weakref.WeakSet[Strategy] = weakref.WeakSet()
"""Of tasks of a cluster: strategies of Estimators that name none. Alone each Estimator has one of its own."""


@checked
class Estimator(WithWaysOut):
    """Trains, evaluates and predicts with the model of a ``model_fn``.

    ``model_fn(features, labels, mode, params)`` is called with every batch and returns an :class:`EstimatorSpec`.
    Objects that outlive a step, its modules and its optimizer, come from ``sg.get_or_create("net", Net)``. The
    Estimator prepares them for the strategy, restores and saves them, and makes the steps::

        def model_fn(features, labels, mode, params):
            net = sg.get_or_create("net", Net)
            logits = net(features)
            if mode == sg.ModeKeys.PREDICT:
                return sg.EstimatorSpec(mode, predictions={"class": logits.argmax(1)})
            loss = torch.nn.functional.cross_entropy(logits, labels)
            if mode == sg.ModeKeys.EVAL:
                return sg.EstimatorSpec(mode, loss=loss, metrics={"accuracy": ("accuracy", logits, labels)})
            optimizer = sg.get_or_create("optimizer", lambda: torch.optim.Adam(net.parameters(), params["lr"]))
            return sg.EstimatorSpec(mode, loss=loss, optimizer=optimizer)

    The first call in each mode, with an example or two of the first batch, creates the objects. Training resumes from
    the newest checkpoint of the folder; evaluation and prediction use its weights, or those of another checkpoint.

    Args:
        model_fn: takes ``features``, and optionally ``labels``, ``mode``, ``params`` and ``config``.
        model_dir: folder for checkpoints, summaries and exports; None: ``config.model_dir``, or else a temporary
            folder.
        config: how it runs; None: the defaults.
        params: for ``model_fn`` and the input functions.

    Raises:
        ConfigurationError: incompatible arguments.
    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config or RunConfig()
        self.params = dict(params or {})
        self.model_dir = _model_dir(model_dir, self.config.model_dir)
        self._function = ModelFunction(model_fn, self.params, self.config)
        self._training: EstimatorTraining | None = None
        self._restored: dict[ModeKeys, RestoredObjects] = {}
        self._evaluations: dict[str | None, Summaries] = {}

    @known_arguments
    def train(
        self,
        input_fn: InputFunction,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[SavingListener] | None = (),
    ) -> Estimator:
        """Trains, starting from the newest checkpoint; saves checkpoints on the way and at the end.

        It iterates over the data repeatedly until the steps are made; without a number of steps, once. An
        interrupted training resumes at the position in its data where it stopped.

        The first SIGTERM or SIGINT to any worker is a request to end: after the current step all workers save
        together and exit with code 143. A second one ends the process at once.

        Workers that run in step all make the steps and the checkpoints together. On parameter servers the steps of
        all workers count, and ``train`` returns when all of them are applied and saved; the batches come from one
        stream of examples, so that none is smaller than the others.

        Args:
            input_fn: returns a DataLoader, or an iterable, of GLOBAL batches ``(features, labels)``. If it takes
                ``input_context``, it returns batches for single replicas and shards by it, as in
                ``distribute_datasets_from_function``; on parameter servers, where the chief leases the batches, the
                context has one pipeline. It may take ``mode``, ``params`` and ``config`` too.
            steps: updates to make.
            max_steps: total updates over all trainings of this model, after which there is nothing left to do.
            saving_listeners: are notified of each checkpoint, on the worker that saves it.

        Raises:
            ConfigurationError: both numbers are given, or the input or ``model_fn`` is invalid.
        """
        if steps is not None and max_steps is not None:
            raise ConfigurationError("expected steps or max_steps, got both")
        whole_numbers(steps=steps, max_steps=max_steps)
        listeners = listening(saving_listeners)
        given = Input(input_fn, ModeKeys.TRAIN, self.params, self.config)
        if self._training is None:
            strategy = _made(self.config.train_distribute) or _of_process()
            shared = strategy in _unnamed
            self._training = EstimatorTraining(self._function, strategy, self.model_dir, self.config, shared)
        step = self._training.run(given, steps, max_steps, listeners)
        logger.info("Trained %d steps in total", step)
        return self

    @known_arguments
    def evaluate(
        self,
        input_fn: InputFunction,
        steps: int | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> dict[str, float]:
        """The loss, the metrics and "global_step" of a checkpoint, and a summary of them in ``<model_dir>/eval``.

        This process evaluates by itself, whatever the strategy of the training. The loss is the mean over the examples.

        Args:
            input_fn: returns a DataLoader, or an iterable, of batches.
            steps: maximum number of batches; None: all.
            checkpoint_path: a checkpoint, or a folder of them; None: the newest one of the model.
            name: name of the data: the summary goes to ``eval_<name>``.

        Raises:
            CheckpointError: the checkpoint is damaged or belongs to another model.
            ConfigurationError: the input or ``model_fn`` is invalid.
        """
        whole_numbers(steps=steps)
        if name:
            check_folder_name("the name of evaluation data that", name)
        given = Input(input_fn, ModeKeys.EVAL, self.params, self.config)
        restored, path = self._restored_in(ModeKeys.EVAL), self._checkpoint(checkpoint_path)
        results = evaluation.evaluate(restored, given, path, steps)
        if restored.strategy.is_lead:
            step = int(results["global_step"])
            # One file for all evaluations of a process: readers order files by the second of their name.
            folder = self.model_dir / (f"eval_{name}" if name else "eval")
            self._evaluations.setdefault(name, Summaries(folder)).write(
                {key: results[key] for key in results if key != "global_step"}, step
            )
            logger.info("evaluated step %d: %s", step, ", ".join(f"{k} {v:.6g}" for k, v in results.items()))
        return results

    @known_arguments
    def predict(self, input_fn: InputFunction, checkpoint_path: str | os.PathLike[str] | None = None) -> Iterator[Any]:
        """The predictions of a checkpoint for each example, in the order of the input, on the CPU.

        Args:
            input_fn: returns a DataLoader, or an iterable, of batches; labels in them are ignored.
            checkpoint_path: a checkpoint, or a folder of them; None: the newest one of the model.

        Raises:
            CheckpointError: the checkpoint is damaged or belongs to another model.
            ConfigurationError: the input or ``model_fn`` is invalid.
        """
        given = Input(input_fn, ModeKeys.PREDICT, self.params, self.config)
        return evaluation.predict(self._restored_in(ModeKeys.PREDICT), given, self._checkpoint(checkpoint_path))

    def latest_checkpoint(self) -> str | None:
        """The newest complete checkpoint of the model; None if there is none. UnreadableError: it could not be read for
        ten seconds."""
        found = patiently(lambda: newest(self.model_dir, CHECKPOINT_NAME, is_certain=True))
        return None if found is None else str(found)

    @known_arguments
    def export_model(
        self,
        path: str | os.PathLike[str],
        example_inputs: Any = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Path:
        """Exports the prediction of the model from features as a program; ``sg.load_model`` reads it.

        Args:
            path: path of the folder.
            example_inputs: features, or ``TensorSpec`` in their place; None: those of ``evaluate`` or ``predict``.
            checkpoint_path: a checkpoint, or a folder of them; None: the newest one of the model.
            metadata: stored with it; anything JSON can hold.

        Raises:
            ConfigurationError: the form of the features is unknown.
            ExportError: the program cannot be made.
        """
        if example_inputs is None:
            example_inputs = next((one.example for one in self._restored.values() if one.example is not None), None)
        if example_inputs is None:
            raise ConfigurationError("export_model needs example_inputs=, a batch of features, or an evaluation before")
        restored = RestoredObjects(self._function, ModeKeys.PREDICT, DefaultStrategy(), torch.device("cpu"))
        restored.build(batch_of(as_arguments((example_inputs,)), 2))
        step = restored.load(self._checkpoint(checkpoint_path))
        predictor = Predictor(self._function, restored.objects, step)
        return export_model(predictor, path, (example_inputs,), {"global_step": step, **(metadata or {})})

    def _restored_in(self, mode: ModeKeys) -> RestoredObjects:
        if mode not in self._restored:
            strategy = _made(self.config.eval_distribute) or DefaultStrategy()
            device = default_device() if self._training is None else self._training.strategy.local_devices[0]
            self._restored[mode] = RestoredObjects(self._function, mode, strategy, device)
        return self._restored[mode]

    def _checkpoint(self, path: str | os.PathLike[str] | None) -> Path | None:
        check_kind(path, str, os.PathLike, NoneType)
        chosen = self.latest_checkpoint() if path is None else path
        return None if chosen is None else patiently(lambda: find(chosen))


def check_folder_name(what: str, name: str) -> None:
    """ConfigurationError: a folder of this name does not lie below the one it is for."""
    if name.startswith((".", os.sep)) or os.path.normpath(name) != name or "\0" in name:
        raise ConfigurationError(f"expected {what} can be that of a folder, got {name!r}")


def _made(given: StrategyOrFactory | None) -> Strategy | None:
    made: object = given if given is None or isinstance(given, Strategy) else given()
    if made is not None and not isinstance(made, Strategy):
        raise ConfigurationError(f"expected a strategy from {given!r}, got {type(made).__name__}")
    return made


def _of_process() -> Strategy:
    """The strategy of the scope, or the default; in a task of a cluster, which joins it once, one made now is that."""
    strategy = current_strategy()
    if isinstance(strategy, DefaultStrategy):
        strategy = strategy_from_environment()
        if active_runtime() is not None:
            set_strategy(strategy)
            _unnamed.add(strategy)
    return strategy


def _model_dir(own: str | os.PathLike[str] | None, of_config: str | os.PathLike[str] | None) -> Path:
    if own is not None and of_config is not None and Path(own) != Path(of_config):
        raise ConfigurationError(f"expected one model_dir, got {os.fspath(own)!r} and RunConfig's {of_config!r}")
    chosen = own if own is not None else of_config
    if chosen == "":
        raise ConfigurationError('expected model_dir= a folder, got "" (of a variable that is not set?)')
    if chosen is not None:
        return Path(chosen)
    if placement_from_environment(os.environ) is not None:
        raise ConfigurationError("this process is part of a cluster: give model_dir, a folder that all tasks see")
    folder = Path(tempfile.mkdtemp(prefix="stratagem-model-"))
    logger.warning("No model_dir was given: the model is in %s", folder)
    return folder
