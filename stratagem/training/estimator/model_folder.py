"""The folder of a model: its checkpoints, by name."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from stratagem.checkpoint.catalog import find_damage, read_step, scan
from stratagem.errors import CheckpointError

logger = logging.getLogger(__name__)

CHECKPOINT_NAME = "model.ckpt"
"""Beginning of the names; another process may keep checkpoints of its own in the folder (a chief does)."""

_NAME = re.compile(rf"{re.escape(CHECKPOINT_NAME)}-\d{{8,}}")


def complete(model_dir: Path) -> list[Path]:
    """The checkpoints of the model, oldest first."""
    return [path for path in scan(model_dir) if path.parent == model_dir and _NAME.fullmatch(path.name)]


def newest(model_dir: Path) -> tuple[Path, int] | None:
    """The newest one and its step."""
    found = complete(model_dir)
    return (found[-1], read_step(found[-1]) or 0) if found else None


def newest_undamaged(model_dir: Path) -> Path | None:
    """The newest one whose checksums are right; damaged ones are named in the log.

    Raises:
        CheckpointError: there are some, and every one is damaged.
    """
    found = complete(model_dir)
    for path in reversed(found):
        damage = find_damage(path)
        if not damage:
            return path
        if not path.exists():
            return newest_undamaged(model_dir)  # a job that runs removed it, and has newer ones
        logger.warning("Left out the checkpoint %s: %s", path, "; ".join(damage))
    if found:
        raise CheckpointError(f"every checkpoint in {model_dir} is damaged; see the log for the files")
    return None
