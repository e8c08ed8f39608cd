"""A module with the training of Keras around it: compile, fit, evaluate, predict, save."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from stratagem.arguments import checked, known_arguments, whole_number, whole_numbers
from stratagem.data.loaders import length_of
from stratagem.data.nested import num_examples
from stratagem.errors import ConfigurationError
from stratagem.strategy.current import current_strategy
from stratagem.strategy.default import get_strategy
from stratagem.training.callbacks.base import Callback, CallbackList, listed
from stratagem.training.callbacks.history import History
from stratagem.training.callbacks.learning_rate import LearningRateScheduler, ReduceLROnPlateau
from stratagem.training.export.loaded_model import NOT_TRAINED, LoadedModel
from stratagem.training.fit import loop as fit_loop
from stratagem.training.fit import sources
from stratagem.training.fit.agreement import FitAgreement, FitOnServers, InStep, check_groups
from stratagem.training.fit.loop import Evaluation, at_epochs
from stratagem.training.fit.position import FitPosition
from stratagem.training.fit.running_metrics import RunningMetrics
from stratagem.training.fit.steps import Compiled, FitSteps, sample_of, unpack
from stratagem.training.losses import Loss, LossFunction
from stratagem.training.metrics import Metrics, metrics_of
from stratagem.training.model_state import ModelState, as_asked, layer_table
from stratagem.training.optimizers import OptimizerFactory, optimizer_of
from stratagem.training.progress import Pace, Verbose, display, numbers
from stratagem.worker.script_runner import awaits_strategy


@known_arguments
class Model(ModelState):
    """A plain ``nn.Module``, with Keras's training, evaluation and prediction.

    It belongs to the strategy of the scope in which it is built. Outside any scope, it belongs to the default that
    ``sg.set_strategy`` was given, or that ``compile`` finds (:func:`~stratagem.get_strategy`): in a job whose script
    makes no strategy, that is the job's. Without any, it trains where the module is.

    Every worker calls ``compile``, ``fit`` and ``evaluate`` alike, and, if workers run in step, ``save`` and
    ``save_weights`` too; each worker calls ``predict`` by itself.

    Args:
        module: not prepared.

    Raises:
        ConfigurationError: ``module`` is not a module.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigurationError(f"expected an nn.Module, got {type(module).__name__}")
        super().__init__(current_strategy(), module)
        self.history: History | None = None
        """Of the newest ``fit``."""
        self._is_prepared = False
        self.compiled = Compiled()
        """What ``compile`` was told."""

    # -- compiling ---------------------------------------------------------------------------------------------

    @checked
    def compile(
        self,
        optimizer: str | torch.optim.Optimizer | OptimizerFactory | None = None,
        loss: str | LossFunction | None = None,
        metrics: Metrics | None = None,
        *,
        mixed_precision: Literal["bf16"] | None = None,
        accumulate_steps: int = 1,
        clip_norm: float | None = None,
        nan: Literal["error", "skip"] = "error",
        sync_batchnorm: bool = False,
        torch_compile: bool | str | Mapping[str, Any] = False,
        memory_format: torch.memory_format | None = None,
    ) -> None:
        """Configures how the model is trained, and prepares it and its optimizer.

        Args:
            optimizer: a class of ``torch.optim`` by name, with torch's defaults; an optimizer over the module's
                parameters; or ``f(parameters)`` that makes one. None: the model only evaluates and predicts.
            loss: a name, a loss module of torch, or ``f(outputs, targets)``; see
                :class:`~stratagem.training.losses.Loss`.
            metrics: names, metrics of torchmetrics and functions of outputs and targets that return one value per
                example, or a dict that names them.
            mixed_precision: "bf16": forward and loss run under bfloat16 autocast.
            accumulate_steps: batches whose gradients make one update, with their mean. The remaining batches at the
                end of an epoch make one too, in which each batch has the same weight as in the others.
            clip_norm: largest global norm of the gradient; None: no clipping.
            nan: "error": a NaN or Inf in a gradient is an error; "skip": the update is skipped and counted.
            sync_batchnorm: BatchNorm over the batches of all replicas in sync.
            torch_compile: True, a mode or arguments of ``torch.compile``: the module is compiled, on each replica.
            memory_format: ``torch.channels_last`` for convolutions; see ``Strategy.prepare``.

        Raises:
            ConfigurationError: an argument out of range, an unknown name, or an optimizer for a model that a worker
                of a cluster has built outside a scope.
            UnsupportedOptimizerError: the strategy cannot run the optimizer.
        """
        if mixed_precision not in (None, "bf16"):
            raise ConfigurationError(f"expected mixed_precision None or 'bf16', got {mixed_precision!r}")
        whole_number("accumulate_steps", accumulate_steps)
        if not self.strategy.places_models and awaits_strategy():
            self.strategy = get_strategy()
        if optimizer is not None:
            self._check_is_for_all()
        if optimizer is not None and isinstance(self._original, LoadedModel):
            raise ConfigurationError(NOT_TRAINED)
        chosen = None if loss is None else Loss(loss)
        metrics_of(metrics, torch.device("cpu"))  # refuses what is none before anything is changed
        made = None if optimizer is None else optimizer_of(optimizer, self._original)
        if isinstance(made, torch.optim.LBFGS):
            raise ConfigurationError(
                "LBFGS computes the loss several times in a step through a closure, which fit does not have: write the "
                "loop, with optimizer.step(closure)"
            )
        objects = [self._original] if made is None else [self._original, made]
        preparation: dict[str, Any] = {
            "clip_norm": clip_norm,
            "nan": nan,
            "sync_batchnorm": sync_batchnorm,
            "torch_compile": torch_compile,
            "memory_format": memory_format,
        }
        with self._scope():
            prepared = self.strategy.prepare(*objects, **preparation)
        self.module, self.optimizer = (prepared, None) if made is None else prepared
        self._is_prepared, self._known = True, [*self._original.parameters()]
        autocast = torch.bfloat16 if mixed_precision else None
        self.compiled = Compiled(chosen, metrics, autocast, accumulate_steps, preparation)

    # -- training ----------------------------------------------------------------------------------------------

    @checked
    def fit(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Verbose = "auto",
        callbacks: Callback | Sequence[Callback] | None = (),
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Collection[int] = 1,
    ) -> History:
        """Trains the model.

        A batch is ``(inputs, targets)`` or ``(inputs, targets, weights)``; inputs in a list, tuple or dict are the
        arguments of the module. Weights make the loss a weighted mean: they are divided by their sum.

        Args:
            x: arrays or tensors, a Dataset, a DataLoader of GLOBAL batches, an iterable of them, or a distributed
                dataset.
            y: targets, with arrays.
            batch_size: examples in a GLOBAL batch, with arrays and Datasets; None: 32.
            epochs: number of the last epoch; ``fit`` runs ``epochs - initial_epoch`` epochs.
            verbose: 0: nothing; 1: a bar; 2: plain lines; "auto": a bar on a terminal, else plain lines. On the lead.
            callbacks: see :class:`Callback`.
            validation_split: fraction of the arrays, at their end, that is not trained on but evaluated after each
                epoch.
            validation_data: evaluated after each epoch: ``(x, y)`` or ``(x, y, sample_weight)`` arrays, or whatever
                ``x`` may be.
            shuffle: each epoch visits arrays and map-style Datasets in a different order, the same under every
                strategy.
            class_weight: weight of each class; unnamed classes have 1.
            sample_weight: a weight for each example, with arrays.
            initial_epoch: number of the first epoch.
            steps_per_epoch: GLOBAL batches of an epoch, over all workers; the next epoch continues after them, from
                pass to pass. None: an epoch is a pass over the data.
            validation_steps: maximum batches of an evaluation; for which ones, see ``steps`` of :meth:`evaluate`.
            validation_batch_size: like ``batch_size``, for the validation data; None: the same.
            validation_freq: epochs from one validation to the next, or a list of epochs, from 1, that have one.

        Returns:
            the logs of the epochs.

        Raises:
            ConfigurationError: incompatible arguments, or the model is not compiled for training.
            NonFiniteGradientError: NaN or Inf in a gradient, under ``nan="error"``.
        """
        compiled = self.compiled
        if self.optimizer is None or compiled.loss is None:
            raise ConfigurationError("fit needs compile(optimizer=..., loss=...)")
        whole_numbers(0, epochs=epochs, initial_epoch=initial_epoch)
        whole_numbers(steps_per_epoch=steps_per_epoch, validation_steps=validation_steps)
        whole_numbers(validation_batch_size=validation_batch_size)
        callbacks = listed(callbacks)
        source = sources.source_of(x, y, sample_weight, batch_size=batch_size, shuffle=shuffle)
        validation = None
        if validation_split:
            arrays = getattr(source, "dataset", None)
            if not isinstance(arrays, sources.Arrays) or validation_data is not None:
                raise ConfigurationError("validation_split is for arrays, and cannot be combined with validation_data")
            trained, held_out = arrays.split(validation_split)
            source = sources.source_of(*trained.parts, batch_size=batch_size, shuffle=shuffle)
            validation = sources.source_of(*held_out.parts, batch_size=validation_batch_size or batch_size)
        elif validation_data is not None:
            validation = sources.validation_source(validation_data, validation_batch_size, batch_size)
        if isinstance(source, Iterator) and steps_per_epoch is None and epochs - initial_epoch > 1:
            raise ConfigurationError(
                f"a {type(source).__name__} can be iterated over only once, but there are {epochs - initial_epoch} "
                "epochs: give steps_per_epoch=, or something that starts over with each iter()"
            )
        validates = at_epochs(validation_freq)
        num_validations = 0 if validation is None else sum(map(validates, range(initial_epoch, epochs)))
        if isinstance(validation, Iterator) and num_validations > 1:
            raise ConfigurationError(
                f"a {type(validation).__name__} can be iterated over only once, but there are {num_validations} "
                "validations: give validation_data= a list, or something that starts over with each iter()"
            )
        with self._scope(), self._fitting():
            dataset = sources.for_training(self.strategy, source, self.module, self._device, self._num_fits)
            check_groups(self.strategy.servers, dataset, compiled.accumulate_steps, steps_per_epoch)
            running = self._new_running_metrics()
            steps = self._steps(dataclasses.replace(compiled, loss=compiled.loss.weighted(class_weight)))
            history, pace = History(), Pace()
            last = [callback for callback in callbacks if getattr(callback, "runs_last", False)]
            first = [callback for callback in callbacks if callback not in last]
            every = [*first, history, pace, *display(verbose, self.strategy.is_lead, pace), *last]
            num_steps = None  # of parameter servers the workers take as many as they can
            if not self.has_servers:
                num_steps = length_of(dataset) if steps_per_epoch is None else steps_per_epoch
            called = self._called(every, verbose, num_steps, epochs)
            self._running = running
            self._position = FitPosition(dataset, running, [*first, history], initial_epoch, self._num_done)
            agreement = self._agreement(dataset, self._position)
            validate = None
            if validation is not None:
                evaluation = self._evaluation(validation, called, validation_steps)
                self._position.validation = evaluation.in_step
                validate = lambda number, is_silent: evaluation.run(is_silent) if validates(number) else {}  # noqa: E731
            self.history = history
            heard = sources.Heard(dataset, self._keep_example)
            passes = sources.Passes(heard, steps_per_epoch, isinstance(source, Iterator))
            together = sorted(type(each).__name__ for each in callbacks if getattr(each, "in_step", False))
            paced = sorted(
                type(each).__name__ for each in callbacks if isinstance(each, LearningRateScheduler | ReduceLROnPlateau)
            )
            agreement.meet(
                {
                    "initial_epoch": initial_epoch,
                    "epochs": epochs,
                    "steps_per_epoch": steps_per_epoch,
                    "callbacks": together,
                    "what sets the learning rate": paced,
                    "the epochs with a validation": 0 if validation is None else sum(map(validates, range(epochs))),
                }
            )
            training = fit_loop.Training(self, steps, running, self._position, called, passes, validate, agreement)
            training.run(epochs)
            self._example = self._position.example if self._example is None else self._example
        return history

    # -- asking ------------------------------------------------------------------------------------------------

    @checked
    def evaluate(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Callback | Sequence[Callback] | None = (),
        return_dict: bool = False,
    ) -> Any:
        """The loss and the metrics, each example counted once, whatever the number of workers and replicas.

        Args:
            x: as in :meth:`fit`; batches are distributed over the replicas. On parameter servers each worker takes
                whole batches, training pauses meanwhile, and one worker takes all batches of an iterable.
            y: targets, with arrays.
            batch_size: examples in a GLOBAL batch, with arrays and Datasets; None: 32.
            verbose: 0: nothing; else the lead prints a line.
            sample_weight: a weight for each example, with arrays.
            steps: maximum number of batches. Parameter servers evaluate the first ones in the order of the examples,
                even of a loader that shuffles; other strategies evaluate the first of the loader's order.
            callbacks: see :class:`Callback`.
            return_dict: a dict by name; else the loss, or a list of the loss and the metrics, as in Keras.

        Raises:
            ConfigurationError: incompatible arguments, or the model has no loss.
        """
        if self.compiled.loss is None:
            raise ConfigurationError("evaluate needs compile(loss=...)")
        whole_numbers(steps=steps)
        source = sources.source_of(x, y, sample_weight, batch_size=batch_size)
        with self._scope():
            called = self._called(listed(callbacks), verbose, steps)
            logs = self._evaluation(source, called, steps).run()
        if verbose and self.strategy.is_lead:
            print(f"evaluation  {numbers(logs)}", file=sys.stderr, flush=True)
        return as_asked(logs, return_dict)

    @checked
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Verbose = 0,
        steps: int | None = None,
        callbacks: Callback | Sequence[Callback] | None = (),
    ) -> Any:
        """The module's outputs for all of ``x``, in its order, on the CPU. Not collective: each worker predicts by
        itself. On a ring, BatchNorm without ``sync_batchnorm`` uses each replica's own statistics; in one process,
        their average.

        Args:
            x: as in :meth:`fit`, but not a distributed dataset; targets in its batches are ignored.
            batch_size: examples at a time, with arrays and Datasets; None: 32.
            verbose: 0: nothing; else a line.
            steps: maximum number of batches.
            callbacks: see :class:`Callback`.
        """
        whole_numbers(steps=steps)
        source, began = sources.source_of(x, batch_size=batch_size), time.monotonic()
        with self._scope():
            if not self._is_prepared:
                self.module, self._is_prepared = self.strategy.prepare(self._original), True
            dataset = sources.for_prediction(self.strategy, source, self._device)
            heard = sources.Heard(dataset, self._keep_example)
            called = self._called(listed(callbacks), verbose, steps)
            outputs = fit_loop.predict(self._steps(self.compiled), heard, called, steps)
        if verbose:
            seconds = time.monotonic() - began
            print(f"prediction  {num_examples(outputs):,} examples in {seconds:.1f} s", file=sys.stderr, flush=True)
        return outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @checked
    def summary(self, print_fn: Callable[[str], Any] = print) -> None:
        """Prints the layers and their numbers of parameters.

        Args:
            print_fn: called with each line.
        """
        strategy = self.strategy
        replicas = f"{strategy.num_replicas_in_sync} replicas" if strategy.num_replicas_in_sync > 1 else "1 replica"
        for line in [*layer_table(self.module), f"Strategy: {type(strategy).__name__}, {replicas} in sync"]:
            print_fn(line)

    # -- inside ------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        """Where the module is; of interest under the pass-through strategy."""
        return next((parameter.device for parameter in self._original.parameters()), torch.device("cpu"))

    def _steps(self, compiled: Compiled) -> FitSteps:
        return FitSteps(self.strategy, self.module, self.optimizer, compiled)

    def _called(
        self, callbacks: Sequence[Callback], verbose: Verbose, steps: int | None, epochs: int = 1
    ) -> CallbackList:
        return CallbackList(callbacks, self, {"epochs": epochs, "steps": steps, "verbose": verbose})

    def _evaluation(self, source: Any, callbacks: CallbackList, num_steps: int | None) -> Evaluation:
        steps, new_running = self._steps(self.compiled), self._new_running_metrics
        return Evaluation(steps, new_running, source, self._device, callbacks, num_steps, self._keep_example)

    def _agreement(self, dataset: Any, position: FitPosition) -> FitAgreement:
        if self.strategy.servers is not None:
            return FitOnServers(self.strategy.servers, self._new_running_metrics())
        workers = self.strategy.communicator
        return FitAgreement() if workers is None else InStep(workers, dataset, position)

    def _new_running_metrics(self) -> RunningMetrics:
        sets = [self.compiled.metrics_on(device) for device in sources.devices_of(self.strategy, self._device)]
        return RunningMetrics(self.strategy, sets)

    def _keep_example(self, batch: Any) -> None:
        inputs = unpack(self.strategy.local_results(batch)[0]).inputs
        if num_examples(inputs):
            self._example = sample_of(inputs)
            if self._position is not None:
                self._position.keep(self._example)
