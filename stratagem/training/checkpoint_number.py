"""Numbers of the checkpoints in a folder that is written again and again."""

from __future__ import annotations

import os
from pathlib import Path

from stratagem.checkpoint.catalog import read_manifest, scan


def next_number(folder: str | os.PathLike[str], at_least: int) -> int:
    """``at_least``, or one more than the highest in ``folder``: no checkpoint is written over another."""
    manifests = [read_manifest(path) for path in scan(Path(folder))]
    return max([at_least, *(manifest.step + 1 for manifest in manifests if manifest is not None)])
