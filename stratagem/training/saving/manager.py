"""``sg.CheckpointManager``: a directory with the newest checkpoints of a training."""

from __future__ import annotations

import logging
import os
import pathlib

from stratagem.arguments import checked, whole_numbers
from stratagem.checkpoint.catalog import named, newest, newest_undamaged, remove
from stratagem.checkpoint.durable import patiently
from stratagem.checkpoint.manifest import Manifest
from stratagem.errors import ForbiddenError
from stratagem.tensorflow_names import WithWaysOut
from stratagem.training.saving.checkpoint import Checkpoint
from stratagem.worker import background_writes

logger = logging.getLogger(__name__)


@checked
class CheckpointManager(WithWaysOut):
    """Saves into one directory, keeps the newest checkpoints, and finds the one to resume from.

    If every worker must call the methods of the checkpoint, every worker must call these.

    Args:
        checkpoint: what to save.
        directory: directory of these checkpoints; created if needed.
        max_to_keep: complete checkpoints to keep, at least 1; None: all. One is removed only when the newer one is
            complete. Those that the chief takes by itself do not count: the chief removes them.
        checkpoint_name: beginning of their names.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        checkpoint_name: str = "step",
    ) -> None:
        whole_numbers(max_to_keep=max_to_keep)
        self.checkpoint = checkpoint
        self.directory = pathlib.Path(directory)
        self._max_to_keep = max_to_keep
        self._name = checkpoint_name
        self._is_warned = False
        self._known: set[str] | None = None
        if checkpoint.strategy.servers is not None and checkpoint.strategy.is_lead:
            try:  # the first save may be long after the first step
                checkpoint.strategy.servers.chief.check_folder(str(self.directory.absolute()))
            except ForbiddenError as error:  # whoever only restores from there need not save
                logger.warning("CheckpointManager.save() will fail: %s", error)

    @property
    def checkpoints(self) -> list[str]:
        """Complete checkpoints in the directory, oldest first, as this process sees it; it asks no other process."""
        return [str(path) for path in named(self.directory, self._name)]

    @property
    def latest_checkpoint(self) -> str | None:
        """The newest of them. UnreadableError: it could not be read for ten seconds."""
        found = patiently(lambda: newest(self.directory, self._name, is_certain=True))
        return None if found is None else str(found)

    @checked
    def save(self, step: int | None = None, *, blocking: bool | None = None) -> str:
        """Saves, and removes checkpoints beyond ``max_to_keep``. See :meth:`Checkpoint.save`."""
        path = self.checkpoint._save(self.directory, self._name, step, blocking, self._prune)
        if pathlib.Path(path).parent != self.directory and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "The workers save one checkpoint together: %s, where the lead said, and nothing in %s. Name the same "
                "directory on every worker: one that takes the lead's place saves where no restarted job looks",
                path,
                self.directory,
            )
        return path

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint that is not damaged and returns its path; None when there is no checkpoint.

        The log names damaged ones. The directory may also be the chief's; its own checkpoints are skipped if the
        objects need more than they hold. If the job resumes from such a newer one (after a graceful shutdown, say),
        parameter servers keep what they have, and the other objects are as in the returned checkpoint.

        Raises:
            CheckpointError: every checkpoint is damaged, or the newest good one does not fit the objects. An
                UnreadableError: the disk did not answer for ten seconds; no older one is taken for that.
        """
        self.checkpoint.wait()  # the newest may be about to be written
        fits = self.checkpoint._fits

        def find() -> str:
            background_writes.settle(self.directory)
            return str(patiently(lambda: newest_undamaged(self.directory, self._name, fits)) or "")

        path: str = self.checkpoint._members.from_first(find)
        restored = self.checkpoint._restore(path or None, resumes=True)
        return None if restored is None else restored.path

    def _prune(self, newest: pathlib.Path) -> None:
        complete = named(self.directory, self._name)
        self._look_for_others({path.name for path in complete}, newest.name)
        if self._max_to_keep is None:
            return
        mine = [path for path in complete if (found := Manifest.read(path)) and not found.automatic]
        for path in mine[: -self._max_to_keep]:
            if path.name != newest.name:
                remove(path)

    def _look_for_others(self, found: set[str], own: str) -> None:
        """Not on parameter servers, where any worker may save and the chief has a lock."""
        others = set() if self._known is None else found - self._known - {own}
        if others and self.checkpoint.strategy.servers is None and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "%s in %s was saved by another job, or by another CheckpointManager of this one: each removes the "
                "other's checkpoints and may resume from them. Give each a directory or a checkpoint_name of its own",
                max(others),
                self.directory,
            )
        self._known = found
