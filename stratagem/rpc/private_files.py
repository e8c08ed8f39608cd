"""Files that hold a secret: who else can read them."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)


def warn_if_open(path: Path, what: str) -> None:
    """Warns when others can read a file. One of another owner may be open to its group: that is how it can be read here
    (a Secret of Kubernetes is root's), and only its owner can change that."""
    status = path.stat()
    if status.st_mode & (stat.S_IROTH | (stat.S_IRGRP if status.st_uid == os.geteuid() else 0)):
        logger.warning("The %s %s can be read by others: chmod 600 %s", what, path, path)
