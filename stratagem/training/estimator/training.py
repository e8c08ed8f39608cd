"""Training a ``model_fn`` under a strategy: its steps, checkpoints and summaries."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import nn

from stratagem.arguments import check_kind
from stratagem.checkpoint.catalog import find_damage, newest, newest_undamaged, read_step, was_removed
from stratagem.checkpoint.draft import CheckpointDraft
from stratagem.checkpoint.durable import patiently
from stratagem.checkpoint.reading import SERVED_OPTIMIZER, SavedCheckpoint, describe, kind_and_state, read_states
from stratagem.checkpoint.server_state import ServerState
from stratagem.data.nested import is_rows, leaves
from stratagem.errors import CheckpointError, ConfigurationError, NonFiniteGradientError, UnreadableError
from stratagem.strategy.base import Strategy
from stratagem.strategy.random_states import random_untouched
from stratagem.training.callbacks.tensorboard import Summaries
from stratagem.training.estimator.feeds import Feed, LeasedFeed, NumberedBatch, open_feed
from stratagem.training.estimator.inputs import Input, split
from stratagem.training.estimator.model_function import EstimatorSpec, ModeKeys, ModelFunction, ModelObjects, giving
from stratagem.training.estimator.run_config import CHECKPOINT_NAME, DEFAULT_SAVE_S, RunConfig
from stratagem.training.estimator.schedules import SaveSchedule
from stratagem.training.fit.agreement import check_alike, check_alike_on_servers
from stratagem.training.preemption import GRACE_S, leave, say_it_resumes
from stratagem.training.saving.checkpoint import Checkpoint
from stratagem.training.saving.manager import CheckpointManager
from stratagem.training.saving.members import CheckpointMembers
from stratagem.training.saving.object_states import put_back, tables_of
from stratagem.worker import interrupts
from stratagem.worker.interrupts import preemption

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """A checkpoint that a training has just saved."""

    path: str
    step: int
    is_last: bool
    """The training is done. Where that turns out only later, listeners hear of the checkpoint once more."""


SavingListener = Callable[[SavedStep], None]


def listening(given: Sequence[SavingListener] | None) -> tuple[SavingListener, ...]:
    """``saving_listeners``, or none. ConfigurationError: it is no list, or one is no function."""
    check_kind(given, Sequence, NoneType)
    for listener in given or ():
        if not callable(listener):
            raise ConfigurationError(f"expected functions of a SavedStep in saving_listeners=, got {listener!r}")
    return tuple(given or ())


class EstimatorTraining:
    """The objects of mode TRAIN under one strategy, and how far they have been trained."""

    def __init__(
        self, function: ModelFunction, strategy: Strategy, model_dir: Path, config: RunConfig, is_shared: bool = False
    ) -> None:
        self.strategy = strategy
        self._is_shared = is_shared
        """Whether the strategy would be another one for each Estimator, if a task did not join its cluster once."""
        self._num_inputs = 0
        self._feed: Feed | None = None
        """Of a training that has not come to its end."""
        self._function = function
        self._model_dir = model_dir
        self._config = config
        self._objects = ModelObjects()
        self._arguments: dict[str, Any] = {}
        self._has_servers = strategy.servers is not None
        self._manager: CheckpointManager | None = None
        self._forget()

    def _forget(self) -> None:
        self._is_prepared = self._is_restored = False
        self._step = self._job_start = 0
        self._saved: SavedStep | None = None
        self._has_trained = False
        self._place: dict[str, Any] | None = None
        """In its input, of a later training than those that had nothing left to do: a job was interrupted in it."""

    def run(
        self, given: Input, steps: int | None, max_steps: int | None, listeners: Sequence[SavingListener] = ()
    ) -> int:
        """:meth:`_run`; if that is interrupted, nobody knows how far its last step came, and the next one begins with
        the newest checkpoint. Of parameter servers the job goes on."""
        try:
            return self._run(given, steps, max_steps, listeners)
        except (KeyboardInterrupt, SystemExit):
            if not self._has_servers:
                self._forget()
            raise

    def _run(self, given: Input, steps: int | None, max_steps: int | None, listeners: Sequence[SavingListener]) -> int:
        """Trains; returns the number of updates that all trainings have made. ``steps``: updates to make.
        ``max_steps``: updates of all trainings together, after which to stop. With neither: one pass over the input.
        ``listeners``: hear of each checkpoint, on the workers that save it."""
        workers = self.strategy.communicator
        if workers is not None and workers.healing is not None:
            workers.healing.refuse_newcomer("an Estimator's training")
        names = ("save_checkpoints_steps", "save_checkpoints_secs", "save_summary_steps")
        every = {name: getattr(self._config, name) for name in names}
        told = {"model_dir": str(self._model_dir), "steps": steps, "max_steps": max_steps, **every}
        if workers is not None:
            check_alike(workers, "an Estimator", told)
        elif self.strategy.servers is not None:
            place = self.strategy.servers.chief.new_group("training of an Estimator")
            check_alike_on_servers(self.strategy.servers, "an Estimator", place, told)
        if self.strategy.is_lead:  # the first checkpoint may be long after the first step
            if self.strategy.servers is not None:
                self.strategy.servers.chief.check_folder(str(self._model_dir.absolute()))
            CheckpointDraft(self._model_dir).close()
            self._check_alone()
        feed = open_feed(self.strategy, given, self._build, self._num_inputs + 1 if self._is_shared else None)
        self._num_inputs += 1
        if isinstance(feed, LeasedFeed) and isinstance(self._feed, LeasedFeed):
            feed.place = self._feed.place
        self._feed = feed
        manager = self._prepare(feed)
        if self._place is not None:
            feed.load_state_dict(self._place)
        target = self._step + steps if steps is not None else max_steps
        if target is not None and self._step >= target:
            logger.info("Nothing to train: %d steps of %d have been made already", self._step, target)
            self._place = feed.state_dict() if self._step > target and not self._has_trained else None
            feed.leave_out()
            self._feed = None
            self._save(manager, listeners, is_last=True)
            return self._step
        self._has_trained, self._place = True, None
        self._objects.train(True)
        summaries = Summaries(self._model_dir)
        if not self._has_servers:
            say_it_resumes()
        interrupts.watch(GRACE_S)
        try:
            self._loop(feed, feed.aim(self._step, target), manager, summaries, listeners)
            path = self._save(manager, listeners, is_last=True)
            self.strategy.barrier()  # who asks for the newest checkpoint then has the last
            self._feed = None
            if preemption.agree(self.strategy.communicator):
                leave(self.strategy, lambda: path)
        finally:
            interrupts.unwatch()
            summaries.close()
        return self._step

    # -- starting ----------------------------------------------------------------------------------------------

    def _build(self, batch: Any) -> nn.Module:
        if not self._is_prepared:
            if self._config.seed is not None:
                torch.manual_seed(self._config.seed)
            with self.strategy.scope(), self._objects.building():
                self._arguments = dict(self._call(*split(batch)).prepare)
        return nn.ModuleList(self._objects.modules.values())

    def _prepare(self, feed: Feed) -> CheckpointManager:
        """Has the objects prepared and restored, if that has not been done."""
        if self._manager is not None:
            self._manager.checkpoint.wait()  # whose save was interrupted, it writes on
        if not self._is_prepared and isinstance(feed, LeasedFeed):
            self._step = _prepare_on_servers(self.strategy, self._objects, self._model_dir, self._arguments, feed)
            self._is_restored, self._job_start = True, self._step
        elif not self._is_prepared:
            self._objects.prepare(self.strategy, True, self._arguments)
        self._is_prepared = True
        objects = {**self._objects.in_use, "input_position": feed}
        servers = self.strategy.servers
        # At staleness 0 a batch may be several updates; of several optimizers the chief counts those of each.
        if servers is not None and servers.staleness > 0 and len(self._objects.optimizers) == 1:
            objects["job_start"] = self._job_start
        checkpoint = Checkpoint(strategy=self.strategy, global_step=self._step, **objects)
        keep = self._config.keep_checkpoint_max or None
        self._manager = manager = CheckpointManager(checkpoint, self._model_dir, keep, CHECKPOINT_NAME)
        if not self._is_restored and (path := manager.restore_or_initialize()) is not None:
            members = CheckpointMembers(self.strategy.communicator)
            updates = members.from_first(lambda: _updates_in(describe(Path(path))))
            self._step = max(checkpoint.global_step, updates)  # a lower one would save below its number
            self._saved = SavedStep(path, self._step, is_last=True)
            logger.info("Resuming from step %d, %s", self._step, path)
        self._is_restored = True
        return manager

    # -- stepping ----------------------------------------------------------------------------------------------

    def _loop(
        self,
        feed: Feed,
        target: int | None,
        manager: CheckpointManager,
        summaries: Summaries,
        listeners: Sequence[SavingListener],
    ) -> None:
        config, first, workers = self._config, self._step, self.strategy.communicator
        clocks: tuple[SaveSchedule, _Pace] | None = None
        for before, batch in feed.batches():
            if clocks is None:  # of a worker that joins a running job: not its first step
                every_s = config.save_checkpoints_secs or DEFAULT_SAVE_S
                schedule = SaveSchedule(config.save_checkpoints_steps, every_s, workers, before)
                clocks = schedule, _Pace(before)
            schedule, pace = clocks
            self._objects.global_step = before
            with giving(self._objects):
                result = self.strategy.run(self._train, args=(batch,))
            # A batch that a lost worker gave back has a lower number than those before it.
            self._step = max(self._step, before + 1)
            if pace.crosses(self._step, config.save_summary_steps):
                self._report(result, pace, summaries)
            is_last = self._step == target
            if schedule.is_due(self._step) and not (is_last and self._has_servers):
                schedule.saved(self._step)
                self._save(manager, listeners, is_last)
            if preemption.is_due(workers):
                leave(self.strategy, lambda: self._save(manager, (), is_last=False))
        if self._has_servers and target is not None:
            self._step = target  # the last steps may have been other workers'; all of them are applied by now
        elif self._step == first:
            raise ConfigurationError("the input gave no batch to train on")

    def _train(self, item: Any) -> torch.Tensor:
        """One update, on one replica."""
        for name in self._objects.optimizers:
            self._objects.in_use[name].zero_grad()
        batch = item.batch if isinstance(item, NumberedBatch) else item
        spec = self._call(*split(batch))
        assert spec.loss is not None and spec.optimizer is not None
        # The mean over a share without examples is NaN, too, and counts nothing.
        if (
            self._arguments.get("nan") != "skip"
            and not math.isfinite(spec.loss.item())
            and {len(leaf) for leaf in leaves(batch) if is_rows(leaf)} != {0}
        ):
            raise NonFiniteGradientError(  # tf.estimator's NaN hook does so; gradients of such a loss may be finite
                f"expected a finite loss, got {spec.loss.item()} in step {self._objects.global_step + 1}; nothing was "
                'applied. Lower the learning rate, look at the input, or give the EstimatorSpec prepare={"nan": '
                '"skip"}: only gradients are looked at then'
            )
        spec.loss.backward()
        spec.optimizer.step()
        return spec.loss.detach()

    def _call(self, features: Any, labels: Any) -> EstimatorSpec:
        spec = self._function(features, labels, ModeKeys.TRAIN)
        known = [self._objects.in_use[name] for name in self._objects.optimizers]
        if not any(spec.optimizer is optimizer for optimizer in known):
            raise ConfigurationError(
                "the optimizer of the EstimatorSpec is not from sg.get_or_create: it would be a new one in each step"
            )
        return spec

    def _report(self, result: Any, pace: _Pace, summaries: Summaries) -> None:
        """Workers that run in step add up the loss together; of others the lead alone reports."""
        if self._has_servers and not self.strategy.is_lead:
            return
        loss = float(self.strategy.reduce_mean(result))
        steps_per_s = pace.since_last(self._step)
        if self.strategy.is_lead:
            logger.info("step %d: loss %.6g, %.1f steps/s", self._step, loss, steps_per_s)
            summaries.write({"loss": loss, "global_step/sec": steps_per_s}, self._step)

    # -- saving ------------------------------------------------------------------------------------------------

    def _save(self, manager: CheckpointManager, listeners: Sequence[SavingListener], is_last: bool) -> str:
        """Returns the path; empty on a worker that leaves it to the lead."""
        if self._has_servers and not self.strategy.is_lead:
            return ""
        if self._saved is None or self._saved.step != self._step:
            self._check_alone()
            manager.checkpoint.global_step = self._step
            return self._tell(SavedStep(manager.save(self._step), self._step, is_last), listeners).path
        if is_last and not self._saved.is_last:
            self._tell(dataclasses.replace(self._saved, is_last=True), listeners)
        return self._saved.path

    def _check_alone(self) -> None:
        """On the lead. CheckpointError: another training saves into the folder, too. On parameter servers a lead that
        has just come may know of fewer steps than the job has made."""
        if not self._is_restored or self._has_servers or not self.strategy.is_lead:
            return
        with contextlib.suppress(UnreadableError):  # the next save looks again
            found = newest(self._model_dir, CHECKPOINT_NAME)
            if found is not None and (read_step(found) or 0) > self._step and not find_damage(found):
                raise CheckpointError(
                    f"{found} is of another training: this Estimator is at step {self._step}. Make a new one to "
                    "continue from that checkpoint, or give each a model_dir of its own"
                )

    def _tell(self, saved: SavedStep, listeners: Sequence[SavingListener]) -> SavedStep:
        self._saved = saved
        # Training goes on as from the checkpoint, which has none of what they draw.
        with random_untouched(self.strategy):
            for listener in listeners:
                listener(saved)
        return saved


def _prepare_on_servers(
    strategy: Strategy, objects: ModelObjects, model_dir: Path, arguments: dict[str, Any], feed: LeasedFeed
) -> int:
    """Prepares the objects of a training on parameter servers: from a checkpoint, in the middle of a job, or from
    nothing; returns the updates that had been made when the job started.

    The lead's values become the job's where it has none yet (docs/protocol.md 13). So a checkpoint is read into the
    modules before they are prepared: a worker that was started again then takes the live values, and the older ones of
    the checkpoint are forgotten. The step at which the job started is a variable too, and so is the place of ``feed``
    at that step. The lead creates them last, and whoever has got them knows that the state of the optimizers is in
    place as well. CheckpointError: there are checkpoints, and none can be restored, or the newest is of another model.
    """
    path, step, states = patiently(lambda: _read_newest(model_dir, objects.made))
    if "input_position" in states:
        feed.resume(states["input_position"][1], step)
    put_back({name: module for name, module in objects.modules.items() if name in states}, states)
    objects.prepare(strategy, True, arguments)
    assert strategy.servers is not None
    for name in objects.optimizers:
        optimizer = objects.in_use[name]
        # A lead that joins a running job must not put old slots over the live ones.
        if name in states and not (strategy.is_lead and strategy.servers.has_begun(optimizer)):
            put_back({name: optimizer}, states)
    start = nn.Module()
    start.register_buffer("step", torch.tensor(step))
    start.register_buffer("place", feed.place)
    strategy.prepare(start)
    job_step, feed.place = int(start.get_buffer("step")), start.get_buffer("place").clone()
    if path is not None:  # the parameter servers may have more, of a job that runs or from their chief's checkpoint
        how = "resumes from" if job_step == step else "goes on; it began at"
        logger.info("The job %s step %d; the newest checkpoint is %s", how, job_step, path)
    return job_step


def _updates_in(saved: SavedCheckpoint) -> int:
    """The updates in a checkpoint. The lead numbers it by its own batches; asynchronous parameter servers have what all
    workers have made with its optimizer since the job started, in which other models may have been trained too."""
    if "job_start" not in saved.objects:
        return saved.step
    start = kind_and_state(read_states(saved, ["job_start"])["job_start"])[1]
    optimizers = (one for one in saved.objects.values() if one.kind == SERVED_OPTIMIZER)
    names = {name for each in optimizers for name in each.tree["variables"]}
    return int(start) + ServerState(saved.path).num_updates(names)


def _read_newest(model_dir: Path, made: dict[str, Any]) -> tuple[Path | None, int, dict[str, tuple[str, Any]]]:
    """The newest checkpoint, the updates in it, and its states with their kinds; None, 0 and none if there is none."""
    while (path := newest_undamaged(model_dir, CHECKPOINT_NAME)) is not None:
        try:
            saved = describe(path)
            names = [*made, *saved.objects.keys() & {"input_position"}]
            states = read_states(saved, names, tables_of(made, saved))
            return path, _updates_in(saved), {name: kind_and_state(state, str(path)) for name, state in states.items()}
        except CheckpointError:
            if not was_removed(path):
                raise  # else the job that runs has newer ones, and removed it
    return None, 0, {}


class _Pace:
    """Steps a second."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._at = time.monotonic()

    def crosses(self, step: int, every: int) -> bool:
        """Whether a multiple of ``every`` lies between the step it was asked about last and this one."""
        return step // every > self._step // every

    def since_last(self, step: int) -> float:
        """Steps a second since it was asked last."""
        now = time.monotonic()
        pace = (step - self._step) / max(now - self._at, 1e-9)
        self._step, self._at = step, now
        return pace
