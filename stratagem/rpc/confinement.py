"""Confines paths in requests to the folders that were given when this task started."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable

from stratagem.errors import ForbiddenError


class AllowedFolders:
    """Folders that requests may name, with everything below them; empty entries do not count."""

    def __init__(self, folders: Iterable[str]) -> None:
        self._folders = tuple(pathlib.Path(folder).resolve() for folder in folders if folder)

    @classmethod
    def of(cls, checkpoint_dir: str, checkpoint_roots: str) -> AllowedFolders:
        """As a role's configuration says it."""
        return cls([checkpoint_dir, *checkpoint_roots.split(os.pathsep)])

    def resolve(self, directory: str) -> pathlib.Path:
        """The place that a request means, without links and ".."; ``directory``: absolute, and need not exist.
        ForbiddenError: it lies elsewhere; says where it may lie."""
        path = pathlib.Path(directory)
        known = ", ".join(map(str, self._folders)) or "no folder at all"
        try:
            place = path.resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a zero byte
            raise ForbiddenError(f"expected a folder below {known}, got {directory!r}: {error}") from None
        if not path.is_absolute() or not any(place.is_relative_to(folder) for folder in self._folders):
            raise ForbiddenError(
                f"checkpoints may lie below {known}, but {directory!r} was asked for. Name a folder there, or start "
                "the chief and every ps with the same --checkpoint-dir or --checkpoint-roots FOLDER (`python "
                "train.py`: every task with STRATAGEM_CHECKPOINT_ROOTS=FOLDER)"
            )
        return place
