"""On SIGTERM or SIGINT a training saves after its current step, on all workers, and resumes later."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from stratagem.arguments import checked
from stratagem.checkpoint.reading import OBJECT, VALUE, VARIABLE
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.training.saving.checkpoint import Checkpoint
from stratagem.training.saving.manager import CheckpointManager
from stratagem.training.saving.object_states import kind_of
from stratagem.worker import interrupts
from stratagem.worker.interrupts import preemption

logger = logging.getLogger(__name__)

RESUME_VARIABLE = "STRATAGEM_RESUME_FILE"
"""Environment variable of ``stratagem run``: the file by which a script says that it goes on when started again."""
GRACE_S = 20.0
"""Seconds from the signal to the end of the step: less than the 25 s of launchers and the 30 s of Kubernetes."""
RUN_CALLS = "total_run_calls"


@checked
class PreemptionCheckpointHandler:
    """Saves a checkpoint when this job shuts down gracefully, and resumes from it when the job restarts.

    ::

        manager = sg.CheckpointManager(sg.Checkpoint(model=model, optimizer=optimizer, data=dataset), "runs/a")
        handler = sg.PreemptionCheckpointHandler(manager)
        for epoch in range(dataset.epoch, 12):
            for batch in dataset:
                handler.run(train_step, args=(batch,))
        handler.close()

    The constructor restores the newest checkpoint. From then on, the first SIGTERM or SIGINT to any worker (or a
    SIGINT to the chief) is noted. In the following backward all workers learn of it; after that step they save
    together and exit with code 143, which asks for a restart. A second signal ends the process at once. Workers
    that run in step need a ``backward()`` in the function that they run, because they agree in it.

    Give the checkpoint everything the next step depends on; random states are always included. A script that
    accumulates gradients over several calls of :meth:`run` uses ``strategy.run`` and calls
    :meth:`save_checkpoint_if_preempted` after the optimizer's step.

    Parameter servers keep what a worker has trained, and their chief saves when the whole job ends: on them a worker
    only finishes its step. What they do not hold (counters, schedulers, buffers) is restored as the script saved it
    last: call ``manager.save()`` now and then. A warning names it.

    Args:
        checkpoint_or_manager: what to save. Every worker makes the handler.
        checkpoint_dir: folder for a :class:`~stratagem.Checkpoint`; the newest checkpoint is kept.
        grace_s: seconds after which the first signal ends the process too, if no step has finished.

    Raises:
        CheckpointError: see :meth:`CheckpointManager.restore_or_initialize`.
        ConfigurationError: it is unclear where to save.
    """

    def __init__(
        self,
        checkpoint_or_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        if isinstance(checkpoint_or_manager, CheckpointManager):
            if checkpoint_dir is not None:
                raise ConfigurationError("a CheckpointManager has a directory already: leave checkpoint_dir out")
            self._manager = checkpoint_or_manager
        elif checkpoint_dir is None:
            raise ConfigurationError(
                "where should the Checkpoint be saved? Give checkpoint_dir, or a CheckpointManager"
            )
        else:
            self._manager = CheckpointManager(checkpoint_or_manager, checkpoint_dir, max_to_keep=1)
        self._checkpoint = self._manager.checkpoint
        self._strategy = self._checkpoint.strategy
        kinds = {name: kind_of(name, item) for name, item in self._checkpoint._objects.items()}
        own = [name for name, kind in kinds.items() if kind in (VALUE, VARIABLE, OBJECT)]
        if own and self._strategy.servers is not None and self._strategy.is_lead:
            logger.warning(
                "PreemptionCheckpointHandler saves nothing on parameter servers: a worker that is started again has %s "
                "as the script saved them last. Call CheckpointManager.save() now and then",
                ", ".join(own),
            )
        self._checkpoint.add(RUN_CALLS, 0)
        self._is_open = True
        interrupts.watch(grace_s)
        try:
            if self._strategy.servers is None:
                say_it_resumes()
            self.restored = self._manager.restore_or_initialize()
            """Path of the checkpoint that was restored; None: there was none."""
            if self.restored is not None:
                logger.info("Resuming after %d calls of run, from %s", self.total_run_calls, self.restored)
        except BaseException:
            self.close()
            raise

    @property
    def total_run_calls(self) -> int:
        """Calls of :meth:`run`, including those before an interruption; on parameter servers those of the worker that
        saved last, and of this process."""
        return int(getattr(self._checkpoint, RUN_CALLS))

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """``strategy.run``, then :meth:`save_checkpoint_if_preempted`."""
        result = self._strategy.run(fn, args, kwargs)
        setattr(self._checkpoint, RUN_CALLS, self.total_run_calls + 1)
        self.save_checkpoint_if_preempted()
        return result

    def save_checkpoint_if_preempted(self) -> None:
        """Saves and exits this process if the job has been asked to end; every worker calls it after the same steps.

        Raises:
            SystemExit: with code 143.
        """
        if preemption.is_due(self._strategy.communicator):
            leave(self._strategy, lambda: self._manager.save(blocking=True))

    def close(self) -> None:
        """Stops handling signals: from now on they end this process. Call it when training is over."""
        if self._is_open:
            self._is_open = False
            interrupts.unwatch()

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def leave(strategy: Strategy, save: Callable[[], str]) -> NoReturn:
    """Ends this process as preempted, once ``save`` has saved; where workers run in step, every one calls it.

    Under parameter servers nothing has to be saved. SystemExit: with code 143.
    """
    preemption.leave()
    if strategy.servers is not None:
        raise interrupts.Preempted("preempted: its step is done, other workers take over what it has not started")
    path = save()
    if strategy.communicator is not None:
        try:
            strategy.communicator.barrier()  # nobody closes its lanes while another still reads from them
        except CollectiveError as error:
            logger.warning("left the ring out of step: %s", error)
    raise interrupts.Preempted(f"preempted: saved {path}; restart the job to resume from there")


def say_it_resumes() -> None:
    """Tells the launcher that this script, started again, goes on where it was."""
    path = os.environ.get(RESUME_VARIABLE)
    if path:
        Path(path).touch()
