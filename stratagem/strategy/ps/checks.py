"""What cannot be trained on parameter servers, found when it is prepared."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from stratagem.data.distribute import contents_of
from stratagem.errors import ConfigurationError, UnsupportedOptimizerError
from stratagem.rpc.codec import can_travel
from stratagem.strategy.model_parts import sparse_embeddings
from stratagem.strategy.prepared import Preparation
from stratagem.strategy.replicas.copyable import check_dense, check_layers, check_memory, check_shapes
from stratagem.worker.gradient_guard import parameters_of
from stratagem.worker.push.remote_table import RemoteTable
from stratagem.worker.reduction.gradient_layout import AS_REAL
from stratagem.worker.ring.agreement import without_addresses
from stratagem.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

_SCALER = (
    "a GradScaler cannot be used with parameter servers: gradients leave during backward, still scaled. Use bfloat16 "
    "autocast, or none, which need no scaling, and leave the scaler out or make it GradScaler(enabled=False)"
)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses what cannot be named on the wire; the ps itself refuses what it cannot run."""
    cls = type(optimizer)
    if getattr(torch.optim, cls.__name__, None) is not cls:
        raise UnsupportedOptimizerError(
            f"expected an optimizer of torch.optim, got {cls.__module__}.{cls.__name__}: a parameter server runs "
            "optimizers by name and cannot run your code; the workers of a ring can (several workers, no ps)"
        )


def check_asked(runtime: WorkerRuntime, preparation: Preparation, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Of workers that are not in step nobody sees beside each other what they ask of ``prepare``: refuses what another
    worker has asked otherwise, by a ConfigurationError that names it, and warns of other hyper-parameters, which a
    script that goes on from a checkpoint may have for a while."""
    if not optimizers:
        return
    task, group = runtime.task, runtime.chief.new_group("prepare")
    mine = preparation.alike
    [(first, index)] = runtime.chief.record_logs(group, 0, {mine: task.index}).items()
    if first != mine:
        raise ConfigurationError(
            f"worker:{index:.0f} has {first}, {task} {mine}: every worker must prepare the same, in the "
            "same order. Changes to the script take effect when the whole job is restarted"
        )
    settings = _settings_of(optimizers)
    theirs = runtime.chief.record_logs(group, 1, dict.fromkeys(settings, float(task.index)))
    for first, text in itertools.zip_longest(theirs, settings, fillvalue="no others"):
        if first != text:
            logger.warning(
                "worker:%d started with %s, but this worker has %s: each update uses the settings of its own worker. "
                "Use the same on all workers, unless this one resumes from a checkpoint",
                *(next(iter(theirs.values())), first, text),
            )


def _settings_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """In words, said once for neighbours that have the same: there may be a param_group for each parameter."""
    texts: list[str] = []
    for optimizer in optimizers:
        for each in optimizer.param_groups:
            settings = {name: value for name, value in each.items() if name in optimizer.defaults}
            texts.append(without_addresses(f"{type(optimizer).__name__} {settings}"))
    starts = [at for at, text in enumerate(texts) if not at or texts[at - 1] != text]
    return [texts[at] + (f" from param_group {at} on" if at else "") for at in starts]


def check_contents(runtime: WorkerRuntime, ordinal: int, dataset: Any) -> None:
    """Warns where another worker registered other examples as this dataset of the script: whoever trains a unit looks
    its indices up in what it holds itself."""
    if not (contents := contents_of(dataset)):
        return
    [(first, index)] = runtime.chief.record_logs("contents", ordinal, {str(contents): runtime.task.index}).items()
    if first != str(contents):
        logger.warning(
            "This worker holds other examples in dataset %d than worker:%d did when the job began, and the chief "
            "leases batches by number: some examples are trained more than once in an epoch, and some never. Give "
            "every worker the same whole dataset (no x[rank::size], no dataset.shard, a seed for what is random), or "
            "give each worker's part to distribute_datasets_from_function",
            *(ordinal, index),
        )


def check_step(optimizer: torch.optim.Optimizer, arguments: Sequence[Any]) -> None:
    """Refuses a step of a prepared optimizer, by a ConfigurationError, with a closure or by a GradScaler."""
    if any(map(callable, arguments)):
        raise ConfigurationError(
            "optimizer.step(closure) cannot run on parameter servers: the closure would have to run there. Do what it "
            "does (zero_grad, loss, backward) and then call optimizer.step()"
        )
    if "found_inf" in vars(optimizer):  # by a scaler to which it has said _step_supports_amp_scaling
        raise ConfigurationError(_SCALER)


def check_prepared(objects: Sequence[Any], preparation: Preparation) -> None:
    """Refuses what cannot be trained on parameter servers, by a ConfigurationError that says what can."""
    models = [item for item in objects if isinstance(item, torch.nn.Module)]
    for model in models:
        check_shapes(model)
        check_dense(model, model.state_dict(keep_vars=True).items())
        _check_dtypes(model)
    check_memory(models)
    check_layers(models)
    if any(isinstance(item, torch.amp.GradScaler) and item.is_enabled() for item in objects):
        raise ConfigurationError(_SCALER)
    if preparation.sync_batchnorm:
        raise ConfigurationError(
            "sync_batchnorm=True needs workers that run in step and talk to each other: use "
            "MultiWorkerMirroredStrategy (--strategy ring)"
        )
    for name, layer in sparse_embeddings(models):
        if not isinstance(getattr(layer, "remote_table", None), RemoteTable):
            raise ConfigurationError(
                f"gradients of an nn.Embedding are sent dense to parameter servers: give {name} sparse=False, or make "
                "it an sg.nn.Embedding (or EmbeddingBag), not a subclass, inside `with strategy.scope():`, whose rows "
                "live on the parameter servers"
            )


def _check_dtypes(model: torch.nn.Module) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or can_travel(tensor.dtype):
            continue
        if not isinstance(tensor, torch.nn.Parameter):
            way_out = "register_buffer(…, persistent=False) keeps it on each worker"
        else:
            way_out = AS_REAL if tensor.is_complex() else "convert it to a dtype that they hold, such as float16"
        raise ConfigurationError(
            f"{name} of {type(model).__name__} is {tensor.dtype}, which parameter servers do not hold: {way_out}"
        )


def grouped_parameters(
    optimizer: torch.optim.Optimizer, names: dict[int, str], taken: set[int]
) -> list[tuple[torch.nn.Parameter, int]]:
    """Parameters of an optimizer, and the param_group of each."""
    found: list[tuple[torch.nn.Parameter, int]] = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigurationError(
                    f"the optimizer {type(optimizer).__name__} holds a parameter of shape {list(parameter.shape)} that "
                    "is in none of the models given to prepare; pass its model in the same call, and a standalone "
                    "tensor as an nn.Parameter of a module (nn.ParameterList([…]) is one)"
                )
            if id(parameter) in taken:
                raise ConfigurationError(
                    f"{names[id(parameter)]} belongs to two optimizers; a ps keeps one optimizer state for it"
                )
            if not parameter.is_floating_point() and not parameter.is_complex():
                continue  # it never has a gradient, and no optimizer changes it
            taken.add(id(parameter))
            found.append((parameter, index))
    return found


def refuse_prepared(
    optimizers: Sequence[torch.optim.Optimizer],
    held: Mapping[int, tuple[str, torch.Tensor]],
    trained: Collection[int],
    tables: Collection[int],
) -> None:
    """Of a further ``prepare``, which would train a variable of another name in the same memory. By identity:
    ``held``: name and tensor of what is prepared; ``trained``: variables with an optimizer; ``tables``."""
    for parameter in [one for each in optimizers for one in parameters_of(each)]:
        if id(parameter) not in held:
            continue
        name = held[id(parameter)][0]
        if id(parameter) not in trained:
            raise ConfigurationError(
                f"{'table ' if id(parameter) in tables else ''}{name} is already prepared, and its parameter "
                "servers keep its optimizer, or that it has none: pass the layer and its optimizer to a single "
                "strategy.prepare, or compile an sg.Model with it first"
            )
        raise ConfigurationError(
            f"{name} is already prepared, or compiled, with an optimizer, and its parameter servers keep that one: "
            "set the learning rate (optimizer.param_groups, model.learning_rate), or prepare a copy, "
            "copy.deepcopy(module), which starts with the weights that it has here"
        )
