"""``sg.train_and_evaluate``: one call that does each task's part in a cluster."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from stratagem.arguments import checked, whole_numbers
from stratagem.checkpoint.catalog import was_removed
from stratagem.cluster.tf_config import placement_from_environment
from stratagem.errors import CheckpointError, ConfigurationError, JobStoppedError, UnreadableError
from stratagem.strategy import roles
from stratagem.training.estimator.estimator import Estimator, check_folder_name
from stratagem.training.estimator.exporters import Exporter
from stratagem.training.estimator.inputs import InputFunction
from stratagem.training.estimator.run_config import CHECKPOINT_NAME
from stratagem.training.estimator.schedules import EvaluatorSchedule
from stratagem.training.estimator.training import SavedStep, SavingListener, listening
from stratagem.training.saving.new_checkpoints import JobWatch

logger = logging.getLogger(__name__)


@checked
@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """What to train on."""

    input_fn: InputFunction
    """See :meth:`Estimator.train`."""
    max_steps: int | None = None
    """Updates of the whole cluster, over all trainings of the model; None: one pass over the input."""
    saving_listeners: Sequence[SavingListener] | None = dataclasses.field(default=(), kw_only=True)
    """See :meth:`Estimator.train`."""

    def __post_init__(self) -> None:
        whole_numbers(max_steps=self.max_steps)
        object.__setattr__(self, "saving_listeners", listening(self.saving_listeners))


@checked
@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """What to evaluate, and which exporters to call.

    Raises:
        ConfigurationError: a value is out of range, or two exporters have the same name.
    """

    input_fn: InputFunction
    """See :meth:`Estimator.evaluate`."""
    steps: int | None = 100
    """Maximum number of batches; None: all."""
    name: str | None = None
    """Name of the data; see :meth:`Estimator.evaluate`."""
    exporters: Exporter | Sequence[Exporter] | None = ()
    """Called after each evaluation."""
    start_delay_secs: float = 120
    """Seconds an evaluator waits first. A process that trains alone evaluates each checkpoint as it is saved."""
    throttle_secs: float = 600
    """Minimum seconds between the starts of two evaluations of an evaluator, except for the last."""

    def __post_init__(self) -> None:
        whole_numbers(steps=self.steps)
        if self.name:
            check_folder_name("the name of evaluation data that", self.name)
        for name in ("start_delay_secs", "throttle_secs"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"expected {name} of at least 0, got {getattr(self, name)!r}")
        given = [self.exporters] if isinstance(self.exporters, Exporter) else list(self.exporters or ())
        for exporter in given:
            if not isinstance(exporter, Exporter):
                raise ConfigurationError(f"expected exporters, got {type(exporter).__name__}")
            check_folder_name("an exporter whose name", exporter.name)
        names = [exporter.name for exporter in given]
        if len({*names}) < len(names):
            raise ConfigurationError(f"each exporter needs a name of its own, got {', '.join(names)}")
        object.__setattr__(self, "exporters", tuple(given))


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The newest evaluation."""

    results: dict[str, float]
    """Loss, metrics and "global_step"."""
    exports: list[Path]
    """Folders that its exporters wrote."""


@checked
def train_and_evaluate(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> Evaluated | None:
    """Trains to ``max_steps`` and evaluates on the way. Call it in every task of the cluster, with the same arguments.

    Workers train; the lead writes summaries and asks for checkpoints. The chief and parameter servers serve until the
    job ends, and then their processes exit. The evaluator evaluates each new checkpoint, calls the exporters and
    returns when ``max_steps`` is reached or the job is over. A process outside a cluster trains, and evaluates each
    checkpoint that it saves.

    Returns:
        the newest evaluation; None where another task evaluates.

    Raises:
        ConfigurationError: incompatible arguments.
        JobStoppedError: in the evaluator: the job failed.
        CheckpointError: in the evaluator: no checkpoint could be restored.
    """
    placement = placement_from_environment(os.environ)
    evaluation = _Evaluation(estimator, eval_spec)
    if placement is None:
        listeners = [evaluation.after_saving, *train_spec.saving_listeners]  # type: ignore[misc]  # as of exporters
        estimator.train(train_spec.input_fn, max_steps=train_spec.max_steps, saving_listeners=listeners)
        if evaluation.newest is None and (path := estimator.latest_checkpoint()) is not None:
            evaluation.evaluate(path, is_last=True)  # nothing was left to train: perhaps it ended before it evaluated
        return evaluation.newest
    # Chief and ps write where the Estimator saves, if they were not told where they may.
    os.environ.setdefault("STRATAGEM_CHECKPOINT_ROOTS", os.path.abspath(estimator.model_dir))
    if (task := placement.task) is not None and task.type == "evaluator":
        return _follow(evaluation, train_spec.max_steps)
    if task is not None and task.type in ("chief", "ps"):
        roles.join_as(None)  # ends the process
    if not placement.cluster.evaluator:
        logger.warning(
            "The cluster has no evaluator: unless one is started separately, nobody evaluates the checkpoints in %s",
            estimator.model_dir,
        )
    estimator.train(train_spec.input_fn, None, train_spec.max_steps, train_spec.saving_listeners)
    return None


@dataclasses.dataclass(eq=False, repr=False)
class _Evaluation:
    estimator: Estimator
    spec: EvalSpec
    newest: Evaluated | None = None

    def after_saving(self, saved: SavedStep) -> None:
        """Evaluates what training has just saved."""
        if self.newest is None or self.newest.results["global_step"] != saved.step:
            self.evaluate(saved.path, saved.is_last)
        else:
            self.export(self.newest.results, saved.path, saved.is_last)

    def evaluate(self, path: str, is_last: bool) -> None:
        results = self.estimator.evaluate(self.spec.input_fn, self.spec.steps, path, self.spec.name)
        self.export(results, path, is_last)

    def export(self, results: dict[str, float], path: str, is_last: bool) -> None:
        exports: list[Path] = []
        for exporter in self.spec.exporters:  # type: ignore[union-attr]  # made a tuple when it was checked
            folder = self.estimator.model_dir / "export" / exporter.name
            written = exporter.export(self.estimator, folder, path, results, is_last)
            exports += [] if written is None else [written]
        self.newest = Evaluated(results, exports)


def _follow(evaluation: _Evaluation, max_steps: int | None) -> Evaluated | None:
    """What an evaluator does beside a training cluster."""
    spec, model_dir = evaluation.spec, evaluation.estimator.model_dir
    schedule = EvaluatorSchedule(max_steps, spec.start_delay_secs, spec.throttle_secs, time.monotonic())
    skipped: CheckpointError | None = None
    with JobWatch(str(model_dir)) as job:
        while True:
            (reason, path, number), started = job.look(model_dir, CHECKPOINT_NAME), time.monotonic()
            step = number or 0
            decision = schedule.decide(started, None if path is None else step, reason is not None)
            if decision == "stop":
                break
            if path is None or decision == "wait":
                continue
            try:
                evaluation.evaluate(str(path), schedule.is_last(step, reason is not None))
            except CheckpointError as error:
                if was_removed(path) or (reason is None and isinstance(error, UnreadableError)):
                    continue  # training keeps the newest ones only, and this one was too old meanwhile
                logger.error("Skipped a checkpoint: %s", error)
                skipped = error
            schedule.evaluated(step, started)
    if reason is not None and not (isinstance(reason, JobStoppedError) and reason.exit_code == 0):
        raise reason
    if skipped is not None and evaluation.newest is None:
        raise skipped  # every one, as of a model_fn that makes another model in mode EVAL
    return evaluation.newest
